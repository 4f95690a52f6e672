"""The draft tokens of a packed step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor


class PackedDrafts(NamedTuple):
    """The decodes of a step that have draft tokens.

    They are the first of its sampled parts, with a sample for each of their tokens. All tensors are int32.
    """

    counts: tuple[int, ...]
    """Tokens of each decode: the newest one and its drafts."""
    table_rows: Tensor
    """`(drafted,)`: table rows of the decodes."""
    positions: Tensor
    """`(drafted,)`: positions of their newest tokens."""
    lengths: Tensor
    """`(drafted,)`: numbers of drafts."""
    tokens: Tensor
    """`(drafted, longest)`: the drafts; those beyond `lengths` are arbitrary."""
    samples: Tensor
    """`(drafted, longest + 1)`: the samples of each part; the last again where a part has fewer."""
    indices: Tensor
    """`(samples,)`: index of each sample in `samples` flattened."""

    @property
    def total(self) -> int:
        """Samples of all of them together."""
        return sum(self.counts)


def sample_arrays(counts: Sequence[int] | np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """`PackedDrafts.samples`, flattened, and `PackedDrafts.indices` for parts of `counts` tokens; `columns` is longest + 1."""
    sizes = np.asarray(counts, np.int32)[:, None]
    column = np.arange(columns, dtype=np.int32)
    samples = np.cumsum(sizes, axis=0, dtype=np.int32) - sizes + np.minimum(column, sizes - 1)
    return samples.ravel(), np.flatnonzero(column < sizes).astype(np.int32)
