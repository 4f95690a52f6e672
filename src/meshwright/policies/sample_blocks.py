"""Divides a sample among k ranks. The sample is cut into 2k blocks, and part i gets the blocks i and 2k − 1 − i.

In causal attention, the work of a block grows with its position, so the two blocks of each part together have equal work. The two blocks of
a part are equally long, except in the last part of a sample of odd length. Example with 2 ranks and 8 tokens: part 0 has tokens 0–1 and
6–7, part 1 has tokens 2–3 and 4–5.
"""

from __future__ import annotations

import numpy as np


def block_ranges(length: int, ranks: int, part: int) -> tuple[range, range]:
    """The token ranges of the two blocks of `part`, for a sample of `length` tokens on `ranks` ranks."""
    first, last = (int(_boundary(length, ranks, index)) for index in (part, part + 1))
    if part == ranks - 1:
        last = length // 2
        return range(first, last), range(last, length - first)
    return range(first, last), range(length - last, length - first)


def part_tokens(lengths: np.ndarray, ranks: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Number of tokens in each part, `(P,)`. Part `parts[i]` is of a sample of `lengths[i]` tokens on `ranks[i]` ranks.

    No part has more than 2 · ⌈length / (2 · ranks)⌉ tokens.
    """
    first = _boundary(lengths, ranks, parts)
    inner = 2 * (_boundary(lengths, ranks, parts + 1) - first)
    return np.where(parts == ranks - 1, lengths - 2 * first, inner)


def _boundary(length: np.ndarray | int, ranks: np.ndarray | int, index: np.ndarray | int) -> np.ndarray | int:
    """The first token of block `index` in the first half of a sample."""
    return np.minimum(-(-length * index // (2 * ranks)), length // 2)
