"""Simulates power cuts: the contents a folder may have after a crash at any system call that changes the disk.

Data and file names that were not flushed by fsync may be lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoint.crash import CALLS, FILE_OPEN, intercept_calls

RECORDED = (*CALLS, FILE_OPEN)
Keeps = Callable[[int], bool]
"""Whether the unflushed changes of the file or folder with this inode number survive the crash."""


@dataclass
class Disk:
    """Names in each folder and contents of each file, by inode.

    `names` and `content` are what processes see; `flushed_names` and `flushed_content` are as of the last fsync.
    """

    root: int
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    content: dict[int, bytes] = field(default_factory=dict)
    flushed_names: dict[int, dict[str, int]] = field(default_factory=dict)
    flushed_content: dict[int, bytes] = field(default_factory=dict)

    def build(self, target: Path, keeps_names: Keeps, keeps_content: Keeps) -> None:
        """Make the folder `target` as a crash leaves it."""
        self._folder(self.root, target, keeps_names, keeps_content)

    def _folder(self, inode: int, target: Path, keeps_names: Keeps, keeps_content: Keeps) -> None:
        target.mkdir()
        names = self.names if keeps_names(inode) and inode in self.names else self.flushed_names
        for name, entry in names.get(inode, {}).items():
            if entry in self.names or (entry in self.flushed_names and entry not in self.content):
                self._folder(entry, target / name, keeps_names, keeps_content)
            else:
                now = self.content if keeps_content(entry) and entry in self.content else self.flushed_content
                (target / name).write_bytes(now.get(entry, b""))


def recorded(folder: Path, work: Callable[[], object]) -> list[Disk]:
    """The disk before each call that `work` makes, and after the last; what is there at first is flushed."""
    disks: list[Disk] = []
    flushed = _look(folder)
    flushed_names, flushed_content = dict(flushed.names), dict(flushed.content)
    lock = threading.RLock()

    def keep() -> None:
        disk = _look(folder)
        disk.flushed_names, disk.flushed_content = dict(flushed_names), dict(flushed_content)
        disks.append(disk)

    def act(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        with lock:
            keep()
            if name == "fsync":
                _flush(arguments[0], flushed_names, flushed_content)

    with intercept_calls(act, RECORDED):
        work()
    keep()
    return disks


def _flush(descriptor: int, names: dict[int, dict[str, int]], content: dict[int, bytes]) -> None:
    path, inode = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_ino
    if path.is_dir():
        names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
    else:
        content[inode] = path.read_bytes()


def _look(folder: Path) -> Disk:
    disk = Disk(folder.stat().st_ino)
    for path, inode in _tree(folder):
        if path.is_dir():
            disk.names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            disk.content[inode] = path.read_bytes()
    return disk


def _tree(folder: Path) -> Iterator[tuple[Path, int]]:
    yield folder, folder.stat().st_ino
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _tree(Path(entry.path))
        else:
            yield Path(entry.path), entry.inode()
