"""Self-attention with grouped key/value heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwright.spec.blocks.norm import NormSpec
from meshwright.spec.blocks.part import BodyPlace
from meshwright.spec.blocks.positions import RotarySpec
from meshwright.spec.blocks.table import AttendOp, FusedWeight, LinearOp, Op, Value, VectorOp
from meshwright.spec.divisors import nearest_divisor
from meshwright.spec.errors import WrongKey

MASK_BLOCK = 128
"""Number of queries, and of keys, in a block of flex attention's mask. A block is computed as a whole or not at all."""
FLASH_HEAD = 128
"""FlashAttention computes windows of any length if heads are wider than this."""
FLASH_WINDOW = 128
"""FlashAttention computes windows up to this length with all heads; flex attention computes the others.

Measured on one H200, torch 2.11, 16,384 tokens, forward and backward together, in ms
(benchmarks/results/2026-11-30-window-attention-H200.json):

| heads | window | FlashAttention | flex attention |
| --- | --- | --- | --- |
| size 256 | 512 | 1.3 | 2.1 |
| size 256 | 1,024 | 2.0 | 3.3 |
| 32 of size 128 | 128 | 1.4 | 1.5 |
| 64 of size 64 | 128 | 1.7 | 1.6 |
| size 128 | 1,024 | 3.6 | 3.2 |
| size 128 | 4,096 | 10.0 | 8.1 |

Flex attention also needs 4 to 6 s to compile for each graph.
"""
WIDEST_FLASH_HEAD = 256
"""Size of the widest heads that FlashAttention supports."""
FLASH_FORMATS = ("bf16", "fp16")
"""Number formats that FlashAttention supports."""


