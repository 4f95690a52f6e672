"""Checks that the dimensions of a ModelSpec are consistent. Needs no torch."""

from __future__ import annotations

from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


def check_dimensions(spec: ModelSpec, where: str = "model") -> None:
    """Raise BadInput that names every field which is inconsistent with another.

    `where` is the file or section that the fields come from.
    """
    mistakes = []
    if spec.vocab_size == 0:
        mistakes.append("vocab_size is 0: expected the tokenizer's size; give model.vocab_size or a tokenizer")
    if spec.heads % spec.kv_heads:
        divisors = [n for n in range(1, spec.heads + 1) if spec.heads % n == 0]
        near = min(divisors, key=lambda n: abs(n - spec.kv_heads))
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
    if mistakes:
        raise BadInput("\n".join(f"{where}: {mistake}" for mistake in mistakes))
