"""A fake of the package `nvidia-ml-py` whose GPUs are described by a JSON file. It offers what meshwright uses.

The variable FAKE_NVML has the path of the file, in which `{host}` stands for the name of the host. The file is read at
each call: `{"gpus": [{...}], "events": [[gpu, xid], ...], "refused": [function, ...]}`. A GPU may have the keys of
`HEALTHY`, which also has their defaults. A test compares the names and constants with the real package.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
NVML_FEATURE_ENABLED = 1
NVML_NVLINK_MAX_LINKS = 36
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94
NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY = 162
NVML_FI_DEV_NVLINK_ERROR_DL_CRC = 163
nvmlEventTypeXidCriticalError = 8
nvmlClocksEventReasonHwThermalSlowdown = 0x40
nvmlClocksEventReasonSwThermalSlowdown = 0x20
nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
nvmlClocksEventReasonSwPowerCap = 4

HEALTHY: dict[str, Any] = {
    "temperature": 61,
    "uncorrected": 0,
    "corrected": 12,
    "remapped": [1, 0, 0, 0],
    "reasons": nvmlClocksEventReasonSwPowerCap,
    "links": [1] * 18,
    "lanes": 16,
    "processes": [],
    "fields": {"230": 0, "94": 5, "162": 2, "163": 40},
    "error": 0,
}
"""Values of a healthy GPU, by the keys of the file."""


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


_delivered = 0
"""Number of events that have been delivered."""


def _world() -> dict[str, Any]:
    return json.loads(
        Path(
            os.environ["FAKE_NVML"].replace("{host}", os.environ.get("MESHWRIGHT_HOST") or socket.gethostname())
        ).read_text()
    )


def _gpu(index: int, function: str) -> dict[str, Any]:
    world = _world()
    gpu = {**HEALTHY, **world["gpus"][index]}
    error = NVML_ERROR_NOT_SUPPORTED if function in world.get("refused", []) else gpu["error"]
    if error:
        raise NVMLError(error)
    return gpu


def nvmlInit() -> None:
    _world()


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_world()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if error := _world()["gpus"][index].get("handle_error"):
        raise NVMLError(error)
    return index


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}0000000-0000"


def nvmlDeviceGetSupportedEventTypes(handle: int) -> int:
    return 0 if "nvmlDeviceGetSupportedEventTypes" in _world().get("refused", []) else nvmlEventTypeXidCriticalError


def nvmlEventSetCreate() -> object:
    return object()


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: object) -> None:
    _gpu(handle, "nvmlDeviceRegisterEvents")


def nvmlEventSetWait_v2(events: object, milliseconds: int) -> SimpleNamespace:
    global _delivered
    deadline = time.monotonic() + milliseconds / 1000
    while True:
        arrived = _world().get("events", [])
        if len(arrived) > _delivered:
            gpu, xid = arrived[_delivered]
            _delivered += 1
            return SimpleNamespace(device=gpu, eventType=nvmlEventTypeXidCriticalError, eventData=xid)
        if time.monotonic() > deadline:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        time.sleep(0.01)


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return _gpu(handle, "nvmlDeviceGetTemperature")["temperature"]


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    gpu = _gpu(handle, "nvmlDeviceGetTotalEccErrors")
    return gpu["uncorrected" if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else "corrected"]


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, ...]:
    return tuple(_gpu(handle, "nvmlDeviceGetRemappedRows")["remapped"])


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    return _gpu(handle, "nvmlDeviceGetCurrentClocksEventReasons")["reasons"]


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    links = _gpu(handle, "nvmlDeviceGetNvLinkState")["links"]
    if link >= len(links):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT if links else NVML_ERROR_NOT_SUPPORTED)
    return links[link]


def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:
    _gpu(handle, "nvmlDeviceGetMaxPcieLinkWidth")
    return 16


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:
    return _gpu(handle, "nvmlDeviceGetCurrPcieLinkWidth")["lanes"]


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    processes = _gpu(handle, "nvmlDeviceGetComputeRunningProcesses")["processes"]
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]


def nvmlDeviceGetFieldValues(handle: int, fields: list[Any]) -> list[SimpleNamespace]:
    known = _gpu(handle, "nvmlDeviceGetFieldValues")["fields"]
    answers = []
    for asked in fields:
        field = asked[0] if isinstance(asked, tuple) else asked
        found = str(field) in known
        value = SimpleNamespace(ullVal=known.get(str(field), 0))
        answer = NVML_SUCCESS if found else NVML_ERROR_NOT_SUPPORTED
        answers.append(SimpleNamespace(fieldId=field, nvmlReturn=answer, valueType=3, value=value))
    return answers
