"""Measures a whole machine: matmuls on an idle device first, then everything on a busy device."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

import torch

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import as_nodes
from meshwright.profile import attention_times as attention
from meshwright.profile import matmul_times as matmuls
from meshwright.profile.attention_times import attention_times
from meshwright.profile.call_timing import TeamClock
from meshwright.profile.collective_times import collective_times
from meshwright.profile.host_links import host_links, launch_seconds
from meshwright.profile.interference import interferences
from meshwright.profile.matmul_times import matmul_times
from meshwright.profile.memory_rates import adamw_rate, copy_rate, pass_rate
from meshwright.profile.mixed import mixed_times
from meshwright.profile.team import Team
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.profile import MachineProfile
from meshwright.workload.device_work import Work

T = TypeVar("T")
SECONDS = {"cuda": 100.0, "cpu": 20.0}
"""Default seconds of all measurements, by device type, without the start of the ranks."""


def measure(
    team: Team,
    cluster: ClusterSpec,
    versions: dict[str, str] | None = None,
    seconds: float | None = None,
    work: Work | None = None,
) -> MachineProfile:
    """Return the profile of the machine of `team`, measured in about `seconds`.

    Call it on all ranks; every rank gets the same result.

    Each part has a share of the time. With less time it repeats less, but at least often enough for a median. If `work`
    is given, only what is needed to predict that step is measured: its matmuls and its attention in a mix like that of
    the step, device memory, the optimizer and collectives.
    """
    total = seconds or SECONDS[team.device.type]
    clock = TeamClock(team)
    profile = machine_properties(team, cluster, versions or {})

    def time_part(name: str, measure_part: Callable[[float], T], share: float) -> T:
        team.meet()
        start = time.perf_counter()
        result = measure_part(total * share)
        if team.cuda:
            torch.cuda.empty_cache()
        if team.rank == 0:
            sys.stderr.write(f"  {name:<16} {time.perf_counter() - start:5.1f} s\n")
        return result

    if work is not None:
        shapes, scores = cases_of(work)
        matmul_times_in_mix, attention_times_in_mix = time_part(
            "matmuls, scores", lambda part_seconds: mixed_times(team, clock, work, shapes, scores, part_seconds), 0.7
        )
        return replace(
            profile,
            products=tuple(matmul_times_in_mix),
            attention=tuple(attention_times_in_mix),
            copy_bytes_per_s=time_part("copies", lambda part_seconds: copy_rate(team, clock, part_seconds), 0.02),
            pass_bytes_per_s=time_part("passes", lambda part_seconds: pass_rate(team, clock, part_seconds), 0.03),
            adamw_parameters_per_s=time_part(
                "optimizer", lambda part_seconds: adamw_rate(team, clock, part_seconds), 0.03
            ),
            launch_seconds=time_part("launches", lambda part_seconds: launch_seconds(team), 0.0),
            collectives=tuple(
                time_part("collectives", lambda part_seconds: collective_times(team, clock, part_seconds), 0.2)
            ),
        )
    return replace(
        profile,
        products=tuple(time_part("products", lambda part_seconds: matmul_times(team, clock, part_seconds), 0.38)),
        attention=tuple(time_part("attention", lambda part_seconds: attention_times(team, clock, part_seconds), 0.1)),
        copy_bytes_per_s=time_part("copies", lambda part_seconds: copy_rate(team, clock, part_seconds), 0.02),
        pass_bytes_per_s=time_part("passes", lambda part_seconds: pass_rate(team, clock, part_seconds), 0.02),
        adamw_parameters_per_s=time_part("optimizer", lambda part_seconds: adamw_rate(team, clock, part_seconds), 0.03),
        launch_seconds=time_part("launches", lambda part_seconds: launch_seconds(team), 0.0),
        host_links=tuple(time_part("host links", lambda part_seconds: host_links(team, clock, part_seconds), 0.05)),
        interference=tuple(
            time_part("interference", lambda part_seconds: interferences(team, clock, part_seconds), 0.1)
        ),
        collectives=tuple(
            time_part("collectives", lambda part_seconds: collective_times(team, clock, part_seconds), 0.3)
        ),
    )


def cases_of(work: Work) -> tuple[list[matmuls.Case], list[attention.Case]]:
    """Return the matmuls and the attention whose times are needed to predict `work`.

    In fp8, each of the three matmuls of a linear layer is a case of its own.
    """
    matmul_cases: list[matmuls.Case] = []
    for linear in work.linears:
        m = linear.m
        k = linear.k
        n = linear.n
        number_format = _matmul_format(linear.format)
        shapes = ((m, k, n), (m, n, k), (n, m, k)) if number_format == "fp8" else ((m, k, n),)
        matmul_cases += [(shape, number_format) for shape in shapes]
    attention_cases = [
        (one.seq, one.heads, one.kv_heads, one.head_dim, one.tokens, one.window) for one in work.attention
    ]
    return list(dict.fromkeys(matmul_cases)), attention_cases


def _matmul_format(name: str) -> matmuls.Format:
    """Return the number format in which a linear layer's matmuls are measured."""
    if name == "fp8":
        return "fp8"
    return "bf16" if name == "bf16" else "fp32"


def machine_properties(team: Team, cluster: ClusterSpec, versions: dict[str, str]) -> MachineProfile:
    """Return a profile with the properties of the machine and without measurements."""
    properties = torch.cuda.get_device_properties(team.device) if team.cuda else None
    chip = CHIPS.get(cluster.gpu)
    machine = machine_of(as_nodes(replace(cluster, profile=None)), next(iter(chip.peak_flops))) if chip else None
    return MachineProfile(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        gpu=cluster.gpu,
        device=properties.name if properties else _processor(),
        devices=team.ranks_per_node,
        nodes=team.nodes,
        cores=usable_cores(),
        memory_bytes=properties.total_memory
        if properties
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        link_bytes_per_s=float(machine.link) if machine else None,
        port_bytes_per_s=float(machine.nic) if machine else None,
        versions=versions,
    )


def _processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
