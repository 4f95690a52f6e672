"""No corrupted checkpoint is loaded: the next older one is, and the message names the file.

Some 200 corruptions in `make test`, more than 1,000 in `make test-crash`.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.format.contents import TensorChunk, TensorRecord
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.format.verify import verify
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write.attempt import Provenance, SaveAttempt, new_attempt
from meshwright.checkpoint.write.live_state import write_tensors
from meshwright.launch.folder import take_over
from meshwright.spec.run import Lease
from tests.checkpoint.made import TEXTS

SHAPE, RANKS = (8, 40), 2
PAGE = 512
Corruption = tuple[str, str, Callable[[], object]]
"""File, description, and the function that corrupts it."""


def values(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, step: int, seed: int, lease: Lease | None) -> Path:
    """A checkpoint as two ranks write it: files of the same sizes whatever the seed."""
    attempt = SaveAttempt(folder, step, new_attempt(lease), lease)
    attempt.create()
    files, chunks, rows_per_rank = {}, [], SHAPE[0] // RANKS
    for rank in range(RANKS):
        name, local_rows = (
            f"tensors-{rank:05d}.safetensors",
            values(seed)[rank * rows_per_rank : (rank + 1) * rows_per_rank],
        )
        entry = TensorHeader(f"x[{rank * rows_per_rank},0]", "F32", tuple(local_rows.shape))
        files[name] = write_tensors(attempt.folder / name, [entry], [local_rows])
        chunks.append(TensorChunk((rank * rows_per_rank, 0), tuple(local_rows.shape), name, entry.key))
    contents = {"x": TensorRecord(SHAPE, "F32", tuple(chunks))}
    encoded_entries = encode_plain({"step": step, "samples": seed}, TEXTS)
    attempt.commit(files, contents, encoded_entries, Provenance(RANKS, "any"))
    return attempt.target


class Scene:
    """A run with a good checkpoint of step 1 and one of step 2 to corrupt; beside it checkpoints to swap files with."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        (self.run / "checkpoints").mkdir(parents=True)
        self.lease = take_over(self.run)
        self.older = write(self.run / "checkpoints", 1, 1, self.lease)
        self.target = write(self.run / "checkpoints", 2, 2, self.lease)
        self.pristine = folder / "pristine"
        shutil.copytree(self.target, self.pristine)
        (folder / "other").mkdir()
        other_lease = take_over(folder / "other")
        self.sources = {
            "step": self.older,
            "attempt": write(folder / "again", 2, 3, None),
            "run": write(folder / "other" / "checkpoints", 2, 4, other_lease),
        }
        self.names = sorted(path.name for path in self.target.iterdir())

    def restore(self) -> None:
        if self.target.is_symlink() or not self.target.is_dir():
            self.target.unlink()
        else:
            shutil.rmtree(self.target)
        shutil.copytree(self.pristine, self.target)

    def loaded(self) -> str:
        """The folder that a start of the run would load, and that its values are right."""
        x = torch.zeros(SHAPE)
        loaded = CheckpointStore(self.target.parent, lease=self.lease).load_newest({"x": x})
        assert loaded is not None
        path, state = loaded
        assert torch.equal(x, values(state["samples"])) and state["step"] == state["samples"]
        return path.name

    def change(self, name: str, change: Callable[[bytearray], bytes | bytearray]) -> Callable[[], object]:
        def corrupt() -> None:
            original = (self.target / name).read_bytes()
            changed = change(bytearray(original))
            (self.target / name).write_bytes(changed)

        return corrupt

    def byte_changes(self, chance: random.Random, flips: int, other_changes: int) -> Iterator[Corruption]:
        for name in self.names:
            size = (self.target / name).stat().st_size
            content = (self.target / name).read_bytes()
            for offset in sorted({0, size - 1, *(chance.randrange(size) for _ in range(flips))}):
                bit = 1 << chance.randrange(8)
                yield (
                    name,
                    f"bit flipped in byte {offset}",
                    self.change(name, lambda data, offset=offset, bit=bit: _flip(data, offset, bit)),
                )
            for offset in sorted({0, size - 1, *(chance.randrange(size) for _ in range(other_changes))}):
                yield name, f"truncated to {offset}", self.change(name, lambda data, offset=offset: data[:offset])
                page = slice(offset // PAGE * PAGE, min(size, offset // PAGE * PAGE + PAGE))
                if any(content[page]):
                    yield name, f"page {page} zeroed", self.change(name, lambda data, page=page: _zero(data, page))
            yield name, "a byte more", self.change(name, lambda data: data + b"\n")
            yield name, "twice", self.change(name, lambda data: data + data)

    def swaps(self) -> Iterator[Corruption]:
        for origin, source in self.sources.items():
            for name in self.names:
                if (source / name).read_bytes() != (self.target / name).read_bytes():
                    content = (source / name).read_bytes()
                    yield name, f"that of another {origin}", self.change(name, lambda _, content=content: content)
        first, second = (f"tensors-{rank:05d}.safetensors" for rank in range(2))
        for name, replacement in ((first, second), (second, first)):
            content = (self.target / replacement).read_bytes()
            yield name, "that of the other rank", self.change(name, lambda _, content=content: content)
        for origin in ("step", "run"):
            yield (
                "",
                f"the folder of another {origin}",
                lambda origin=origin: self._replace_folder(self.sources[origin]),
            )

    def no_files(self) -> Iterator[Corruption]:
        makers: dict[str, Callable[[Path], object]] = {
            "missing": lambda path: None,
            "a folder": Path.mkdir,
            "a link to the file": lambda path: path.symlink_to(self.pristine / path.name),
            "a link to nowhere": lambda path: path.symlink_to("nowhere"),
            "a pipe": os.mkfifo,
            "a socket": _make_socket,
        }
        if os.geteuid() == 0:
            makers["a device"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
        for name in self.names:
            for file_type, make in makers.items():

                def corrupt(name: str = name, make: Callable[[Path], object] = make) -> None:
                    (self.target / name).unlink()
                    make(self.target / name)

                yield name, file_type, corrupt
        yield "extra.safetensors", "a file too many", lambda: (self.target / "extra.safetensors").write_bytes(b"x")

    def _replace_folder(self, source: Path) -> None:
        shutil.rmtree(self.target)
        shutil.copytree(source, self.target)


@pytest.mark.parametrize(
    ("flips", "other_changes"), [(6, 3), pytest.param(140, 40, marks=[pytest.mark.slow, pytest.mark.crash])]
)
def test_no_corruption_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, flips: int, other_changes: int
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    scene = Scene(tmp_path)
    assert scene.loaded() == "step-00000002"
    cases = [*scene.byte_changes(random.Random(5), flips, other_changes), *scene.swaps(), *scene.no_files()]
    assert len(cases) >= (1000 if flips > 100 else 150)
    for name, target, corrupt in cases:
        corrupt()
        caplog.clear()
        assert scene.loaded() == "step-00000001", f"{name}: {target}"
        (message,) = [record.message for record in caplog.records if record.name.startswith("meshwright.checkpoint")]
        named = re.search(
            r"step-00000002.*?(COMMITTED|manifest\.json|" + re.escape(name or "manifest.json") + ")", message
        )
        assert named and message.count("\n") == 0, f"{name}: {target}: {message}"
        assert verify(scene.target, scene.lease.run_id), f"{name}: {target}"
        scene.restore()
    assert scene.loaded() == "step-00000002"


def _flip(data: bytearray, offset: int, bit: int) -> bytearray:
    data[offset] ^= bit
    return data


def _zero(data: bytearray, page: slice) -> bytearray:
    data[page] = bytes(page.stop - page.start)
    return data


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))
