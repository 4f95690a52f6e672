"""Gradients summed over shards by an exchange: parts travel as they were computed, and each rank adds up those of its own shard.

A reduce-scatter by ring adds on the way, so what travels has the format of the sum, mostly fp32, and the order of addition is the ring's.
Here every rank sends every other rank the part that is to be added there, in the format of the gradients (bf16: half the bytes, and
nothing is rounded), and adds in the format of the sum what came from all. The order of addition is a function of the number of ranks alone.
Each of n ranks sends (n - 1) / n of the gradients, as in a ring; but of these more leave a node (docs/design/reductions.md).
Method: reduce-scatter by pairwise exchange (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class GradientExchange:
    """The transport and the sum behind it. Everything runs on the stream that is current, so memory made here is let go behind its use."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what this rank will send. Another stream may fill it; it stays until the call has ended on its own stream."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, total: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
        """Fill `total` `(n,)` with the sum over ranks of what each has for this one: its row of `parts` `(ranks × n,)`, one row a rank."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=total.dtype, out=total)
