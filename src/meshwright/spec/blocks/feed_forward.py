"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from meshwright.spec.blocks.part import BodyPlace
from meshwright.spec.blocks.table import ActivateOp, FusedWeight, LinearOp, Op, Value
from meshwright.spec.errors import WrongKey

Activation = Literal["swiglu", "geglu", "clamped_swiglu", "gelu"]
"""Activation function of a feed-forward network; `FeedForwardSpec` has their formulas."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """A feed-forward network.

    - swiglu: down(silu(gate) · up). geglu: down(gelu(gate) · up).
    - gelu: down(gelu(up)), without a gate. GELU is its tanh approximation.
    - clamped_swiglu: the activation of `kernels.swiglu.clamped_activation`.
    """

    MODULE: ClassVar[str] = "mlp"
    NORM: ClassVar[str] = "mlp_norm"
    OUTPUT_NORM: ClassVar[str] = "mlp_output_norm"

    width: int
    """Width between its linear layers."""
    activation: Activation = "swiglu"
    bias: bool = False
    """Whether both linear layers have biases."""

    @property
    def gated(self) -> bool:
        """Return whether the first linear layer also computes a gate."""
        return self.activation != "gelu"

    @property
    def first(self) -> str:
        """Return the name of the first linear layer."""
        return "gate_up" if self.gated else "up"

    @property
    def first_width(self) -> int:
        """Return the number of outputs of the first linear layer."""
        return (1 + self.gated) * self.width

    def operations(self, place: BodyPlace, *, tiled: bool = True) -> Iterator[Op]:
        """Yield both linear layers and the activation between them; `tiled` is as in `ActivateOp`."""
        name = place.name
        projected = Value(name("projected"), self.first_width)
        activated = Value(name("activated"), self.width)
        yield LinearOp(
            name=name(self.first),
            reads=(place.reads,),
            writes=(projected,),
            inputs=place.hidden,
            outputs=projected.width,
            std=place.std,
            split="rows",
            parts=(FusedWeight("gate", self.width), FusedWeight("up", self.width)) if self.gated else (),
            bias=self.bias,
        )
        yield ActivateOp(name=name("activate"), reads=(projected.name,), writes=(activated,), tiled=tiled)
        yield LinearOp(
            name=name("down"),
            reads=(activated.name,),
            writes=(place.output,),
            inputs=self.width,
            outputs=place.hidden,
            std=place.residual_std,
            split="columns",
            bias=self.bias,
        )

    def mistakes(self) -> Iterator[WrongKey]:
        yield from ()
