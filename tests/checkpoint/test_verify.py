from __future__ import annotations

import errno
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.format.files import BLOCK_BYTES
from meshwright.checkpoint.format.inventory import newest_checkpoint
from meshwright.checkpoint.format.manifest import COMMITTED, MANIFEST, has_commit
from meshwright.checkpoint.format.verify import list_checkpoints, verify
from meshwright.checkpoint.inspect import choose_checkpoint, describe_checkpoint
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.spec.errors import BadInput, Damaged
from tests.checkpoint.made import save

SHARD = "tensors-00000.safetensors"


def plain(path: Path) -> list[tuple[str, int | None, str]]:
    return [(damage.file, damage.offset, damage.kind) for damage in verify(path)]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_every_one_of_200_bit_flips_is_found_in_its_file(tmp_path: Path):
    path = save(tmp_path, 1)
    assert verify(path) == []
    chance = random.Random(0)
    damaged_files = set()
    for _ in range(200):
        file = chance.choice(sorted(path.iterdir()))
        bit = chance.randrange(8 * file.stat().st_size)
        flip(file, bit)
        damage = plain(path)
        expected = {(COMMITTED, 0, "commit"), (MANIFEST, 0, "manifest")}
        assert damage and (
            set(damage) <= expected if file.name in (COMMITTED, MANIFEST) else damage == [(file.name, 0, "digest")]
        )
        flip(file, bit)
        damaged_files.add(file.name)
    assert verify(path) == [] and len(damaged_files) == 7


def test_a_flip_in_a_large_file_is_located_to_its_block(tmp_path: Path):
    large = {"x": torch.arange(10 << 20, dtype=torch.int32), "y": torch.zeros(3)}
    path = CheckpointStore(tmp_path).save(5, large, {}, {}).path
    flip(path / SHARD, 8 * (2 * BLOCK_BYTES + 77))
    flip(path / SHARD, 8 * (BLOCK_BYTES + BLOCK_BYTES - 1))
    assert plain(path) == [(SHARD, BLOCK_BYTES, "digest")]
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read_rows("x", 0, 1000), large["x"][:1000])
        with pytest.raises(Damaged, match=f"in the 16 MiB from byte {BLOCK_BYTES:,}"):
            reader.read_rows("x", 5 << 20, (5 << 20) + 1)


def test_truncation_is_found_at_every_length(tmp_path: Path):
    path = save(tmp_path, 1)
    content = (path / SHARD).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        (path / SHARD).write_bytes(content[:length])
        assert plain(path) == [(SHARD, length, "truncated")]
    (path / SHARD).write_bytes(content + b"\0")
    assert plain(path) == [(SHARD, len(content), "extra")]


def test_every_missing_file_is_named(tmp_path: Path):
    path = save(tmp_path, 1)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        file.unlink()
        assert plain(path) == [(file.name, None, "missing")]
        file.write_bytes(data)
    assert verify(path) == []


def replaced_by_socket(file: Path) -> None:
    file.unlink()
    folder = os.open(file.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{file.name}")  # a socket's path may have 107 bytes at most
    os.close(folder)


def replaced_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replaced_by_device(file: Path) -> None:
    """/dev/zero, which gives as many bytes as one reads; only root may make one."""
    if os.geteuid():
        pytest.skip("needs root")
    file.unlink()
    os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))


@pytest.mark.parametrize("replace", [replaced_by_socket, replaced_by_folder, replaced_by_pipe, replaced_by_device])
@pytest.mark.parametrize("name", [COMMITTED, MANIFEST, SHARD, "config.yaml"])
def test_an_entry_that_is_not_a_regular_file_is_damage(tmp_path: Path, replace: Callable[[Path], None], name: str):
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    replace(path / name)
    assert [damage.file for damage in verify(path)] == [name]
    assert CheckpointStore(tmp_path).newest_good() == older
    # Both stay listed as committed, so that a run does not start anew over them.
    assert all(checkpoint["committed"] for checkpoint in list_checkpoints(tmp_path))
    assert len(list_checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("name", [COMMITTED, MANIFEST, SHARD, "config.yaml", ""])
def test_a_file_or_folder_that_may_not_be_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
):
    """Tests may run as root, who may read everything: the refusal is played."""
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    call = "open" if name else "scandir"
    real = getattr(os, call)

    def refuse(path_argument: str | Path, *arguments: Any, **options: Any) -> Any:
        if Path(path_argument) == path / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path_argument))
        return real(path_argument, *arguments, **options)

    monkeypatch.setattr(os, call, refuse)
    assert [(damage.file, "Permission denied" in damage.note) for damage in verify(path)] == [(name or ".", True)]
    assert CheckpointStore(tmp_path).newest_good() == older
    assert f"{name or '.'}: " in caplog.text and "Permission denied" in caplog.text
    assert [checkpoint["ok"] for checkpoint in list_checkpoints(tmp_path)] == [True, False]


