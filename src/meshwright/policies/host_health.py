"""Decides from readings whether a host and its GPUs are healthy, and which action to take.

The module reads no clock and no hardware: callers pass values and times. `HealthWatch` keeps the earlier readings of one host.
`RULES` is the only table of thresholds. `HealthWatch` compares readings with it and returns findings; `action_of` says
what a finding means at each of three moments: before an attempt starts, while it runs, and after it failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

HealthAction = Literal["none", "warn", "drain", "exclude"]
"""`warn` prints a line once. `drain` leaves the host out when the job can go on without it: if a spare host is ready, or if
`supervision.wait_seconds` lets the run continue on fewer hosts. A running attempt also needs checkpoints: it saves after the current step,
and the next attempt starts without the host. If the job cannot go on, the host stays and a line says so. `exclude` leaves the host out at
once, even if no other host is ready."""
Moment = Literal["start", "run", "failure"]
Test = Literal["above", "below", "one of", "rises"]
READING_SECONDS = 3.0
"""Seconds between two readings. An XID event ends the wait for the next one."""
SILENT_SECONDS = 30.0
"""If the driver answers no reading for this many seconds, it counts as silent."""

HOST = "host"
"""The name of the part in readings that are about the whole host."""
CATALOGUE = "NVIDIA's XID catalogue, 29 October 2025"
DCGM = "DCGM, dcgm_gpu_hardware_limits.h"
GCM = "Meta's GCM, health checks"
BYTEROBUST = "ByteRobust, arXiv 2509.16293"
NVML = "NVML, nvmlDeviceGetFieldValues and clock event reasons"
OWN = "own choice"

IGNORED_XIDS = frozenset({43, 44, 45, 92, 93, 121, 137, 154})
"""XIDs that give no finding. The catalogue says to ignore most of them. XID 45 only follows another XID. XID 154 announces a recovery
action, which the value `recovery_action` already has."""


@dataclass(frozen=True)
class Rule:
    """A threshold for one quantity, and the action to take at each of the three moments."""

    name: str
    quantity: str
    """Key of `HealthReading.values`, or `xid` for the events of a reading."""
    test: Test
    limit: float
    """For `above` and `below` the limit. For `rises` the greatest increase of the counter within `seconds` that is still healthy."""
    start: HealthAction
    run: HealthAction
    failure: HealthAction
    meaning: str
    source: str
    readings: int = 1
    """How many successive readings must be above or below the limit."""
    seconds: float = 0.0
    """For `rises`: the period in which the increase is measured."""
    values: frozenset[int] = frozenset()
    """Values that `one of` matches. For XIDs, an empty set matches every XID that no other rule lists."""


def _xids(
    name: str,
    values: set[int],
    start: HealthAction,
    run: HealthAction,
    failure: HealthAction,
    meaning: str,
    source: str = CATALOGUE,
) -> Rule:
    return Rule(name, "xid", "one of", 0, start, run, failure, meaning, source, values=frozenset(values))


def _recovery(
    name: str, values: set[int], start: HealthAction, run: HealthAction, failure: HealthAction, meaning: str
) -> Rule:
    return Rule(name, "recovery_action", "one of", 0, start, run, failure, meaning, NVML, values=frozenset(values))


# fmt: off
RULES: tuple[Rule, ...] = (
    # Columns of actions: before the start, during the run, after a failure.
    _xids("xid-lost", {79}, "exclude", "exclude", "exclude", "the GPU has fallen off the bus; reboot the host"),
    _xids("xid-uncontained", {95}, "exclude", "exclude", "exclude", "memory error that may have reached any data; reset the GPU"),
    _xids("xid-reset", {46, 62, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}, "exclude", "exclude", "exclude",
          "the GPU works again after a reset only"),
    _xids("xid-restart-vm", {151}, "exclude", "exclude", "exclude", "restart the virtual machine"),
    _xids("xid-memory", {48, 64}, "exclude", "drain", "exclude", "memory error that was not corrected, or whose row was not replaced"),
    _xids("xid-nvlink", {74, *range(144, 151)}, "drain", "drain", "exclude", "error of an NVLink"),
    _xids("xid-contained", {94}, "warn", "warn", "drain", "memory error that ended the program which read it"),
    _xids("xid-remapped", {63}, "warn", "warn", "drain", "a row of the memory is replaced at the next reset of the GPU"),
    _xids("xid-program", {13, 31, 32, 69}, "warn", "warn", "warn", "usually an error of the program"),
    _xids("xid-other", set(), "warn", "warn", "warn", "see NVIDIA's catalogue", OWN),
    Rule("gpu-lost", "lost", "above", 0, "exclude", "exclude", "exclude", "the driver has lost the GPU, or asks for its reset",
         "NVML, errors GPU_IS_LOST and RESET_REQUIRED"),
    _recovery("recovery-reset", {1, 2, 5, 6, 7}, "exclude", "exclude", "exclude",
              "the driver asks for a reset (1 GPU, 2 and 7 host, 5 IMEX domain, 6 bus)"),
    _recovery("recovery-drain", {3, 4}, "drain", "drain", "exclude", "the driver asks to drain the GPU (3) and to reset it (4)"),
    Rule("uncorrected", "uncorrected_errors", "above", 0, "drain", "warn", "exclude",
         "uncorrected memory errors since the driver was loaded", GCM),
    Rule("uncorrected-rise", "uncorrected_errors", "rises", 0, "exclude", "drain", "exclude", "new uncorrected memory errors", GCM,
         seconds=600.0),
    Rule("corrected", "corrected_errors", "above", 50e6, "warn", "warn", "drain", "many corrected memory errors", GCM),
    Rule("remap-pending", "remap_pending", "above", 0, "drain", "warn", "exclude", "a memory row is replaced at the next reset", GCM),
    Rule("remap-failed", "remap_failed", "above", 0, "exclude", "drain", "exclude", "a defective memory row cannot be replaced", GCM),
    Rule("nvlink-down", "nvlinks_down", "above", 0, "drain", "drain", "exclude",
         "NVLinks that are down, and up before or on other GPUs of the host", "NVRx, GPU health check of NVLink states", readings=2),
    Rule("nvlink-recovery", "nvlink_recoveries", "rises", 0, "warn", "warn", "drain", "NVLinks that had to recover", DCGM, seconds=60.0),
    Rule("nvlink-crc", "nvlink_crc_errors", "rises", 6000, "warn", "warn", "drain", "checksum errors of NVLinks, 100 a second", DCGM,
         seconds=60.0),
    Rule("pcie-width", "pcie_lanes_missing", "above", 0, "warn", "warn", "warn", "PCIe lanes that the GPU and its slot have and do not use",
         "DCGM, diagnostic of PCIe width", readings=3),
    Rule("pcie-replays", "pcie_replays", "rises", 8, "warn", "warn", "warn", "PCIe packets sent again within a minute", DCGM, seconds=60.0),
    Rule("thermal", "thermal_slowdown", "above", 0, "drain", "drain", "drain", "the hardware has lowered the clocks, as the GPU is too hot",
         NVML, readings=2),
    Rule("power-brake", "power_brake", "above", 0, "warn", "warn", "warn", "the power supply has lowered the clocks", NVML, readings=2),
    Rule("warm", "software_thermal_slowdown", "above", 0, "warn", "warn", "warn", "the driver has lowered the clocks for a minute, as the "
         "GPU is too warm", NVML, readings=20),
    Rule("memory-of-others", "memory_of_others", "above", 15 << 20, "warn", "warn", "warn",
         "bytes of GPU memory that other processes hold", GCM),
    Rule("silent", "silent_seconds", "above", SILENT_SECONDS, "warn", "warn", "warn",
         "seconds since the driver has answered a reading of its GPUs", OWN),
    Rule("disk-readonly", "disk_readonly", "above", 0, "drain", "drain", "exclude", "the disk of temporary files is read-only", BYTEROBUST),
    Rule("disk-space", "disk_free", "below", 1e9, "warn", "warn", "warn", "bytes that are free for temporary files", OWN),
    Rule("memory-pressure", "memory_pressure", "above", 10, "warn", "warn", "warn", "percent of the time in which all processes wait for "
         "memory", OWN, readings=5),
    Rule("port-down", "port_down", "above", 0, "warn", "drain", "exclude", "a network port is down that was up", GCM, readings=3),
    Rule("port-flaps", "link_downed", "rises", 1, "warn", "drain", "exclude", "two losses of a link within 5 minutes", BYTEROBUST,
         seconds=300.0),
    Rule("port-errors", "port_errors", "rises", 100, "warn", "warn", "warn", "errors of a network port within a minute", OWN, seconds=60.0),
    Rule("clock-jump", "clock_jump", "above", 1, "warn", "warn", "warn", "seconds by which the host's clock was set", OWN),
    Rule("clock-free", "clock_unsynchronised", "above", 0, "warn", "none", "none", "nothing keeps the host's clock right",
         "adjtimex(2), TIME_ERROR"),
)
# fmt: on
_BY_NAME = {rule.name: rule for rule in RULES}
_LISTED_XIDS = frozenset().union(*(rule.values for rule in RULES if rule.quantity == "xid"))
_LONGEST_SECONDS = max(rule.seconds for rule in RULES)
_LONGEST_ROW = max(rule.readings for rule in RULES)


@dataclass(frozen=True)
class HealthReading:
    """Values of one part of a host at one time: a GPU, a network port, or the host itself."""

    part: str
    """Name for people, e.g. `GPU 3`."""
    values: Mapping[str, float]
    """Values by quantity. A quantity is missing if the part does not have it or does not show it, or if reading it failed this time."""
    xids: tuple[int, ...] = ()
    """XID events since the previous reading."""


@dataclass(frozen=True)
class HealthFinding:
    """A part of a host meets a rule."""

    rule: str
    part: str
    text: str

    @property
    def description(self) -> str:
        """The finding as part of a sentence about its host."""
        return self.text if self.part == HOST else f"{self.part}: {self.text}"


def is_rule(name: str) -> bool:
    """Whether a rule of this name exists."""
    return name in _BY_NAME


def action_of(rule: str, moment: Moment) -> HealthAction:
    """The action that a rule requires at a moment."""
    found = _BY_NAME[rule]
    actions: dict[Moment, HealthAction] = {"start": found.start, "run": found.run, "failure": found.failure}
    return actions[moment]


def source_of(rule: str) -> str:
    """The source of a rule's threshold."""
    return _BY_NAME[rule].source


