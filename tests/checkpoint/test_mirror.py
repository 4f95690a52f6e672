"""The mirror of checkpoints, with a folder as its store; `test_mirror_s3` has a real server and its faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.checkpoint.format.manifest import read_manifest
from meshwright.checkpoint.mirror import store as object_store
from meshwright.checkpoint.mirror.copies import INDEX, fetch_newest, read_index, upload_checkpoint
from meshwright.checkpoint.mirror.process import MirrorUploader
from meshwright.checkpoint.mirror.store import MirrorStore, check_url
from meshwright.checkpoint.store import CheckpointStore
from meshwright.launch.folder import take_over
from meshwright.spec.errors import BadInput, CommunicationFailure, Damaged
from tests.checkpoint.made import holds, save


def run_with_steps(run: Path, *steps: int) -> list[Path]:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(run / "checkpoints", lease=take_over(run))
    return [save(run / "checkpoints", step, store) for step in steps]


def mirror_of(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'mirror'}"


def store_of(tmp_path: Path) -> MirrorStore:
    return MirrorStore(f"{mirror_of(tmp_path)}/run", patience=1.0)


def test_a_start_elsewhere_continues_from_the_mirror_as_the_same_run(tmp_path: Path) -> None:
    paths, notes = run_with_steps(tmp_path / "a" / "run", 1, 2, 3), list[str]()
    for path in paths:
        upload_checkpoint(store_of(tmp_path), path, keep=2)
    fetched = fetch_newest(mirror_of(tmp_path), tmp_path / "b" / "run", notes.append)
    assert fetched is not None and holds(fetched, 3) and "resuming from step 3 of file://" in notes[0]
    assert take_over(tmp_path / "b" / "run").run_id == read_manifest(paths[0]).run_id
    assert sorted(
        path.name.partition(".")[0] for path in (tmp_path / "mirror" / "run").iterdir() if any(path.glob("*"))
    ) == [
        "step-00000002",
        "step-00000003",
    ]


def test_the_index_is_written_after_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However early an upload breaks off, a start gets the checkpoint before."""
    first, second = run_with_steps(tmp_path / "a" / "run", 1, 2)
    upload_checkpoint(store_of(tmp_path), first, keep=3)
    names: list[str] = []
    put, put_bytes = MirrorStore.put, MirrorStore.put_bytes
    monkeypatch.setattr(MirrorStore, "put", lambda self, path, name: (names.append(name), put(self, path, name)))
    monkeypatch.setattr(
        MirrorStore, "put_bytes", lambda self, data, name: (names.append(name), put_bytes(self, data, name))
    )
    upload_checkpoint(store_of(tmp_path), second, keep=3)
    assert [name.rpartition("/")[2] for name in names[-3:]] == ["manifest.json", "COMMITTED", INDEX]
    monkeypatch.undo()
    objects = tmp_path / "mirror" / "run"
    newest = next(objects.glob("step-00000002.*"))
    (newest / "tensors-00000.safetensors").unlink()  # an object that the store has lost
    fetched = fetch_newest(mirror_of(tmp_path), tmp_path / "b" / "run", lambda text: None)
    assert fetched is not None and fetched.name == "step-00000001" and holds(fetched, 1)


def test_another_run_and_an_earlier_start_do_not_write(tmp_path: Path) -> None:
    run = tmp_path / "a" / "run"
    (earlier_start,) = run_with_steps(run, 1)
    (later_start,) = run_with_steps(run, 2)
    (other_run,) = run_with_steps(tmp_path / "b" / "run", 9)
    store = store_of(tmp_path)
    upload_checkpoint(store, later_start, keep=3)
    with pytest.raises(BadInput, match=r"later start of this run writes there \(epoch 2; this one has 1\)"):
        upload_checkpoint(store, earlier_start, keep=3)
    with pytest.raises(BadInput, match="holds checkpoints of run"):
        upload_checkpoint(store, other_run, keep=3)
    with pytest.raises(BadInput, match=r"choose another name or checkpoint\.mirror"):
        fetch_newest(mirror_of(tmp_path), tmp_path / "b" / "run", lambda text: None)
    index = read_index(store)
    assert index is not None and [entry.step for entry in index.checkpoints] == [2]


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"run_id": null, "epoch": 1, "checkpoints": [{"step": 1, "folder": "../x"}]}']
)
def test_an_invalid_index_is_refused(tmp_path: Path, text: bytes) -> None:
    store_of(tmp_path).put_bytes(text, INDEX)
    with pytest.raises(Damaged, match=INDEX.replace(".", r"\.")):
        read_index(store_of(tmp_path))


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/prefix",
        "bucket/prefix",
        "s3://bucket/prefix?token=secret",
        "key:secret@bucket",
        "",
        "simplecache::s3://key:secret@bucket/prefix",
        "blockcache::simplecache::s3://key:secret@bucket",
        "simplecache://secret@x::s3://bucket/prefix",
        "s3://bucket/prefix::s3://key:secret@other",
        "s3://key:sec/secret@bucket",
        "simplecache::s3://bucket?secret=x",
        "simplecache://?secret=x::s3://bucket/a",
        "simplecache::bucket/prefix",
    ],
)
def test_a_url_has_a_protocol_and_no_credentials(url: str) -> None:
    with pytest.raises(BadInput, match="checkpoint.mirror") as refused:
        check_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("s3://bucket/prefix", "s3"),
        ("s3://bucket", "s3"),
        ("gs://a-b.c/d@e:f", "gs"),
        ("file:///data/x", "file"),
        ("memory://x", "memory"),
        ("simplecache::s3://bucket/x", "s3"),
        ("http://host:9000/x", "http"),
    ],
)
def test_the_protocol_of_a_url(url: str, protocol: str) -> None:
    assert check_url(url) == protocol


