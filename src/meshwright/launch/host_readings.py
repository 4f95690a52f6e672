"""Readings of this host beside its GPUs: disk of temporary files, memory pressure, network ports, clock."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from meshwright.policies.host_health import HOST, HealthReading

PRESSURE = Path("/proc/pressure/memory")
INFINIBAND, INTERFACES = Path("/sys/class/infiniband"), Path("/sys/class/net")
PORT_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Counters of an InfiniBand or RoCE port under `counters` that a good cable and switch leave alone."""
TRANSPORT_ERRORS = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence")
"""Counters of the same port under `hw_counters`."""
_TIMEX_BYTES = 256
"""More than `struct timex` takes."""
_TIME_ERROR = 5
"""Answer of adjtimex(2) for a clock that nothing keeps right."""


class HostReader:
    """Reads the host again and again; a port counts as down only if it was up at an earlier reading."""

    def __init__(self) -> None:
        self._were_up: set[str] = set()
        self._offset: float | None = None
        self._unsynchronised = _unsynchronised()

    def read(self) -> list[HealthReading]:
        """One reading of the host, and one of each network port."""
        values = {**_disk(), **_memory_pressure(), **self._clock()}
        return [HealthReading(HOST, values), *self._infiniband(), *self._interfaces()]

    def _clock(self) -> dict[str, float]:
        """How far the clock was set since the reading before. The time in which the host sleeps counts as passed."""
        offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        jump = 0.0 if self._offset is None else abs(offset - self._offset)
        self._offset = offset
        return {"clock_jump": jump, **self._unsynchronised}

    def _infiniband(self) -> list[HealthReading]:
        readings = []
        for port in sorted(INFINIBAND.glob("*/ports/*")):
            name = f"port {port.parent.parent.name}/{port.name}"
            state = _text(port / "state")
            if state is None:
                continue
            values = self._link(name, "ACTIVE" in state)
            counts = [_number(port / "counters" / counter) for counter in PORT_ERRORS]
            counts += [_number(port / "hw_counters" / counter) for counter in TRANSPORT_ERRORS]
            values["port_errors"] = sum(count for count in counts if count is not None)
            downed = _number(port / "counters" / "link_downed")
            readings.append(HealthReading(name, values if downed is None else {**values, "link_downed": downed}))
        return readings

    def _interfaces(self) -> list[HealthReading]:
        """Interfaces of devices; virtual ones have none."""
        readings = []
        for interface in sorted(INTERFACES.glob("*")):
            name, state = f"port {interface.name}", _text(interface / "operstate")
            if state is None or not (interface / "device").exists():
                continue
            values, downed = self._link(name, state == "up"), _number(interface / "carrier_down_count")
            counts = [_number(interface / "statistics" / counter) for counter in ("rx_errors", "tx_errors")]
            values["port_errors"] = sum(count for count in counts if count is not None)
            readings.append(HealthReading(name, values if downed is None else {**values, "link_downed": downed}))
        return readings

    def _link(self, name: str, up: bool) -> dict[str, float]:
        if up:
            self._were_up.add(name)
        return {"port_down": float(not up and name in self._were_up)}


def _unsynchronised() -> dict[str, float]:
    """Whether nothing keeps the host's clock right, at this time; empty where the kernel does not say."""
    with suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        return {"clock_unsynchronised": float(state == _TIME_ERROR)}
    return {}


def _disk() -> dict[str, float]:
    try:
        state = os.statvfs(tempfile.gettempdir())
    except OSError:
        return {"disk_readonly": 1.0}
    return {
        "disk_readonly": float(bool(state.f_flag & os.ST_RDONLY)),
        "disk_free": float(state.f_bavail * state.f_frsize),
    }


def _memory_pressure() -> dict[str, float]:
    """Percent of the last 10 s in which all processes waited for memory."""
    for line in (_text(PRESSURE) or "").splitlines():
        kind, *fields = line.split()
        if kind == "full":
            return {"memory_pressure": float(fields[0].removeprefix("avg10="))}
    return {}


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(file: Path) -> float | None:
    text = _text(file)
    return float(text) if text is not None and text.isdecimal() else None
