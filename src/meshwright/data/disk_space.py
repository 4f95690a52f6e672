"""Checks before a preparation that its tokens will fit on the disk, and explains the error if the disk becomes full."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from meshwright.data.encode import token_dtype
from meshwright.data.inputs import InputFile
from meshwright.data.units import text_bytes
from meshwright.spec.errors import OutOfResources

LEAST_BYTES_PER_TOKEN = 2
"""A token is assumed to stand for at least this many bytes of text."""


def prepared_bytes(files: Sequence[InputFile], vocab_size: int) -> int:
    """Return an upper estimate of the bytes that the tokens of these files will take."""
    tokens = sum(map(text_bytes, files)) // LEAST_BYTES_PER_TOKEN
    return tokens * np.dtype(token_dtype(vocab_size)).itemsize


def check_space(out: Path, needed: int) -> None:
    """Raise OutOfResources if fewer than `needed` bytes are free on the disk of `out`."""
    free = shutil.disk_usage(out).free
    if needed > free:
        raise OutOfResources(f"{out}: about {needed:,} bytes are needed, {free:,} are free on its disk")


@contextmanager
def full_disk_named(out: Path, needed: int) -> Iterator[None]:
    """A context that turns the error of a full disk into OutOfResources.

    The message names the file, the free bytes, and the bytes `needed` for the whole preparation.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or out
        raise OutOfResources(
            f"{where}: the disk is full ({error.strerror}); {out} needs about {needed:,} bytes in all, "
            f"{shutil.disk_usage(out).free:,} are free; make room and run the same command again to continue"
        ) from error