def window_by_flash(head_dim: int, window: int, cap: float | None, number_format: str) -> bool:
    """Return whether torch's FlashAttention computes causal attention with a window on CUDA, instead of flex attention.

    `head_dim` is the size of heads, `window` the number of keys of a query, `cap` the cap of scores, and
    `number_format` the format of the block: "bf16", "fp16", …
    """
    if cap is not None or number_format not in FLASH_FORMATS or head_dim % 8 or head_dim > WIDEST_FLASH_HEAD:
        return False
    return head_dim > FLASH_HEAD or window <= FLASH_WINDOW


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Causal self-attention. With fewer key/value heads than heads it is grouped-query attention."""

    MODULE: ClassVar[str] = "attention"
    NORM: ClassVar[str] = "attention_norm"
    OUTPUT_NORM: ClassVar[str] = "attention_output_norm"

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key heads, and of value heads."""
    head_dim: int
    """Size of a head."""
    rotary: RotarySpec | None = None
    """Rotary embedding; None does not rotate queries and keys."""
    window: int | None = None
    """Each token attends to at most this many tokens, itself included; None is full causal attention."""
    qk_norm: NormSpec | None = None
    """Norm of each query and key head."""
    rotated_norm: bool = False
    """Whether `qk_norm` comes after the rotation, not before it."""
    whole_norm: bool = False
    """Whether `qk_norm` is over all heads of a token together."""
    score_scale: float | None = None
    """Factor of the scores (queries times keys) before the softmax; None is 1 / √head_dim."""
    score_cap: float | None = None
    """Scores s become cap · tanh(s / cap) before the softmax; None does not cap them."""
    sinks: bool = False
    """Whether each head has a trained score that takes part in every softmax and has no value (gpt-oss)."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the output projection has a bias."""

    @property
    def query_factor(self) -> float:
        """Return the factor of queries which gives the scores the factor `score_scale`, since attention itself divides
        them by √head_dim.
        """
        return 1.0 if self.score_scale is None else self.score_scale * math.sqrt(self.head_dim)

    @property
    def rotates_whole_heads(self) -> bool:
        """Return whether heads are rotated as a whole and by halves, or not at all.

        The CPU's kernels for decodes only do that.
        """
        rotary = self.rotary
        return rotary is None or (rotary.width == self.head_dim and rotary.pairs == "halves")

    def rotates_as_written(self, *, on_cuda: bool) -> bool:
        """Return whether the kernels that write keys into a cache can also rotate them.

        They cannot if a norm follows the rotation.
        """
        return (self.rotates_whole_heads or on_cuda) and not self.rotated_norm

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Yield the fused projection, norms of heads, rotation, attention, and output projection."""
        name = place.name
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        joined = Value(name("joined"), queries + 2 * keys)
        if self.sinks:
            yield VectorOp(name=name("sinks"), reads=(), size=self.heads, heads=self.heads)
        yield LinearOp(
            name=name("qkv"),
            reads=(place.reads,),
            writes=(
                joined,
                Value(name("q"), queries, inside=joined.name),
                Value(name("k"), keys, inside=joined.name),
                Value(name("v"), keys, inside=joined.name),
            ),
            inputs=place.hidden,
            outputs=queries + 2 * keys,
            std=place.std,
            split="rows",
            parts=(
                FusedWeight("q", queries, self.heads),
                FusedWeight("k", keys, self.kv_heads),
                FusedWeight("v", keys, self.kv_heads),
            ),
            bias=self.qkv_bias,
        )
        attended = {"q": name("q"), "k": name("k")}
        steps = (self._rotated, self._normed) if self.rotated_norm else (self._normed, self._rotated)
        for step in steps:
            yield from step(place, attended)
        attention = Value(name("heads"), queries)
        yield AttendOp(
            name=name("attend"),
            reads=(attended["q"], attended["k"], name("v")),
            writes=(attention,),
            heads=self.heads,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            window=self.window,
            cap=self.score_cap,
        )
        yield LinearOp(
            name=name("out"),
            reads=(attention.name,),
            writes=(place.output,),
            inputs=queries,
            outputs=place.hidden,
            std=place.residual_std,
            split="columns",
            bias=self.out_bias,
        )

    def _normed(self, place: BodyPlace, attended: dict[str, str]) -> Iterator[Op]:
        """Yield the norms of queries and keys, and replace the values in `attended` by their results."""
        for part, heads in (("q", self.heads), ("k", self.kv_heads)):
            if self.qk_norm is not None:
                normed = Value(place.name(f"normed_{part}"), heads * self.head_dim)
                width, divided = (normed.width, heads) if self.whole_norm else (self.head_dim, 0)
                yield self.qk_norm.operation(place.name(f"{part}_norm"), attended[part], normed, width, divided)
                attended[part] = normed.name

    def _rotated(self, place: BodyPlace, attended: dict[str, str]) -> Iterator[Op]:
        """Yield the rotations of queries and keys, and replace the values in `attended` by their results."""
        for part, heads in (("q", self.heads), ("k", self.kv_heads)):
            if self.rotary is not None:
                rotated = Value(place.name(f"rotated_{part}"), heads * self.head_dim)
                yield Op(name=place.name(f"rotate_{part}"), reads=(attended[part],), writes=(rotated,))
                attended[part] = rotated.name

    def cache_shape(self, positions: int) -> tuple[int, ...]:
        """Return the shape of the keys and values of `positions` positions: (2, kv_heads, positions, head_dim)."""
        return 2, self.kv_heads, positions, self.head_dim

    def mistakes(self) -> Iterator[WrongKey]:
        """Yield what is wrong with the heads. Mistakes name keys of `model`."""
        if self.heads % self.kv_heads:
            near = str(nearest_divisor(self.heads, self.kv_heads))
            yield WrongKey("kv_heads", str(self.kv_heads), "a divisor of {heads}", near, (("heads", self.heads),))
        if self.rotary is not None:
            whole = self.rotary.width == self.head_dim
            if self.rotary.width % 2:
                key = "head_dim" if whole else "rope_width"
                near = str(self.rotary.width + 1)
                expected = "an even number, as rotary embedding turns pairs"
                yield WrongKey(key, str(self.rotary.width), expected, near)
            if self.rotary.width > self.head_dim:
                found = str(self.rotary.width)
                near = str(self.head_dim)
                yield WrongKey("rope_width", found, "at most {head_dim}", near, (("head_dim", self.head_dim),))
            yield from self.rotary.mistakes()
