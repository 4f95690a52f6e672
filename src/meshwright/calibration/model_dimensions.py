"""Looks up the dimensions of public model families by name.

Sources: each family's published config.json or paper. A name is compared without case, spaces or punctuation.
Dimensions that a caller gives replace the dimensions in the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meshwright.spec.blocks.block import BlockSpec, SublayerSpec
from meshwright.spec.blocks.feed_forward import Activation, FeedForwardSpec
from meshwright.spec.blocks.moe import MoESpec, RouterSpec
from meshwright.spec.blocks.norm import NormSpec
from meshwright.spec.blocks.part import BlockBody, BodyPlace
from meshwright.spec.blocks.table import AttendOp, LinearOp, Op, Value
from meshwright.spec.errors import WrongKey
from meshwright.workload.model_shape import Shape, shape_of_runs

Dims = dict[str, Any]
"""Dimensions of a model by name, such as "layers" and "kv_heads"."""


def _dense(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **extras: Any) -> Dims:
    """Return the dimensions of a dense model with gated feed-forward networks."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "ffn": ffn, "vocab": vocab, **extras}


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, **extras: Any) -> Dims:
    """Return the dimensions of a GPT: feed-forward networks of width 4 · hidden without gates, and a head tied to the
    embedding.
    """
    return _dense(layers, hidden, heads, heads, 4 * hidden, vocab, gated=0, tied=1, **extras)


def _moe(
    dims: Dims, experts: int, top_k: int, expert_ffn: int, shared_ffn: int = 0, dense: int = 0, **extras: Any
) -> Dims:
    """Return `dims` with experts; the first `dense` layers have no experts."""
    sizes = {"experts": experts, "top_k": top_k, "expert_ffn": expert_ffn, "shared_ffn": shared_ffn}
    return {**dims, **sizes, "first_dense": dense, **extras}


_LATENT_ATTENTION = {"q_rank": 1536, "kv_rank": 512, "head_dim": 192, "v_head_dim": 128, "rope_dim": 64}
"""Sizes of multi-head latent attention that DeepSeek's models share."""

