"""Text streamed from a real S3-protocol server on loopback, behind a proxy that is slow and fails: run by `make test-storage`."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from meshwright.data.source import open_data
from meshwright.data.streams import open as opening
from meshwright.data.streams.stores import ObjectStore
from meshwright.spec.errors import BadInput, CommunicationFailure
from meshwright.spec.job import DataSpec
from tests.checkpoint.s3 import Server
from tests.data.streams.answers import AnswerProxy
from tests.data.streams.made import SEQ_LEN, json_lines, open_ranks, spec_of, whole_steps, write_parquet

for package in ("moto", "obstore"):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
SECRET = "a-secret-that-nobody-writes-down"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AnswerProxy]:
    server.reset()
    opening._index.cache_clear()
    for file in sorted(write_parquet(tmp_path / "web").iterdir()):
        put(server, f"web/{file.name}", file.read_bytes())
    put(server, "code.jsonl", json_lines(0, 4000))
    proxy = AnswerProxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield proxy
    proxy.close()


def put(server: Server, key: str, content: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream", "x-amz-acl": "public-read-write"}
    with urlopen(Request(f"http://127.0.0.1:{server.port}/runs/{key}", content, headers, method="PUT"), timeout=10):
        pass


def streamed(tokenizer: Path, cache: Path) -> DataSpec:
    return spec_of(
        {"web": ("s3://runs/web/*.parquet", "content"), "code": ("s3://runs/code.jsonl", "text")}, tokenizer, cache
    )


def test_a_slow_store_with_faults_gives_the_same_samples(
    proxy: AnswerProxy, tokenizer_file: Path, tmp_path: Path
) -> None:
    right = list(whole_steps(open_ranks(streamed(tokenizer_file, tmp_path / "one"), 1), 0, 3))
    proxy.delay, proxy.faulty = 0.03, 0.3
    opening._index.cache_clear()
    read = list(whole_steps(open_ranks(streamed(tokenizer_file, tmp_path / "two"), 1), 0, 3))
    assert all(np.array_equal(one, other) for one, other in zip(right, read, strict=True))
    assert sum(proxy.faults.values()) >= 3, proxy.faults


@pytest.mark.parametrize("kind", ["cut", "short", "stall"])
def test_parts_of_an_answer_are_never_taken_for_all(proxy: AnswerProxy, kind: str) -> None:
    store = ObjectStore("s3://runs/code.jsonl", patience=30.0)
    (file,) = store.list("s3://runs/code.jsonl")
    whole = store.read(file, 0, file.size)
    assert whole == json_lines(0, 4000)
    proxy.faulty, proxy.kinds = 0.5, (kind,)
    for start in range(0, file.size, file.size // 4):
        assert store.read(file, start, min(start + 100_000, file.size)) == whole[start : start + 100_000]
    assert proxy.faults


def test_a_store_that_stays_away_is_named_without_secrets(
    proxy: AnswerProxy,
    tokenizer_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(opening, "PATIENCE", 3.0)
    caplog.set_level(logging.DEBUG)
    proxy.faulty, proxy.kinds = 1.0, ("503",)
    with pytest.raises(
        CommunicationFailure, match=r"s3://runs/web/part-0.parquet: cannot be read: .*tried for 3 s"
    ) as failure:
        open_data(streamed(tokenizer_file, tmp_path / "cache"), seq_len=SEQ_LEN, seed=1)
    captured = capfd.readouterr()
    assert SECRET not in f"{failure.value}{captured.out}{captured.err}{caplog.text}"


def test_an_object_that_is_replaced_ends_the_run(
    proxy: AnswerProxy, server: Server, tokenizer_file: Path, tmp_path: Path
) -> None:
    data = open_data(
        spec_of({"code": ("s3://runs/code.jsonl", "text")}, tokenizer_file, tmp_path / "cache"), seq_len=SEQ_LEN, seed=1
    )
    put(server, "code.jsonl", json_lines(4000, 8000))
    with pytest.raises(BadInput, match="s3://runs/code.jsonl: changed since the run has listed it"):
        data.samples([0])


def test_a_read_never_joins_two_versions_of_an_object(proxy: AnswerProxy, server: Server) -> None:
    """The object is replaced while an answer breaks off in the middle of its body; what is read again begins anew."""
    old, new = b"a" * 300_000, b"b" * 300_000
    put(server, "one.bin", old)
    store = ObjectStore("s3://runs/one.bin", patience=10.0)
    (file,) = store.list("s3://runs/one.bin")
    proxy.faulty, proxy.kinds = 1.0, ("cut",)

    def replace_once() -> None:
        proxy.faulty = 0.0
        put(server, "one.bin", new)

    proxy.on_fault = replace_once
    with pytest.raises(BadInput, match="one.bin: changed since the run has listed it"):
        store.read(file, 0, len(old))


RANK = """
import sys
from tests.data.streams.test_s3 import SEQ_LEN, Path, open_data, streamed

data = open_data(streamed(Path(sys.argv[1]), Path(sys.argv[2])), seq_len=SEQ_LEN, seed=1)
print(data.samples([0, 1]).tokens.size, *(name for name in sys.modules if name.split(".")[0] == "obstore"))
"""


def test_a_rank_never_has_the_client_whose_threads_a_fork_would_break(
    proxy: AnswerProxy, tokenizer_file: Path, tmp_path: Path
) -> None:
    """`obstore` hangs in a forked child of a process that has used it."""
    command = [sys.executable, "-c", RANK, str(tokenizer_file), str(tmp_path / "cache")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert found.stdout.split() == [str(2 * SEQ_LEN)], found.stderr


def test_the_second_pass_reads_the_cache(proxy: AnswerProxy, tokenizer_file: Path, tmp_path: Path) -> None:
    spec = streamed(tokenizer_file, tmp_path / "cache")
    first = list(whole_steps(open_ranks(spec, 1), 0, 4))
    before = proxy.requests
    again = list(whole_steps(open_ranks(spec, 1), 0, 4))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert proxy.requests == before


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("s3://runs/wab/*.parquet", "matches no file"),
        ("s3://runs/web/part-9.parquet", "no files here to read"),
        ("s3://user:pass@runs/web/*.parquet", "without user"),
        ("s3://runs/web/x.parquet?X-Amz-Signature=abc", "without user"),
    ],
)
def test_files_that_are_not_there_are_named(
    proxy: AnswerProxy, tokenizer_file: Path, tmp_path: Path, files: str, words: str
) -> None:
    with pytest.raises(BadInput, match=words) as error:
        open_data(spec_of({"web": (files, "content")}, tokenizer_file, tmp_path / "cache"), seq_len=SEQ_LEN, seed=1)
    assert "pass" not in str(error.value) and "abc" not in str(error.value)
