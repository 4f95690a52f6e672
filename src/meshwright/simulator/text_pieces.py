"""Divides sequences into pieces: runs of cache blocks that the same requests have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from meshwright.spec.deployment import PREFIX_BLOCK, TimedRequest

Text = Sequence[tuple[int, int, int]]
"""Pieces of a text in order: a number that stands for its content, its first block, and the block behind its last one."""


def block_digests(text: Text) -> list[bytes]:
    """A digest of each block of a text, or of its last pieces."""
    return [
        piece.to_bytes(8, "little", signed=True) + block.to_bytes(4, "little")
        for piece, first, end in text
        for block in range(first, end)
    ]


class TextPieces:
    """The pieces of the sequences of all requests, in blocks of `size` tokens."""

    def __init__(self, requests: Sequence[TimedRequest], size: int) -> None:
        self._requests = requests
        self._size = size
        numbers: dict[tuple[int, int], int] = {}
        self.prefixes = [_prefixes(request.prefix_blocks, numbers) for request in requests]
        """By request, a number for each prefix of its prompt's prefix blocks, the shortest first."""
        self._users: Counter[int] = Counter()
        """By prefix, the requests with a full block that begins in its last prefix block."""
        self._ends: defaultdict[int, set[int]] = defaultdict(set)
        """Ends of the common blocks of requests, by the prefix in which they end."""
        self._pieces: dict[tuple[int, int], int] = {}
        """Numbers of pieces, by the prefix in which they begin and their first block."""
        for request, prefixes in zip(requests, self.prefixes, strict=True):
            if end := self._common_end(request):
                used = prefixes[: (end - 1) * size // PREFIX_BLOCK + 1]
                self._users.update(used)
                self._ends[used[-1]].add(end)

    def texts(self, number: int) -> tuple[Text, Text]:
        """The text of a request with its new tokens, and its prompt with the block that this does not fill.

        The pieces that it shares with others come first, then one piece of its own.
        """
        request = self._requests[number]
        size = self._size
        shared, first = self._shared(number)
        own = -1 - 2 * number
        full = request.input_tokens // size
        blocks = (request.input_tokens + request.output_tokens) // size
        return (*shared, (own, first, blocks)), (*shared, (own, first, full), (own - 1, full, full + 1))

    def _shared(self, number: int) -> tuple[list[tuple[int, int, int]], int]:
        """The pieces that a request shares with others, and the block behind them."""
        if not self.prefixes[number]:
            return [], 0
        end = self._common_end(self._requests[number])
        pieces = []
        begin = 0
        users = 0
        origin = 0
        behind = 0
        """First block of the piece, its users, and the prefix in which it begins."""

        def close(position: int, prefix: int) -> None:
            nonlocal begin, origin
            if position > begin:
                piece = self._pieces.setdefault((origin, begin), len(self._pieces) + 1)
                pieces.append((piece, begin, position))
            begin = position
            origin = prefix

        for index, prefix in enumerate(self.prefixes[number]):
            first = behind
            behind = self._first_block(index + 1)
            if first >= end:
                break
            if self._users[prefix] != users:
                close(first, prefix)
                users = self._users[prefix]
            if users == 1:
                return pieces, first
            if prefix in self._ends:
                for cut in sorted(self._ends[prefix]):
                    if cut < min(behind, end):
                        close(cut, prefix)
        close(end, 0)
        return pieces, end

    def _common_end(self, request: TimedRequest) -> int:
        """Full blocks of a prompt that begin in its prefix blocks."""
        return min(request.input_tokens // self._size, self._first_block(len(request.prefix_blocks)))

    def _first_block(self, index: int) -> int:
        """The first block that begins in a prefix block."""
        return -(-index * PREFIX_BLOCK // self._size)


def _prefixes(blocks: Sequence[int], numbers: dict[tuple[int, int], int]) -> list[int]:
    """A number for each beginning of the blocks: equal ones where sequences begin alike.

    Two sequences that begin with block 7 share its number, not that of what follows:

    >>> numbers = {}
    >>> _prefixes([7, 8], numbers), _prefixes([7, 9], numbers)
    ([1, 2], [1, 3])
    """
    prefix = 0
    prefixes = []
    for block in blocks:
        prefix = numbers.setdefault((prefix, block), len(numbers) + 1)
        prefixes.append(prefix)
    return prefixes