FAMILIES: tuple[tuple[str, Dims], ...] = (
    (r"llama(3|31|33)?405b", _dense(126, 16384, 128, 8, 53248, 128256)),
    (r"llama(3|31|33)70b", _dense(80, 8192, 64, 8, 28672, 128256)),
    (r"llama(3|31)8b", _dense(32, 4096, 32, 8, 14336, 128256)),
    (r"llama323b", _dense(28, 3072, 24, 8, 8192, 128256, tied=1)),
    (r"llama321b", _dense(16, 2048, 32, 8, 8192, 128256, head_dim=64, tied=1)),
    (r"llama270b", _dense(80, 8192, 64, 8, 28672, 32000)),
    (r"llama(1|2)?65b", _dense(80, 8192, 64, 64, 22016, 32000)),
    (r"llama(1|2)?(33|34|30)b", _dense(60, 6656, 52, 52, 17920, 32000)),
    (r"llama(1|2)?13b", _dense(40, 5120, 40, 40, 13824, 32000)),
    (r"llama(1|2)?7b", _dense(32, 4096, 32, 32, 11008, 32000)),
    (r"llamalike134b", _dense(16, 2048, 32, 32, 8192, 131072, tied=0)),
    (r"llamalike357b", _dense(28, 3072, 32, 32, 8192, 131072)),
    (r"llamalike886b", _dense(32, 4096, 32, 32, 14336, 131072)),
    (r"llamalike80b", _dense(80, 8192, 64, 64, 28672, 131072)),
    (r"gpt35b", _gpt(24, 4096, 32)),
    (r"gpt320b", _gpt(44, 6144, 48)),
    (r"gpt3?175b|gpt31746b|gpt1746b", _gpt(96, 12288, 96)),
    (r"mtnlg530b|gpt530b|gpt5296b", _gpt(105, 20480, 128)),
    (r"gpt1t|gpt1008b", _gpt(128, 25600, 160)),
    (r"gpt22b", _gpt(48, 6144, 64)),
    (r"bloom(176b|175b)?", _gpt(70, 14336, 112, 250880)),
    (r"opt175b", _gpt(96, 12288, 96, 50272)),
    (r"gptneox20b", _gpt(44, 6144, 64, 50432)),
    (r"nemotron(3)?8b", _dense(32, 4096, 32, 32, 16384, 256000, gated=0)),
    (r"nemotron(3)?22b", _dense(40, 6144, 48, 48, 24576, 256000, gated=0)),
    (r"nemotron415b", _dense(32, 6144, 48, 8, 24576, 256000, gated=0)),
    (r"nemotron4?340b", _dense(96, 18432, 96, 8, 73728, 256000, gated=0)),
    (r"mistral7b", _dense(32, 4096, 32, 8, 14336, 32000)),
    (r"mixtral8x7b", _moe(_dense(32, 4096, 32, 8, 14336, 32000), 8, 2, 14336)),
    (r"mixtral8x22b", _moe(_dense(56, 6144, 48, 8, 16384, 32768), 8, 2, 16384)),
    (r"grok1(314b)?", _moe(_dense(64, 6144, 48, 8, 32768, 131072, head_dim=128), 8, 2, 32768)),
    (
        r"deepseekv3|deepseekr1|deepseekv31",
        _moe(_dense(61, 7168, 128, 128, 18432, 129280), 256, 8, 2048, 2048, 3, **_LATENT_ATTENTION),
    ),
    (
        r"deepseekv2lite|deepseekv316b|deepseekmoe16b",
        _moe(_dense(27, 2048, 16, 16, 10944, 102400), 64, 6, 1408, 2816, 1, **{**_LATENT_ATTENTION, "q_rank": 0}),
    ),
    (r"deepseekv2", _moe(_dense(60, 5120, 128, 128, 12288, 102400), 160, 6, 1536, 3072, 1, **_LATENT_ATTENTION)),
    (r"kimik2", _moe(_dense(61, 7168, 64, 64, 18432, 163840), 384, 8, 2048, 2048, 1, **_LATENT_ATTENTION)),
    (
        r"qwen3next80b(a3b)?",
        _moe(_dense(48, 2048, 16, 2, 5120, 151936, head_dim=256), 512, 10, 512, 512, attention_every=4),
    ),
    (r"qwen330b(a3b)?", _moe(_dense(48, 2048, 32, 4, 6144, 151936, head_dim=128), 128, 8, 768)),
    (r"qwen3235b(a22b)?", _moe(_dense(94, 4096, 64, 4, 12288, 151936, head_dim=128), 128, 8, 1536)),
    (r"qwen38b", _dense(36, 4096, 32, 8, 12288, 151936)),
    (r"qwen314b", _dense(40, 5120, 40, 8, 17408, 151936)),
    (r"qwen332b", _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128)),
    (r"qwen2?57b", _dense(28, 3584, 28, 4, 18944, 152064)),
    (r"qwen2?572b", _dense(80, 8192, 64, 8, 29568, 152064)),
    (
        r"gptoss120b",
        _moe(_dense(36, 2880, 64, 8, 2880, 201088, head_dim=64), 128, 4, 2880, full_attention=0.5, expert_bias=1),
    ),
    (
        r"gptoss20b",
        _moe(_dense(24, 2880, 64, 8, 2880, 201088, head_dim=64), 32, 4, 2880, full_attention=0.5, expert_bias=1),
    ),
    (
        r"nemotron3nano(30ba3b)?",
        _moe(_dense(52, 2688, 32, 2, 1856, 131072, head_dim=128, gated=0), 128, 6, 1856, 3712, hybrid=(6, 23, 23)),
    ),
    (
        r"nemotron3super(120ba12b)?",
        _moe(
            _dense(88, 4096, 32, 2, 2688, 131072, head_dim=128, gated=0),
            experts=512,
            top_k=22,
            expert_ffn=2688,
            shared_ffn=5376,
            hybrid=(8, 40, 40),
            expert_in=1024,
        ),
    ),
    (r"smollm2135m", _dense(30, 576, 9, 3, 1536, 49152, tied=1)),
    (r"mpt70b", _gpt(80, 8192, 64, 50368)),
    (r"mpt30b", _gpt(48, 7168, 56, 50368)),
    (r"mpt13b", _gpt(40, 5120, 40, 50368)),
    (r"mpt7b", _gpt(32, 4096, 32, 50368)),
    (r"mpt3b", _gpt(32, 2560, 20, 50368)),
    (r"mpt1b", _gpt(24, 2048, 16, 50368)),
    (r"mpt760m", _gpt(24, 1536, 12, 50368)),
    (r"mpt350m", _gpt(24, 1024, 16, 50368)),
    (r"mpt125m", _gpt(12, 768, 12, 50368)),
)
"""(pattern that matches the whole simplified name, dimensions); specific patterns come first."""


