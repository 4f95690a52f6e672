"""The weight of each token of a shard in the loss. A token of weight 0 is not trained on.

shard-00000.mask      where every weight is 0 or 1: a bit for each token, the first the highest of its byte
shard-00000.weights   else: a float32 for each token, little endian
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
"""Kinds of files, by their endings and by their keys in the manifest. A shard has one at most."""
FLOAT = np.dtype("<f4")


class WeightFile:
    """The open weights of a shard. Raises BadInput if the file is missing, Damaged if its size is not that of `tokens` tokens."""

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
        """The weights of tokens [start, stop): bool of a mask, else float32."""
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
    """Bytes of the weights of `tokens` tokens."""
    return tokens * FLOAT.itemsize if kind == "weights" else (tokens + 7) // 8


def encode_weights(documents: Sequence[np.ndarray]) -> tuple[Kind, bytes]:
    """The kind and content of the file for the documents of a shard, whose weights are bool or float32."""
    weights = np.concatenate(documents)
    if weights.dtype == bool:
        return "mask", np.packbits(weights).tobytes()
    return "weights", weights.astype(FLOAT).tobytes()
