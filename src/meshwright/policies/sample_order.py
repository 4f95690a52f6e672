"""The sample at each global index, as a pure function of (seed, names, index). It does not depend on ranks or on earlier samples.

A mixture consists of blocks of 65,536 samples. In each block, every source occurs as often as its weight says, in shuffled order. Within a
source, each epoch visits every window once, in an order of its own. So any sample can be computed without going through the samples before
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.spec.errors import BadInput

BLOCK = 65536
"""Samples in a block. The weight of a source is rounded to a multiple of 1 / `BLOCK`."""
ROUNDS = 8
"""Rounds of the Feistel network."""
FEWEST_HALF_BITS = 3
"""Fewest bits in each half of the Feistel network. Smaller halves mix poorly."""
MASK64 = 2**64 - 1


class Draws(NamedTuple):
    """For each global sample: number of its source, its window in the source, and the epoch of the source, each `(samples,)`."""

    source: np.ndarray
    window: np.ndarray
    epoch: np.ndarray


def rank_samples(first: int, global_batch: int, data_rank: int, data_ranks: int) -> range:
    """Global samples of a data rank in the step that begins at sample `first`. Ranks have equal, consecutive ranges in their order."""
    count = global_batch // data_ranks
    return range(first + data_rank * count, first + (data_rank + 1) * count)


class Mixture:
    """The order in which samples of several sources are drawn.

    `weights` maps names to relative numbers of samples, `windows` maps names to numbers of windows. Sources are numbered in the order of
    their sorted names, so the order of keys in a file does not matter. `identities`, if given, replace the names in sorting and shuffling.
    If they are digests of the contents, the order of samples does not depend on paths. Raises BadInput when a weight is too small to give
    one sample in 65,536.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        windows: Mapping[str, int],
        seed: int,
        identities: Mapping[str, str] | None = None,
    ) -> None:
        self._identities = identities or {name: name for name in weights}
        self.names = sorted(weights, key=lambda name: (self._identities[name], weights[name], name))
        self.windows = [windows[name] for name in self.names]
        self.seed = seed
        self.counts = quantise([weights[name] for name in self.names], self.names)
        self._block = lru_cache(maxsize=4)(self._make_block)

    def draws(self, indices: np.ndarray) -> Draws:
        """Source, window and epoch of each global sample index; `indices` is `(samples,)`, not negative."""
        indices = np.asarray(indices, dtype=np.int64)
        source, index = self._within_sources(indices)
        epoch, window_index = np.divmod(index, np.array(self.windows)[source])
        window = np.empty_like(index)
        for number, name in enumerate(self.names):
            from_source = source == number
            window[from_source] = self._windows_of(
                name, self.windows[number], epoch[from_source], window_index[from_source]
            )
        return Draws(source, window, epoch)

    def drawn(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples are from each source, `(sources,)` int64."""
        blocks, beyond = divmod(samples, BLOCK)
        if len(self.names) == 1:
            return np.array([samples])
        sources, _ = self._block(blocks)
        return blocks * self.counts + np.bincount(sources[:beyond], minlength=len(self.names))

    def drawn_by_lane(self, source: int, lanes: int, lane: int, first: int, last: int) -> int:
        """How many of the samples in [first, last) of this lane (those with index % lanes == lane) are from a source."""
        indices = np.arange(first + (lane - first) % lanes, last, lanes)
        return int(np.count_nonzero(self._within_sources(indices)[0] == source))

    def _within_sources(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each global sample: its source, and its index among all samples of that source."""
        if len(self.names) == 1:
            return np.zeros_like(indices), indices
        source = np.empty_like(indices)
        index = np.empty_like(indices)
        blocks, offsets = np.divmod(indices, BLOCK)
        for block in np.unique(blocks):
            in_block = blocks == block
            sources, rank = self._block(int(block))
            source[in_block] = sources[offsets[in_block]]
            index[in_block] = block * self.counts[source[in_block]] + rank[offsets[in_block]]
        return source, index

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a block: its source, and how many samples of the same source come before it in the block."""
        # Sort the raw output of Philox instead of using Generator.permutation: NumPy guarantees only the raw stream for later versions.
        philox = np.random.Philox(key=np.array([self.seed & MASK64, block], dtype=np.uint64))
        pattern = np.repeat(np.arange(len(self.names)), self.counts)
        sources = pattern[np.argsort(philox.random_raw(BLOCK), kind="stable")]
        rank = np.empty(BLOCK, dtype=np.int64)
        for number, count in enumerate(self.counts):
            rank[sources == number] = np.arange(count)
        return sources, rank

    def _windows_of(self, name: str, windows: int, epochs: np.ndarray, within: np.ndarray) -> np.ndarray:
        """The window for each index `within` an epoch, by the order of that epoch."""
        windows_read = np.empty_like(within)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            windows_read[in_epoch] = permute(
                within[in_epoch], windows, f"{self.seed}/{self._identities[name]}/{int(epoch)}"
            )
        return windows_read


class InTurn:
    """Draws every window of every source once: in order, one source after another. `windows` maps names to numbers of windows."""

    def __init__(self, windows: Mapping[str, int]) -> None:
        self.names = sorted(windows)
        self.windows = [windows[name] for name in self.names]
        self._ends = np.cumsum(self.windows)

    def draws(self, indices: np.ndarray) -> Draws:
        """Source, window and epoch of each global sample index; `indices` is `(samples,)`, below the number of all windows."""
        indices = np.asarray(indices, dtype=np.int64)
        source = np.searchsorted(self._ends, indices, side="right")
        return Draws(source, indices - self.first(source), np.zeros_like(indices))

    def drawn(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples are from each source, `(sources,)` int64."""
        return np.clip(samples - self.first(np.arange(len(self.names))), 0, self.windows)

    def first(self, source: np.ndarray) -> np.ndarray:
        """Global index of the first window of each source."""
        return self._ends[source] - np.array(self.windows)[source]


def quantise(weights: Sequence[float], names: Sequence[str]) -> np.ndarray:
    """The number of samples of each source in a block of 65,536, by largest remainder; of equal remainders, the earlier name wins."""
    exact = np.asarray(weights, dtype=np.float64)
    exact = exact / exact.sum() * BLOCK
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(-(exact - counts), kind="stable")[: BLOCK - int(counts.sum())]
    counts[largest_remainders] += 1
    for name, weight, count in zip(names, weights, counts, strict=True):
        if count == 0:
            problem = f"less than one sample in {BLOCK:,}"
            raise BadInput(f"data.mix: {name}: weight {weight:g} gives {problem}; raise it or leave the source out")
    return counts


def permute(values: np.ndarray, size: int, key: str) -> np.ndarray:
    """The values to which a pseudo-random permutation of [0, size) maps `values`. `key` selects the permutation.

    The permutation is a Feistel network on the smallest even number of bits that covers `size`. If a result is outside of [0, size), the
    network is applied again until it is inside (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half_bits = max((max(size - 1, 1).bit_length() + 1) // 2, FEWEST_HALF_BITS)
    keys = np.frombuffer(
        hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8 * ROUNDS).digest(), dtype="<u8"
    )
    image = _feistel(np.asarray(values).astype(np.uint64), half_bits, keys)
    while (outside := image >= size).any():
        image[outside] = _feistel(image[outside], half_bits, keys)
    return image.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = values >> shift
    right = values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right + key) & mask)
    return (left << shift) | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
