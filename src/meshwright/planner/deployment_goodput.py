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
"""Serves requests with a deployment in simulated time, until the attainment is certainly below a share (`simulate`)."""
BLOCKS = 8
"""Runs of consecutive requests that make a sample: arrivals stay as bursty as they are, and prefixes near each other."""
SMALLEST_SHARE = 1e-3
LARGEST_SHARE = 1e3
"""Rates that are tried, as shares of the estimate; a deployment that fails even at the smallest has no goodput."""
SERVED_SHARE = 0.9
"""Share of the requests that have their first token when the last one arrives, at a rate that can be sustained."""


@dataclass(frozen=True)
class RatePoint:
    """A simulated rate."""

    rate: float
    """Requests per second."""
    attainment: float
    """Share of requests that met both limits; 0 at a rate that cannot be sustained."""
    ttft_share: float
    """Share that met the limit of the first token."""
    tpot_share: float
    """Share that met the limit of the other tokens."""
    cut: bool = False
    """Whether the simulation was cut, so that the shares are upper bounds."""


@dataclass(frozen=True)
class DeploymentGoodput:
    """The goodput of one deployment, with the simulated rates around it."""

    rate: float
    """The highest rate that meets the limits, in requests per second; 0 if none does."""
    binding: Limit
    """The limit that more requests miss at the lowest rate which fails."""
    points: tuple[RatePoint, ...]
    """Simulated rates, ascending."""
    served: ServedDeployment | None = None
    """The simulation at the goodput."""

    def rate_at(self, attainment: float) -> float:
        """The rate with this attainment, between simulated rates; the lowest or highest of them beyond."""
        for below, above in pairwise(self.points):
            if above.attainment < attainment <= below.attainment:
                share = (below.attainment - attainment) / (below.attainment - above.attainment)
                return below.rate * (above.rate / below.rate) ** share
        return self.points[0 if attainment > self.points[0].attainment else -1].rate


class RequestSample:
    """Requests of a workload at any rate: runs of consecutive ones, evenly spaced or drawn at random."""

    def __init__(self, requests: Sequence[TimedRequest], count: int, seed: int | None = None) -> None:
        """Take `count` requests in `BLOCKS` runs; those of a short workload repeat. Without a seed the runs are evenly spaced."""
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
        """The requests at so many a second: all times are scaled. Requests that all arrive at once are spaced evenly."""
        if not self._rate:
            return [request._replace(arrival_seconds=i / rate) for i, request in enumerate(self._requests)]
        scale = self._rate / rate
        return [request._replace(arrival_seconds=scale * request.arrival_seconds) for request in self._requests]


def _mean_gap(requests: Sequence[TimedRequest]) -> float:
    """Mean seconds between two arrivals.

    Three requests within 4 seconds have two gaps:

    >>> from meshwright.spec.deployment import TimedRequest
    >>> _mean_gap([TimedRequest(second, 10, 10) for second in (0.0, 1.0, 4.0)])
    2.0
    """
    return requests[-1].arrival_seconds / max(1, len(requests) - 1)


class GoodputSearch:
    """Finds goodputs of deployments under the same limits."""

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
        """Bisect the rate, from an estimate of it and a first factor, until two rates that meet and miss are within `tolerance`.

        `count` requests are simulated (`RequestSample`). A deployment that misses the limits at the rate `least` has the estimate as its
        goodput, or a rate that is lower than `least` by the tolerance, after this one simulation. Simulations are cut below the share `cut`
        of the attainment asked for.
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
        """Simulate `count` requests at one rate; a `seed` draws another sample of the requests."""
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
