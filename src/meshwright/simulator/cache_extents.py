"""A prefix cache for the simulator that handles ranges of blocks (extents) instead of single blocks, because that is faster.

It gives the same counts as `policies.cache_blocks.BlockPool`, which the engine uses block by block.

- A sequence ("text" in names) is a list of pieces (`text_pieces`); several sequences may share a piece.
- An extent is a range of consecutive cached blocks of one piece with the same number of references.
- A holder has references on blocks of one sequence. It may be a request, a reservation of blocks, or a sender of computed blocks.
- A private block belongs to one holder and is not in the cache. A second copy of a cached block is private too.
- A block without references is idle if it is cached, and empty if it is not.

A holder that needs blocks gets the empty ones first, then the idle ones in the order of their release.
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush
from operator import attrgetter

from meshwright.policies.cache_blocks import BlockCounts
from meshwright.simulator.text_pieces import Text

Span = tuple[int, int]
"""A range of blocks of a sequence: (first block, block after the last block)."""


EMPTIED = -1
"""Value of `Extent.references` for an extent that is not cached any more. The heap of idle extents may still have an entry for it."""


class Extent:
    """A range of cached blocks, `first` … `end - 1`, of one piece. All of its blocks have the same number of references."""

    __slots__ = ("end", "first", "forward", "piece", "references", "stamp")

    def __init__(self, piece: int, first: int, end: int, references: int) -> None:
        self.piece = piece
        self.first = first
        self.end = end
        self.references = references
        self.stamp = 0
        """Number of the release that made the extent idle."""
        self.forward = False
        """Whether that release went from the first block to the last one. If so, the first block is evicted first."""


class Holder:
    """The blocks that a request, a reservation or a sender refers to. All belong to one sequence, `text`."""

    __slots__ = ("private", "spans", "text")

    def __init__(self, text: Text) -> None:
        self.text = text
        self.private = 0
        """Number of the holder's blocks that are not cached."""
        self.spans: list[Span] = []
        """The holder's cached blocks as ranges, ascending."""

    def add(self, first: int, end: int) -> None:
        """Add the range `first` … `end - 1` to `spans`. It must begin at or after the end of the last range.

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
    """The blocks of one instance's cache: the cached blocks as extents, and the numbers of free and of empty blocks.

    A free block has no references: it is idle (cached) or empty.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.empty = self.blocks
        """Blocks without references and without content."""
        self._extents: dict[int, list[Extent]] = {}
        """By number of the piece, its extents in ascending order."""
        self._released: list[tuple[int, int, Extent]] = []
        """A heap of idle extents, the next to evict first: (number of the release, order within the release, extent).

        An entry is stale once its extent is used again or emptied. Comparisons never reach the third value, because no two entries
        have the same first two: one release concerns one sequence, and its extents begin at different blocks, also after splits.
        """
        self._uncounted: list[tuple[Holder, int, int]] = []
        """References of senders that `Extent.references` does not include yet: (sender, first block, block after the last).

        To count them would split extents. Usually the sender releases the same blocks soon, which would join the extents again, so
        counting waits. Any other release counts the references first (`_release`). Until then each of these blocks has at
        least one other reference, so none of them can be idle.
        """

    def take(self, count: int) -> None:
        """Take `count` free blocks, which the caller adds to `Holder.private`. Raises IndexError if fewer are free."""
        if count > self.free:
            raise IndexError(f"{count} blocks are needed, and {self.free} are free")
        if count > self.empty:
            self._evict(count - self.empty)
        self.free -= count
        self.empty -= count

    def cached_end(self, text: Text, first: int, end: int) -> int:
        """Return the first block from `first` on that is not cached, or `end` if all blocks before `end` are cached."""
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
        """Return the extents that contain any of the blocks `first` … `end - 1` of a sequence."""
        found: list[Extent] = []
        for piece, begin, stop in text:
            if stop > first and begin < end:
                found += [each for each in self._extents.get(piece, ()) if each.first < end and each.end > first]
        return found

    def idle_blocks(self, text: Text, end: int) -> int:
        """Return how many of the first `end` blocks of a sequence are idle: cached, and without references."""
        idle = [each for each in self._overlapping(text, 0, end) if not each.references]
        return sum([min(each.end, end) - each.first for each in idle])

    def share(self, holder: Holder, first: int, end: int) -> None:
        """Add a reference of `holder` to its blocks `first` … `end - 1`, all of which are cached."""
        for extent in self._between(holder.text, first, end):
            if not extent.references:
                self.free -= extent.end - extent.first
            extent.references += 1
        holder.add(first, end)

    def share_cached(self, holder: Holder, first: int, end: int) -> int:
        """Add a reference of `holder` to its cached blocks from `first` on, up to the first block that is not cached, at most to `end`.

        Returns the block after the last of them. If all of these blocks have other references, the new references are not counted at
        once but listed in `_uncounted`; this is faster if the next release is the holder's own `release_first`.
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
        """Add the references in `_uncounted` to those of the extents."""
        for holder, first, end in self._uncounted:
            for extent in self._between(holder.text, first, end):
                extent.references += 1
        self._uncounted.clear()

    def enter(self, holder: Holder, first: int, end: int) -> None:
        """Put the private blocks `first` … `end - 1` of `holder` into the cache. A block that is cached already stays private."""
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
            # The extent before has one reference, and the holder refers to it, so that reference is the holder's: the extent can grow.
            # Senders may have uncounted references to a part of it. `_count_all` splits the extent at the ends of that part.
            before.end = end
        holder.add(first, end)

    def release(self, holder: Holder) -> None:
        """Remove all references of `holder`, from its last block to its first one, so the last block is evicted first."""
        self.free += holder.private
        self.empty += holder.private
        self.releases += 1
        for first, end in holder.spans:
            self._release(holder.text, first, end, forward=False)
        holder.private = 0
        holder.spans = []

    def release_first(self, holder: Holder, first: int, end: int) -> None:
        """Remove the references of `holder` to `first` … `end - 1`, the beginning of its only range, from the first block on."""
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
        """Join extents of one piece that follow each other and have the same number of references.

        Idle extents are not joined: the heap has an entry for each of them, and different releases may have made them idle.
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
        """Take the last block of `text` out of the cache and make it a private block of `holder`.

        Returns false, and changes nothing, if the block is not cached or has references.
        """
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
        """Return extents that cover exactly the cached blocks among `first` … `end - 1`; extents across the limits are split there.

        The order of the result does not matter. The extents of a piece are visited from the last to the first, because a split
        inserts an extent and so moves those after it.
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
        """Split the extent `extents[index]` before block `position`. Returns the new extent, which begins at `position`."""
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
        """Remove `count` idle blocks from the cache, which makes them empty. The blocks that were released first go first."""
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
                # The rest of the extent is still the next to evict, so its entry stays at the top of the heap.
                if extent.forward:
                    extent.first += count
                else:
                    extent.end -= count
                return
