"""What a layout cannot have beside adapters (`model.adapter`)."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.spec.plan import Linear


def adapter_conflict(
    kind: str | None,
    *,
    tensor: int = 1,
    formats: Iterable[Linear] = (),
    mlp_tile: int = 0,
    expert_policy: str = "none",
    expert_owners: str = "even",
) -> tuple[str, str] | None:
    """The key of `plan` that does not go with adapters of a kind and what was expected; None without a conflict or adapters."""
    if kind is None:
        return None
    if kind == "dora" and tensor > 1:
        return (
            "tensor",
            "1, as the row lengths of model.adapter.kind = dora are sums over the inputs of all tensor ranks",
        )
    if kind == "dora" and any(name != "compute" for name in formats):
        return (
            "linear",
            "compute, as the row lengths of model.adapter.kind = dora follow from weights that are not rounded",
        )
    if mlp_tile:
        return "mlp_tile", "0, as tiles do not compute the adapters of model.adapter in this release"
    if expert_policy != "none":
        return (
            "expert_policy",
            "none, as copies of experts are for experts that are trained, and model.adapter freezes them",
        )
    if expert_owners != "even":
        return "expert_owners", "even, as experts move with their optimizer state, which model.adapter leaves out"
    return None
