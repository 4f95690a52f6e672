"""The goodput of a deployment: the highest rate at which enough requests meet both limits, by exact simulation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from meshwright.simulator.serve_types import ServedDeployment
from meshwright.spec.deployment import Deployment, Limit, ServeLimits, TimedRequest

Simulate = Callable[[Deployment, Sequence[TimedRequest], float], ServedDeployment]
"""Simulates a deployment: (deployment, requests, sought attainment). It may stop when that attainment cannot be reached any more."""
BLOCKS = 8
"""A sample of requests consists of 8 ranges of consecutive requests. So bursts of arrivals and shared prefixes stay together."""
SMALLEST_SHARE = 1e-3
"""The lowest rate that is tried, relative to the estimate. A deployment that fails even there has goodput 0."""
LARGEST_SHARE = 1e3
"""The highest rate that is tried, relative to the estimate."""
SERVED_SHARE = 0.9
"""A rate counts as sustainable if this share of all requests has its first token by the time when the last request arrives."""


@dataclass(frozen=True)
class RatePoint:
    """The result of a simulation at one rate."""

    rate: float
    """Requests per second."""
    attainment: float
    """Share of requests that met both limits; 0 at a rate that cannot be sustained."""
    ttft_share: float
    """Share of requests whose first token met its limit."""
    tpot_share: float
    """Share of requests whose other tokens met their limit."""
    cut: bool = False
    """Whether the simulation stopped early. The shares are then upper bounds."""


@dataclass(frozen=True)
class DeploymentGoodput:
    """The goodput of one deployment, with the simulated rates around it."""

    rate: float
    """The highest rate that meets the limits, in requests per second; 0 if none does."""
    binding: Limit
    """The limit that more requests miss, at the lowest simulated rate that fails."""
    points: tuple[RatePoint, ...]
    """All simulated rates, ascending."""
    served: ServedDeployment | None = None
    """The simulation at the goodput; None if no rate of the bisection met the limits."""

    def rate_at(self, attainment: float) -> float:
        """Return the rate with this attainment, interpolated between simulated rates; outside of them, the lowest or the highest rate."""
        for below, above in pairwise(self.points):
            if above.attainment < attainment <= below.attainment:
                share = (below.attainment - attainment) / (below.attainment - above.attainment)
                return below.rate * (above.rate / below.rate) ** share
        return self.points[0 if attainment > self.points[0].attainment else -1].rate


class RequestSample:
    """A sample of a workload's requests that can be replayed at any rate. It consists of `BLOCKS` ranges of consecutive requests."""

    def __init__(self, requests: Sequence[TimedRequest], count: int, seed: int | None = None) -> None:
        """Take `count` requests in `BLOCKS` ranges. With a seed the ranges begin at random requests, without one they are evenly spaced.

        The requests of a short workload repeat.
        """
        size = -(-count // BLOCKS)
        total = len(requests)
        draw = random.Random(seed)
        self._requests: list[TimedRequest] = []
        time = 0.0
        mean_gap = _mean_gap(requests)
        for block in range(BLOCKS):
            start = block * total // BLOCKS if seed is None else draw.randrange(total)
            for index in range(start, start + size):
                request = requests[index % total]
                self._requests.append(request._replace(arrival_seconds=time))
                following = (index + 1) % total
                gap = requests[following].arrival_seconds - request.arrival_seconds if following else mean_gap
                time += gap
        del self._requests[count:]
        self._rate = (len(self._requests) - 1) / self._requests[-1].arrival_seconds if time > 0 else 0.0

    def at(self, rate: float) -> list[TimedRequest]:
        """Return the requests at `rate` requests per second, by scaling all arrival times.

        If all requests of the workload arrive at the same time, they are spaced evenly.
        """
        if not self._rate:
            return [request._replace(arrival_seconds=i / rate) for i, request in enumerate(self._requests)]
        scale = self._rate / rate
        return [request._replace(arrival_seconds=scale * request.arrival_seconds) for request in self._requests]


def _mean_gap(requests: Sequence[TimedRequest]) -> float:
    """Return the mean seconds between two arrivals.

    Three requests within 4 seconds have two gaps, of 2 seconds on average:

    >>> from meshwright.spec.deployment import TimedRequest
    >>> _mean_gap([TimedRequest(second, 10, 10) for second in (0.0, 1.0, 4.0)])
    2.0
    """
    return requests[-1].arrival_seconds / max(1, len(requests) - 1)


class GoodputSearch:
    """Finds the goodput of deployments, all under the same limits and for the same workload."""

    def __init__(self, simulate: Simulate, limits: ServeLimits, requests: Sequence[TimedRequest]) -> None:
        self._simulate = simulate
        self._limits = limits
        self._requests = requests

    def goodput(
        self,
        deployment: Deployment,
        estimate: float,
        count: int,
        *,
        tolerance: float = 0.01,
        step: float = 1.25,
        least: float = 0.0,
        cut: float = 1.0,
    ) -> DeploymentGoodput:
        """Find the highest rate that meets the limits, by bisection.

        The search begins at `estimate`, and goes up or down by the factor `step` until one rate meets the limits and another one misses
        them. Then it bisects until the two are within `tolerance`. Each simulation has `count` requests (`RequestSample`), and may stop
        when the attainment must be below `cut` times the required one.

        With `least`, that rate is simulated first. If it misses the limits, nothing else is simulated, and the goodput is the estimate, but
        below `least`.
        """
        sample = RequestSample(self._requests, count)
        points: list[RatePoint] = []
        low = high = 0.0
        best: ServedDeployment | None = None
        rate = estimate
        if least:
            points.append(_rate_point(least, self._simulate(deployment, sample.at(least), self._limits.attainment)))
            if points[-1].attainment < self._limits.attainment:
                return DeploymentGoodput(min(estimate, least / (1 + tolerance)), self._binding(points), tuple(points))
            low = least
            rate = max(estimate, least * step)
        while SMALLEST_SHARE * estimate <= rate <= LARGEST_SHARE * estimate:
            served = self._simulate(deployment, sample.at(rate), cut * self._limits.attainment)
            points.append(_rate_point(rate, served))
            if points[-1].attainment >= self._limits.attainment:
                low = rate
                best = served
            else:
                high = rate
            if low and high:
                if high <= low * (1 + tolerance):
                    break
                rate = exp((log(low) + log(high)) / 2)
            else:
                rate = rate * step if low else rate / step
                step = min(4.0, step * step)
        points.sort(key=lambda point: point.rate)
        return DeploymentGoodput(low, self._binding(points), tuple(points), best)

    def point(self, deployment: Deployment, rate: float, count: int, seed: int | None = None) -> RatePoint:
        """Simulate `count` requests at one rate. A `seed` draws a random sample of the requests."""
        return _rate_point(rate, self._simulate(deployment, RequestSample(self._requests, count, seed).at(rate), 0.0))

    def _binding(self, points: Sequence[RatePoint]) -> Limit:
        missed = [point for point in points if point.attainment < self._limits.attainment]
        point = missed[0] if missed else points[-1]
        return "tpot" if point.tpot_share < point.ttft_share else "ttft"


def _rate_point(rate: float, served: ServedDeployment) -> RatePoint:
    last = served.requests[-1].request.arrival_seconds
    begun = sum(times.first_token <= last for times in served.requests)
    sustained = begun >= SERVED_SHARE * len(served.requests)
    shares = served.share(served.meets_ttft), served.share(served.meets_tpot)
    return RatePoint(rate, served.attainment if sustained else 0.0, *shares, served.cut)
