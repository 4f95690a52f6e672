"""Blocks that a receiver copies out of the sender's cache itself, where it can map that: both ends of one connection.

The sender offers its cache in its welcome, and the receiver answers whether it could map it; until then, and without it, blocks go
through staging memory. A message `mapped_blocks` names blocks, with their checksums; the sender keeps them unchanged until the receiver
returns them, or the connection ends.
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
    """The sender's end."""

    def __init__(self, blocks: OwnBlocks, offer: Sequence[Mapping[str, Any]]) -> None:
        self._blocks = blocks
        self.offer = offer
        self.mapped = False
        """Whether the receiver has mapped the cache."""
        self._unreturned: dict[int, UnsentBlocks] = {}
        self._numbers = itertools.count()

    @classmethod
    def for_peer(cls, blocks: OwnBlocks | None, host: object) -> MappedSender | None:
        """The end for a receiver that maps memory on `host`; None if it cannot map this cache."""
        if blocks is None or not host or host != blocks.host or (offer := blocks.offer()) is None:
            return None
        return cls(blocks, offer)

    @property
    def unreturned_blocks(self) -> int:
        """Blocks that the receiver has not returned."""
        return sum(map(len, self._unreturned.values()))

    def send(self, unsent: UnsentBlocks) -> dict[str, Any]:
        """Keep all computed blocks of a prompt for the receiver: the fields of the message that names them."""
        index = unsent.next
        sent = unsent.split(len(unsent))
        number = next(self._numbers)
        self._unreturned[number] = sent
        tables = sent.take(len(sent))
        return {"index": index, "number": number, "tables": tables, "sums": self._blocks.sums(tables).tobytes().hex()}

    def release(self, number: int) -> None:
        """Release the blocks of a message. Raises KeyError for the number of no message, or of one that was returned."""
        self._unreturned.pop(number).release()

    def close(self) -> None:
        """Release all blocks."""
        for number in list(self._unreturned):
            self.release(number)


class MappedReceiver:
    """The receiver's end."""

    def __init__(self, blocks: OwnBlocks, source: MappedBlocks) -> None:
        self._blocks = blocks
        self._source = source

    @classmethod
    def of_offer(cls, blocks: OwnBlocks | None, offer: Sequence[Mapping[str, Any]]) -> MappedReceiver | None:
        """Return the receiver's end for a sender's offer; None if it cannot be mapped. Raises KeyError, TypeError or ValueError."""
        from meshwright.parallel.mapped_memory import NotMappable

        try:
            return None if blocks is None else cls(blocks, blocks.map(offer))
        except NotMappable as error:
            log.warning("cache blocks come through host memory: the sender's cache cannot be mapped (%s)", error)
            return None

    def copy(self, message: Mapping[str, Any], reserved: ReservedBlocks) -> int:
        """Copy the blocks of a message by one kernel, and enter them into the prefix cache up to the first that is damaged.

        Returns the number of blocks entered. Raises BadFrame for blocks that were not requested, and the errors of a wrong message.
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
