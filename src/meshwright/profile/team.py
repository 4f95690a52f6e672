"""The ranks that measure together, one device each. A single device needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.parallel.world import World, world_group


@dataclass(frozen=True)
class Team:
    """This rank's device, and the ranks that measure with it."""

    device: torch.device
    world: World | None = None
    """All ranks; None if this rank is alone."""

    @property
    def cuda(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return self.world.rank if self.world else 0

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.world.ranks if self.world else 1

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on a node."""
        return self.world.ranks_per_node if self.world else 1

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.ranks // self.ranks_per_node

    def finish(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until the devices of all ranks have finished all queued work."""
        self.finish()
        if self.world:
            dist.barrier(group=self.world.control)

    def largest(self, value: float) -> float:
        """Return the largest `value` of all ranks, on every rank."""
        if self.world is None:
            return value
        reduced = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.world.control)
        return float(reduced)

    def from_first_rank(self, value: float) -> float:
        """Return the `value` of rank 0, on every rank."""
        if self.world is None:
            return value
        broadcast = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(broadcast, 0, group=self.world.control)
        return float(broadcast)

    def group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return this rank's process group. `groups` has the ranks of each group; call it on all ranks."""
        assert self.world is not None, "a single rank has no process group"
        return world_group() if len(groups) == 1 else self.world.split(groups, "profile")
