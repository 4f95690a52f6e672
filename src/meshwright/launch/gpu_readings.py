"""Reads this host's GPUs with NVML (package `nvidia-ml-py`): values for `policies.host_health`, and XID events.

A quantity that a GPU or a container does not offer is left out, and not asked for again.

One call for the state of an NVLink takes 75 µs of processor time, and a GPU has 18 links. So not every reading has all
quantities:

- Every reading: memory errors, remapped rows and the reasons for low clocks of all GPUs (4 calls for each GPU, together
  0.15 ms).
- Every second reading of a GPU: the states of its NVLinks, the driver's recovery action and PCIe replays (19 calls, 1.7
  ms). GPUs take turns. A GPU is also read when it has reported an XID event, and at every reading while it misses a
  link.
- Every tenth reading of a GPU: quantities that lead to warnings only (PCIe width, memory of other processes, errors of
  NVLinks), and the temperature.

Example: a reading of two GPUs makes 8 calls for both, 19 for one of them, and on average 0.8 of the last kind. That is
28 calls and 2.1 ms every 3 s, 0.07% of a core. A reading of eight GPUs takes 8.2 ms, 0.27% of a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.policies.host_health import HealthReading

LINKS_EVERY = 2
"""A GPU's NVLinks are read at every second reading of the host.

The rule `nvlink-down` needs two readings in a row with a missing link. The first comes after at most 6 s, the next 3 s
later.
"""
WARNINGS_EVERY = 10
"""Quantities that lead to warnings only are read at every tenth reading of the host."""
SHORTEST_WAIT = 0.5
"""Shortest time between two readings, in seconds.

Without it, a GPU that reports hundreds of events a second would be read each time.
"""
PROC = Path("/proc")
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of a field value's union that holds the value, by its type: the index is a value of NVML_VALUE_TYPE_*."""


class NoGpus(Exception):
    """NVML cannot be used here; the message says why."""


class _Lost(Exception):
    """The driver has lost the GPU."""


class GpuReader:
    """Reads the GPUs of this host that a process with this environment may use."""

    def __init__(self, count: int | None = None, environment: Mapping[str, str] = os.environ) -> None:
        """Open NVML for the first `count` visible GPUs, or for all of them. Raises NoGpus if NVML cannot be used."""
        try:
            import pynvml
        except ImportError:
            raise NoGpus("the package nvidia-ml-py is not installed (pip install 'meshwright[health]')") from None
        self._nvml: ModuleType = pynvml
        try:
            pynvml.nvmlInit()
            listed = [_Gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
            visible = visible_indices([gpu.identity for gpu in listed], environment.get("CUDA_VISIBLE_DEVICES"))
            self._gpus = [listed[index] for index in visible[:count]]
        except pynvml.NVMLError as error:
            raise NoGpus(f"NVML: {error}") from None
        self.events_hidden = ""
        """Why XID events cannot be read; empty if they are read."""
        self._events = self._subscribe()
        self._readings = 0

    @property
    def count(self) -> int:
        return len(self._gpus)

    def wait(self, seconds: float) -> dict[int, list[int]]:
        """Wait for `seconds`, or less if an XID event arrives. Return the XIDs of each GPU's NVML index."""
        began = time.monotonic()
        xids = dict[int, list[int]]()
        deadline = began + seconds
        while (left := deadline - time.monotonic()) > 0:
            event = self._next_event(left)
            if event is not None:
                xids.setdefault(event[0], []).append(event[1])
                deadline = min(deadline, max(time.monotonic(), began + SHORTEST_WAIT))
        return xids

    def read(self, xids: Mapping[int, Sequence[int]], own_pid: int) -> list[HealthReading]:
        """Return the values that are due for each GPU. The first reading has all of them.

        `xids` are the XIDs of each GPU's NVML index since the last reading. Memory of `own_pid` and its descendants
        does not count as memory of other processes.
        """
        found = []
        for place, gpu in enumerate(self._gpus):
            first = self._readings == 0
            links = first or gpu.index in xids or gpu.misses_links or (self._readings + place) % LINKS_EVERY == 0
            warnings = first or (self._readings + place) % WARNINGS_EVERY == 0
            found.append((gpu, gpu.read(own_pid, links=links, warnings=warnings)))
        self._readings += 1
        most = max((gpu.most_links for gpu in self._gpus), default=0)
        readings = []
        for gpu, values in found:
            if "nvlinks" in values:
                values["nvlinks_down"] = most - values.pop("nvlinks")
                gpu.misses_links = values["nvlinks_down"] > 0
            readings.append(HealthReading(f"GPU {gpu.index}", values, tuple(xids.get(gpu.index, ()))))
        return readings

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _subscribe(self) -> Any:
        """Return the event set to which all GPUs report XIDs; None if a driver or container offers no such events."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for gpu in (gpu for gpu in self._gpus if gpu.handle is not None):
                if not nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & nvml.nvmlEventTypeXidCriticalError:
                    self.events_hidden = f"GPU {gpu.index} reports none here"
                    return None
                nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            self.events_hidden = f"NVML: {error}"
            return None
        return events

    def _next_event(self, seconds: float) -> tuple[int, int] | None:
        """Return a GPU's index and its XID, if an event arrives within `seconds`; else None."""
        nvml = self._nvml
        if self._events is None:
            time.sleep(seconds)
            return None
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, max(1, round(seconds * 1000)))
            return nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                # A broken GPU also fails here; its other readings say what is wrong.
                time.sleep(min(seconds, SHORTEST_WAIT))
            return None


