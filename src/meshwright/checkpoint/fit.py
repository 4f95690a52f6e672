"""Do these tensors fit this checkpoint? Asked before anything is written or filled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.contents import Contents
from meshwright.checkpoint.shards import dtype_name
from meshwright.spec.errors import BadInput, nearest
from meshwright.state.parts import StateParts


def check_storable(tensors: Mapping[str, Tensor | StateParts]) -> None:
    """Raise BadInput for what is not a tensor with values of a dtype that safetensors knows."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, (Tensor, StateParts)):
            raise BadInput(
                f"{name} is a {type(tensor).__name__}; only tensors are stored so, plain values belong in the state"
            )
        if tensor.is_meta:
            raise BadInput(f"{name} is on the meta device and has no values to store")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise BadInput(f"{name} is a sum that its ranks have not taken yet ({tensor.placements}); reduce it first")
        dtype_name(tensor.dtype)


def check_fit(contents: Contents, tensors: Mapping[str, Tensor | StateParts], prefix: str, convert: bool) -> set[str]:
    """Compare the names, shapes and dtypes one rank asks for with those stored, and return the names.

    Raises BadInput for the first that does not fit.
    """
    missing = [name for name in tensors if name not in contents]
    if missing:
        hint = nearest(missing[0], contents)
        raise BadInput(f"the checkpoint has no {_some(missing)}" + (f"; nearest to the first: {hint}" if hint else ""))
    for name, tensor in tensors.items():
        stored = contents[name]
        if not name.startswith(prefix):
            raise BadInput(f"{name} does not start with the prefix {prefix!r} that is loaded")
        if tuple(tensor.shape) != stored.shape:
            raise BadInput(f"{name} is stored with shape {stored.shape}, and shape {tuple(tensor.shape)} is asked for")
        if dtype_name(tensor.dtype) != stored.dtype and not convert:
            raise BadInput(
                f"{name} is stored as {stored.dtype}, and {dtype_name(tensor.dtype)} is asked for; "
                "pass convert=True to convert it"
            )
        if tensor.is_meta:
            raise BadInput(f"{name} is on the meta device and cannot be filled")
    return set(tensors)


def check_complete(contents: Contents, given: set[str], prefix: str, doing: str) -> None:
    """Raise BadInput when the checkpoint has tensors under `prefix` that no rank asked for."""
    spare = [name for name in contents if name.startswith(prefix) and name not in given]
    if spare:
        raise BadInput(
            f"{doing}: the checkpoint has {_some(spare)} too, for which no rank gave a tensor (prefix: {prefix!r})"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more tensors" if len(names) > 5 else "")
