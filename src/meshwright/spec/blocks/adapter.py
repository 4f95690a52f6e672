"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023; DoRA, Liu et al. 2024).

A run with adapters trains only them: every other weight is frozen. This file says which linear layers have adapters,
and how large these are. Their parameters, memory, FLOPs and files follow from the tables of blocks, as for other
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from meshwright.spec.blocks.table import AdapterPart, ExpertsOp, LinearOp, Op
from meshwright.spec.fields import Bound, Positive

AdapterKind = Literal["lora", "rslora", "dora"]
ALL_LINEAR = "all-linear"
"""The target that stands for all linear layers of the blocks, except routers."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Low-rank adapters of frozen weights: y = xWᵀ + s · (xAᵀ)Bᵀ, with A `(rank, inputs)` and B `(outputs, rank)`."""

    rank: Positive = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Bound(more_than=0)] = 32.0
    """Scale: an adapter's output is multiplied by alpha / rank, or by alpha / √rank with `kind: rslora`."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Linear layers with an adapter: names of the model's folder (`q_proj`, `mlp.down_proj`), our names
    (`attention.qkv.q`, `mlp.down`), or `all-linear`.
    """
    kind: AdapterKind = "lora"
    """lora; rslora, whose scale is alpha / √rank; or dora, which also trains the length of each row of the weights."""

    experts: bool = False
    """Whether both linear layers of each routed expert have adapters too. Their rank must be a multiple of 8."""

    init: str | None = None
    """Adapters with which training starts: a folder with peft's files, or a run with adapters.

    They must have this rank, scale and kind, and these targets. none: A is random and B is zero.
    """

    @property
    def scale(self) -> float:
        """Return the factor s of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def parts(self, op: LinearOp) -> tuple[AdapterPart, ...]:
        """Return the adapters of a linear layer: one for the whole layer, or one for some of its fused parts.

        The result is empty if it is no target.
        """
        if op.router:
            return ()
        if op.name in self.targets:
            return (AdapterPart("", op.outputs, self.rank, tuple((part.name, part.size) for part in op.parts)),)
        return tuple(
            AdapterPart(part.name, part.size, self.rank)
            for part in op.parts
            if f"{op.name}.{part.name}" in self.targets
        )

    def applied(self, operations: Iterable[Op]) -> Iterator[Op]:
        """Yield the operations of a block with its adapters."""
        for op in operations:
            if isinstance(op, LinearOp):
                yield replace(op, adapters=self.parts(op), frozen=True, magnitudes=self.kind == "dora")
            elif isinstance(op, ExpertsOp) and self.experts:
                parts = tuple(AdapterPart(part.name, part.size, self.rank) for part in op.parts)
                yield replace(op, adapters=parts or (AdapterPart("", op.outputs, self.rank),))
            else:
                yield op


def target_names(operations: Iterable[Op]) -> Iterator[str]:
    """Yield our name of each linear layer that can have an adapter, each followed by the names of its fused parts."""
    for op in operations:
        if isinstance(op, LinearOp) and not op.router:
            yield op.name
            yield from (f"{op.name}.{part.name}" for part in op.parts)