class _Gpu:
    """One GPU, and what NVML offers for it. If it was already lost at the start, it has no handle and stays lost."""

    def __init__(self, nvml: ModuleType, index: int) -> None:
        self.index = index
        self.handle = None
        self.identity = ""
        self.most_links = 0
        """Most NVLinks that have been up at the same time."""
        self.misses_links = False
        """Whether the last reading of the NVLinks found fewer links up than on another GPU, or than earlier."""
        self._nvml = nvml
        self._lanes = 0
        """Widest PCIe link that the GPU supports, in lanes; 0 if unknown."""
        self._links_present: int | None = None
        """Number of the GPU's NVLinks, up or down; None before they are counted."""
        self._link_counters: dict[int, str] = {}
        """Field ids of the link error counters that this GPU offers, with the quantity of each; empty until one has
        answered.
        """
        self._refused: set[str] = set()
        """Names of calls that NVML does not support for this GPU."""
        try:
            self.handle = self._ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
            self.identity = self._ask("identity", lambda: nvml.nvmlDeviceGetUUID(self.handle)) or ""
            self._lanes = self._ask("lanes", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(self.handle)) or 0
        except _Lost:
            self.handle = None

    def read(self, own_pid: int, *, links: bool, warnings: bool) -> dict[str, float]:
        """Return values by the quantities of `policies.host_health.RULES`, and the number of `nvlinks` that are up.

        `links`: also read NVLinks and the driver's fields. `warnings`: also read quantities that lead to warnings only.
        """
        if self.handle is None:
            return {"lost": 1.0}
        values = {"lost": 0.0}
        try:
            for name, call in self._calls(own_pid, links=links, warnings=warnings):
                values |= self._ask(name, call) or {}
        except _Lost:
            return {"lost": 1.0}
        return values

    def _calls(
        self, own_pid: int, *, links: bool, warnings: bool
    ) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        """Yield the name of each group of quantities with the function that reads it."""
        yield "uncorrected_errors", self._uncorrected_errors
        yield "corrected_errors", self._corrected_errors
        yield "remapped", self._remapped
        yield "clocks", self._clock_reasons
        if links:
            yield "nvlinks", self._links
            yield "fields", self._fields
        if warnings:
            yield "temperature", self._temperature
            yield "memory_of_others", lambda: self._memory_of_others(own_pid)
            if self._lanes:
                yield "pcie_lanes_missing", self._lanes_missing
            if self.most_links:
                yield "link_errors", self._link_errors

    def _ask(self, name: str, call: Callable[[], Any]) -> Any:
        """Return NVML's answer to a call; None if there is none. Raises _Lost if the GPU is gone."""
        if name in self._refused:
            return None
        nvml = self._nvml
        try:
            return call()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise _Lost from None
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._refused.add(name)
            return None

    def _temperature(self) -> dict[str, float]:
        return {"temperature": self._nvml.nvmlDeviceGetTemperature(self.handle, self._nvml.NVML_TEMPERATURE_GPU)}

    def _lanes_missing(self) -> dict[str, float]:
        return {"pcie_lanes_missing": self._lanes - self._nvml.nvmlDeviceGetCurrPcieLinkWidth(self.handle)}

    def _uncorrected_errors(self) -> dict[str, float]:
        return {"uncorrected_errors": self._memory_errors(self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)}

    def _corrected_errors(self) -> dict[str, float]:
        return {"corrected_errors": self._memory_errors(self._nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)}

    def _memory_errors(self, kind: int) -> float:
        return self._nvml.nvmlDeviceGetTotalEccErrors(self.handle, kind, self._nvml.NVML_VOLATILE_ECC)

    def _remapped(self) -> dict[str, float]:
        _, _, pending, failed = self._nvml.nvmlDeviceGetRemappedRows(self.handle)
        return {"remap_pending": float(pending), "remap_failed": float(failed)}

    def _clock_reasons(self) -> dict[str, float]:
        """Return which reasons for low clocks apply now, each as 0 or 1."""
        nvml = self._nvml
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle)
        masks = {
            "thermal_slowdown": nvml.nvmlClocksEventReasonHwThermalSlowdown,
            "software_thermal_slowdown": nvml.nvmlClocksEventReasonSwThermalSlowdown,
            "power_brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        }
        return {name: float(bool(reasons & mask)) for name, mask in masks.items()}

    def _fields(self) -> dict[str, float]:
        nvml = self._nvml
        names = {nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: "recovery_action"}
        names |= {nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: "pcie_replays"}
        return {names[field]: value for field, value in self._field_values(list(names))}

    def _links(self) -> dict[str, float]:
        """Return the number of NVLinks that are up. Raises NVMLError if the GPU has no NVLinks."""
        nvml = self._nvml
        states = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS if self._links_present is None else self._links_present):
            try:
                states.append(nvml.nvmlDeviceGetNvLinkState(self.handle, link))
            except nvml.NVMLError as error:
                if link == 0 or error.value != nvml.NVML_ERROR_INVALID_ARGUMENT:
                    raise
                break  # the GPU has no link of this number, so all links are counted
        self._links_present = len(states)
        up = states.count(nvml.NVML_FEATURE_ENABLED)
        self.most_links = max(self.most_links, up)
        return {"nvlinks": float(up)}

    def _link_errors(self) -> dict[str, float]:
        """Return recoveries and checksum errors, each summed over all NVLinks.

        Older GPUs offer totals. Newer ones offer a counter for each link, and these are added up here.
        """
        nvml = self._nvml
        totals = {
            nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: "nvlink_recoveries",
            nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: "nvlink_crc_errors",
        }
        by_link = {
            nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY: "nvlink_recoveries",
            nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC: "nvlink_crc_errors",
        }
        for names in [self._link_counters] if self._link_counters else [totals, by_link]:
            links = range(self.most_links)
            fields = list(names) if names == totals else [(field, link) for field in names for link in links]
            sums: dict[str, float] = {}
            for field, value in self._field_values(fields):
                sums[names[field]] = sums.get(names[field], 0.0) + value
            if sums:
                self._link_counters = names
                return sums
        return {}

    def _field_values(self, fields: Sequence[Any]) -> Iterator[tuple[int, float]]:
        """Yield the id and value of each field. Fields that the GPU does not offer are left out."""
        nvml = self._nvml
        for found in nvml.nvmlDeviceGetFieldValues(self.handle, list(fields)):
            if found.nvmlReturn == nvml.NVML_SUCCESS:
                yield found.fieldId, float(getattr(found.value, _MEMBERS[found.valueType]))

    def _memory_of_others(self, own_pid: int) -> dict[str, float]:
        """Return the bytes used by processes that are not `own_pid` or its descendants.

        A container hides processes outside of it.
        """
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        used = sum(each.usedGpuMemory or 0 for each in processes if _is_foreign(each.pid, own_pid))
        return {"memory_of_others": float(used)}


def visible_indices(identities: Sequence[str], visible: str | None) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES allows, in its order.

    `identities` are the UUIDs of all GPUs. `visible` is the variable's value: indices or beginnings of UUIDs, separated
    by commas. None allows all.
    """
    if visible is None:
        return list(range(len(identities)))
    indices = []
    for word in visible.split(","):
        name = word.strip()
        if name.isdecimal() and int(name) < len(identities):
            indices.append(int(name))
            continue
        found = [index for index, identity in enumerate(identities) if name and identity.startswith(name)]
        if len(found) != 1:  # CUDA ignores an unknown device and all that come after it
            break
        indices += found
    return indices


def _is_foreign(pid: int, own_pid: int) -> bool:
    """Whether a process of this host is neither `own_pid` nor one of its descendants."""
    while pid > 1:
        if pid == own_pid:
            return False
        try:
            stat = (PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        # The second field after the command's name is the parent's process id.
        pid = int(stat.rpartition(")")[2].split()[1])
    return True
