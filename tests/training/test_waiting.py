"""The share of step time spent waiting for data, over all ranks."""

from __future__ import annotations

from typing import Any

from meshwright.parallel.world import World
from meshwright.training.waiting import DataWait


def together(world: World) -> tuple[str | None, str | None]:
    """Rank 1 waits for half of step 8; what came before step 6 does not count."""
    wait, cold = DataWait(5), DataWait(5)
    for step in range(1, 11):
        data = 5.0 if step < 6 else 0.5 * (world.rank == 1 and step == 8)
        wait.step({"step": step, "step_seconds": 1.0, "phases": {"data": data, "forward": 1 - data}})
    cold.step({"step": 5, "step_seconds": 1.0, "phases": {}})
    return wait.line(world.control), cold.line(world.control)


def test_the_longest_wait_of_all_ranks_is_recorded(pool: Any) -> None:
    assert pool.run(together, 3) == [("waiting for data: 10.00% of the steps' time", None)] * 3
