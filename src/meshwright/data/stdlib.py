"""The built-in corpus `data.mix: stdlib`: the source files of Python's standard library, prepared when they are first used."""

from __future__ import annotations

import errno
import platform
from pathlib import Path

from meshwright.data.inputs import STDLIB
from meshwright.data.prepare import prepare
from meshwright.data.request import Preparation, finished_manifests
from meshwright.data.tokenizer import TRAIN_PREFIX
from meshwright.spec.errors import BadInput
from meshwright.spec.folders import CACHE_HINT, user_cache

VOCABULARY = 4096
"""Default number of tokens in its vocabulary."""
HELD_OUT_FRACTION = 0.02
"""Fraction of the files in the held-out split."""


def ensure_stdlib(folder: Path, vocab: int = VOCABULARY, *, shown: bool = False) -> Path:
    """Prepare the standard library in `folder` unless that was done before, and return `folder`.

    2% of the files are held out. Any number of processes may call this at the same time: one does the work and the
    others wait for it. `shown` shows progress on stderr. Raises BadInput if the folder was prepared with another
    vocabulary, or if this user cannot write it.
    """
    preparation = Preparation((STDLIB,), f"{TRAIN_PREFIX}{vocab}", folder, held_out=HELD_OUT_FRACTION)
    for manifest in finished_manifests(preparation).values():
        if (earlier_request := manifest.request.get("tokenizer")) != preparation.tokenizer:
            raise BadInput(
                f"{folder}: prepared with tokenizer {earlier_request}, asked for {preparation.tokenizer}; choose another folder"
            )
        return folder
    try:
        prepare(
            preparation.inputs, preparation.tokenizer, folder, held_out=preparation.held_out, shown=shown, wait=True
        )
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        reason = f"{error.filename or folder}: {error.strerror}"
        raise BadInput(
            f"{reason}; Python's standard library is prepared there as training text: {CACHE_HINT}"
        ) from None
    return folder


def stdlib_folder(vocab: int = VOCABULARY) -> Path:
    """Return the default folder of the built-in corpus.

    It is in the user's cache, and its name contains the vocabulary and the Python version.
    """
    return user_cache() / f"{STDLIB}-{vocab}-py{platform.python_version()}"
