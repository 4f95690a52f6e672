"""The inference engine on a group of tensor ranks. Each rank has a part of every layer and of the cache.

Every rank runs the same engine with the same policy, and gets the same calls and the same clock (`serve.rank_group`). So all ranks plan
the same steps. All ranks have the same logits, bit for bit, and a draw depends only on logits, seed and position. So they draw the same
tokens without exchanging them. As a check, each message of rank 0 has a checksum of the tokens of the last step, and the other ranks
compare it with theirs.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.policies.recorded_blocks import repeat_change
from meshwright.serve.generation import Update
from meshwright.serve.rank_blocks import LeadingBlocks, RankSlices
from meshwright.serve.rank_group import RankEngine
from meshwright.serve.text_request import TextRequest


class TensorEngine(RankEngine):
    """The engine of one tensor rank."""

    def _queue(self, request: TextRequest) -> int:
        call = {"now": time.monotonic(), "submit": request.to_plain()}
        number = self._apply(call)
        self._calls.append(call)
        return number

    def abort(self, number: int) -> None:
        """End a request on all ranks, as `Engine.abort`."""
        call = {"now": time.monotonic(), "abort": number}
        self._apply(call)
        self._calls.append(call)

    def prefix_blocks(self) -> LeadingBlocks:
        """Return the prefix cache of all ranks, for other processes, as `Engine.prefix_blocks`. For rank 0."""

        def record(change: Sequence[Any]) -> None:
            self._calls.append({"change": change})

        return LeadingBlocks(
            self._model, self.spec, self._policy, self._cache, self._world, record=record, send=self._send
        )

    def _apply(self, call: Mapping[str, Any]) -> int:
        """Apply a call on this rank: submit, abort, or a change of a pool of cache blocks. Returns the number of the request, or -1."""
        if "change" in call:
            repeat_change(self._policy.cache, call["change"])
            return -1
        return super()._apply(call)

    def _take_part(self, message: Mapping[str, Any]) -> None:
        if not message.keys() & {"gather", "scatter", "weight_sums"}:
            return
        slices = RankSlices(self._model, self.spec, self._policy, self._cache, self._world)
        if "gather" in message:
            slices.gather(message["gather"])
        elif "scatter" in message:
            slices.scatter(message["scatter"], None)
        else:
            slices.summed_weights()

    def _compute_step(self) -> list[Update]:
        updates = super()._compute_step()
        drawn = [(update.number, update.tokens, update.reason) for update in updates]
        self._checksum = zlib.crc32(repr(drawn).encode())
        return updates
