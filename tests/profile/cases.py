"""Functions for the ranks of a pool: the whole profile with tiny shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from meshwright.parallel.world import World
from meshwright.profile import attention_times as attention
from meshwright.profile import collective_times as collectives
from meshwright.profile import interference
from meshwright.profile import matmul_times as matmuls
from meshwright.profile import memory_rates as memory
from meshwright.profile.measure import measure
from meshwright.profile.team import Team
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import to_plain
from meshwright.spec.profile import MachineProfile
from meshwright.workload.device_work import Work

TINY: tuple[tuple[Any, str, Any], ...] = (
    (matmuls, "CPU_SHAPES", ((32, 16, 64), (64, 64, 64))),
    (matmuls, "CACHE_BYTES", {"cpu": 1 << 16}),
    (attention, "CPU_CASES", ((16, 4, 2, 8, 32, None),)),
    (memory, "ELEMENTS", {"cpu": 1 << 12}),
    (memory, "PARAMETERS", {"cpu": (1 << 10, 3)}),
    (collectives, "SIZES", {"cpu": (1 << 10, 1 << 12)}),
    (interference, "SHAPE", {"cpu": (32, 32, 32)}),
    (interference, "BYTES", {"cpu": 1 << 12}),
)


def tiny(team: Team, work: Work | None = None) -> MachineProfile:
    for module, name, value in TINY:
        mock.patch.object(module, name, value).start()
    try:
        cluster = ClusterSpec(gpu="cpu", gpus_per_node=team.ranks)
        return measure(team, cluster, {"torch": "some"}, seconds=0.01, work=work)
    finally:
        mock.patch.stopall()


def measured(world: World, per_node: int) -> dict[str, Any]:
    """The profile of this rank as plain data, with nodes of `per_node` ranks."""
    return to_plain(tiny(Team(world.device, replace(world, node_ranks=per_node))))
