"""A source that is read without preparation. Its samples have global indices and come from lanes (`policies.lanes`).

A lane is an endless stream of tokens: the documents of its windows one after another, each followed by its end token.
The stream is cut into samples of `seq_len` inputs. As in prepared data, the last target of a sample is the first input
of the lane's next sample.

Samples of a lane are read in order. So the position of each lane is state: a checkpoint stores `cursors`, and `restore`
sets them. Any rank can continue any lane.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.packing import WindowTokens
from meshwright.data.streams.group_file import Cache, GroupFile, group_name, texts_digest
from meshwright.data.streams.index import SourceIndex, size_text
from meshwright.data.streams.loaders import NOW, SOON, Loaders
from meshwright.data.streams.stores import StoredFile
from meshwright.data.tokenizer import LoadedTokenizer
from meshwright.policies.lanes import WINDOW_PARTS, LaneOrder, LanePart, parts_of
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import StreamSpec

PART_BYTES = 4 << 20
"""Maximum number of bytes of text in a part of a group."""
OPEN_GROUPS = 128
"""Maximum number of group files of a source that a process has open."""
REMEMBERED_GROUPS = 4096
"""Maximum number of groups that a process remembers as made."""
AHEAD_BYTES = 2 << 20
"""Bytes of a lane's text that are tokenised ahead. At least AHEAD_SAMPLES samples and half a window are."""
AHEAD_SAMPLES = 2
"""Samples of a lane that are tokenised ahead; see AHEAD_BYTES."""
AHEAD_WINDOWS = 32
"""Maximum number of windows of a lane that are requested ahead of the current one."""
FIRST_AHEAD = 4
"""Steps between the request for a lane's first window and the lane's first sample."""
REOPENED = 3
"""Maximum number of times that a group is made again because the cache deleted it before this process opened it."""
EMPTY_WINDOWS = 10_000
"""Maximum number of windows in a row without a document. More of them raise BadInput."""
REMEMBERED = 64
"""Recent positions that are kept for each lane. They are needed because samples are read ahead of the step that a checkpoint stores."""
NAMED_GROUPS = 20
"""Maximum number of groups whose unusable documents are reported in the log."""
log = logging.getLogger("meshwright")


class Cursor(NamedTuple):
    """The position of a lane: where its next sample begins."""

    sample: int
    """Global index of the next sample."""
    window: int
    """Number of the window in the lane."""
    token: int
    """Number of the token in the window."""


class DocumentPlace(NamedTuple):
    """A part of a document, for reports: where the document is, and which of its tokens."""

    file: str
    """Path or URL of the file."""
    place: int
    """Row in the row group, or offset in bytes of the line (`GroupFile.place`)."""
    start: int
    """First token of the part, counted from the beginning of the document."""
    stop: int
    """Token after the last one of the part."""


@dataclass(frozen=True)
class _Window:
    """The documents of a window in the order in which they are read. All arrays are `(documents,)`."""

    parts: list[LanePart]
    """The parts of groups of which the window consists."""
    part: np.ndarray
    """Number in `parts` of each document's part, int32."""
    document: np.ndarray
    """Number of each document in its group, int32."""
    starts: np.ndarray
    """Number of each document's first token in its group, int64."""
    ends: np.ndarray
    """Tokens of the window up to the end of each document, int64."""

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0


