"""Divides the token sequences of requests into pieces, so that the simulated cache can handle many blocks at once.

A piece is a range of consecutive cache blocks that the same requests have in common. For example, if requests A and B share their first 8
blocks and have 10 blocks each, there are three pieces: one of 8 blocks for both, and one of 2 blocks for each request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from meshwright.spec.deployment import PREFIX_BLOCK, TimedRequest

Text = Sequence[tuple[int, int, int]]
"""The cache blocks of one sequence, as its pieces in order: (number of the piece, its first block, the block after its last block).

Equal piece numbers mean equal content. `((7, 0, 8), (-1, 8, 10))` is a sequence of 10 blocks: piece 7 has blocks 0 … 7, piece -1 has
blocks 8 and 9.
"""


def block_digests(text: Text) -> list[bytes]:
    """Return one digest for each block of the given pieces. Blocks of equal pieces at equal positions have equal digests."""
    return [
        piece.to_bytes(8, "little", signed=True) + block.to_bytes(4, "little")
        for piece, first, end in text
        for block in range(first, end)
    ]


class TextPieces:
    """Divides the sequences of `requests` into pieces of cache blocks, where a block has `size` tokens.

    Requests describe their prompts by ids of prefix blocks of `PREFIX_BLOCK` tokens; cache blocks usually have another size.
    """

    def __init__(self, requests: Sequence[TimedRequest], size: int) -> None:
        self._requests = requests
        self._size = size
        numbers: dict[tuple[int, int], int] = {}
        self.prefixes = [_prefixes(request.prefix_blocks, numbers) for request in requests]
        """By request, the numbers of its prefixes: of its first prefix block, of its first two prefix blocks, and so on (`_prefixes`)."""
        self._users: Counter[int] = Counter()
        """By prefix, the number of requests that begin with this prefix and can share cache blocks as far as its last prefix block.

        A request counts if one of its full cache blocks begins in that last prefix block, or later in the request's prefix blocks.
        """
        self._ends: defaultdict[int, set[int]] = defaultdict(set)
        """By prefix, the values of `_common_end` of those requests whose last sharable cache block begins in its last prefix block."""
        self._pieces: dict[tuple[int, int], int] = {}
        """Numbers 1, 2, … of shared pieces. The key is (number of the prefix in which the piece begins, first cache block)."""
        for request, prefixes in zip(requests, self.prefixes, strict=True):
            if end := self._common_end(request):
                used = prefixes[: (end - 1) * size // PREFIX_BLOCK + 1]
                self._users.update(used)
                self._ends[used[-1]].add(end)

    def texts(self, number: int) -> tuple[Text, Text]:
        """Return the pieces of request `number` twice: for its whole sequence, and for its prompt alone.

        The first result has the full blocks of prompt and answer. The second result has the full blocks of the prompt, and then the
        block that the prompt fills in part. In both, the shared pieces come first. Private pieces have negative numbers, two for
        each request: request 0 has -1 (its own full blocks) and -2 (the partly filled block), request 1 has -3 and -4.
        """
        request = self._requests[number]
        size = self._size
        shared, first = self._shared(number)
        own = -1 - 2 * number
        full = request.input_tokens // size
        blocks = (request.input_tokens + request.output_tokens) // size
        return (*shared, (own, first, blocks)), (*shared, (own, first, full), (own - 1, full, full + 1))

    def _shared(self, number: int) -> tuple[list[tuple[int, int, int]], int]:
        """Return the pieces that request `number` shares with other requests, and the block after the last of them.

        A new piece begins where the number of sharing requests changes, and where the sharable blocks of any of them end.
        """
        if not self.prefixes[number]:
            return [], 0
        end = self._common_end(self._requests[number])
        pieces = []
        begin = 0
        users = 0
        origin = 0
        behind = 0
        """The open piece begins at block `begin` in prefix `origin`, and `users` requests share it.

        `behind` is the first cache block after the prefix block that the loop visits.
        """

        def close(position: int, prefix: int) -> None:
            """End the open piece before block `position`; the next piece begins there, in `prefix`."""
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
        """Return how many cache blocks of a prompt can be shared: they are full, and begin in one of its prefix blocks.

        A prompt of 1,100 tokens has 68 full blocks of 16 tokens. If a trace gives only one prefix block (512 tokens), 32 of them count.
        """
        return min(request.input_tokens // self._size, self._first_block(len(request.prefix_blocks)))

    def _first_block(self, index: int) -> int:
        """Return the first cache block that begins at or after the start of prefix block `index`."""
        return -(-index * PREFIX_BLOCK // self._size)


def _prefixes(blocks: Sequence[int], numbers: dict[tuple[int, int], int]) -> list[int]:
    """Return a number for each prefix of `blocks`: for the first block, the first two, and so on.

    Sequences that begin with the same blocks get the same numbers for them. `numbers` keeps the numbers from call to call.

    Two sequences both begin with block 7, which has number 1. Then they differ, so the next numbers are 2 and 3:

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
