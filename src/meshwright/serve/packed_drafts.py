"""The draft tokens of a packed step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor


class PackedDrafts(NamedTuple):
    """The decodes of a step that have draft tokens ("drafted" decodes). All tensors are int32.

    These decodes come first in `PackedStep.sampled_parts`. Each has a sample for each of its tokens: for the newest token and for each
    draft. So the first `total` samples of the step belong to these decodes.
    """

    counts: tuple[int, ...]
    """Number of tokens of each decode: 1 (the newest token) + its number of drafts."""
    table_rows: Tensor
    """`(drafted,)`: table row of each decode."""
    positions: Tensor
    """`(drafted,)`: position of the newest token of each decode."""
    lengths: Tensor
    """`(drafted,)`: number of drafts of each decode."""
    tokens: Tensor
    """`(drafted, longest)`: the drafts of each decode; values after its first `lengths` drafts are arbitrary."""
    samples: Tensor
    """`(drafted, longest + 1)`: for each token of each decode, the index of its sample among the samples of the step.

    The row of a decode with fewer tokens ends with repeats of its last sample. Example: see `sample_arrays`.
    """
    indices: Tensor
    """`(total,)`: index of each sample in the flattened `samples`."""

    @property
    def total(self) -> int:
        """Number of samples of all decodes that have drafts."""
        return sum(self.counts)


def sample_arrays(counts: Sequence[int] | np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `PackedDrafts.samples`, flattened, and `PackedDrafts.indices`, for decodes of `counts` tokens.

    `columns` is the number of columns of `samples`: longest + 1. Example: decodes of 3 and 2 tokens with 3 columns have the `samples`
    [[0, 1, 2], [3, 4, 4]] and the `indices` [0, 1, 2, 3, 4].
    """
    sizes = np.asarray(counts, np.int32)[:, None]
    column = np.arange(columns, dtype=np.int32)
    samples = np.cumsum(sizes, axis=0, dtype=np.int32) - sizes + np.minimum(column, sizes - 1)
    return samples.ravel(), np.flatnonzero(column < sizes).astype(np.int32)
