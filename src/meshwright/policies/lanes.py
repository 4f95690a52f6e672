"""The order of documents that are read without preparation: lanes over shuffled groups of documents, for any number of ranks.

A source is a list of groups, such as the row groups of parquet files, and each group is cut into parts. Each epoch has its own shuffled
order of the groups; the parts of a group stay together. The epochs one after another are an endless sequence of parts.

There are S lanes. Lane s takes the parts s, s + S, s + 2S, … A window is K (`WINDOW_PARTS`) parts of a lane that follow one another. The
documents of a window are shuffled. Global sample i of the run is read from lane i mod S.

The first window of lane s has 1 + s mod K parts, so that not all lanes begin a window at the same time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.policies.sample_order import permute

WINDOW_PARTS = 4
"""Parts of a window. More shuffle better and need more room (docs/how-to/stream.md has the figures)."""
KEPT_EPOCHS = 2
"""Orders of epochs that are kept; lanes are seldom more than one epoch apart."""


class LanePart(NamedTuple):
    """Part `part` of the `parts` equal parts of a group."""

    group: int
    part: int
    parts: int

    def documents(self, count: int) -> range:
        """Numbers of its documents, of a group of `count` documents."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)


class LaneOrder:
    """The windows of each lane. `parts` `(groups,)` are the parts of each group; `identity` names the contents of the source."""

    def __init__(self, parts: np.ndarray, lanes: int, seed: int, identity: str) -> None:
        self._parts = np.asarray(parts, dtype=np.int32)
        self.lanes = lanes
        self._key = f"{seed}/{identity}"
        self._total = int(self._parts.sum(dtype=np.int64))
        self._epoch = lru_cache(maxsize=KEPT_EPOCHS)(self._make_epoch)

    def window(self, lane: int, window: int) -> list[LanePart]:
        """The parts of a window of a lane."""
        first = 1 + lane % WINDOW_PARTS
        begin = first + (window - 1) * WINDOW_PARTS if window else 0
        return [self._part(lane + number * self.lanes) for number in range(begin, first + window * WINDOW_PARTS)]

    def shuffled(self, lane: int, window: int, documents: int) -> np.ndarray:
        """The numbers 0 to `documents` - 1 in the order in which the window's documents are read, int64."""
        return permute(np.arange(documents), documents, f"{self._key}/lane {lane}/{window}")

    def _part(self, number: int) -> LanePart:
        """Part `number` of the endless sequence."""
        epoch, within = divmod(number, self._total)
        groups, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, within, side="right"))
        group = int(groups[at])
        parts = int(self._parts[group])
        return LanePart(group, within - (int(ends[at]) - parts), parts)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups in the order of an epoch, and the number of parts up to the end of each."""
        count = len(self._parts)
        groups = permute(np.arange(count), count, f"{self._key}/epoch {epoch}").astype(np.int32)
        return groups, np.cumsum(self._parts[groups], dtype=np.int64)


def parts_of(group_bytes: np.ndarray, lanes: int, most: int) -> np.ndarray:
    """The number of parts of each group: `(groups,)` int32, at least 1, for `group_bytes` `(groups,)` int64.

    Parts have at most `most` bytes in the mean of their group; documents are not divided. There are enough parts for a window of every
    lane, `lanes` · WINDOW_PARTS.
    """
    size = max(min(most, int(group_bytes.sum()) // (lanes * WINDOW_PARTS)), 1)
    return np.maximum(-(-group_bytes // size), 1).astype(np.int32)
