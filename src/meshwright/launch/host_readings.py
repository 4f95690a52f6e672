"""Readings of this host apart from its GPUs: disk for temporary files, memory pressure, network ports, clock."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.policies.host_health import HOST, HealthReading

PRESSURE = Path("/proc/pressure/memory")
INFINIBAND = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
PORT_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Error counters of an InfiniBand or RoCE port, in its folder `counters`. With good cables and switches they do not grow."""
TRANSPORT_ERRORS = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence")
"""Error counters of the same port, in its folder `hw_counters`."""
PORTS_EVERY = 10
"""New ports are looked for at every tenth reading. Only then error counters are read, because they lead to warnings only."""
_TIMEX_BYTES = 256
"""Size of a buffer for `struct timex`, which is smaller."""
_TIME_ERROR = 5
"""What adjtimex(2) returns if the clock is not synchronised."""


class HostReader:
    """Reads the host repeatedly. A port counts as down only if an earlier reading found it up."""

    def __init__(self) -> None:
        self._were_up: set[str] = set()
        """Names of the ports that were up at some reading."""
        self._offset: float | None = None
        """Seconds between the system clock and the time since boot, at the last reading."""
        self._unsynchronised = _unsynchronised()
        self._readings = 0
        self._ports: list[_Port] = []

    def read(self) -> list[HealthReading]:
        """Return one reading of the host and one of each network port. Port errors are in the first and every tenth reading."""
        errors = self._readings % PORTS_EVERY == 0
        self._readings += 1
        if errors:
            self._ports = [*_infiniband(), *_interfaces()]
        values = {**_disk(), **_memory_pressure(), **self._clock()}
        ports = [self._port(port, errors=errors) for port in self._ports]
        return [HealthReading(HOST, values), *(reading for reading in ports if reading is not None)]

    def _clock(self) -> dict[str, float]:
        """Return how far the clock was set since the last reading, in seconds. Time in which the host slept does not count."""
        offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        jump = 0.0 if self._offset is None else abs(offset - self._offset)
        self._offset = offset
        return {"clock_jump": jump, **self._unsynchronised}

    def _port(self, port: _Port, *, errors: bool) -> HealthReading | None:
        """Return the state of a port, and with `errors` the sum of its error counters; None if the port is gone."""
        state = _text(port.state)
        if state is None:
            return None
        up = port.up in state
        if up:
            self._were_up.add(port.name)
        values = {"port_down": float(not up and port.name in self._were_up)}
        downed = _number(port.downed)
        if downed is not None:
            values["link_downed"] = downed
        if errors:
            counts = [_number(counter) for counter in port.errors]
            values["port_errors"] = sum(count for count in counts if count is not None)
        return HealthReading(port.name, values)


@dataclass(frozen=True)
class _Port:
    """A network port, and the files that describe it."""

    name: str
    # `name` is shown in findings, for example "port mlx5_0/1"; `state` is the file with the port's state.
    state: str
    up: str
    """Text that the file `state` contains if the port is up."""
    downed: str
    """File that counts how often the link was lost."""
    errors: tuple[str, ...]
    """Files that count errors."""


def _infiniband() -> Iterator[_Port]:
    """Yield the ports of InfiniBand and RoCE devices."""
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        errors = [port / "counters" / name for name in PORT_ERRORS]
        errors += [port / "hw_counters" / name for name in TRANSPORT_ERRORS]
        yield _Port(
            name=f"port {port.parent.parent.name}/{port.name}",
            state=str(port / "state"),
            up="ACTIVE",
            downed=str(port / "counters" / "link_downed"),
            errors=tuple(map(str, errors)),
        )


def _interfaces() -> Iterator[_Port]:
    """Yield the network interfaces that have a device; virtual interfaces have none."""
    for interface in sorted(INTERFACES.glob("*")):
        if (interface / "device").exists():
            yield _Port(
                name=f"port {interface.name}",
                state=str(interface / "operstate"),
                up="up",
                downed=str(interface / "carrier_down_count"),
                errors=tuple(str(interface / "statistics" / name) for name in ("rx_errors", "tx_errors")),
            )


def _unsynchronised() -> dict[str, float]:
    """Return whether the host's clock is not synchronised now; nothing if the kernel does not say."""
    with suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        return {"clock_unsynchronised": float(state == _TIME_ERROR)}
    return {}


def _disk() -> dict[str, float]:
    """Return the free bytes of the disk for temporary files, and whether it is read-only or missing."""
    try:
        state = os.statvfs(tempfile.gettempdir())
    except OSError:
        return {"disk_readonly": 1.0}
    return {
        "disk_readonly": float(bool(state.f_flag & os.ST_RDONLY)),
        "disk_free": float(state.f_bavail * state.f_frsize),
    }


def _memory_pressure() -> dict[str, float]:
    """Return the percentage of the last 10 s in which all processes waited for memory; nothing if the kernel does not say."""
    for line in (_text(PRESSURE) or "").splitlines():
        kind, *fields = line.split()
        if kind == "full":
            return {"memory_pressure": float(fields[0].removeprefix("avg10="))}
    return {}


def _text(file: Path | str) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            return opened.read().strip()
    except OSError:
        return None


def _number(file: Path | str) -> float | None:
    text = _text(file)
    return float(text) if text is not None and text.isdecimal() else None
