"""A rank's parts of tensors: which boxes of each tensor the rank has, and whether a checkpoint can store them.

A box is a rectangular part of a tensor, given by the index of its first element and its size in each dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.spec.errors import BadInput
from meshwright.state.parts import StateParts

LocalTensor = Tensor | StateParts
"""What a rank has of a tensor: a DTensor, a plain tensor (then it is the whole tensor), or StateParts."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that safetensors has for a dtype. Raises BadInput if safetensors cannot store it."""
    if dtype not in _NAMES:
        raise BadInput(f"{dtype} cannot be stored in a checkpoint; expected one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def local_boxes(tensor: LocalTensor) -> Iterable[tuple[tuple[int, ...], Tensor]]:
    """Return each box that this rank has of a tensor: its offsets in the whole tensor, and its elements, detached from autograd."""
    if isinstance(tensor, StateParts):
        return ((box.offsets, elements.detach()) for box, elements in tensor.pieces())
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tensor.detach())]
    if tensor.device_mesh.get_coordinate() is None:  # this rank is not in the mesh
        return []
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [(offsets, tensor.to_local().detach())]


def device_of(tensors: Mapping[str, LocalTensor]) -> torch.device:
    """Return this rank's GPU if any of the tensors is on it, otherwise the CPU."""
    devices = (tensor.device for tensor in tensors.values())
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def check_storable(tensors: Mapping[str, LocalTensor]) -> None:
    """Raise BadInput unless every value is a tensor with memory and with a dtype that safetensors can store.

    StateParts are this rank's boxes of a tensor that the engine itself shards, such as optimizer state. A sharded tensor of a user is a
    DTensor.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, (Tensor, StateParts)):
            raise BadInput(
                f"{name} is a {type(tensor).__name__}, not a tensor; pass plain values in the checkpoint's state instead"
            )
        if tensor.is_meta:
            raise BadInput(f"{name} is on the meta device and has no values to store")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise BadInput(
                f"{name} is a sum that is not reduced over its ranks yet ({tensor.placements}); reduce it first"
            )
        dtype_name(tensor.dtype)
