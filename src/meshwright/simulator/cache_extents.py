"""Cached blocks of simulated sequences as extents, which take less time than single blocks.

A text is a path of pieces (`text_pieces`), which other sequences may share. The cached blocks of a piece are extents:
consecutive blocks with the same number of references. A request, a reservation or a sender refers to spans of its text.
Blocks that are not in the cache are private to their holder, also a second copy of a cached block. Blocks without
references are idle if they are cached, else empty. Empty ones are taken first, then idle ones in the order of their
release, as `policies.cache_blocks.BlockPool` does block by block.
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush
from operator import attrgetter

from meshwright.policies.cache_blocks import BlockCounts
from meshwright.simulator.text_pieces import Text

Span = tuple[int, int]
"""Blocks of a text: the first, and the one behind the last."""


EMPTIED = -1
"""References of an extent that is not cached any more, though it may stay in the heap of idle ones."""


class Extent:
    """Cached blocks `first` … `end - 1` of a text in one piece, with the same number of references."""

    __slots__ = ("end", "first", "forward", "piece", "references", "stamp")

    def __init__(self, piece: int, first: int, end: int, references: int) -> None:
        self.piece = piece
        self.first = first
        self.end = end
        self.references = references
        self.stamp = 0
        self.forward = False
        """Number of the release that made it idle, and whether that released the first block first."""


class Holder:
    """References to blocks of a text: private and cached ones."""

    __slots__ = ("private", "spans", "text")

    def __init__(self, text: Text) -> None:
        self.text = text
        self.private = 0
        """`private`: its blocks that are not cached."""
        self.spans: list[Span] = []
        """Its cached blocks, ascending."""

    def add(self, first: int, end: int) -> None:
        """Add a span behind the others.

        A span that begins where the last one ends extends it:

        >>> holder = Holder(())
        >>> holder.add(0, 4)
        >>> holder.add(4, 6)
        >>> holder.add(9, 10)
        >>> holder.spans
        [(0, 6), (9, 10)]
        """
        spans = self.spans
        if spans and spans[-1][1] == first:
            spans[-1] = spans[-1][0], end
        elif first < end:
            spans.append((first, end))


class ExtentPool(BlockCounts):
    """The numbers of free and empty blocks, and the cached ones as extents."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.empty = self.blocks
        """Blocks without references and without content."""
        self._extents: dict[int, list[Extent]] = {}
        """Extents by piece, ascending."""
        self._released: list[tuple[int, int, Extent]] = []
        """A heap of (release, order within it, extent); an entry is stale once its extent is used again or emptied.

        Extents have no order and need none: those of a release are of one text and begin at different blocks, also after
        splits, so no two entries have the same first two numbers.
        """
        self._uncounted: list[tuple[Holder, int, int]] = []
        """Senders with spans of referenced blocks, to which they refer without being counted in `Extent.references`.

        Usually the next release is the sender's own; then extents are not split and joined for nothing. Any other release
        counts these references first (`_release`), so the blocks keep their other references until then: none is idle.
        """

    def take(self, count: int) -> None:
        """Take so many free blocks, as private ones of holders. Raises IndexError if there are not so many."""
        if count > self.free:
            raise IndexError(f"{count} blocks are needed, and {self.free} are free")
        if count > self.empty:
            self._evict(count - self.empty)
        self.free -= count
        self.empty -= count

    def cached_end(self, text: Text, first: int, end: int) -> int:
        """The end of the consecutive cached blocks of a text from `first` on, at most `end`."""
        position = first
        for extent in self._overlapping(text, first, end):
            if extent.first > position:
                break
            position = extent.end
        return position if position < end else end

    def has_any(self, text: Text, first: int, end: int) -> bool:
        """Whether any of the blocks `first` … `end - 1` of a text is cached."""
        return bool(self._overlapping(text, first, end))

    def _overlapping(self, text: Text, first: int, end: int) -> list[Extent]:
        """The extents with any of these blocks of a text."""
        found: list[Extent] = []
        for piece, begin, stop in text:
            if stop > first and begin < end:
                found += [each for each in self._extents.get(piece, ()) if each.first < end and each.end > first]
        return found

    def idle_blocks(self, text: Text, end: int) -> int:
        """Idle blocks among the first `end` of a text."""
        idle = [each for each in self._overlapping(text, 0, end) if not each.references]
        return sum([min(each.end, end) - each.first for each in idle])

    def share(self, holder: Holder, first: int, end: int) -> None:
        """Let a holder refer to cached blocks."""
        for extent in self._between(holder.text, first, end):
            if not extent.references:
                self.free -= extent.end - extent.first
            extent.references += 1
        holder.add(first, end)

    def share_cached(self, holder: Holder, first: int, end: int) -> int:
        """Let a holder refer to the consecutive cached blocks from `first` on; returns their end.

        Blocks with references are not counted at once (`_uncounted`): that costs less if `release_first` is the next release.
        """
        position = first
        referenced = True
        for extent in self._overlapping(holder.text, first, end):
            if extent.first > position:
                break
            position = extent.end
            referenced = referenced and extent.references > 0
        position = position if position < end else end
        if not referenced:
            self.share(holder, first, position)
        elif position > first:
            self._uncounted.append((holder, first, position))
            holder.add(first, position)
        return position

    def _count_all(self) -> None:
        """Count the references that are not counted yet."""
        for holder, first, end in self._uncounted:
            for extent in self._between(holder.text, first, end):
                extent.references += 1
        self._uncounted.clear()

    def enter(self, holder: Holder, first: int, end: int) -> None:
        """Put private blocks of a holder into the cache, except those of which equal ones are there already."""
        for piece, begin, stop in holder.text:
            position = first if first > begin else begin
            last = end if end < stop else stop
            if position >= last:
                continue
            extents = self._extents.setdefault(piece, [])
            if extents and extents[-1].end > position:
                for extent in [*extents]:
                    if extent.end <= position:
                        continue
                    if extent.first > position:
                        self._add(holder, extents, piece, position, min(extent.first, last))
                    position = extent.end
                    if position >= last:
                        break
            if position < last:
                self._add(holder, extents, piece, position, last)

    def _add(self, holder: Holder, extents: list[Extent], piece: int, first: int, end: int) -> None:
        holder.private -= end - first
        before = extents[-1] if extents else None
        if before is None or before.end < first:
            extents.append(Extent(piece, first, end, 1))
        elif before.end > first or before.references != 1 or not holder.spans or holder.spans[-1][1] != first:
            insort(extents, Extent(piece, first, end, 1), key=attrgetter("first"))
        else:
            # The holder refers to the block before, so the one reference is its own. Uncounted ones of senders
            # may be added to a longer extent: `_count_all` splits it at the ends of their spans.
            before.end = end
        holder.add(first, end)

    def release(self, holder: Holder) -> None:
        """Release all blocks of a holder, the last one first."""
        self.free += holder.private
        self.empty += holder.private
        self.releases += 1
        for first, end in holder.spans:
            self._release(holder.text, first, end, forward=False)
        holder.private = 0
        holder.spans = []

    def release_first(self, holder: Holder, first: int, end: int) -> None:
        """Release the first blocks of a holder's only span, the first one first."""
        self.releases += 1
        ((begin, stop),) = holder.spans
        assert begin == first < end <= stop
        if (holder, first, end) in self._uncounted:
            self._uncounted.remove((holder, first, end))
        else:
            self._release(holder.text, first, end, forward=True)
        holder.spans = [(end, stop)] if end < stop else []

    def _release(self, text: Text, first: int, end: int, *, forward: bool) -> None:
        if self._uncounted:
            self._count_all()
        shared: set[int] = set()
        for extent in self._between(text, first, end):
            extent.references -= 1
            if extent.references:
                shared.add(extent.piece)
            else:
                self.free += extent.end - extent.first
                extent.stamp = self.releases
                extent.forward = forward
                self._note_idle(extent)
        for piece in shared:
            self._join(self._extents[piece])

    @staticmethod
    def _join(extents: list[Extent]) -> None:
        """Make one extent of consecutive ones with the same number of references.

        Idle extents stay apart: the heap has an entry for each, and they may be of different releases.
        """
        for index in range(len(extents) - 1, 0, -1):
            before = extents[index - 1]
            behind = extents[index]
            if before.end == behind.first and before.references == behind.references > 0:
                before.end = behind.end
                behind.references = EMPTIED
                del extents[index]

    def _note_idle(self, extent: Extent) -> None:
        heappush(self._released, (extent.stamp, extent.first if extent.forward else -extent.first, extent))

    def take_cached(self, holder: Holder, text: Text) -> bool:
        """Make the cached block at the end of a text private to a holder; false if it is not cached or not idle."""
        piece, _, end = text[-1]
        extents = self._extents.get(piece, ())
        if not extents or extents[-1].end != end or extents[-1].references:
            return False
        extent = extents[-1] if extents[-1].first == end - 1 else self._split(extents, -1, end - 1)
        self._drop(extent)
        self.free -= 1
        holder.private += 1
        return True

    def _between(self, text: Text, first: int, end: int) -> list[Extent]:
        """The extents of these blocks, which are split from those outside.

        Their order does not count. Those of a piece are visited from the last one on, as splits move the ones behind.
        """
        found: list[Extent] = []
        for piece, begin, stop in text:
            if begin >= end or first >= end:
                break
            if stop <= first:
                continue
            extents = self._extents.get(piece)
            if extents is None:
                continue
            if len(extents) == 1 and extents[0].first >= first and extents[0].end <= end:
                found.append(extents[0])
                continue
            for index in range(len(extents) - 1, -1, -1):
                extent = extents[index]
                if extent.end <= first:
                    break
                if extent.first < end:
                    if extent.end > end:
                        self._split(extents, index, end)
                    found.append(self._split(extents, index, first) if extent.first < first else extent)
        return found

    def _split(self, extents: list[Extent], index: int, position: int) -> Extent:
        """Divide an extent of a piece before a block; returns the second part."""
        extent = extents[index]
        behind = Extent(extent.piece, position, extent.end, extent.references)
        behind.stamp = extent.stamp
        behind.forward = extent.forward
        extent.end = position
        extents.insert(index % len(extents) + 1, behind)
        if not behind.references:
            self._note_idle(behind)
        return behind

    def _drop(self, extent: Extent) -> None:
        extents = self._extents[extent.piece]
        extents.remove(extent)
        extent.references = EMPTIED
        if not extents:
            del self._extents[extent.piece]

    def _evict(self, count: int) -> None:
        """Empty so many idle blocks, those of the earliest release first."""
        self.empty += count
        while count:
            stamp, _, extent = self._released[0]
            if extent.references or extent.stamp != stamp:
                heappop(self._released)
            elif count >= extent.end - extent.first:
                count -= extent.end - extent.first
                heappop(self._released)
                self._drop(extent)
            else:
                # The entry keeps its place in the heap, before the blocks that the same release freed later.
                if extent.forward:
                    extent.first += count
                else:
                    extent.end -= count
                return
