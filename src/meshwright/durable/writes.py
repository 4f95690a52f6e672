"""Durable writes: a file has its old content or all of its new content, even after a power failure.

A file is written under a temporary name in the same folder, flushed to the disk, and renamed. Then the folder's entries
are flushed too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

PARTIAL = ".partial"
"""Suffix of a file that is still being written."""


def write_durable(path: Path, content: bytes | str | Iterable[str]) -> None:
    """Replace the file `path` by `content` (text as UTF-8, as a whole or as lines) in one step.

    Raises OSError with `path` as its file name; then `path` is unchanged, and the temporary file is removed.
    """
    chunks = [content] if isinstance(content, (bytes, str)) else content
    if path.exists() and not path.is_file():  # a device or pipe, such as /dev/stdout, is written to directly
        path.write_text(
            "".join(chunk if isinstance(chunk, str) else chunk.decode() for chunk in chunks), encoding="utf-8"
        )
        return
    path = Path(os.path.realpath(path))  # a link stays, and its target gets the new content
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            for chunk in chunks:
                file.write(chunk.encode() if isinstance(chunk, str) else chunk)
            file.flush()
            sync_open_file(file.fileno(), path)
        publish(partial, path)
    except OSError as error:
        _remove(partial)
        error.filename = str(path)
        raise
    except BaseException:
        _remove(partial)
        raise


def write_replacing(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step, without flushing it to the disk. For a file that is written often."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        _remove(partial)
        raise


def append_durable(path: Path, content: bytes) -> None:
    """Append the lines `content` to a file, and flush it. The file is created if it is missing.

    After an OSError, which names `path`, the file ends as before if the file system permits that. A crash may leave a part
    of `content` at the end. The next call then ends that line first.
    """
    is_new = not path.exists()
    with path.open("a+b", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            content = b"\n" + content
        try:
            while content:
                content = content[file.write(content) :]
            sync_open_file(file.fileno(), path)
            if is_new:
                sync_folder(path.parent)
        except OSError as error:
            error.filename = str(path)
            with suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise


def publish(partial: Path, path: Path) -> None:
    """Rename a flushed file or folder to `path`, replacing a file there, and flush the new name."""
    os.replace(partial, path)
    sync_folder(path.parent)


def publish_folder(partial: Path, path: Path, displaced: Path) -> None:
    """Rename a flushed folder to `path`, and flush the new name.

    An existing `path` is first renamed to `displaced`. It keeps that name if a crash follows between the two renames. If
    the second rename fails, the first one is undone.
    """
    replacing = os.path.lexists(path)
    if replacing:
        os.rename(path, displaced)
    try:
        os.rename(partial, path)
    except BaseException:
        if replacing:
            os.rename(displaced, path)
        raise
    sync_folder(path.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a file or folder. Until `sync_folder` has flushed the folder of `target`, a crash may undo it."""
    os.rename(path, target)


def sync_file(path: Path) -> None:
    """Flush the content of a file to the disk, even if another process wrote it."""
    with path.open("rb") as file:
        sync_open_file(file.fileno(), path)


def sync_open_file(descriptor: int, path: Path) -> None:
    """Flush the content of an open file to the disk. An OSError names `path`."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to the disk: files and folders that were created, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partials(folder: Path) -> None:
    """Remove the partial files of dead writers in `folder`. Only the process that holds the folder's lock may call this."""
    for path in folder.glob(f"*{PARTIAL}"):
        if path.is_file():
            _remove(path)


def digest(content: bytes) -> str:
    """Return the xxh3_128 digest of `content`, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(content)


def digest_file(path: Path) -> str:
    """Return the xxh3_128 digest of a file, in hexadecimal. 8 MiB are read at a time."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(8 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the folder is gone, or the disk has failed: the first error counts
        return
