"""Result of a simulated serving deployment: times of each request, attainment of the limits, and use of each instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.spec.deployment import Role, ServeLimits, TimedRequest

WARM_UP = 0.1
"""Attainment leaves out this share of the requests at the beginning and again at the end, because instances are nearly empty then."""


def counted_requests(total: int) -> range:
    """Return the indices of the requests that attainment counts, of `total` requests in order of arrival."""
    edge = int(WARM_UP * total)
    return range(edge, total - edge)


def spare_misses(total: int, sought: float) -> int:
    """Return how many of the counted requests may miss a limit so that the attainment is still at least `sought`.

    Of 100 requests the middle 80 count. For an attainment of 90%, eight of the 80 may miss a limit:

    >>> counted_requests(100), spare_misses(100, 0.9)
    (range(10, 90), 8)
    """
    counted = len(counted_requests(total))
    missed = 0
    while missed < counted and (counted - (missed + 1)) / counted >= sought:
        missed += 1
    return missed


@dataclass(slots=True)
class RequestTimes:
    """When a request's first token and its end came, in seconds from the time 0 of its `arrival_seconds`; infinite until then."""

    request: TimedRequest
    first_token: float = float("inf")
    end: float = float("inf")

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first new token."""
        return self.first_token - self.request.arrival_seconds

    @property
    def tpot(self) -> float:
        """Mean seconds between new tokens after the first one; 0 if the request has only one new token."""
        new_tokens = self.request.output_tokens
        return (self.end - self.first_token) / (new_tokens - 1) if new_tokens > 1 else 0.0


class InstanceFigures(NamedTuple):
    """How much one instance was used during a simulation."""

    role: Role
    busy: float
    """Share of the time in which the device computed a step, or waited for the rest of the step's launch."""
    cache_mean: float
    """Share of the instance's cache blocks that requests held, mean over time."""
    cache_peak: float
    """The largest share of the cache blocks that requests held at any time."""
    preemptions: int
    """How often a request lost its blocks and had to be computed again."""
    cached_tokens: int
    """Prompt tokens that the prefix cache had, so they were not computed."""


class Occupancy(NamedTuple):
    """The batch and the cache of an instance from a time on, until the next record."""

    seconds: float
    """Time from which the record holds."""
    running: int
    """Requests in the batch."""
    cache: float
    """Share of the cache blocks that requests held."""


@dataclass(frozen=True, kw_only=True)
class ServedDeployment:
    """The result of a simulation: times of each request, in order of arrival, and the use of each instance."""

    limits: ServeLimits
    devices: int
    """Number of devices of all instances together."""
    requests: Sequence[RequestTimes]
    instances: Sequence[InstanceFigures]
    seconds: float
    """Time when the last request ended, from the same 0 as the arrival times."""
    transferred_bytes: float = 0.0
    """Bytes of keys and values that were sent between instances."""
    occupancy: Sequence[Sequence[Occupancy]] = ()
    """By instance, its records in order of time; empty unless the simulation was `watched`."""
    cut: bool = False
    """Whether the simulation stopped early because the sought attainment could not be reached any more. `instances` is then empty."""

    @property
    def ttft(self) -> np.ndarray:
        """Seconds to the first token of each request."""
        return np.array([times.ttft for times in self.requests])

    @property
    def tpot(self) -> np.ndarray:
        """Mean seconds of each request between its new tokens after the first one; 0 with one new token."""
        return np.array([times.tpot for times in self.requests])

    @property
    def meets_ttft(self) -> np.ndarray:
        """Whether each request's first token came within the limit."""
        return self.ttft <= self.limits.ttft_seconds

    @property
    def meets_tpot(self) -> np.ndarray:
        """Whether each request's mean time per further token was within the limit."""
        return self.tpot <= self.limits.tpot_seconds

    @property
    def attainment(self) -> float:
        """Share of the counted requests that met both limits (`WARM_UP` tells which requests do not count)."""
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
        """Return the mean of `values`, one for each request, over the counted requests (`counted_requests`)."""
        counted = counted_requests(len(values))
        return float(np.mean(values[counted.start : counted.stop]))

    def utilisation(self, role: Role) -> float | None:
        """Return the mean of `InstanceFigures.busy` over the instances with this role; None if there are none."""
        busy = [figures.busy for figures in self.instances if figures.role == role]
        return float(np.mean(busy)) if busy else None