def dimensions_by_name(name: str) -> Dims:
    """Return the dimensions of a family by its name; an empty dict if the name is not known."""
    simplified = re.sub(r"[^a-z0-9]", "", name.lower())
    simplified = simplified.removeprefix("meta").removesuffix("instruct").removesuffix("base")
    return next((dict(dims) for pattern, dims in FAMILIES if re.fullmatch(pattern, simplified)), {})


def looks_like_gpt(name: str) -> bool:
    """Return whether a name suggests GPT blocks (feed-forward of width 4 · hidden without gates, tied head) instead of
    Llama blocks.
    """
    return bool(re.match(r"(gpt|mpt|opt|bloom|megatron|mt-?nlg|bert)", name.lower()))


def shape_from_dimensions(dims: Mapping[str, Any]) -> Shape:
    """Return the Shape of a model with the dimensions `dims`.

    They are layers, hidden, heads, kv_heads, ffn and vocab, and any of the optional names that `FAMILIES` has.
    """
    heads = dims["heads"]
    hidden = dims["hidden"]
    layers = dims["layers"]
    head_dim = dims.get("head_dim") or hidden / heads
    value_head = dims.get("v_head_dim") or head_dim
    moe_layers = layers - min(layers, dims.get("first_dense", 0)) if dims.get("experts") else 0
    attention_layers = layers
    mixer_layers = 0
    dense_layers = layers - moe_layers
    if "hybrid" in dims:
        hybrid_layers = sum(dims["hybrid"])
        attention_layers, mixer_layers, moe_layers = (layers * count / hybrid_layers for count in dims["hybrid"])
        dense_layers = 0
    if "attention_every" in dims:
        attention_layers = layers / dims["attention_every"]
        mixer_layers = layers - attention_layers
    if dims.get("kv_rank"):
        kv_width = dims["kv_rank"] + dims["rope_dim"]
        attention_params = _latent_params(dims, head_dim, value_head)
    else:
        kv_width = 2 * dims["kv_heads"] * head_dim
        attention_params = hidden * (heads * head_dim + kv_width + heads * value_head)
    attention = PublishedAttentionSpec(
        heads=heads,
        head_dim=head_dim,
        value_head_dim=value_head,
        kv_width=kv_width,
        columns=attention_params / hidden - heads * value_head,
    )
    activation: Activation = "swiglu" if dims.get("gated", 1) else "gelu"
    expert_in = dims.get("expert_in", hidden)
    expert_ffn = dims.get("expert_ffn", 0)
    moe = MoESpec(
        experts=dims.get("experts", 0),
        per_token=dims.get("top_k", 0),
        expert=FeedForwardSpec(width=expert_ffn, activation=activation),
        router=RouterSpec(),
        shared=FeedForwardSpec(width=dims["shared_ffn"], activation=activation) if dims.get("shared_ffn") else None,
        width=expert_in if expert_in != hidden else None,
    )
    dense = FeedForwardSpec(width=dims["ffn"], activation=activation)
    mixers: list[tuple[BlockBody, float]] = [
        (attention, attention_layers),
        (PublishedMixerSpec(columns=6 * hidden), mixer_layers),
    ]
    networks: list[tuple[BlockBody, float]] = [(dense, dense_layers), (moe, moe_layers)]
    if "hybrid" in dims:  # each layer has one body: a mixer, or a feed-forward network
        runs = [(_block(hidden, body), count) for body, count in (*mixers, *networks) if count]
    else:  # it does not matter which mixer is in one block with which network
        pairs = [(mixer, network, of * beside / layers) for mixer, of in mixers for network, beside in networks]
        runs = [(_block(hidden, mixer, network), count) for mixer, network, count in pairs if count]
    # The constants of other training software were fitted with two tensor-parallel exchanges in every layer without
    # experts, whatever its mixer is.
    exchanges = (layers - moe_layers) * 2 + moe_layers * (1 + bool(dims.get("shared_ffn")))
    return replace(
        shape_of_runs(tuple(runs), layers=layers, seq_len=1),
        vocab=dims["vocab"],
        tied=dims.get("tied", 0),
        gated=dims.get("gated", 1),
        kv_width=kv_width,
        kv_head_width=0.0,
        padding=0.0,
        full_attention=dims.get("full_attention", 1.0),
        ffn=dims["ffn"],
        expert_ffn=expert_ffn,
        gathers=exchanges,
        scatters=exchanges,
        mixer_layers=mixer_layers,
        expert_bias=dims.get("expert_bias", 0.0),
    )


