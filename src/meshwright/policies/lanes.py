"""The order in which documents are read without preparation: lanes over shuffled groups of documents, for any number of ranks.

A source is a list of groups, such as the row groups of parquet files. Each group is cut into parts. Each epoch has its own shuffled order
of the groups; the parts of one group stay together. The epochs, one after another, form an endless sequence of parts.

There are S lanes. Lane s reads the parts s, s + S, s + 2S, … A window is K (`WINDOW_PARTS`) successive parts of a lane. The documents of a
window are shuffled. Global sample i of a run is read from lane i mod S. Example with S = 2: lane 0 reads parts 0, 2, 4, …, and samples 0,
2, 4, … come from lane 0.

The first window of lane s has only 1 + s mod K parts, so that the lanes do not all begin a new window at the same time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.policies.sample_order import permute

WINDOW_PARTS = 4
"""Parts in a window. More parts shuffle better, but need more memory (docs/how-to/stream.md has the figures)."""
KEPT_EPOCHS = 2
"""Epochs whose orders are cached. Lanes are rarely more than one epoch apart."""


class LanePart(NamedTuple):
    """One of the `parts` equal parts of a group, counted from 0."""

    group: int
    part: int
    parts: int

    def documents(self, count: int) -> range:
        """Numbers of the documents in this part, if the group has `count` documents."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)


class LaneOrder:
    """The windows of each lane. `parts` `(groups,)` is the number of parts of each group. `identity` names the contents of the source."""

    def __init__(self, parts: np.ndarray, lanes: int, seed: int, identity: str) -> None:
        self._parts = np.asarray(parts, dtype=np.int32)
        self.lanes = lanes
        self._key = f"{seed}/{identity}"
        self._total = int(self._parts.sum(dtype=np.int64))
        self._epoch = lru_cache(maxsize=KEPT_EPOCHS)(self._make_epoch)

    def window(self, lane: int, window: int) -> list[LanePart]:
        """The parts in window number `window` of a lane."""
        first = 1 + lane % WINDOW_PARTS
        begin = first + (window - 1) * WINDOW_PARTS if window else 0
        return [self._part(lane + number * self.lanes) for number in range(begin, first + window * WINDOW_PARTS)]

    def shuffled(self, lane: int, window: int, documents: int) -> np.ndarray:
        """The numbers 0 … `documents` - 1 in the order in which the documents of a window are read, int64."""
        return permute(np.arange(documents), documents, f"{self._key}/lane {lane}/{window}")

    def _part(self, number: int) -> LanePart:
        """Part `number` of the endless sequence of all epochs."""
        epoch, within = divmod(number, self._total)
        groups, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, within, side="right"))
        group = int(groups[at])
        parts = int(self._parts[group])
        return LanePart(group, within - (int(ends[at]) - parts), parts)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups in the order of an epoch, and for each the number of parts up to its end."""
        count = len(self._parts)
        groups = permute(np.arange(count), count, f"{self._key}/epoch {epoch}").astype(np.int32)
        return groups, np.cumsum(self._parts[groups], dtype=np.int64)


def parts_of(group_bytes: np.ndarray, lanes: int, most: int) -> np.ndarray:
    """The number of parts of each group, `(groups,)` int32, at least 1. `group_bytes` is `(groups,)` int64.

    Parts of a group have on average at most `most` bytes; documents are not divided. There are enough parts for a window of every lane,
    that is `lanes` · WINDOW_PARTS.
    """
    size = max(min(most, int(group_bytes.sum()) // (lanes * WINDOW_PARTS)), 1)
    return np.maximum(-(-group_bytes // size), 1).astype(np.int32)