def test_requests_are_repeated_with_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, clock = list[float](), [0.0]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    # Not in the module `time`, which threads of other tests use.
    monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    store = MirrorStore(f"{mirror_of(tmp_path)}/run", patience=100.0)
    failing = [OSError("503 Slow Down")] * 4

    def cat_file(path: str) -> bytes:
        if failing:
            raise failing.pop()
        return b"there"

    monkeypatch.setattr(store._files, "cat_file", cat_file)
    assert store.get_bytes("x") == b"there" and pauses == [0.5, 1.0, 2.0, 4.0]
    failing[:] = [OSError("503 Slow Down")] * 100
    with pytest.raises(CommunicationFailure, match="503 Slow Down; tried for 100 s"):
        store.get_bytes("x")
    assert max(pauses) == 30.0 and clock[0] < 210


class FailingStore:
    """Makes every call of an `MirrorStore` fail until its clock, which only its pauses advance, has reached `seconds`."""

    def __init__(self, store: MirrorStore, fault: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fault, self._seconds, self.clock, self.failures = fault, seconds, 0.0, 0
        monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=self._pause, monotonic=lambda: self.clock))
        for name in ("put_file", "pipe_file", "cat_file", "info", "makedirs"):
            monkeypatch.setattr(store._files, name, self._failing(getattr(store._files, name), store._files))

    def _pause(self, seconds: float) -> None:
        self.clock += seconds

    def _failing(self, call: Callable[..., Any], files: Any) -> Callable[..., Any]:
        def fail_or_call(*arguments: Any, **options: Any) -> Any:
            if self.clock >= self._seconds:
                return call(*arguments, **options)
            self.failures += 1
            if self._fault == "hangs":  # until the client's own time limit
                self.clock += object_store.ANSWER_SECONDS
                raise TimeoutError("Read timeout on endpoint")
            if self._fault == "drops" and call.__name__ == "put_file":  # within the file
                source, target = arguments
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                data = Path(source).read_bytes()
                Path(target).write_bytes(data[: len(data) // 2])
                raise ConnectionResetError("Connection was closed")
            raise OSError("503 Slow Down")

        return fail_or_call


@pytest.mark.parametrize("fault", ["answers 503", "hangs", "drops"])
def test_a_store_that_fails_for_a_minute_gets_the_checkpoint_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Without a server and by a clock of its own; `test_mirror_s3` has the real ones."""
    paths = run_with_steps(tmp_path / "a" / "run", 1, 2)
    upload_checkpoint(store_of(tmp_path), paths[0], keep=3)
    store = MirrorStore(f"{mirror_of(tmp_path)}/run", patience=3600.0)
    with monkeypatch.context() as context:
        failing = FailingStore(store, fault, 60.0, context)
        upload_checkpoint(store, paths[1], keep=3)
        assert failing.failures > 1 and 60 <= failing.clock < 200
    fetched = fetch_newest(mirror_of(tmp_path), tmp_path / "b" / "run", lambda text: None)
    assert fetched is not None and holds(fetched, 2)


@pytest.mark.parametrize("fault", ["answers 503", "hangs", "drops"])
def test_a_store_that_does_not_recover_keeps_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    paths = run_with_steps(tmp_path / "a" / "run", 1, 2)
    upload_checkpoint(store_of(tmp_path), paths[0], keep=3)
    store = MirrorStore(f"{mirror_of(tmp_path)}/run", patience=300.0)
    with monkeypatch.context() as context:
        FailingStore(store, fault, float("inf"), context)
        with pytest.raises(CommunicationFailure, match="tried for 300 s"):
            upload_checkpoint(store, paths[1], keep=3)
    fetched = fetch_newest(mirror_of(tmp_path), tmp_path / "b" / "run", lambda text: None)
    assert fetched is not None and holds(fetched, 1)


def test_the_uploading_process_copies_the_requested_checkpoints(tmp_path: Path) -> None:
    messages: list[str] = []
    paths = run_with_steps(tmp_path / "a" / "run", 1, 2)
    uploader = MirrorUploader(mirror_of(tmp_path), tmp_path / "a" / "run", 3, messages.append)
    uploader.offer(paths[1])
    uploader.close(60.0)
    assert messages == []
    index = read_index(store_of(tmp_path))
    assert index is not None and [entry.step for entry in index.checkpoints] == [2]
    uploader = MirrorUploader(mirror_of(tmp_path), tmp_path / "a" / "run", 3, messages.append)
    uploader.offer(tmp_path / "step-00000007")
    uploader.close(60.0)
    (sentence,) = messages
    assert sentence.startswith("step 7 is not in the mirror: ")
