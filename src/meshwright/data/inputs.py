"""The files that the inputs of a preparation name, and everything that is not read, each with a reason.

A directory stands for every file below it whose name does not begin with a dot. Links to files and directories are followed. If several
names lead to the same file or directory, it is read once.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from meshwright.data.file_formats import RECORDS, FileFormat, format_of
from meshwright.spec.errors import BadInput, nearest

STDLIB = "stdlib"
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
CACHES = {"__pycache__"}
Reason = Literal[
    "hidden",
    "empty",
    "the same as another",
    "binary",
    "format not read",
    "no column",
    "no chats",
    "no preferences",
    "damaged",
    "broken link",
    "link loop",
    "no regular file",
    "cannot be read",
]
HARMLESS: tuple[Reason, ...] = ("hidden", "empty", "the same as another")
"""Reasons that do not mean a loss of text that the inputs name."""


@dataclass(frozen=True)
class FileRange:
    """A part of a file: bytes [start, stop) of a file of lines, or row groups [start, stop) of a parquet file.

    `before` is the number of lines or rows before this part. `size` is the part's share of the file in bytes.
    """

    start: int
    stop: int
    before: int
    size: int


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    - `name` is shown to people. `key` is the path of the file within its input; it does not change if the input is moved.
    - `from_search`: the file was found in a directory, so it is skipped if it is binary or empty. Otherwise such a file is an error.
    - `before`: size of all files before this one, in bytes.
    - `modified_ns` and `changed_ns`: modification time and inode change time.
    - `range`: if set, only this part of the file is read.
    """

    path: Path
    name: str
    key: str
    size: int
    from_search: bool = False
    before: int = 0
    modified_ns: int = 0
    changed_ns: int = 0
    range: FileRange | None = None

    format: FileFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of(self.name))


@dataclass(frozen=True)
class NotRead:
    """A file or directory, or the end of a file, that is not read. `bytes` is its size, 0 if unknown."""

    where: str
    reason: Reason
    detail: str = ""
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f": {self.detail}" if self.detail else "")


class Inputs(NamedTuple):
    """The files to read, and what the inputs name but is not read."""

    files: list[InputFile]
    not_read: list[NotRead]


def list_inputs(inputs: Sequence[str], exclude: Path | None = None) -> Inputs:
    """All files of `inputs`, which are files, directories, or the word `stdlib`. Their order depends only on names.

    Files below `exclude` (the output) are left out. Raises BadInput if an input is missing, empty, given twice, or is a file that cannot be
    read as text.
    """
    files: list[InputFile] = []
    not_read: list[NotRead] = []
    earlier: dict[Identity, InputFile] = {}
    for name in inputs:
        named, unreadable = _files_of(name, exclude)
        here: dict[Identity, InputFile] = {}
        for file, identity in named:
            if identity in here:
                not_read.append(NotRead(file.name, "the same as another", here[identity].name, file.size))
            elif identity in earlier:
                other = earlier[identity].name
                raise BadInput(f"{file.name}: is the same file as {other}, which is an input too; name each file once")
            else:
                here[identity] = file
                files.append(file)
        earlier |= here
        not_read += unreadable
        if not named:
            first = "".join(f"; {each}" for each in unreadable if each.reason not in HARMLESS)
            raise BadInput(f"{name}: no files here to read{first}")
    if not files:
        raise BadInput(f"no input given: expected files, directories, or the word `{STDLIB}`")
    _check_packages(files)
    starts = accumulate((file.size for file in files), initial=0)
    return Inputs([replace(file, before=start) for file, start in zip(files, starts, strict=False)], not_read)


Identity = tuple[int, int, int, int]
"""Device, inode, size and modification time of a file. They are equal for two names of the same file."""
Named = list[tuple[InputFile, Identity]]


def _files_of(name: str, exclude: Path | None) -> tuple[Named, list[NotRead]]:
    path = Path(name)
    if name == STDLIB and not path.exists():
        return _stdlib_files(), []
    if path.is_dir():
        if exclude is not None and path.resolve() == exclude.resolve():
            raise BadInput(f"{name}: is both input and output; choose another --out")
        search = _Search(path, exclude)
        return search.files(), search.not_read
    if not path.is_file():
        raise BadInput(_missing(name, path))
    if refused := format_of(name).refused:
        raise BadInput(f"{name}: is {refused}")
    return [_input_file(path, name, path.name, path.stat(), from_search=False)], []


def _input_file(
    path: Path, name: str, key: str, status: os.stat_result, *, from_search: bool
) -> tuple[InputFile, Identity]:
    size = status.st_size
    modified = status.st_mtime_ns
    file = InputFile(path, name, key, size, from_search, modified_ns=modified, changed_ns=status.st_ctime_ns)
    return file, (status.st_dev, status.st_ino, size, modified)


