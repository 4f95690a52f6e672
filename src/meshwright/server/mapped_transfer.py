"""Transfer of cache blocks through mapped memory: the receiver maps the sender's cache, and copies the blocks from it.

`MappedSender` and `MappedReceiver` are the two sides of one connection:

1. In its message `welcome`, the sender offers its cache. The receiver answers whether it could map the cache. Until then, and if it could
   not, blocks go through staging memory.
2. A message `mapped_blocks` has the numbers of blocks and their checksums. The sender does not change these blocks.
3. The receiver copies the blocks and sends `returned`. Then, or when the connection ends, the sender releases them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.server.frames import BadFrame

if TYPE_CHECKING:
    from meshwright.policies.moving_blocks import ReservedBlocks, UnsentBlocks
    from meshwright.serve.mapped_blocks import MappedBlocks, OwnBlocks

log = logging.getLogger("meshwright.server")


class MappedSender:
    """The sender's side: the blocks that the receiver may copy from this engine's cache."""

    def __init__(self, blocks: OwnBlocks, offer: Sequence[Mapping[str, Any]]) -> None:
        self._blocks = blocks
        self.offer = offer
        self.mapped = False
        """Whether the receiver has mapped the cache."""
        self._unreturned: dict[int, UnsentBlocks] = {}
        """By message number: the blocks of a message that the receiver has not returned yet."""
        self._numbers = itertools.count()

    @classmethod
    def for_peer(cls, blocks: OwnBlocks | None, host: object) -> MappedSender | None:
        """Make the sender's side for a receiver on the host `host`. Returns None if that receiver cannot map this cache."""
        if blocks is None or not host or host != blocks.host or (offer := blocks.offer()) is None:
            return None
        return cls(blocks, offer)

    @property
    def unreturned_blocks(self) -> int:
        """Number of blocks that the receiver has not returned."""
        return sum(map(len, self._unreturned.values()))

    def send(self, unsent: UnsentBlocks) -> dict[str, Any]:
        """Reference all computed blocks of a prompt that are not sent yet. Returns the fields of the message `mapped_blocks` for them."""
        index = unsent.next
        sent = unsent.split(len(unsent))
        number = next(self._numbers)
        self._unreturned[number] = sent
        tables = sent.take(len(sent))
        return {"index": index, "number": number, "tables": tables, "sums": self._blocks.sums(tables).tobytes().hex()}

    def release(self, number: int) -> None:
        """Release the blocks of message `number`. Raises KeyError if there is no such message, or if its blocks were returned before."""
        self._unreturned.pop(number).release()

    def close(self) -> None:
        """Release all blocks."""
        for number in list(self._unreturned):
            self.release(number)


class MappedReceiver:
    """The receiver's side: the mapped cache of the sender."""

    def __init__(self, blocks: OwnBlocks, source: MappedBlocks) -> None:
        self._blocks = blocks
        self._source = source

    @classmethod
    def of_offer(cls, blocks: OwnBlocks | None, offer: Sequence[Mapping[str, Any]]) -> MappedReceiver | None:
        """Map the cache that a sender offers. Returns None if that is not possible.

        Raises KeyError, TypeError or ValueError for a malformed offer.
        """
        from meshwright.parallel.mapped_memory import NotMappable

        try:
            return None if blocks is None else cls(blocks, blocks.map(offer))
        except NotMappable as error:
            log.warning("cache blocks come through host memory: the sender's cache cannot be mapped (%s)", error)
            return None

    def copy(self, message: Mapping[str, Any], reserved: ReservedBlocks) -> int:
        """Copy the blocks of a message with one kernel. Enter them into the prefix cache, up to the first block with a wrong checksum.

        Returns the number of blocks that were entered. Raises BadFrame if the blocks were not requested or have too few checksums;
        KeyError, TypeError or ValueError for a malformed message.
        """
        tables = message["tables"]
        index = message["index"]
        targets = reserved.tables(index, len(tables))
        if not targets:
            raise BadFrame(f"blocks {index} to {index + len(tables)} are not asked for")
        found = self._blocks.copy(self._source, tables, targets)
        expected = bytes.fromhex(message["sums"])
        if len(expected) != found.nbytes:
            raise BadFrame("not all blocks have checksums")
        size = found[0].nbytes
        damaged = (at for at, sums in enumerate(found) if sums.tobytes() != expected[at * size : (at + 1) * size])
        entered = next(damaged, len(found))
        reserved.enter(index, entered)
        return entered

    def close(self) -> None:
        """Unmap the sender's cache."""
        self._source.close()
