"""The mirror against a real S3-protocol server on loopback, also behind a proxy that fails: run by `make test-storage`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.format.manifest import read_manifest
from meshwright.checkpoint.mirror import store as object_store
from meshwright.checkpoint.mirror.copies import INDEX, fetch_newest, read_index, upload_checkpoint
from meshwright.checkpoint.mirror.process import MirrorUploader
from meshwright.checkpoint.mirror.store import MirrorStore
from meshwright.checkpoint.store import CheckpointStore
from meshwright.launch.folder import take_over
from meshwright.spec.errors import CommunicationFailure
from tests.checkpoint.s3 import FaultProxy, Server

pytest.importorskip("moto")
pytest.importorskip("s3fs")
SECRET = "a-secret-that-nobody-writes-down"
MIRROR = "s3://runs/mirror"
LARGE = 4 << 20
"""Elements of a tensor of 16 MB: four parts."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    server.reset()
    proxy = FaultProxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield proxy
    proxy.mode = "pass"
    proxy.close()


def store(patience: float = 60.0, answer_seconds: float = 2.0, name: str = "run") -> MirrorStore:
    return MirrorStore(f"{MIRROR}/{name}", patience=patience, answer_seconds=answer_seconds, part_bytes=5 << 20)


def values(step: int) -> dict[str, torch.Tensor]:
    return {"model.x": torch.arange(LARGE, dtype=torch.float32) + step}


def run_with_steps(run: Path, *steps: int) -> list[Path]:
    (run / "checkpoints").mkdir(parents=True)
    checkpoints = CheckpointStore(run / "checkpoints", lease=take_over(run))
    return [checkpoints.save(step, values(step), {"step": step}, {}).path for step in steps]


def assert_resumes(run: Path, step: int) -> None:
    """Whether a start on another machine, with an empty folder of the run, gets `step` from the mirror."""
    fetch_newest(MIRROR, run, lambda text: None)
    x = {"model.x": torch.zeros(LARGE)}
    loaded = CheckpointStore(run / "checkpoints", lease=take_over(run)).load_newest(x)
    assert loaded is not None and loaded[1] == {"step": step}
    assert torch.equal(x["model.x"], values(step)["model.x"])


def test_a_run_continues_on_another_machine_from_the_mirror(proxy: FaultProxy, tmp_path: Path) -> None:
    paths = run_with_steps(tmp_path / "a" / "run", 1, 2, 3)
    for path in paths:
        assert upload_checkpoint(store(), path, keep=2) > 16e6
    assert upload_checkpoint(store(), paths[2], keep=2) == 0  # complete already
    index = read_index(store())
    assert index is not None and [entry.step for entry in index.checkpoints] == [2, 3]
    assert store().get_bytes(f"step-00000001.{read_manifest(paths[0]).attempt}/COMMITTED") is None
    assert_resumes(tmp_path / "b" / "run", 3)


def test_the_newest_of_folder_and_mirror_is_taken(proxy: FaultProxy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    paths, notes = run_with_steps(run, 1, 2), list[str]()
    upload_checkpoint(store(), paths[0], keep=3)
    assert fetch_newest(MIRROR, run, notes.append) is None
    assert notes == [f"resuming from the local checkpoint of step 2; {MIRROR}/run has none that is newer"]


def test_a_damaged_object_is_not_taken(proxy: FaultProxy, tmp_path: Path) -> None:
    for path in run_with_steps(tmp_path / "a" / "run", 1, 2):
        upload_checkpoint(store(), path, keep=3)
    index = read_index(store())
    assert index is not None
    newest, notes = index.checkpoints[-1].folder, list[str]()
    data = bytearray(store().get_bytes(f"{newest}/tensors-00000.safetensors") or b"")
    data[7 << 20] ^= 1
    store().put_bytes(bytes(data), f"{newest}/tensors-00000.safetensors")
    fetched = fetch_newest(MIRROR, tmp_path / "b" / "run", notes.append)
    assert fetched is not None and fetched.name == "step-00000001"
    assert "tensors-00000.safetensors: digest in the 16 MiB from byte 0; trying" in notes[0]
    assert [path.name for path in fetched.parent.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("mode", "seconds"),
    [("503", 5.0), ("hang", 5.0), ("drop", 3.0), pytest.param("503", 60.0, marks=pytest.mark.slow)],
)
def test_a_store_that_fails_for_a_while_gets_the_checkpoint_later(
    proxy: FaultProxy, tmp_path: Path, mode: str, seconds: float
) -> None:
    (path,) = run_with_steps(tmp_path / "a" / "run", 4)
    proxy.mode = mode
    timer = threading.Timer(seconds, lambda: setattr(proxy, "mode", "pass"))
    timer.start()
    upload_checkpoint(store(patience=seconds + 60), path, keep=3)
    assert proxy.faults > 0
    timer.join()
    assert_resumes(tmp_path / "b" / "run", 4)


def test_an_interrupted_upload_is_ignored(proxy: FaultProxy, tmp_path: Path) -> None:
    paths = run_with_steps(tmp_path / "a" / "run", 1, 2)
    upload_checkpoint(store(), paths[0], keep=3)
    proxy.mode = "drop"
    with pytest.raises(CommunicationFailure, match="tried for 3 s"):
        upload_checkpoint(store(patience=3.0), paths[1], keep=3)
    proxy.mode = "pass"
    assert_resumes(tmp_path / "b" / "run", 1)


@pytest.mark.slow
def test_an_unreachable_store_does_not_delay_training(proxy: FaultProxy, tmp_path: Path) -> None:
    """The uploading process is beside the run: offering and closing return at once, and nothing secret is printed."""
    (path,) = run_with_steps(tmp_path / "a" / "run", 1)
    proxy.mode = "hang"
    messages: list[str] = []
    started = time.monotonic()
    uploader = MirrorUploader(MIRROR, tmp_path / "a" / "run", 3, messages.append)
    uploader.offer(path)
    uploader.close(0.5)
    assert time.monotonic() - started < 3 and "is not done after 0 s" in messages[-1]
    proxy.mode = "pass"  # the process goes on by itself
    deadline = time.monotonic() + 60
    while read_index(store(patience=20.0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert_resumes(tmp_path / "b" / "run", 1)


def test_a_start_without_checkpoints_refuses_to_begin_anew_when_the_store_is_absent(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 1.0)
    proxy.mode = "503"
    with pytest.raises(CommunicationFailure, match="tried for 2 s"):
        fetch_newest(MIRROR, tmp_path / "run", lambda text: None, patience=2.0)
    run_with_steps(tmp_path / "run", 5)
    notes: list[str] = []
    fetch_newest(MIRROR, tmp_path / "run", notes.append, patience=2.0)
    assert "cannot be reached" in notes[0] and notes[0].endswith("the newest local checkpoint is of step 5")


def test_no_credentials_in_files_and_logs(proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="meshwright")
    (path,) = run_with_steps(tmp_path / "a" / "run", 1)
    proxy.mode = "503"
    with pytest.raises(CommunicationFailure) as failed:
        upload_checkpoint(store(patience=2.0), path, keep=3)
    proxy.mode = "pass"
    upload_checkpoint(store(), path, keep=3)
    assert_resumes(tmp_path / "b" / "run", 1)
    texts = [
        str(failed.value),
        *(record.getMessage() for record in caplog.records if record.name.startswith("meshwright")),
    ]
    assert not any(SECRET in text for text in texts)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not any(SECRET.encode() in file.read_bytes() for file in files)
    assert SECRET.encode() not in (store().get_bytes(INDEX) or b"")
