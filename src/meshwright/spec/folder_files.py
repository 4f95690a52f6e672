"""Reads files of Hugging Face folders: links that leave the folder are not followed, and sizes have limits."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from meshwright.spec.errors import BadInput

MiB = 1 << 20
JSON_BYTES, TOKENIZER_BYTES, TEMPLATE_BYTES = 64 * MiB, 256 * MiB, 4 * MiB
"""Most bytes of a JSON file, of a tokenizer's file and of a chat template; the largest known have 10, 35 and 0.1 MiB."""


def read_folder_file(file: Path, limit: int, folder: Path | None = None) -> bytes:
    """The bytes of a file of `folder`, its own by default.

    Raises BadInput if it is larger than `limit`, no regular file, or a link out of the folder, before any of it is read.
    """
    check_inside(file, folder)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{file}: is a directory, pipe or device; expected a file")
        if status.st_size > limit:
            raise BadInput(
                f"{file}: has {status.st_size:,} bytes, expected at most {limit:,}; is it another file under this name?"
            )
        return opened.read()


def read_folder_text(file: Path, limit: int, folder: Path | None = None) -> str:
    """The text of such a file. Raises BadInput also if it is not UTF-8."""
    try:
        return read_folder_file(file, limit, folder).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: cannot be read: {error}") from None


def check_inside(file: Path, folder: Path | None = None) -> None:
    """Raise BadInput if a file of `folder`, its own by default, is a link to a file outside.

    A folder `snapshots/REVISION` of the Hugging Face cache has links to `blobs` beside `snapshots`, which are inside.
    """
    folder = folder or file.parent
    real, root = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(each) for each in roots):
        raise BadInput(f"{file}: is a link to {real}, outside {folder}; copy the file into the folder")
