"""Chooses the samples of held-out text that a validation reads. Training and `meshwright eval` use the same choice.

It depends only on the documents, `train.seq_len` and the number of tokens requested. If the samples have no more tokens
than that, all are read. Otherwise each source gives an equal number of tokens, or all that it has, from samples at
equal distances. As documents are sorted by a digest of their tokens, these are a random sample of the documents.
"""

from __future__ import annotations

import numpy as np

from meshwright.data.source import DataSource
from meshwright.spec.job import MOST_VALIDATION_TOKENS


def validation_samples(source: DataSource, tokens: int | None = None) -> dict[str, np.ndarray]:
    """Return the global indices of the samples to read, by source, `(samples,)` int64 and ascending.

    They have about `tokens` inputs together. Each source gives at least one sample.
    """
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
    """Divide `total` equally among the names. A name with less available gives all it has, and the others give more.

    Example: a total of 90 among {a: 10, b: 100, c: 100} gives a 10, b 40 and c 40.
    """
    shares: dict[str, int] = {}
    for name in sorted(available, key=lambda name: available[name]):
        shares[name] = min(available[name], (total - sum(shares.values())) // (len(available) - len(shares)))
    return shares
