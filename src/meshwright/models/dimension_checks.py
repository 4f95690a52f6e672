"""Checks that the dimensions of a ModelSpec are consistent. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import get_args

from meshwright.spec.errors import BadInput
from meshwright.spec.fields import describe_type, hints_of, within
from meshwright.spec.model import MOST_PARAMETERS, ModelSpec, parameter_count

MOST_EXPERTS = 10**6
"""Routed experts of all layers. Each is a few tensors of a folder, whose names are listed."""


def check_dimensions(spec: ModelSpec, where: str = "model") -> None:
    """Raise BadInput that names every field which is inconsistent with another.

    `where` is the file or section that the fields come from.
    """
    mistakes = [*_bound_mistakes(spec)]
    if mistakes:
        raise BadInput("\n".join(f"{where}: {mistake}" for mistake in mistakes))
    if spec.vocab_size == 0:
        mistakes.append("vocab_size is 0: expected the tokenizer's size; give model.vocab_size or a tokenizer")
    if spec.heads % spec.kv_heads:
        small = [n for n in range(1, isqrt(spec.heads) + 1) if spec.heads % n == 0]
        near = min((*small, *(spec.heads // n for n in small)), key=lambda n: (abs(n - spec.kv_heads), n))
        mistakes.append(f"kv_heads is {spec.kv_heads}: expected a divisor of heads ({spec.heads}); nearest: {near}")
    if spec.positions == "rope" and spec.head_dim % 2:
        near = spec.head_dim + 1
        mistakes.append(
            f"head_dim is {spec.head_dim}: rotary embedding rotates pairs, expected an even number; nearest: {near}"
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        mistakes.append(
            f"rope_scaling.high_freq_factor is {scaling.high_freq_factor:g}: expected more than low_freq_factor "
            f"({scaling.low_freq_factor:g})"
        )
    if spec.experts and not 1 <= spec.experts_per_token <= spec.experts:
        near = min(max(spec.experts_per_token, 1), spec.experts)
        mistakes.append(
            f"experts_per_token is {spec.experts_per_token}: expected 1 to experts ({spec.experts}); nearest: {near}"
        )
    if spec.experts and not spec.expert_hidden:
        mistakes.append("expert_hidden is 0: expected the width inside one expert")
    mistakes += [*_latent_mistakes(spec), *_group_mistakes(spec)]
    if not mistakes and (count := parameter_count(spec)) > MOST_PARAMETERS:
        mistakes.append(f"{count:.1e} parameters: expected at most {MOST_PARAMETERS:.0e}")
    if mistakes:
        raise BadInput("\n".join(f"{where}: {mistake}" for mistake in mistakes))


def _bound_mistakes(spec: ModelSpec) -> Iterator[str]:
    """Yield the numbers outside their bounds, and a number of experts that no machine can list."""
    for prefix, section in (("", spec), ("rope_scaling.", spec.rope_scaling), ("yarn.", spec.yarn)):
        for name, annotation in hints_of(type(section)).items() if section is not None else ():
            value, bounds = getattr(section, name), get_args(annotation)[1:]
            if not all(within(bound, value) for bound in bounds):
                yield f"{prefix}{name} is {value}: expected {describe_type(annotation)}"
    if (spec.layers + spec.prediction_depth) * spec.experts > MOST_EXPERTS:
        yield f"experts is {spec.experts}: expected at most {MOST_EXPERTS:,} in all {spec.layers} layers"


def _latent_mistakes(spec: ModelSpec) -> Iterator[str]:
    """Yield the mistakes in the dimensions of multi-head latent attention."""
    others = ("q_rank", "rope_head_dim", "value_head_dim")
    if not spec.kv_rank:
        yield from (
            f"{name} is {getattr(spec, name)}: expected 0 without kv_rank" for name in others if getattr(spec, name)
        )
        return
    if not 0 < spec.rope_head_dim < spec.head_dim or spec.rope_head_dim % 2:
        yield f"rope_head_dim is {spec.rope_head_dim}: expected an even number below head_dim ({spec.head_dim})"
    if not 0 < spec.value_head_dim <= spec.head_dim:
        yield f"value_head_dim is {spec.value_head_dim}: expected 1 to head_dim ({spec.head_dim})"
    fixed = {"kv_heads": spec.heads, "positions": "rope", "qk_norm": False, "bias": False, "parallel_block": False}
    for name, value in fixed.items():
        if getattr(spec, name) != value:
            yield f"{name} is {getattr(spec, name)}: expected {value} with kv_rank (latent attention)"


def _group_mistakes(spec: ModelSpec) -> Iterator[str]:
    """Yield the mistakes in the groups of experts."""
    groups, size = spec.expert_groups, spec.experts // spec.expert_groups
    if groups > 1 and spec.experts % groups:
        yield f"expert_groups is {groups}: expected a divisor of experts ({spec.experts})"
    elif groups > 1 and spec.router == "sigmoid" and size < 2:
        yield f"expert_groups is {groups}: expected groups of at least 2 of the {spec.experts} experts"
    if spec.groups_per_token > groups:
        yield f"groups_per_token is {spec.groups_per_token}: expected 1 to expert_groups ({groups})"
    elif groups > 1 and spec.groups_per_token * size < spec.experts_per_token:
        yield f"groups_per_token is {spec.groups_per_token}: expected groups with experts_per_token ({spec.experts_per_token}) experts"
