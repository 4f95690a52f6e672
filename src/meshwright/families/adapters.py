"""Translates names of linear layers for adapters: the names in a model's folder, which peft and users write, and this project's names."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.families.registry import FAMILIES
from meshwright.spec.blocks.adapter import ALL_LINEAR
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.model import ModelSpec, adapter_targets


def folder_names(spec: ModelSpec) -> dict[str, str]:
    """Return the linear layers in one layer of the model's folder.

    Keys are names in the folder, such as `self_attn.q_proj`; values are this project's names.
    """
    modules = FAMILIES[spec.family].modules
    names = {}
    targets = adapter_targets(spec)
    for module in targets:
        parts = [target for target in targets if target.rpartition(".")[0] == module]
        theirs = modules.get(module, ())
        names |= dict(zip(theirs, parts if len(theirs) == len(parts) > 1 else [module], strict=False))
    return names


def resolved_targets(spec: ModelSpec, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the linear layers that `targets` select, by this project's names and in its order.

    A target is a name in the folder, in full or only its last part, a name of this project, or `all-linear`. Raises
    BadInput if a target matches no layer, and if there are no targets.
    """
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
    """Shorten the names of layers in a folder to their last part.

    A name stays in full if a layer in `others` ends with the same part, because the short name would then also mean
    that layer.
    """
    taken = {name.rpartition(".")[2] for name in others}
    return tuple(dict.fromkeys(last if (last := name.rpartition(".")[2]) not in taken else name for name in layers))
