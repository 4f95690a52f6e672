"""Normalisation: RMSNorm and LayerNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.spec.blocks.table import NormOp, Value

NormKind = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """RMSNorm without a bias, or LayerNorm with one."""

    kind: NormKind = "rmsnorm"
    eps: float = 1e-5
    """Added to the variance before the square root."""
    plus_one: bool = False
    """Whether the stored weight is the weight minus one, so that the norm multiplies by 1 + stored weight (Gemma).

    RMSNorm only.
    """

    def operation(self, name: str, reads: str, writes: Value, width: int, heads: int = 0) -> NormOp:
        """Return the norm of the last `width` elements of the value `reads`, as the module `name`.

        `heads` is as in `NormOp`.
        """
        return NormOp(
            name=name,
            reads=(reads,),
            writes=(writes,),
            width=width,
            bias=self.kind == "layernorm",
            fill="zeros" if self.plus_one else "ones",
            heads=heads,
        )
