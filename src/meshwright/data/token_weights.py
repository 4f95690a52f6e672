"""The weight of each token of a shard in the loss. A token of weight 0 is not trained on.

A shard has one of two files:

shard-00000.mask      if every weight is 0 or 1: one bit for each token; the first token has the highest bit of the first byte
shard-00000.weights   otherwise: one float32 for each token, little endian
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from meshwright.data.checked import CheckedFile
from meshwright.spec.errors import BadInput, Damaged

Kind = Literal["mask", "weights"]
KINDS: tuple[Kind, ...] = ("mask", "weights")
"""Kinds of weight files: each is the suffix of the file and its key in the manifest. A shard has at most one."""
FLOAT = np.dtype("<f4")


class WeightFile:
    """The open weight file of a shard. Raises BadInput if the file is missing, Damaged if its size does not fit `tokens` tokens."""

    def __init__(self, stem: Path, tokens: int, kind: Kind) -> None:
        self.path = weight_path(stem, kind)
        self.kind = kind
        if not self.path.is_file():
            raise BadInput(f"{self.path}: no such file; the manifest names it")
        self._file = CheckedFile(self.path)
        expected = weight_bytes(tokens, kind)
        if self._file.size != expected:
            raise Damaged(f"{self.path}: expected {expected} bytes for {tokens} tokens, found {self._file.size}")

    def read(self, start: int, stop: int) -> np.ndarray:
        """The weights of tokens [start, stop): bool from a mask, else float32."""
        if self.kind == "weights":
            content = self._file.read(start * FLOAT.itemsize, (stop - start) * FLOAT.itemsize)
            return np.frombuffer(content, FLOAT)
        first = start // 8
        content = self._file.read(first, weight_bytes(stop, "mask") - first)
        bits = np.unpackbits(np.frombuffer(content, np.uint8)).astype(bool)
        return bits[start - 8 * first : stop - 8 * first]

    def check_size(self) -> None:
        """Raise Damaged if the size of the file has changed since it was opened."""
        self._file.check_size()

    def digest(self) -> str:
        """xxh3_128 of the file."""
        return self._file.digest()


def weight_path(stem: Path, kind: Kind) -> Path:
    return stem.with_name(f"{stem.name}.{kind}")


def weight_bytes(tokens: int, kind: Kind) -> int:
    """Size of a weight file of `tokens` tokens."""
    return tokens * FLOAT.itemsize if kind == "weights" else (tokens + 7) // 8


def encode_weights(documents: Sequence[np.ndarray]) -> tuple[Kind, bytes]:
    """The kind and the content of a shard's weight file. `documents` are the weights of each document, bool or float32."""
    weights = np.concatenate(documents)
    if weights.dtype == bool:
        return "mask", np.packbits(weights).tobytes()
    return "weights", weights.astype(FLOAT).tobytes()