class StreamSource:
    """Reads the samples of one source from its lanes.

    `drawn(lane, first, last)` counts how many of the lane's samples with a global index in [first, last) belong to this
    source. The owner replaces it if a run mixes several sources.
    """

    def __init__(
        self,
        name: str,
        spec: StreamSpec,
        index: SourceIndex,
        *,
        seq_len: int,
        lanes: int,
        seed: int,
        tokenizer: LoadedTokenizer,
        cache: Cache,
        loaders: Callable[[], Loaders],
    ) -> None:
        self.name = name
        self.spec = spec
        self.index = index
        self.seq_len = seq_len
        self.lanes = lanes
        self.tokenizer = tokenizer.record
        self._texts = texts_digest(tokenizer)
        self._cache = cache
        self.parts = parts_of(index.group_bytes, lanes, PART_BYTES)
        self._order = LaneOrder(self.parts, lanes, seed, index.digest)
        self._window_tokens = max(index.tokens * WINDOW_PARTS // int(self.parts.sum(dtype=np.int64)), 1)
        """Tokens of a window, estimated."""
        self._ahead_tokens = max(round(AHEAD_BYTES * index.tokens_per_byte), AHEAD_SAMPLES * seq_len)
        self._loaders = loaders
        self._groups: OrderedDict[int, GroupFile] = OrderedDict()
        self._made: OrderedDict[int, Future[dict[str, Any]]] = OrderedDict()
        """Requests for groups, newest last. A request that was answered is not sent again."""
        self._windows: dict[int, tuple[int, _Window]] = {}
        """The window that each lane reads now: its number and its documents."""
        self._asked: set[tuple[int, int]] = set()
        """Pairs (lane, window) that were requested ahead."""
        self._positions: dict[int, deque[Cursor]] = {}
        """The recent positions of each lane that this process has reached, oldest first."""
        self._base = np.stack([np.arange(lanes), np.zeros(lanes), np.zeros(lanes)], axis=1).astype(np.int64)
        self._lock = threading.Lock()
        """Guards `_positions`: one thread reads samples while another one writes a checkpoint."""
        self._reported: set[int] = set()
        self.drawn: Callable[[int, int, int], int] = lambda lane, first, last: len(range(first, last, lanes))

    def describe_size(self) -> str:
        """Return the source and how much of it is read at a time, in one line for people."""
        at_once = self.lanes * WINDOW_PARTS
        size = min(self.index.text_bytes * at_once // int(self.parts.sum()), self.index.text_bytes)
        return f"{self.index.describe()}; {self.lanes:,} lanes read {size_text(size)} of it at a time, on all hosts together"

    @property
    def windows(self) -> int:
        """Samples in one pass over the source, estimated."""
        return max(self.index.tokens // self.seq_len, 1)

    @property
    def tokens(self) -> int:
        """Tokens of the source, estimated."""
        return self.index.tokens

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the source, so that a resumed run can check that the order of samples is still the same."""
        return {
            "content": self.index.digest,
            "tokenizer": self.tokenizer.digest,
            "order": self.index.digest,
            "text": self.spec.text,
            "texts": self._texts,
            "lanes": str(self.lanes),
        }

    def read(self, sample: int) -> WindowTokens:
        """Read the sample with this global index."""
        lane = sample % self.lanes
        cursor = self._cursor_for(lane, sample)
        tokens, begins, after = self._take(lane, cursor)
        self._remember(lane, Cursor(sample + self.lanes, *after))
        return WindowTokens(tokens, begins, None)

    def describe(self, sample: int) -> list[DocumentPlace]:
        """Return the documents from which the inputs of a sample come, without reading the sample's tokens."""
        lane = sample % self.lanes
        cursor = self._cursor_for(lane, sample)
        places = []
        for window, first, last in self._ranges(lane, cursor, self.seq_len):
            for at, start, stop in _documents(window, first, last):
                part = window.parts[int(window.part[at])]
                document = int(window.document[at])
                file = self._file(part.group).name
                begin = int(window.ends[at - 1]) if at else 0
                place = self._opened(part.group).place(document)
                places.append(DocumentPlace(file, place, start - begin, stop - begin))
        return places

    def prepare(self, samples: range) -> None:
        """Request the first windows of lanes that `samples` will begin to read."""
        for sample in samples:
            lane = sample % self.lanes
            if lane not in self._positions and lane not in self._windows:
                self._ask(lane, int(self._base[lane, 1]))

    def cursors(self, sample: int) -> np.ndarray:
        """Return the position of each lane before global sample `sample`, as `Cursor`: `(lanes, 3)` int64.

        Lanes that this process has not read keep the position that they had at the start or at `restore`.
        """
        known = self._base.copy()
        with self._lock:
            for lane, positions in self._positions.items():
                before = [cursor for cursor in positions if cursor.sample - self.lanes < sample]
                if before:
                    known[lane] = before[-1]
        return known

    def restore(self, cursors: np.ndarray) -> None:
        """Continue from these positions, `(lanes, 3)` int64 as from `cursors`."""
        self._base = np.asarray(cursors, dtype=np.int64).copy()
        with self._lock:
            self._positions.clear()
        self._windows.clear()
        self._asked.clear()

    def _cursor_for(self, lane: int, sample: int) -> Cursor:
        """Return the position of a lane at `sample`.

        Samples between the last one that was read and this one are skipped.

        Raises BadInput if the lane is already past `sample`, and no position before it is remembered.
        """
        positions = self._positions.get(lane)
        cursor = positions[-1] if positions else Cursor(*map(int, self._base[lane]))
        if sample < cursor.sample and positions:
            earlier = [known for known in positions if known.sample <= sample]
            cursor = earlier[-1] if earlier else Cursor(*map(int, self._base[lane]))
        if sample < cursor.sample:
            raise BadInput(
                f"data.mix: {self.name}: sample {sample:,} lies before the position of its lane, {cursor.sample:,}"
            )
        window = cursor.window
        token = cursor.token
        for _ in range(self.drawn(lane, cursor.sample, sample)):
            *_, last = self._ranges(lane, Cursor(0, window, token), self.seq_len)
            window = self._windows[lane][0]
            token = last[2]
        return Cursor(sample, window, token)

    def _take(self, lane: int, cursor: Cursor) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """Return the tokens of a sample, `(seq_len + 1,)`; the indices at which documents begin; and (window, token) after its inputs."""
        pieces = []
        begins = [0]
        count = 0
        after = (cursor.window, cursor.token)
        for window, first, last in self._ranges(lane, cursor, self.seq_len + 1):
            after = (self._windows[lane][0], first + min(self.seq_len - count, last - first))
            for at, start, stop in _documents(window, first, last):
                begin = int(window.ends[at - 1]) if at else 0
                if start == begin and count:
                    begins.append(count)
                group = window.parts[int(window.part[at])].group
                origin = int(window.starts[at]) - begin
                pieces.append(self._opened(group).read(origin + start, origin + stop))
                count += stop - start
        return np.concatenate(pieces), np.array(begins, dtype=np.int64), after

    def _ranges(self, lane: int, cursor: Cursor, tokens: int) -> Iterator[tuple[_Window, int, int]]:
        """Yield where the next `tokens` tokens of a lane are: (window, first token, last token + 1), in one or more windows."""
        number = cursor.window
        start = cursor.token
        empty = 0
        while tokens:
            window = self._window(lane, number)
            last = min(start + tokens, window.tokens)
            if last > start:
                yield window, start, last
                tokens = tokens - (last - start)
                empty = 0
            self._look_ahead(lane, number, window, last)
            if tokens:
                number = number + 1
                start = 0
                empty = empty + 1
            if empty > EMPTY_WINDOWS:
                raise BadInput(
                    f"data.mix: {self.name}: no usable documents in {EMPTY_WINDOWS:,} windows one after another"
                )

    def _look_ahead(self, lane: int, number: int, window: _Window, token: int) -> None:
        """Request the windows after number `number` that are needed soon. `token` is the next token to read in `window`."""
        ahead = max(self._ahead_tokens, window.tokens // 2) - (window.tokens - token)
        if ahead > 0:
            for more in range(1, min(-(-ahead // self._window_tokens), AHEAD_WINDOWS) + 1):
                self._ask(lane, number + more)

    def _remember(self, lane: int, cursor: Cursor) -> None:
        with self._lock:
            positions = self._positions.setdefault(lane, deque(maxlen=REMEMBERED))
            while positions and positions[-1].sample >= cursor.sample:  # The sample is read again.
                positions.pop()
            positions.append(cursor)

    def _window(self, lane: int, number: int) -> _Window:
        """Load the documents of a window. Waits until all its groups are in the cache."""
        if lane in self._windows and self._windows[lane][0] == number:
            return self._windows[lane][1]
        parts = self._order.window(lane, number)
        self._asked.discard((lane, number))
        made = {part.group: self._request(part.group, NOW) for part in parts if part.group not in self._groups}
        for group, future in made.items():
            self._report(group, future.result())
        groups = [self._opened(part.group) for part in parts]
        ranges = [part.documents(group.record.documents) for part, group in zip(parts, groups, strict=True)]
        bounds = [group.bounds[each.start : each.stop + 1] for group, each in zip(groups, ranges, strict=True)]
        part = np.repeat(np.arange(len(parts), dtype=np.int32), [len(each) for each in ranges])
        document = np.concatenate([np.arange(each.start, each.stop, dtype=np.int32) for each in ranges])
        starts = np.concatenate([each[:-1] for each in bounds])
        lengths = np.concatenate([np.diff(each) for each in bounds])
        order = self._order.shuffled(lane, number, len(document))
        window = _Window(parts, part[order], document[order], starts[order], np.cumsum(lengths[order]))
        self._windows[lane] = number, window
        return window

    def _ask(self, lane: int, number: int) -> None:
        """Request the groups of a window that will be read soon."""
        if (lane, number) not in self._asked:
            self._asked.add((lane, number))
            for part in self._order.window(lane, number):
                if part.group not in self._groups:
                    self._request(part.group, SOON)

    def _request(self, group: int, priority: int, *, again: bool = False) -> Future[dict[str, Any]]:
        """Request that a group is made. With `again`, the request is sent even if it was answered before."""
        known = self._made.get(group)
        if known is not None and known.done() and known.exception() is None and not again:
            return known
        message = {
            "op": "group",
            "file": asdict(self._file(group)),
            "group": self._number(group),
            "text": self.spec.text,
        }
        asked = self._made[group] = self._loaders().request(message, priority)
        self._made.move_to_end(group)
        while len(self._made) > REMEMBERED_GROUPS:
            self._made.popitem(last=False)
        return asked

    def _file(self, group: int) -> StoredFile:
        return self.index.files[int(self.index.group_file[group])]

    def _number(self, group: int) -> int:
        return int(self.index.group_number[group])

    def _opened(self, group: int) -> GroupFile:
        """Open the file of a group. If the cache has deleted it, the group is made again."""
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        name = group_name(self._file(group), self._number(group), self.spec.text, self._texts)
        for _ in range(REOPENED):
            try:
                opened = self._groups[group] = GroupFile(self._cache.path(name))
            except FileNotFoundError:
                self._request(group, NOW, again=True).result()
                continue
            while len(self._groups) > OPEN_GROUPS:
                self._groups.popitem(last=False)
            return opened
        raise Damaged(f"{self._cache.folder}: loses files as soon as they are written; raise data.cache_gib")

    def _report(self, group: int, answer: dict[str, Any]) -> None:
        """Log the unusable documents of a group, once."""
        if answer["bad"] and group not in self._reported and len(self._reported) < NAMED_GROUPS:
            self._reported.add(group)
            log.warning(
                "data.mix: %s: %d bad documents left out: %s", self.name, answer["bad"], "; ".join(answer["first_bad"])
            )


def _documents(window: _Window, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield the documents that have tokens in the range [first, last) of a window:

    (number in the window, first token, last token + 1).

    Token numbers count from the beginning of the window.
    """
    at = int(np.searchsorted(window.ends, first, side="right"))
    while first < last:
        stop = min(int(window.ends[at]), last)
        if stop > first:
            yield at, first, stop
        first = stop
        at = at + 1


def merge_cursors(known: list[list[list[int]]]) -> np.ndarray:
    """Combine the positions that all ranks know: of each lane the furthest one, `(lanes, 3)` int64.

    `known` has one list for each rank, `[[sample, window, token], ...]` with one entry for each lane.
    """
    stacked = np.array(known, dtype=np.int64)
    return stacked[np.argmax(stacked[:, :, 0], axis=0), np.arange(stacked.shape[1])]