@dataclass
class HealthWatch:
    """Compares the readings of one host with the rules."""

    _series: dict[tuple[str, str], deque[tuple[float, float]]] = field(default_factory=dict)
    """Times and values of each part and quantity, for the longest period that any rule needs."""
    _states: dict[tuple[str, str], list[HealthFinding]] = field(default_factory=dict)
    """Findings from the newest values of each part and quantity. They remain until the quantity is read again."""
    _events: dict[tuple[str, str], HealthFinding] = field(default_factory=dict)
    """Findings from XIDs. They are never removed, because most XIDs are valid until the GPU is reset."""
    _rises: dict[tuple[str, str], tuple[float, HealthFinding]] = field(default_factory=dict)
    """Findings from counters, and the time until which they count."""

    def update(self, now: float, readings: Sequence[HealthReading]) -> tuple[HealthFinding, ...]:
        """Add readings made at time `now`, in seconds of any monotonic clock, and return all current findings."""
        for reading in readings:
            self._take_events(reading)
            for quantity, value in reading.values.items():
                self._take_value(now, reading.part, quantity, value)
            self._take_states(reading)
            self._take_rises(now, reading)
        rises = [finding for until, finding in self._rises.values() if now <= until]
        states = [finding for found in self._states.values() for finding in found]
        return (*self._events.values(), *rises, *states)

    def _take_events(self, reading: HealthReading) -> None:
        """Add findings for the XID events of a reading."""
        for xid in reading.xids:
            if xid in IGNORED_XIDS:
                continue
            for rule in RULES:
                listed = xid in rule.values or (not rule.values and xid not in _LISTED_XIDS)
                if rule.quantity == "xid" and listed:
                    text = f"XID {xid}, {rule.meaning}"
                    self._events.setdefault((reading.part, rule.name), HealthFinding(rule.name, reading.part, text))

    def _take_value(self, now: float, part: str, quantity: str, value: float) -> None:
        """Add a value to its series, and drop values that no rule needs any more."""
        counts = quantity in _COUNTERS
        series = self._series.setdefault((part, quantity), deque(maxlen=None if counts else _LONGEST_ROW))
        if counts and series and value < series[-1][1]:
            series.clear()  # the driver was loaded again
        series.append((now, value))
        while counts and now - series[0][0] > _LONGEST_SECONDS:
            series.popleft()

    def _take_states(self, reading: HealthReading) -> None:
        """Replace the findings of rules that compare the newest values with a limit."""
        for quantity, value in reading.values.items():
            newest = [earlier for _, earlier in self._series[reading.part, quantity]]
            found = []
            for rule in _BY_QUANTITY.get(quantity, ()):
                row = newest[-rule.readings :]
                if len(row) == rule.readings and _meets(rule, row):
                    found.append(_finding(rule, reading.part, value))
            self._states[reading.part, quantity] = found

    def _take_rises(self, now: float, reading: HealthReading) -> None:
        """Add findings for counters that have increased too much."""
        for quantity, value in reading.values.items():
            for rule in _BY_QUANTITY.get(quantity, ()):
                if rule.test != "rises":
                    continue
                series = self._series[reading.part, quantity]
                first = next(earlier for time, earlier in series if now - time <= rule.seconds)
                if value - first > rule.limit:
                    until = now + _LONGEST_SECONDS
                    self._rises[reading.part, rule.name] = until, _finding(rule, reading.part, value - first)


def _meets(rule: Rule, row: Sequence[float]) -> bool:
    """Whether successive values meet a rule with `above`, `below` or `one of`."""
    match rule.test:
        case "above":
            return all(value > rule.limit for value in row)
        case "below":
            return all(value < rule.limit for value in row)
        case "one of":
            return row[-1] in rule.values
        case "rises":
            return False


def _finding(rule: Rule, part: str, value: float) -> HealthFinding:
    return HealthFinding(rule.name, part, f"{rule.meaning} ({rule.quantity} {value:,.10g})")


_QUANTITIES = {rule.quantity for rule in RULES}
_BY_QUANTITY = {quantity: [rule for rule in RULES if rule.quantity == quantity] for quantity in _QUANTITIES}
_COUNTERS = frozenset(rule.quantity for rule in RULES if rule.test == "rises")
