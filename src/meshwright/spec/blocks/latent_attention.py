"""Multi-head latent attention (DeepSeek-V2, 2024, §2.1): keys and values are computed from a narrow vector of each
token, its latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwright.spec.blocks.norm import NormSpec
from meshwright.spec.blocks.part import BodyPlace
from meshwright.spec.blocks.positions import RotarySpec
from meshwright.spec.blocks.table import AttendOp, FusedWeight, LinearOp, Op, Value
from meshwright.spec.errors import WrongKey


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Attention with latents for keys and values, and also for queries unless `q_rank` is 0. It has no biases.

    The rows of the weights `q` and `kv_up` are ordered by head. Inside a head of `q`, the rows of the unrotated part
    come before the rows of the rotated part. Inside a head of `kv_up`, the rows of the key's unrotated part come before
    the rows of the value.
    """

    MODULE: ClassVar[str] = "attention"
    NORM: ClassVar[str] = "attention_norm"
    OUTPUT_NORM: ClassVar[str] = "attention_output_norm"

    heads: int
    """Number of heads."""
    head_dim: int
    """Size of a query and a key head: the unrotated and the rotated part."""
    rotary: RotarySpec
    """Rotates a part of each query head, and a part of the key that all heads share."""
    value_head_dim: int
    """Size of a value head."""
    kv_rank: int
    """Width of the latent of keys and values."""
    latent_norm: NormSpec
    """Norm of the latents."""
    q_rank: int = 0
    """Width of the latent of queries; 0 computes them from the residual stream."""
    window: int | None = None
    """As in `AttentionSpec`."""
    score_cap: ClassVar[None] = None
    """Its scores are not capped."""

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Yield projections to latents, their norms, projections to heads, rotation, attention, and output projection."""
        name = place.name
        rotated = self.rotary.width
        queries = self.heads * self.head_dim
        unrotated = self.heads * (self.head_dim - rotated)
        values = self.heads * self.value_head_dim
        latents = Value(name("latents"), self.q_rank + self.kv_rank + rotated)
        latent_parts = {"q_latent": self.q_rank, "kv_latent": self.kv_rank, "shared_key": rotated}
        yield LinearOp(
            name=name("down" if self.q_rank else "kv_down"),
            reads=(place.reads,),
            writes=(latents, *(Value(name(part), width, inside=latents.name) for part, width in latent_parts.items())),
            inputs=place.hidden,
            outputs=latents.width,
            std=place.std,
            split="whole",
            parts=(FusedWeight("q", self.q_rank), FusedWeight("kv", self.kv_rank + rotated)) if self.q_rank else (),
        )
        query_source = place.reads
        if self.q_rank:
            normed = Value(name("normed_q_latent"), self.q_rank)
            yield self.latent_norm.operation(name("q_norm"), name("q_latent"), normed, self.q_rank)
            query_source = normed.name
        projected_queries = Value(name("projected_q"), queries)
        yield LinearOp(
            name=name("q"),
            reads=(query_source,),
            writes=(projected_queries,),
            inputs=self.q_rank or place.hidden,
            outputs=queries,
            std=place.std,
            split="rows",
        )
        normed = Value(name("normed_kv_latent"), self.kv_rank)
        yield self.latent_norm.operation(name("kv_norm"), name("kv_latent"), normed, self.kv_rank)
        expanded = Value(name("keys_values"), unrotated + values)
        yield LinearOp(
            name=name("kv_up"),
            reads=(normed.name,),
            writes=(
                expanded,
                Value(name("unrotated_k"), unrotated, inside=expanded.name),
                Value(name("v"), values, inside=expanded.name),
            ),
            inputs=self.kv_rank,
            outputs=unrotated + values,
            std=place.std,
            split="rows",
        )
        # The rotated and the unrotated part of a head are joined in a new tensor.
        q = Value(name("joined_q"), queries)
        k = Value(name("joined_k"), queries)
        rotated_key = Value(name("rotated_key"), rotated)
        yield Op(name=name("rotate_q"), reads=(projected_queries.name,), writes=(q,))
        yield RotateSharedOp(name=name("rotate_k"), reads=(name("shared_key"),), writes=(rotated_key,))
        yield Op(name=name("join_k"), reads=(name("unrotated_k"), rotated_key.name), writes=(k,))
        heads = Value(name("heads"), values)
        yield AttendOp(
            name=name("attend"),
            reads=(q.name, k.name, name("v")),
            writes=(heads,),
            heads=self.heads,
            kv_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.value_head_dim,
            window=self.window,
        )
        yield LinearOp(
            name=name("out"),
            reads=(heads.name,),
            writes=(place.output,),
            inputs=values,
            outputs=place.hidden,
            std=place.residual_std,
            split="columns",
        )

    def cache_shape(self, positions: int) -> tuple[int, ...]:
        """Return the shape of the latents and rotated keys of `positions` positions: (positions, kv_rank + rotated
        width).
        """
        return positions, self.kv_rank + self.rotary.width

    def mistakes(self) -> Iterator[WrongKey]:
        """Yield what is wrong with the widths of heads. Mistakes name keys of `model`."""
        beside = (("head_dim", self.head_dim),)
        if not 0 < self.rotary.width < self.head_dim or self.rotary.width % 2:
            found = str(self.rotary.width)
            yield WrongKey("rope_head_dim", found, "an even number below {head_dim}", None, beside)
        if not 0 < self.value_head_dim <= self.head_dim:
            found = str(self.value_head_dim)
            near = str(self.head_dim)
            yield WrongKey("value_head_dim", found, "1 to {head_dim}", near, beside)


@dataclass(frozen=True, kw_only=True)
class RotateSharedOp(Op):
    """Rotates the part of the key that all heads share.

    Its result is counted as saved for the backward, in the number format of linear layers. It is less than a thousandth
    of what a block saves.
    """

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.writes)

    @property
    def rounds(self) -> bool:
        return True
