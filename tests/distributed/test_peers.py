"""Token exchange through mapped memory, on CPU processes with shared memory instead of GPUs.

Streams run in program order; all other code is that of GPUs.

One rank is as late as possible: after every barrier it waits until the other ranks have reached their next barrier. By then they have
overwritten every slot that they may overwrite.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.world import World
from tests.distributed.pool import Pool
from tests.distributed.test_async_tensor import every_operator
from tests.distributed.test_schedules import Case


class ImmediateStream:
    """A stream whose work has ended when it is launched."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> None: ...


def shared_window(folder: Path, late_rank: int) -> type:
    """`peers._Window` over files that the ranks map; rank `late` leaves each barrier one exchange late."""
    from meshwright.parallel import peers

    class Window(peers._Window):
        windows = 0

        def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
            self.size, self._rank, self._ranks = peers.aligned(size), group.rank(), group.size()
            self._flag_bytes = peers.aligned(4 * self._ranks)
            Window.windows += 1
            total = self._flag_bytes + peers.TOKEN_SLOTS * self.size
            names = [str(folder / f"{owner}-{Window.windows}") for owner in range(self._ranks)]
            torch.from_file(names[self._rank], shared=True, size=total, dtype=torch.uint8).zero_()
            dist.barrier(group)
            self._memories = [torch.from_file(name, shared=True, size=total, dtype=torch.uint8) for name in names]
            self._flags = [self._view(owner, 0, (self._ranks,), torch.int32) for owner in range(self._ranks)]

        def _view(self, owner: int, first: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
            return self._memories[owner][first : first + prod(shape) * dtype.itemsize].view(dtype).view(*shape)

        def barrier(self, number: int) -> None:
            self.set_flags(number)
            self.wait_for_flags(number)
            if self._rank == late_rank:
                self.wait_for_flags(number + 1)

        def set_flags(self, number: int) -> None:
            for owner in range(self._ranks):
                self._flags[owner][self._rank] = number

        def wait_for_flags(self, number: int) -> None:
            deadline = time.monotonic() + 20
            other_ranks = [rank for rank in range(self._ranks) if rank != self._rank]
            while any(self._flags[self._rank][peer] < number for peer in other_ranks):
                assert time.monotonic() < deadline, f"barrier {number} timed out: {self._flags[self._rank]}"
                os.sched_yield()

    return Window


@contextmanager
def streams_in_order() -> Iterator[None]:
    replacements = {
        "Stream": lambda *_, **__: ImmediateStream(),
        "current_stream": ImmediateStream,
        "stream": nullcontext,
        "synchronize": lambda _: None,
    }
    with mock.patch.multiple(torch.cuda, **replacements):
        yield


def largest_error(world: World, ranks: int, late_rank: int, slots: int, batch: int, folder: Path) -> float:
    """Largest error of three runs of every operator against the variants with collectives."""
    from meshwright.parallel import peers
    from meshwright.parallel.mesh import build_mesh

    group = build_mesh(Case("1f1b", tensor=ranks).plan, world).group("tensor")
    assert group is not None
    by_collectives = every_operator(world.rank, group.group_name, ranks, batch)
    window = shared_window(folder, late_rank)
    with mock.patch.multiple(peers, _Window=window, TOKEN_SLOTS=slots), streams_in_order():
        memory = peers.PeerMemory(group, torch.device("cpu"))
        peers.register(group.group_name, memory)
        repeated = [every_operator(world.rank, group.group_name, ranks, batch) for _ in range(3)]
        assert isinstance(memory._window, window)
        memory._window.set_flags(memory.uses + 1)
        dist.barrier(group)
    peers.close_peers(group.group_name)
    return max(
        float((a - b).abs().max())
        for outputs in repeated
        for name in by_collectives
        for a, b in zip(outputs[name], by_collectives[name], strict=True)
    )


@pytest.mark.parametrize(("ranks", "late_rank", "batch"), [(2, 1, 2), pytest.param(4, 2, 1, marks=pytest.mark.slow)])
def test_no_rank_overwrites_data_that_a_late_rank_has_yet_to_read(
    pool: Pool, tmp_path: Path, ranks: int, late_rank: int, batch: int
) -> None:
    assert max(pool.run(largest_error, ranks, ranks, late_rank, 2, batch, tmp_path)) < 1e-12


def test_a_single_slot_gives_wrong_results(pool: Pool, tmp_path: Path) -> None:
    assert max(pool.run(largest_error, 2, 2, 1, 1, 1, tmp_path)) > 1e-3
