"""Checks before a load whether the tensors match the stored names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.checkpoint.format.contents import Contents
from meshwright.checkpoint.local_tensors import LocalTensor, dtype_name
from meshwright.spec.errors import BadInput, nearest


def check_fit(contents: Contents, tensors: Mapping[str, LocalTensor], prefix: str, convert: bool) -> set[str]:
    """Compare the tensors that this rank wants to fill with the stored ones. Return their names.

    Raises BadInput for the first tensor that is not stored, does not start with `prefix`, or differs in shape. A tensor of
    another dtype raises it too, unless `convert`.
    """
    missing = [name for name in tensors if name not in contents]
    if missing:
        hint = nearest(missing[0], contents)
        raise BadInput(
            f"the checkpoint has no {_first_names(missing)}" + (f"; nearest to the first: {hint}" if hint else "")
        )
    for name, tensor in tensors.items():
        stored = contents[name]
        if not name.startswith(prefix):
            raise BadInput(f"{name} does not start with {prefix!r}, the prefix of the tensors to load")
        if tuple(tensor.shape) != stored.shape:
            raise BadInput(f"{name} is stored with shape {stored.shape}; the tensor to fill has {tuple(tensor.shape)}")
        if dtype_name(tensor.dtype) != stored.dtype and not convert:
            raise BadInput(
                f"{name} is stored as {stored.dtype}; the tensor to fill is {dtype_name(tensor.dtype)}; "
                "pass convert=True to convert it"
            )
        if tensor.is_meta:
            raise BadInput(f"{name} is on the meta device and cannot be filled")
    return set(tensors)


def check_complete(contents: Contents, requested: set[str], prefix: str, activity: str) -> None:
    """Raise BadInput if the checkpoint has tensors under `prefix` that no rank requested; `activity` begins the message."""
    unused = [name for name in contents if name.startswith(prefix) and name not in requested]
    if unused:
        raise BadInput(
            f"{activity}: the checkpoint has {_first_names(unused)} too, for which no rank gave a tensor (prefix: {prefix!r})"
        )


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more tensors" if len(names) > 5 else "")
