"""The ranks that measure together: one device each, and what they agree on. One device alone needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.parallel.world import World, world_group


@dataclass(frozen=True)
class Team:
    """This rank's device, and the job it belongs to (None: it is alone)."""

    device: torch.device
    world: World | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rank(self) -> int:
        return self.world.rank if self.world else 0

    @property
    def ranks(self) -> int:
        return self.world.ranks if self.world else 1

    @property
    def ranks_per_node(self) -> int:
        return self.world.ranks_per_node if self.world else 1

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def finish(self) -> None:
        """Wait until the device has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until every rank's device has done what it was given."""
        self.finish()
        if self.world:
            dist.barrier(group=self.world.control)

    def slowest(self, value: float) -> float:
        """The largest `value` of all ranks: what a step would wait for."""
        if self.world is None:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.world.control)
        return float(found)

    def leader(self, value: float) -> float:
        """Rank 0's `value`, on every rank."""
        if self.world is None:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(found, 0, group=self.world.control)
        return float(found)

    def group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's group where `parts` divides all ranks; collective over all ranks."""
        assert self.world is not None, "one rank has nobody to talk to"
        return world_group() if len(parts) == 1 else self.world.split(parts, "profile")
