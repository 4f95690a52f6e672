"""Division of a sample among k ranks: 2k blocks, of which part i has block i and block 2k − 1 − i.

In causal attention a block's work grows with its position, so the two blocks of each part have equal work together.
Block sizes are symmetric: the two blocks of a part are equally long, but for the last part of a sample of odd length.
"""

from __future__ import annotations

import numpy as np


def block_ranges(length: int, ranks: int, part: int) -> tuple[range, range]:
    """Tokens of the two blocks of `part`, of a sample of `length` tokens on `ranks` ranks."""
    first, last = (int(_boundary(length, ranks, index)) for index in (part, part + 1))
    if part == ranks - 1:
        last = length // 2
        return range(first, last), range(last, length - first)
    return range(first, last), range(length - last, length - first)


def part_tokens(lengths: np.ndarray, ranks: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Tokens `(P,)` of the parts `parts` of samples of `lengths` tokens on `ranks` ranks, each `(P,)`.

    No part has more than 2 · ⌈length / (2 · ranks)⌉ tokens.
    """
    first = _boundary(lengths, ranks, parts)
    inner = 2 * (_boundary(lengths, ranks, parts + 1) - first)
    return np.where(parts == ranks - 1, lengths - 2 * first, inner)


def _boundary(length: np.ndarray | int, ranks: np.ndarray | int, index: np.ndarray | int) -> np.ndarray | int:
    """The token at which block `index` of the first half begins."""
    return np.minimum(-(-length * index // (2 * ranks)), length // 2)