class _Search:
    """The search of a directory. After `files` has been read to its end, `not_read` has what was not read."""

    def __init__(self, root: Path, exclude: Path | None, skipped: Iterable[str] = CACHES) -> None:
        self.not_read: list[NotRead] = []
        self._root = str(root)
        self._skipped = set(skipped)
        self._excluded = None if exclude is None else os.path.realpath(exclude)
        self._trees = [os.path.realpath(root)]
        """Real paths of directories that are read with everything below them."""

    def files(self) -> Named:
        """All files. Files of a directory come before those of its subdirectories, each in the order of names."""
        return list(self._below(self._root, ""))

    def _below(self, folder: str, key: str) -> Iterator[tuple[InputFile, Identity]]:
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.not_read.append(NotRead(folder, "cannot be read", error.strerror or ""))
            return
        folders = []
        for entry in listed:
            if entry.name.startswith(".") or entry.name in self._skipped:
                if not self._is_excluded(entry):
                    self.not_read.append(NotRead(entry.path, "hidden"))
            elif self._is_folder(entry):
                folders.append(entry)
            elif (status := self._status(entry)) is not None:
                path = Path(entry.path)
                yield _input_file(path, str(path), key + entry.name, status, from_search=True)
        for entry in folders:
            if not self._is_excluded(entry) and (not entry.is_symlink() or self._follows(entry)):
                yield from self._below(entry.path, f"{key}{entry.name}/")

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError:  # links that form a circle; `_status` reports them
            return False

    def _status(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """The status of a regular file, after following links."""
        try:
            status = entry.stat()
        except OSError as error:
            broken = entry.is_symlink()
            reason: Reason = "broken link" if broken else "cannot be read"
            self.not_read.append(
                NotRead(entry.path, reason, os.readlink(entry.path) if broken else error.strerror or "")
            )
            return None
        if not stat.S_ISREG(status.st_mode):
            self.not_read.append(NotRead(entry.path, "no regular file", "a pipe, socket or device"))
            return None
        return status

    def _follows(self, entry: os.DirEntry[str]) -> bool:
        """Whether to follow a link to a directory. It is not followed if the directory is read under its own name or by an earlier link."""
        target = os.path.realpath(entry.path)
        if any(self._reads(tree, target) for tree in self._trees):
            self.not_read.append(NotRead(entry.path, "the same as another", target))
            return False
        here = os.path.realpath(os.path.dirname(entry.path))
        if os.path.commonpath([here, target]) == target:
            self.not_read.append(NotRead(entry.path, "link loop", f"{target} contains it"))
            return False
        self._trees.append(target)
        return True

    def _reads(self, tree: str, target: str) -> bool:
        """Whether the search of `tree` reads the directory `target` under its own name."""
        if os.path.commonpath([tree, target]) != tree:
            return False
        parts = Path(target).relative_to(tree).parts
        return not any(part.startswith(".") or part in self._skipped for part in parts)

    def _is_excluded(self, entry: os.DirEntry[str]) -> bool:
        return self._excluded is not None and os.path.realpath(entry.path) == self._excluded


def _stdlib_files() -> Named:
    search = _Search(Path(sysconfig.get_path("stdlib")), None, {*CACHES, *NOT_STDLIB})
    return [
        (replace(file, name=f"{STDLIB}/{file.key}"), inode)
        for file, inode in search.files()
        if file.path.suffix == ".py" and file.size
    ]


def _check_packages(files: list[InputFile]) -> None:
    """Raise BadInput, before any work, if a file needs a package that is not installed."""
    needed: dict[str, InputFile] = {}
    for file in files:
        for package in file.format.packages:
            needed.setdefault(package, file)
    for package, file in needed.items():
        try:
            __import__(package)
        except ImportError:
            message = f"reading {file.path.suffix} needs {package}: pip install {package}"
            raise BadInput(f"{file.name}: {message}, or meshwright[data]") from None


def check_text_key(text_key: str | None, files: list[InputFile]) -> None:
    """Raise BadInput if a text key is given but no file has records."""
    if text_key is not None and all(file.format.layout == "text" for file in files):
        raise BadInput(f"--text-key {text_key}: no input has records ({RECORDS}); leave it out")


def _missing(name: str, path: Path) -> str:
    if name == "-" or path.exists():
        return (
            f"{name}: is a stream, and a preparation reads its inputs more than once; write it to a file, whose name says what it has, "
            "for example posts.jsonl"
        )
    if path.is_symlink():
        return f"{name}: is a link to {os.readlink(path)}, which does not exist"
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, [*siblings, STDLIB])
    nearest_path = near if near == STDLIB else path.parent / (near or "")
    hint = f" (nearest: {nearest_path})" if near else ""
    return f"{name}: no such file or directory{hint}; expected files, directories, or the word `{STDLIB}`"
