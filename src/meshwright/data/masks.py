"""The mask of a shard's tokens in `.mask`: a bit for each token, the first the highest of its byte; 1 is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshwright.data.checked import CheckedFile
from meshwright.spec.errors import BadInput, Damaged


class MaskFile:
    """An open `.mask`. Raises BadInput if it is missing, Damaged if its size is not that of `tokens` tokens."""

    def __init__(self, stem: Path, tokens: int) -> None:
        self.path = mask_path(stem)
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such file; the manifest names it")
        self._file = CheckedFile(self.path)
        if self._file.size != mask_bytes(tokens):
            raise Damaged(
                f"{self.path}: expected {mask_bytes(tokens)} bytes for {tokens} tokens, found {self._file.size}"
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the tokens [start, stop) is trained on, bool."""
        first = start // 8
        content = self._file.read(first, mask_bytes(stop) - first)
        bits = np.unpackbits(np.frombuffer(content, np.uint8)).astype(bool)
        return bits[start - 8 * first : stop - 8 * first]

    def check_size(self) -> None:
        """Raise Damaged if the size of the file has changed since it was opened."""
        self._file.check_size()

    def digest(self) -> str:
        """xxh3_128 of the file."""
        return self._file.digest()


def mask_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".mask")


def mask_bytes(tokens: int) -> int:
    """Bytes of the mask of `tokens` tokens."""
    return (tokens + 7) // 8


def encode_masks(masks: Sequence[np.ndarray]) -> bytes:
    """The content of a `.mask` file for the documents of a shard."""
    return np.packbits(np.concatenate(masks)).tobytes()
