"""Clocks of a device: time stamps on the current stream, and their time on the host's clock, without synchronisation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

DRIFT = 5e-5
"""Largest relative difference between the rates of the host's and the device's clock that the error bound allows for."""


class DeviceClock(Protocol):
    """Makes time stamps in the order of the device's work, and later measures the time between them."""

    blocks_host: bool
    """Whether the host waits until each operation is done, as on a CPU."""

    def stamp(self) -> Any:
        """Return a stamp after the work that has been issued so far. The host does not wait."""

    def ready(self, stamp: Any) -> bool:
        """Whether the device has reached the stamp."""
        ...

    def wait(self, stamp: Any) -> None:
        """Block until the device has reached the stamp."""

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two stamps that the device has reached."""
        ...

    def recycle(self, stamp: Any) -> None:
        """Release a stamp that is no longer needed, so that it can be used again."""

    def reference(self) -> ClockReference:
        """Return a stamp that the device reaches at once, however much work it has.

        It relates the device's clock to the host's.
        """
        ...


@dataclass(slots=True)
class ClockReference:
    """A stamp, and the earliest and latest Unix time (ns) at which the device may have reached it.

    `latest_ns` is None until the host has seen that the device reached the stamp.
    """

    stamp: Any
    earliest_ns: int
    latest_ns: int | None = None

    def look(self, clock: DeviceClock, host: HostTime) -> bool:
        """Whether the device has reached the stamp. The first call that sees this sets `latest_ns`."""
        if self.latest_ns is None and clock.ready(self.stamp):
            self.latest_ns = host.now_ns()
        return self.latest_ns is not None


class HostTime:
    """Unix time that never jumps: the monotonic clock, plus its difference from the wall clock when this was created."""

    def __init__(self) -> None:
        self.offset_ns = time.time_ns() - time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() + self.offset_ns


class DeviceTime:
    """Computes the Unix time of references with an error bound.

    A reference has been reached between its `earliest_ns` and `latest_ns`. The device's clock gives its distance from
    the last reference, and this narrows the interval, with an allowance of `DRIFT`.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._last: Any = None
        self._bounds = (0.0, 0.0)

    def of(self, reference: ClockReference) -> tuple[int, int]:
        """Return (Unix time in ns of a reference, error bound in ns).

        Call this once for each reference, in their order.

        `latest_ns` of the reference must be set.
        """
        assert reference.latest_ns is not None
        low = float(reference.earliest_ns)
        high = float(reference.latest_ns)
        if self._last is not None:
            # The interval in which the last reference puts this one.
            elapsed = self._clock.seconds(self._last, reference.stamp) * 1e9
            slack = abs(elapsed) * DRIFT
            before = self._bounds[0] + elapsed - slack, self._bounds[1] + elapsed + slack
            if max(low, before[0]) <= min(high, before[1]):
                # Otherwise one of the clocks was changed, and the past says nothing.
                low = max(low, before[0])
                high = min(high, before[1])
            self._clock.recycle(self._last)
        self._last = reference.stamp
        self._bounds = (low, high)
        return round((low + high) / 2), round((high - low) / 2)


class HostClock:
    """The clock of a CPU: stamps are values of time.perf_counter."""

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
    """The clock of a CUDA device: stamps are CUDA events on the current stream.

    Events are reused, because creating one costs more than recording it.
    """

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
        # This stream has no other work, so the device reaches the event at once, even if its computation is steps
        # behind the host.
        self._idle = self._idle or torch.cuda.Stream(priority=-1)
        event = self._event()
        before = self._host.now_ns()
        event.record(self._idle)
        return ClockReference(event, before)

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock for operations on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()