def _block(hidden: Any, *bodies: BlockBody) -> BlockSpec:
    """Return a block with one sublayer for each body. Initial values of weights do not matter here."""
    sublayers = tuple(SublayerSpec(norm=NormSpec(), bodies=(body,)) for body in bodies)
    return BlockSpec(hidden=hidden, sublayers=sublayers, std=0.0, residual_std=0.0)


@dataclass(frozen=True, kw_only=True)
class PublishedAttentionSpec:
    """Attention of a published model.

    All projections before the attention itself, also those to and from latents, are one linear layer with `columns`
    outputs. Sizes are numbers of a record, which may be fractions.
    """

    MODULE: ClassVar[str] = "attention"
    NORM: ClassVar[str] = "attention_norm"
    OUTPUT_NORM: ClassVar[str] = "attention_output_norm"

    heads: Any
    """Number of heads."""
    head_dim: Any
    """Size of a query head."""
    value_head_dim: Any
    """Size of a value head."""
    kv_width: Any
    """Width of keys and values together, as they are saved and exchanged."""
    columns: Any
    """Outputs of the linear layer before the attention."""

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Yield projection, rotation, attention and output projection."""
        name = place.name
        queries = self.heads * self.head_dim
        values = self.heads * self.value_head_dim
        joined = Value(name("joined"), queries + self.kv_width)
        parts = {"q": queries, "k": self.kv_width / 2, "v": self.kv_width / 2}
        yield LinearOp(
            name=name("qkv"),
            reads=(place.reads,),
            writes=(joined, *(Value(name(part), width, inside=joined.name) for part, width in parts.items())),
            inputs=place.hidden,
            outputs=self.columns,
            std=place.std,
            split="rows",
        )
        for part in ("q", "k"):
            rotated = Value(name(f"rotated_{part}"), parts[part])
            yield Op(name=name(f"rotate_{part}"), reads=(name(part),), writes=(rotated,))
        heads = Value(name("heads"), values)
        yield AttendOp(
            name=name("attend"),
            reads=(name("rotated_q"), name("rotated_k"), name("v")),
            writes=(heads,),
            heads=self.heads,
            kv_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.value_head_dim,
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

    def mistakes(self) -> Iterator[WrongKey]:
        yield from ()


@dataclass(frozen=True, kw_only=True)
class PublishedMixerSpec:
    """A state-space or linear-attention layer as one linear layer of `columns` outputs.

    Its other work is not predicted.
    """

    MODULE: ClassVar[str] = "mixer"
    NORM: ClassVar[str] = "mixer_norm"
    OUTPUT_NORM: ClassVar[str] = "mixer_output_norm"

    columns: Any
    """Outputs of the linear layer."""

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Yield the linear layer."""
        yield LinearOp(
            name=place.name("in"),
            reads=(place.reads,),
            writes=(place.output,),
            inputs=place.hidden,
            outputs=self.columns,
            std=place.std,
            split="rows",
        )

    def mistakes(self) -> Iterator[WrongKey]:
        yield from ()


def _latent_params(dims: Mapping[str, Any], head_dim: float, value_head_dim: float) -> float:
    """Return the number of weights of one multi-head latent attention layer (DeepSeek-V2, section 2.1)."""
    hidden = dims["hidden"]
    heads = dims["heads"]
    kv_rank = dims["kv_rank"]
    rope_dim = dims["rope_dim"]
    query_params = dims["q_rank"] * (hidden + heads * head_dim) if dims.get("q_rank") else hidden * heads * head_dim
    key_value_params = hidden * (kv_rank + rope_dim) + kv_rank * heads * (head_dim - rope_dim + value_head_dim)
    return query_params + key_value_params + heads * value_head_dim * hidden
