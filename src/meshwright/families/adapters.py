"""Names of adapters: the linear layers of a model's folder, as peft and users name them, and ours."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.families.registry import FAMILIES
from meshwright.spec.blocks.adapter import ALL_LINEAR
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.model import ModelSpec, adapter_targets


def folder_names(spec: ModelSpec) -> dict[str, str]:
    """Linear layers of a layer of the model's folder, such as `self_attn.q_proj`: the folder's name → our target."""
    modules = FAMILIES[spec.family].modules
    names = {}
    targets = adapter_targets(spec)
    for module in targets:
        parts = [target for target in targets if target.rpartition(".")[0] == module]
        theirs = modules.get(module, ())
        names |= dict(zip(theirs, parts if len(theirs) == len(parts) > 1 else [module], strict=False))
    return names


def resolved_targets(spec: ModelSpec, targets: Iterable[str]) -> tuple[str, ...]:
    """Our names of `targets`: names of folders in full or their last part, ours, or `all-linear`."""
    theirs = folder_names(spec)
    ours = adapter_targets(spec)
    found: set[str] = set()
    for target in targets:
        matches = {name for full, name in theirs.items() if full == target or full.endswith(f".{target}")}
        if target == ALL_LINEAR:
            matches = set(theirs.values())
        elif target in ours:
            matches = {name for name in theirs.values() if name == target or name.rpartition(".")[0] == target}
        if not matches:
            short = [name.rpartition(".")[2] for name in theirs]
            near = nearest(target, [*short, *theirs, *ours], cutoff=0.3)
            raise BadInput(
                f"{target} matches no linear layer: expected {ALL_LINEAR} or some of {', '.join(dict.fromkeys(short))}"
                + (f"; nearest: {near}" if near else "")
            )
        found |= matches
    if not found:
        raise BadInput(f"no targets: expected {ALL_LINEAR} or names of linear layers")
    return tuple(target for target in ours if target in found)


def shortened(layers: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Names of a folder's layers as short as they can be: last parts, but the whole name where a layer of `others` ends alike."""
    taken = {name.rpartition(".")[2] for name in others}
    return tuple(dict.fromkeys(last if (last := name.rpartition(".")[2]) not in taken else name for name in layers))