def test_a_folder_that_may_not_be_searched_may_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path_argument: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path_argument))

    assert not has_commit(tmp_path)
    monkeypatch.setattr(os, "lstat", refuse)
    assert has_commit(tmp_path)


def test_a_lack_of_descriptors_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(tmp_path, 1)

    def refuse(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many"):
        verify(path)


def test_extra_files_and_folders_are_named(tmp_path: Path):
    path = save(tmp_path, 1)
    (path / "notes.txt").write_text("hello")
    (path / "folder").mkdir()
    assert sorted(plain(path)) == [("folder", None, "extra"), ("notes.txt", None, "extra")]


def test_several_damages_are_all_reported(tmp_path: Path):
    path = save(tmp_path, 1)
    (path / "plan.yaml").unlink()
    (path / "config.yaml").write_bytes(b"name")
    flip(path / SHARD, 0)
    assert sorted(plain(path), key=str) == [
        ("config.yaml", 4, "truncated"),
        ("plan.yaml", None, "missing"),
        (SHARD, 0, "digest"),
    ]


def test_the_list_tells_committed_and_good_apart(tmp_path: Path):
    good, bad, never = (save(tmp_path / "checkpoints", step) for step in (1, 2, 3))
    flip(bad / SHARD, 8 * 100)
    (never / COMMITTED).unlink()
    (tmp_path / "checkpoints" / ".step-00000004.abcd.partial").mkdir()
    damaged = [{"file": SHARD, "offset": 0, "kind": "digest"}]
    missing = [{"file": COMMITTED, "offset": None, "kind": "missing"}]
    expected = [
        {"path": str(good), "step": 1, "committed": True, "ok": True, "damaged": []},
        {"path": str(bad), "step": 2, "committed": True, "ok": False, "damaged": damaged},
        {"path": str(never), "step": 3, "committed": False, "ok": False, "damaged": missing},
    ]
    assert list_checkpoints(tmp_path) == expected
    assert list_checkpoints(tmp_path / "checkpoints") == expected
    assert [checkpoint for path in (good, bad, never) for checkpoint in list_checkpoints(path)] == expected
    assert [checkpoint["ok"] for checkpoint in list_checkpoints(tmp_path, contents=False)] == [True, True, False]
    assert newest_checkpoint(tmp_path) == good
    assert newest_checkpoint(tmp_path, contents=False) == bad


def test_a_damaged_step_renamed_for_its_replacement_is_listed_with_its_step(tmp_path: Path):
    """As a crash between the two renames of a replacement leaves it."""
    checkpoints = tmp_path / "checkpoints"
    renamed = save(checkpoints, 2).rename(checkpoints / ".replaced-step-00000002.ab")
    (renamed / COMMITTED).unlink()
    missing = [{"file": COMMITTED, "offset": None, "kind": "missing"}]
    expected = [{"path": str(renamed), "step": 2, "committed": False, "ok": False, "damaged": missing}]
    assert list_checkpoints(tmp_path) == expected
    assert list_checkpoints(renamed) == expected
    assert choose_checkpoint(tmp_path, 2) == renamed and describe_checkpoint(renamed)["step"] == 2
    with pytest.raises(BadInput, match="no checkpoint of step 7; steps there: 2"):
        choose_checkpoint(tmp_path, 7)


def test_a_folder_without_good_checkpoints_says_why(tmp_path: Path):
    with pytest.raises(BadInput, match="no committed"):
        newest_checkpoint(tmp_path)
    (tmp_path / "run-one").mkdir()
    with pytest.raises(BadInput, match="run-one"):
        list_checkpoints(tmp_path / "run-on")
    flip(save(tmp_path, 1) / SHARD, 800)
    with pytest.raises(Damaged, match="every checkpoint"):
        newest_checkpoint(tmp_path)


def test_verifying_needs_no_torch(tmp_path: Path):
    path = save(tmp_path, 1)
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from pathlib import Path\n"
        "from meshwright.checkpoint.format import contents, manifest, plain_files, verify\n"
        "from meshwright.checkpoint.write import attempt\n"
        f"path = Path({str(path)!r})\n"
        "assert verify.verify(path) == [] and contents.read_contents(path, manifest.read_manifest(path))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})
