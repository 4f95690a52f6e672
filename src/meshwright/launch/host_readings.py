"""Readings of this host beside its GPUs: disk of temporary files, memory pressure, network ports, clock."""

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
"""Counters of an InfiniBand or RoCE port under `counters` that a good cable and switch leave alone."""
TRANSPORT_ERRORS = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence")
"""Counters of the same port under `hw_counters`."""
PORTS_EVERY = 10
"""Readings between two looks for new ports. At these the counters of errors are read too, which lead to warnings only."""
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
        self._readings = 0
        self._ports: list[_Port] = []

    def read(self) -> list[HealthReading]:
        """One reading of the host, and one of each network port. Errors of ports are in the first and every tenth reading."""
        errors = self._readings % PORTS_EVERY == 0
        self._readings += 1
        if errors:
            self._ports = [*_infiniband(), *_interfaces()]
        values = {**_disk(), **_memory_pressure(), **self._clock()}
        ports = [self._port(port, errors=errors) for port in self._ports]
        return [HealthReading(HOST, values), *(reading for reading in ports if reading is not None)]

    def _clock(self) -> dict[str, float]:
        """How far the clock was set since the reading before. The time in which the host sleeps counts as passed."""
        offset = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        jump = 0.0 if self._offset is None else abs(offset - self._offset)
        self._offset = offset
        return {"clock_jump": jump, **self._unsynchronised}

    def _port(self, port: _Port, *, errors: bool) -> HealthReading | None:
        """The state of a port, and with `errors` the sum of its error counters; None for a port that is gone."""
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
    """A network port and its files."""

    name: str
    state: str
    up: str
    """Text in the file `state` of a port that is up."""
    downed: str
    """File that counts how often the link was lost."""
    errors: tuple[str, ...]
    """Files that count errors."""


def _infiniband() -> Iterator[_Port]:
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
    """Interfaces of devices; virtual ones have none."""
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


def _text(file: Path | str) -> str | None:
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            return opened.read().strip()
    except OSError:
        return None


def _number(file: Path | str) -> float | None:
    text = _text(file)
    return float(text) if text is not None and text.isdecimal() else None
