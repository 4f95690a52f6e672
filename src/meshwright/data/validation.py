"""The samples of held-out text that a validation reads: one definition for training and `meshwright eval`.

They follow from the documents, `train.seq_len` and the number of tokens alone. All samples are read where they have no more tokens than
that. Otherwise each source gives as many tokens, or all it has, from samples at equal distances; as documents are sorted by a digest of
their tokens, that is a random sample of them.
"""

from __future__ import annotations

import numpy as np

from meshwright.data.source import DataSource
from meshwright.spec.job import MOST_VALIDATION_TOKENS


def validation_samples(source: DataSource, tokens: int | None = None) -> dict[str, np.ndarray]:
    """Global indices of the samples by source, int64, in ascending order; about `tokens` inputs, at least one sample of each source."""
    inputs = {name: each.layout.inputs for name, each in source.sources.items()}
    shares = equal_shares(inputs, tokens or MOST_VALIDATION_TOKENS)
    chosen: dict[str, np.ndarray] = {}
    first = 0
    for name in source.order.names:
        count = source.sources[name].windows
        number = max(count * shares[name] // inputs[name], 1)
        chosen[name] = first + np.arange(number, dtype=np.int64) * count // number
        first += count
    return chosen


def equal_shares(available: dict[str, int], total: int) -> dict[str, int]:
    """Divide `total` equally by name; who has less gives all it has, and the others more."""
    shares: dict[str, int] = {}
    for name in sorted(available, key=lambda name: available[name]):
        shares[name] = min(available[name], (total - sum(shares.values())) // (len(available) - len(shares)))
    return shares
