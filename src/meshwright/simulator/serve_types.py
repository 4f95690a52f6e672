"""Times of simulated requests, and the figures of a deployment from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.spec.deployment import Role, ServeLimits, TimedRequest

WARM_UP = 0.1
"""Share of the requests, the first and the last, that attainment leaves out: instances are empty at both ends."""


def counted_requests(total: int) -> range:
    """The requests that attainment counts, of so many."""
    edge = int(WARM_UP * total)
    return range(edge, total - edge)


def spare_misses(total: int, sought: float) -> int:
    """How many of the counted requests may miss a limit while the attainment is at least `sought`.

    Of 100 requests the middle 80 count; at 90% eight of these may miss a limit:

    >>> counted_requests(100), spare_misses(100, 0.9)
    (range(10, 90), 8)
    """
    counted = len(counted_requests(total))
    return next(
        missed - 1 for missed in range(1, counted + 2) if missed > counted or (counted - missed) / counted < sought
    )


@dataclass(slots=True)
class RequestTimes:
    """Times of a request's events in seconds since the first arrival; infinite before an event."""

    request: TimedRequest
    first_token: float = float("inf")
    end: float = float("inf")

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first new token."""
        return self.first_token - self.request.arrival_seconds

    @property
    def tpot(self) -> float:
        """Mean seconds of a new token after the first; 0 with one new token."""
        new_tokens = self.request.output_tokens
        return (self.end - self.first_token) / (new_tokens - 1) if new_tokens > 1 else 0.0


class InstanceFigures(NamedTuple):
    """Figures of an instance's use."""

    role: Role
    busy: float
    """Share of the time in which its device computed a step, or waited for the rest of the step's launch."""
    cache_mean: float
    """Share of its cache blocks that requests held, mean over time."""
    cache_peak: float
    """The largest share."""
    preemptions: int
    """Times that a request lost its blocks."""
    cached_tokens: int
    """Positions of prompts taken from its prefix cache."""


class Occupancy(NamedTuple):
    """Requests and cache use of an instance from a time on."""

    seconds: float
    running: int
    """Requests in its batch."""
    cache: float
    """Share of its cache blocks that requests held."""


@dataclass(frozen=True, kw_only=True)
class ServedDeployment:
    """A simulated deployment: times of each request, in order of arrival, and figures of each instance."""

    limits: ServeLimits
    devices: int
    """Devices of all instances."""
    requests: Sequence[RequestTimes]
    instances: Sequence[InstanceFigures]
    seconds: float
    """Time of the last end; times of arrival count from the same 0."""
    transferred_bytes: float = 0.0
    """Keys and values that moved between instances."""
    occupancy: Sequence[Sequence[Occupancy]] = ()
    """By instance and time; empty unless the simulation was watched."""
    cut: bool = False
    """Whether it ended before all requests had, as too few could keep the limits; it then has no `instances`."""

    @property
    def ttft(self) -> np.ndarray:
        """Seconds to the first token of each request."""
        return np.array([times.ttft for times in self.requests])

    @property
    def tpot(self) -> np.ndarray:
        """Seconds of each request's tokens after the first, mean; 0 with one token."""
        return np.array([times.tpot for times in self.requests])

    @property
    def meets_ttft(self) -> np.ndarray:
        """Whether each request met the limit of its first token."""
        return self.ttft <= self.limits.ttft_seconds

    @property
    def meets_tpot(self) -> np.ndarray:
        """Whether each request met the limit of its other tokens."""
        return self.tpot <= self.limits.tpot_seconds

    @property
    def attainment(self) -> float:
        """Share of requests that met both limits, without those at both ends (`WARM_UP`)."""
        return self.share(self.meets_ttft & self.meets_tpot)

    def attainment_within(self, scale: float) -> float:
        """Attainment with both limits multiplied by `scale`."""
        limits = self.limits
        return self.share((self.ttft <= scale * limits.ttft_seconds) & (self.tpot <= scale * limits.tpot_seconds))

    @property
    def rate(self) -> float:
        """Requests that arrived per second."""
        arrivals = [times.request.arrival_seconds for times in self.requests]
        return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]) if arrivals[-1] > arrivals[0] else float("inf")

    @property
    def good_rate_per_gpu(self) -> float:
        """Requests per second and device that met both limits."""
        return self.attainment * self.rate / self.devices

    def share(self, values: np.ndarray) -> float:
        """Mean of values by request, without the requests at both ends."""
        counted = counted_requests(len(values))
        return float(np.mean(values[counted.start : counted.stop]))

    def utilisation(self, role: Role) -> float | None:
        """Mean of `InstanceFigures.busy` over the instances of a role; None if it has none."""
        busy = [figures.busy for figures in self.instances if figures.role == role]
        return float(np.mean(busy)) if busy else None
