"""Maps device memory of another process of the same host into the address space of this process (CUDA driver API, "IPC").

The owner exports memory as a handle of 64 bytes, which may travel in any message; nothing is unpickled. The other process opens the handle,
on the same device or on a device with peer access to it. The driver refuses memory of expandable segments, devices without peer access, and
containers that share no IPC namespace. Callers then copy through host memory instead.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""Value of the flag CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NotMappable(Exception):
    """The driver cannot export memory, or cannot map the exported memory of another process."""


@dataclass(frozen=True)
class ExportedMemory:
    """Memory that other processes of the host can map."""

    handle: bytes
    """Handle of the allocation that contains the memory."""
    offset: int
    """Offset of the memory in the allocation, bytes."""


def host_name() -> str:
    """Return a name that all processes under the same kernel share, also in different containers; empty if it cannot be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def mappable(device: torch.device) -> bool:
    """Whether memory of this kind of device can be exported and mapped. A particular allocation may still be refused."""
    return device.type == "cuda"


def export(tensor: Tensor) -> ExportedMemory:
    """Export the memory of a contiguous tensor. It must stay allocated as long as anyone maps it. Raises NotMappable."""
    base = ctypes.c_uint64()
    handle = _Handle()
    with torch.cuda.device(tensor.device):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(tensor.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return ExportedMemory(bytes(handle.content), tensor.data_ptr() - base.value)


class MappedMemory:
    """Memory of another process that is mapped until `close` is called."""

    def __init__(self, exported: ExportedMemory, size: int, device: torch.device) -> None:
        """Map `size` bytes for work on `device`. Raises NotMappable if the allocation is smaller, or if it belongs to this process."""
        if len(exported.handle) != HANDLE_BYTES or exported.offset < 0:
            raise NotMappable(f"a handle of {len(exported.handle)} bytes at byte {exported.offset}")
        self._base = ctypes.c_uint64()
        self._device = device
        handle = _Handle.from_buffer_copy(exported.handle)
        mapped = ctypes.c_size_t()
        with torch.cuda.device(device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
            try:
                _call("cuMemGetAddressRange_v2", None, ctypes.byref(mapped), self._base)
                if exported.offset + size > mapped.value:
                    raise NotMappable(f"{mapped.value} bytes; expected {size} at byte {exported.offset}")
            except NotMappable:
                self.close()
                raise
        self.address = self._base.value + exported.offset

    def close(self) -> None:
        """Unmap the memory. The device must have finished all work that uses it."""
        with torch.cuda.device(self._device):
            _driver().cuIpcCloseMemHandle(self._base)


class _Handle(ctypes.Structure):
    """The driver's struct `CUipcMemHandle`, which is passed by value."""

    _fields_ = (("content", ctypes.c_ubyte * HANDLE_BYTES),)


def _call(name: str, *arguments: object) -> None:
    if error := getattr(_driver(), name)(*arguments):
        raise NotMappable(f"{name}: CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotMappable(str(error)) from error
