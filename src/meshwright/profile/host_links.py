"""The host: how fast it launches kernels, and its link to each device, alone and when all of its devices copy."""

from __future__ import annotations

import statistics
import time

import torch

from meshwright.profile.call_timing import Clock
from meshwright.profile.team import Team
from meshwright.spec.profile import HostLink

COPY_BYTES = 256 << 20
LAUNCHES, ROUNDS = 400, 9
"""Launches in a row: fewer than a device's queue holds, so that the host never waits."""


def launch_seconds(team: Team) -> float:
    """Host seconds to launch one small kernel (on a CPU: to dispatch and run it), on the slowest rank."""
    one, rounds = torch.zeros(1, device=team.device), []
    for _ in range(ROUNDS):
        team.finish()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            one.add_(1.0)
        rounds.append((time.perf_counter() - start) / LAUNCHES)
    team.meet()
    return team.slowest(statistics.median(rounds))


def host_links(team: Team, clock: Clock, budget: float) -> list[HostLink]:
    """Copies of pinned memory both ways: rank 0 alone, then all ranks of every host at once. Empty on a CPU."""
    if not team.cuda:
        return []
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=team.device)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    # Not one of `Clock.seconds`' calls: the others wait until rank 0 has copied alone.
    team.meet()
    rates = [0.0, 0.0]
    if team.rank == 0:
        rates = [
            COPY_BYTES / clock.alone(lambda: host.copy_(device, non_blocking=True), budget / 4),
            COPY_BYTES / clock.alone(lambda: device.copy_(host, non_blocking=True), budget / 4),
        ]
    team.meet()
    links = [HostLink(devices=1, to_host=team.leader(rates[0]), to_device=team.leader(rates[1]))]
    local = team.world.environment.local_ranks if team.world else 1
    if local > 1:
        out = clock.seconds(lambda: host.copy_(device, non_blocking=True), budget / 4)
        back = clock.seconds(lambda: device.copy_(host, non_blocking=True), budget / 4)
        links.append(HostLink(devices=local, to_host=COPY_BYTES / out, to_device=COPY_BYTES / back))
    return links
