"""Clocks of a device: stamps on the current stream, and their time on the host's clock, without synchronisation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

DRIFT = 5e-5
"""Largest difference in rate between the clocks of host and device that the error bound allows for."""


class DeviceClock(Protocol):
    """Makes stamps, and later returns the seconds between two of them."""

    blocks_host: bool
    """Whether the host waits for each operation, as on a CPU."""

    def stamp(self) -> Any:
        """A stamp of the current time, without waiting."""

    def ready(self, stamp: Any) -> bool:
        """Whether the device has passed the stamp."""
        ...

    def wait(self, stamp: Any) -> None:
        """Block until the device has passed the stamp."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one ready stamp to another."""
        ...

    def recycle(self, stamp: Any) -> None:
        """Release a stamp that is not needed any more."""

    def reference(self) -> ClockReference:
        """A stamp that the device passes at once, whatever it computes, to find the host time of others."""
        ...


@dataclass(slots=True)
class ClockReference:
    """A stamp, and the earliest and latest Unix time in ns at which the device passed it; None until it was seen."""

    stamp: Any
    earliest_ns: int
    latest_ns: int | None = None

    def look(self, clock: DeviceClock, host: HostTime) -> bool:
        """Whether the device has passed the stamp; the first time that it has sets `latest_ns`."""
        if self.latest_ns is None and clock.ready(self.stamp):
            self.latest_ns = host.now_ns()
        return self.latest_ns is not None


class HostTime:
    """Unix time that never steps: the monotonic clock plus its distance from the wall clock at the start."""

    def __init__(self) -> None:
        self.offset_ns = time.time_ns() - time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() + self.offset_ns


class DeviceTime:
    """Unix time of references, with an error bound: each must agree with all earlier ones, up to `DRIFT`."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._last: Any = None
        self._bounds = (0.0, 0.0)

    def of(self, reference: ClockReference) -> tuple[int, int]:
        """(Unix time in ns of a reference that was seen, error bound in ns). Call it once for each, in order."""
        assert reference.latest_ns is not None
        low = float(reference.earliest_ns)
        high = float(reference.latest_ns)
        if self._last is not None:
            elapsed = self._clock.seconds(self._last, reference.stamp) * 1e9
            slack = abs(elapsed) * DRIFT
            before = self._bounds[0] + elapsed - slack, self._bounds[1] + elapsed + slack
            if max(low, before[0]) <= min(high, before[1]):  # else one of the clocks was set
                low = max(low, before[0])
                high = min(high, before[1])
            self._clock.recycle(self._last)
        self._last = reference.stamp
        self._bounds = (low, high)
        return round((low + high) / 2), round((high - low) / 2)


class HostClock:
    """Stamps of time.perf_counter."""

    blocks_host = True

    def __init__(self) -> None:
        self._host = HostTime()

    def stamp(self) -> float:
        return time.perf_counter()

    def ready(self, stamp: float) -> bool:
        return True

    def wait(self, stamp: float) -> None:
        pass

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def recycle(self, stamp: float) -> None:
        pass

    def reference(self) -> ClockReference:
        stamp = self.stamp()
        now = round(stamp * 1e9) + self._host.offset_ns
        return ClockReference(stamp, now, now)


class CudaClock:
    """CUDA events on the current stream, reused after reading (creating one costs more than recording it)."""

    blocks_host = False

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._host = HostTime()
        self._idle: torch.cuda.Stream | None = None

    def stamp(self) -> torch.cuda.Event:
        event = self._event()
        event.record()
        return event

    def ready(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1000.0

    def recycle(self, stamp: torch.cuda.Event) -> None:
        self._free.append(stamp)

    def reference(self) -> ClockReference:
        # Nothing else runs on this stream, so the device passes the event while compute is steps behind the host.
        self._idle = self._idle or torch.cuda.Stream(priority=-1)
        event = self._event()
        before = self._host.now_ns()
        event.record(self._idle)
        return ClockReference(event, before)

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> DeviceClock:
    """The clock for operations of `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()
