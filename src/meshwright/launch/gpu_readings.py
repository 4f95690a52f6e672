"""Readings of this host's GPUs by NVML (package `nvidia-ml-py`): values for `policies.host_health`, and XID events.

A quantity that a GPU or a container does not offer is left out, and is not asked for again.

A call for the state of an NVLink takes 75 µs of processor time, and a GPU has 18 links. The calls are therefore spread:

- At each reading: memory errors, remapped rows and the reasons for low clocks of all GPUs (4 calls for each, together 0.15 ms).
- At every second reading of a GPU: the states of its NVLinks, the driver's recovery action and PCIe replays (19 calls, 1.7 ms). GPUs
  take turns. A GPU with a missing link, or with an XID event, is read at once and at the next reading.
- At every tenth reading: what leads to warnings only (PCIe width, memory of other processes, errors of NVLinks) and the temperature.

Example: a reading of two GPUs makes 8 calls for both, 19 for one of them, and on average 0.8 of the last kind: 28 calls and 2.1 ms,
0.07% of a core, every 3 s. A reading of eight GPUs takes 8.2 ms, 0.27% of a core.
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
"""Readings of the host for one reading of a GPU's NVLinks. `nvlink-down` needs two states in a row: 6 s, and 3 s later."""
WARNINGS_EVERY = 10
"""Readings of the host for one reading of the quantities that lead to warnings only."""
SHORTEST_WAIT = 0.5
"""Least seconds between two polls: a GPU may report hundreds of events a second."""
PROC = Path("/proc")
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of the union of a field's value for each type, in the order of NVML_VALUE_TYPE_*."""


class NoGpus(Exception):
    """NVML cannot be read here; the text says why."""


class _Lost(Exception):
    """The driver has lost a GPU."""


class GpuReader:
    """Reads the GPUs of this host that a process with this environment may use."""

    def __init__(self, count: int | None = None, environment: Mapping[str, str] = os.environ) -> None:
        """Open NVML for the first `count` visible GPUs. Raises NoGpus."""
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
        """Why no XID events are read; empty if they are."""
        self._events = self._subscribe()
        self._readings = 0

    @property
    def count(self) -> int:
        return len(self._gpus)

    def wait(self, seconds: float) -> dict[int, list[int]]:
        """Wait for `seconds`, or less if an XID event arrives; returns the XIDs of each GPU index."""
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
        """The values of each GPU that are read this time; the first reading has all.

        `xids` are the events of each GPU index. Memory of processes that descend from `own_pid` is not that of others.
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
        """The set of events that all GPUs report to; None if a driver or container offers none."""
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
        """Index of a GPU and its XID, if one arrives within `seconds`."""
        nvml = self._nvml
        if self._events is None:
            time.sleep(seconds)
            return None
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, max(1, round(seconds * 1000)))
            return nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:  # the state of the GPU says more
                time.sleep(min(seconds, SHORTEST_WAIT))
            return None


class _Gpu:
    """One GPU, and the calls that it supports. One that was lost before has no handle and stays lost."""

    def __init__(self, nvml: ModuleType, index: int) -> None:
        self.index = index
        self.handle = None
        self.identity = ""
        self.most_links = 0
        """NVLinks that were up at the same time."""
        self.misses_links = False
        """Whether fewer NVLinks than on other GPUs, or than before, were up at the last reading of them."""
        self._nvml = nvml
        self._lanes = 0
        self._links_present: int | None = None
        """NVLinks of the GPU, up or down; None before they are counted."""
        self._link_counters: dict[int, str] = {}
        """Field ids of the error counters that the GPU offers, and their quantities; empty before the first answer."""
        self._refused: set[str] = set()
        """Quantities that NVML does not offer for this GPU."""
        try:
            self.handle = self._ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
            self.identity = self._ask("identity", lambda: nvml.nvmlDeviceGetUUID(self.handle)) or ""
            self._lanes = self._ask("lanes", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(self.handle)) or 0
        except _Lost:
            self.handle = None

    def read(self, own_pid: int, *, links: bool, warnings: bool) -> dict[str, float]:
        """Quantities of `policies.host_health.RULES`, and the number of `nvlinks` that are up.

        NVLinks and the driver's fields are read with `links`, quantities that lead to warnings only with `warnings`.
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
        """Names of groups of quantities, and the calls that read them."""
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
        """The answer of NVML; None without one. Raises _Lost for a GPU that is gone."""
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
        """NVLinks that are up. Raises NVMLError if the GPU has none."""
        nvml = self._nvml
        states = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS if self._links_present is None else self._links_present):
            try:
                states.append(nvml.nvmlDeviceGetNvLinkState(self.handle, link))
            except nvml.NVMLError as error:
                if link == 0 or error.value != nvml.NVML_ERROR_INVALID_ARGUMENT:
                    raise
                break  # it has no further link
        self._links_present = len(states)
        up = states.count(nvml.NVML_FEATURE_ENABLED)
        self.most_links = max(self.most_links, up)
        return {"nvlinks": float(up)}

    def _link_errors(self) -> dict[str, float]:
        """Recoveries and checksum errors of all NVLinks: totals of older GPUs, sums over links of newer ones."""
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
        """Field ids and values; those that the GPU does not offer are left out."""
        nvml = self._nvml
        for found in nvml.nvmlDeviceGetFieldValues(self.handle, list(fields)):
            if found.nvmlReturn == nvml.NVML_SUCCESS:
                yield found.fieldId, float(getattr(found.value, _MEMBERS[found.valueType]))

    def _memory_of_others(self, own_pid: int) -> dict[str, float]:
        """Bytes of processes of this host that do not descend from `own_pid`; a container hides those outside of it."""
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        used = sum(each.usedGpuMemory or 0 for each in processes if _is_foreign(each.pid, own_pid))
        return {"memory_of_others": float(used)}


def visible_indices(identities: Sequence[str], visible: str | None) -> list[int]:
    """Indices of the GPUs with these UUIDs that CUDA_VISIBLE_DEVICES allows, in its order."""
    if visible is None:
        return list(range(len(identities)))
    indices = []
    for word in visible.split(","):
        name = word.strip()
        if name.isdecimal() and int(name) < len(identities):
            indices.append(int(name))
            continue
        found = [index for index, identity in enumerate(identities) if name and identity.startswith(name)]
        if len(found) != 1:  # CUDA ignores an unknown device and all after it
            break
        indices += found
    return indices


def _is_foreign(pid: int, own_pid: int) -> bool:
    """Whether a process of this host is neither `own_pid` nor descends from it."""
    while pid > 1:
        if pid == own_pid:
            return False
        try:
            stat = (PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return True
