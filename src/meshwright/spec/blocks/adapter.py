"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023; DoRA, Liu et al. 2024).

A run with adapters trains only them: every other weight is frozen. This file says which linear layers have adapters and how large these
are; parameters, memory, FLOPs and files follow from the tables of blocks, as for other weights.
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
"""The target that stands for every linear layer of the blocks, without routers."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Low-rank adapters beside frozen weights: y = xWᵀ + s · (xAᵀ)Bᵀ, with A `(rank, inputs)` and B `(outputs, rank)`."""

    rank: Positive = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Bound(more_than=0)] = 32.0
    """Scale: an adapter's output is multiplied by alpha / rank, or by alpha / √rank with `kind: rslora`."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Linear layers with an adapter: names of the model's folder (`q_proj`, `mlp.down_proj`), ours (`attention.qkv.q`, `mlp.down`), or
    `all-linear`."""
    kind: AdapterKind = "lora"
    """LoRA; rsLoRA, whose scale falls with √rank; or DoRA, which also trains the length of each row of the weights."""

    experts: bool = False
    """Whether each routed expert has adapters too, of both its linear layers; their rank must be a multiple of 8."""

    @property
    def scale(self) -> float:
        """Factor s of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def parts(self, op: LinearOp) -> tuple[AdapterPart, ...]:
        """The adapters of a linear layer: one for the whole of it, or for some of its fused parts; none if it is no target."""
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
        """The operations of a block with its adapters."""
        for op in operations:
            if isinstance(op, LinearOp):
                yield replace(op, adapters=self.parts(op), frozen=True, magnitudes=self.kind == "dora")
            elif isinstance(op, ExpertsOp) and self.experts:
                parts = tuple(AdapterPart(part.name, part.size, self.rank) for part in op.parts)
                yield replace(op, adapters=parts or (AdapterPart("", op.outputs, self.rank),))
            else:
                yield op


def target_names(operations: Iterable[Op]) -> Iterator[str]:
    """Our names of all linear layers that can have an adapter, each followed by those of its fused parts."""
    for op in operations:
        if isinstance(op, LinearOp) and not op.router:
            yield op.name
            yield from (f"{op.name}.{part.name}" for part in op.parts)
