"""Measures the host: its kernel launch time, and its link to one device and to all devices at once."""

from __future__ import annotations

import statistics
import time

import torch

from meshwright.profile.call_timing import TeamClock
from meshwright.profile.team import Team
from meshwright.spec.profile import HostLink

COPY_BYTES = 256 << 20
"""Bytes of one copy: enough for the full rate of a link."""
LAUNCHES = 400
"""Launches per round: fewer than a device's queue holds, so that the host never waits."""
ROUNDS = 9


def launch_seconds(team: Team) -> float:
    """Host seconds to launch a small kernel (on a CPU: to dispatch and run it), on the slowest rank."""
    operand = torch.zeros(1, device=team.device)
    rounds = []
    for _ in range(ROUNDS):
        team.finish()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            operand.add_(1.0)
        rounds.append((time.perf_counter() - start) / LAUNCHES)
    team.meet()
    return team.largest(statistics.median(rounds))


def host_links(team: Team, clock: TeamClock, budget: float) -> list[HostLink]:
    """Rates of copies from and to pinned memory: by rank 0 alone, then by all ranks of every host. Empty on a CPU."""
    if not team.cuda:
        return []
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=team.device)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    # `TeamClock.seconds` is collective, so rank 0 uses `rank_seconds` while the others wait.
    team.meet()
    rates = [0.0, 0.0]
    if team.rank == 0:
        rates = [
            COPY_BYTES / clock.rank_seconds(lambda: host.copy_(device, non_blocking=True), budget / 4),
            COPY_BYTES / clock.rank_seconds(lambda: device.copy_(host, non_blocking=True), budget / 4),
        ]
    team.meet()
    links = [HostLink(devices=1, to_host=team.from_first_rank(rates[0]), to_device=team.from_first_rank(rates[1]))]
    host_ranks = team.world.environment.local_ranks if team.world else 1
    if host_ranks > 1:
        to_host_seconds = clock.seconds(lambda: host.copy_(device, non_blocking=True), budget / 4)
        to_device_seconds = clock.seconds(lambda: device.copy_(host, non_blocking=True), budget / 4)
        links.append(
            HostLink(devices=host_ranks, to_host=COPY_BYTES / to_host_seconds, to_device=COPY_BYTES / to_device_seconds)
        )
    return links
