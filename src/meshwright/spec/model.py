"""The dimensions of a decoder, its parameter table, and counts derived from them.

`parameters(spec)` is the only table of a model's weights. A test compares the modules of `models/` with it; initial
values, weight decay, sharding, Hugging Face import and export and memory estimates read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import cycle, groupby, islice
from typing import Annotated, Any, Literal

from meshwright.spec.block_pattern import expanded, pattern_mistakes
from meshwright.spec.blocks.adapter import AdapterSpec, target_names
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.block import BlockSpec, SublayerSpec
from meshwright.spec.blocks.feed_forward import FeedForwardSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.moe import MoESpec, RouterScore, RouterSpec
from meshwright.spec.blocks.norm import NormSpec
from meshwright.spec.blocks.part import BlockBody
from meshwright.spec.blocks.positions import LongRopeScaling, Pairs, RopeScaling, RotarySpec, YarnScaling
from meshwright.spec.blocks.table import ParameterSpec, TensorSplit, Value, as_frozen
from meshwright.spec.errors import WrongKey, nearest
from meshwright.spec.fields import Bound, Name, NotNegative, Positive

LATENT_NORM_EPS = 1e-6
"""DeepSeek's norms of latents do not use the model's epsilon."""
BESIDE_LATENTS: dict[str, Any] = {
    "positions": "rope",
    "rope_width": 0,
    "rope_pairs": "halves",
    "longrope": None,
    "query_growth": 0.0,
    "qk_norm": False,
    "qk_norm_rotated": False,
    "bias": False,
    "qkv_bias": False,
    "out_bias": False,
    "parallel_block": False,
    "score_scale": None,
    "score_cap": None,
    "sinks": False,
}
"""Values of keys that latent attention needs, beside as many key/value heads as heads."""
SCALINGS = ("rope_scaling", "yarn", "longrope")
"""Keys of scalings of the rotary frequencies, of which a model, or a kind of layer, has one at most."""
EXPERT_RANKS = 8
"""Adapters of experts have a multiple of this rank: grouped matmuls read rows of 16 bytes."""
SCORE = "head.score"
"""Weight of a head that gives a score."""
MOST_PARAMETERS = 10**15
"""Weights of a model: more exceed the arithmetic of the cost model."""


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """A kind of block (`model.blocks.NAME`): where it differs from the other keys of `model`. A key that is none is the model's."""

    sliding_window: NotNegative | None = None
    """Each token attends to this many tokens, itself included; 0 is full causal attention."""
    positions: Literal["rope", "none"] | None = None
    """Rotary embedding, or no positions in attention."""
    rope_theta: Annotated[float, Bound(more_than=0)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies: Llama 3.1's, or linear."""
    yarn: YarnScaling | None = None
    """YaRN scaling of the rotary frequencies."""
    ffn_hidden: Positive | None = None
    """Width inside the feed-forward network of a dense layer."""
    routed: bool | None = None
    """Whether the layer has the model's experts in place of a dense feed-forward network."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: GPT-2/3, Llama 2/3.x, Qwen2.5, Qwen3, DeepSeek-V2/V3, MegaScale variants, MoE models."""

    family: Annotated[str, Name("family")]
    """Model family, which gives the Hugging Face parameter names and config keys of import and export."""
    layers: Annotated[int, Bound(at_least=1, at_most=1000)]
    """Transformer blocks. The planner times every block of every layout, so their number is limited."""
    hidden: Positive
    """Width of the residual stream."""
    heads: Positive
    """Query heads."""
    kv_heads: Positive
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    head_dim: Positive
    """Width of one head."""
    ffn_hidden: Positive
    """Width inside the feed-forward network of a dense layer."""
    vocab_size: NotNegative = 0
    """Rows of the embedding; 0 takes the tokenizer's size, rounded up to a multiple of 128."""
    max_seq_len: Positive = 2048
    """Longest sequence the model is built for, in tokens."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary embedding, or a learned table added to the token embedding."""
    rope_theta: Annotated[float, Bound(more_than=0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies: Llama 3.1's, or linear."""
    yarn: YarnScaling | None = None
    """YaRN scaling of the rotary frequencies (DeepSeek, OLMo 3, Ministral 3)."""
    longrope: LongRopeScaling | None = None
    """LongRoPE scaling of the rotary frequencies (Phi-3, Phi-4-mini)."""
    rope_width: NotNegative = 0
    """Rotated elements at the start of each query and key head; 0 rotates whole heads."""
    rope_pairs: Pairs = "halves"
    """Elements that are rotated together: i and i + width / 2, or the neighbours 2i and 2i + 1 (GLM-4, Ernie 4.5)."""
    query_growth: Annotated[float, Bound(at_least=0)] = 0.0
    """Growth of queries with their position p: factor 1 + this · log(1 + ⌊p / yarn.original_max_seq_len⌋) (Ministral 3)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the feed-forward network and before the head."""
    norm_eps: Annotated[float, Bound(more_than=0)] = 1e-5
    """Added to the variance before the square root."""
    norm_plus_one: bool = False
    """RMS norms multiply by 1 + weight, and weights start from zero (Gemma)."""
    input_norms: bool = True
    """Norms of the inputs of attention and feed-forward network; false needs `output_norms` (OLMo 2)."""
    output_norms: bool = False
    """Norms of the outputs of attention and feed-forward network too, before they are added (Gemma)."""
    residual_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of the outputs of attention and feed-forward network, before they are added (Granite)."""
    mlp: Literal["swiglu", "geglu", "clamped_swiglu", "gelu"] = "swiglu"
    """Gated SiLU, gated GELU, gpt-oss's clamped gated SiLU, or GELU without a gate; GELU is its tanh approximation."""
    bias: bool = False
    """Biases in every projection (not in the head)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values; `bias` has them too (Qwen2)."""
    out_bias: bool = False
    """A bias of attention's output projection; `bias` has it too (gpt-oss)."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before RoPE (Qwen3)."""
    qk_norm_whole: bool = False
    """`qk_norm` is over all heads of a token together (OLMo 2)."""
    qk_norm_rotated: bool = False
    """`qk_norm` is of heads behind RoPE (Hunyuan)."""
    embedding_scale: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of token embeddings, rounded to their dtype (Gemma: √hidden)."""
    logit_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of the head's input, and so of the logits (Granite)."""
    tied: bool = False
    """The head is the transposed token embedding."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What the head computes of a token: a logit for each row of the vocabulary, or one number, the score of the text up to it. Only
    `preference.loss: reward` trains a score, and sets this key."""
    parallel_block: bool = False
    """Attention and feed-forward network read one norm and are added together (MegaScale §3.1)."""
    score_scale: Annotated[float, Bound(more_than=0)] | None = None
    """Factor of attention scores before the softmax; none is 1 / √head_dim."""
    score_cap: Annotated[float, Bound(more_than=0)] | None = None
    """Attention scores s become cap · tanh(s / cap) before the softmax; none does not cap them (Gemma 2)."""
    logit_cap: Annotated[float, Bound(more_than=0)] | None = None
    """Logits z become cap · tanh(z / cap); none does not cap them (Gemma 2)."""
    sinks: bool = False
    """Each head has a trained score that takes part in every softmax and has no value (gpt-oss)."""
    sliding_window: Positive | None = None
    """Each token attends to this many tokens, itself included; none is full causal attention."""
    experts: NotNegative = 0
    """Routed experts that replace a layer's feed-forward network; a router picks some for each token. 0 is a dense model."""
    experts_per_token: NotNegative = 0
    """Experts that the router picks for each token."""
    expert_hidden: NotNegative = 0
    """Width inside one routed expert."""
    shared_expert_hidden: NotNegative = 0
    """Width inside the shared expert, which every token passes; 0 is none."""
    shared_expert_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid of the token (Qwen2-MoE)."""
    expert_bias: bool = False
    """Biases of the router and of the experts' linear layers (gpt-oss)."""
    normalised_routing: bool = True
    """Weight a token's experts by their scores divided by the sum of those picked; false: by the scores."""
    first_dense_layers: NotNegative = 0
    """Layers at the start that have a dense feed-forward network in place of experts."""
    router: RouterScore = "softmax"
    """Scores of the router. `sigmoid` (DeepSeek-V3) and `biased_softmax` (ERNIE 4.5) pick experts by score plus a bias that balances their
    loads."""
    expert_groups: Positive = 1
    """Groups of experts, of which a token uses `groups_per_token` (DeepSeek)."""
    groups_per_token: Positive = 1
    """Groups that the router picks first: by their best score, or with a bias for the choice by the sum of their two best."""
    routing_scale: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of the experts' weights."""
    kv_rank: NotNegative = 0
    """Width of the latent from which keys and values are computed (multi-head latent attention, DeepSeek); 0 is none."""
    q_rank: NotNegative = 0
    """Width of the latent from which queries are computed; 0 computes them from the residual stream."""
    rope_head_dim: NotNegative = 0
    """Rotated part of `head_dim` in latent attention; all heads share this part of the key."""
    value_head_dim: NotNegative = 0
    """Width of a value head in latent attention."""
    prediction_depth: Annotated[int, Bound(at_least=0, at_most=16)] = 0
    """Modules after the last block, of which the k-th predicts the token k + 1 ahead (multi-token prediction, DeepSeek-V3)."""
    init_std: Annotated[float, Bound(more_than=0)] = 0.02
    """Standard deviation of initial weights; projections back into the residual stream use it / √(2·layers)."""
    blocks: dict[str, KindSpec] = field(default_factory=dict)
    """Kinds of blocks by name, of a model whose layers differ. A kind has the keys above where it does not set its own."""
    pattern: tuple[str, ...] = ()
    """Kinds of the layers in order, repeated and cut at `layers`: `[5*local, global]`."""
    first: tuple[str, ...] = ()
    """Kinds of the first layers, before `pattern`."""
    sequence: tuple[str, ...] = ()
    """Kinds of all layers, in place of `pattern`."""
    adapter: AdapterSpec | None = None
    """Low-rank adapters of linear layers. A run with them trains only them; all other weights stay as they are."""

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields without what is cached: another process hashes texts otherwise."""
        return {key.name: getattr(self, key.name) for key in fields(self)}

    @cached_property
    def _hash(self) -> int:
        """The planner's caches look a spec up for every layout, so its hash is computed once."""
        values = [
            tuple(value.items()) if isinstance(value := getattr(self, key.name), dict) else value
            for key in fields(self)
        ]
        return hash(tuple(values))

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """For each layer the number of its block among `block_kinds`."""
        return _kinds(self)[1]

    @cached_property
    def block_kinds(self) -> tuple[BlockSpec, ...]:
        """The distinct blocks, in the order in which layers first have them."""
        return _kinds(self)[0]

    def kind(self, layer: int) -> int:
        """The number of a layer's block among `block_kinds`; blocks of prediction modules, from `layers` on, equal the last layer's."""
        return self.layer_kinds[min(layer, self.layers - 1)]

    def block(self, layer: int) -> BlockSpec:
        """The block of a layer, or of a prediction module as in `kind`."""
        return self.block_kinds[self.kind(layer)]

    def routed(self, layer: int) -> bool:
        """Whether block `layer` has experts in place of a dense feed-forward network; prediction modules as in `kind`."""
        return self.block(layer).moe is not None

    @property
    def routed_layers(self) -> int:
        """Layers with experts, without prediction modules."""
        return sum(map(self.routed, range(self.layers)))

    @property
    def embedding_at_both_ends(self) -> bool:
        """Whether the last stage uses the token embedding too: as a tied head, or in prediction modules."""
        return self.tied or self.prediction_depth > 0

    @property
    def outputs(self) -> int:
        """Numbers that the head computes of a token."""
        return 1 if self.head == "score" else self.vocab_size

    @property
    def residual_norm(self) -> NormSpec:
        """The norms of the residual stream."""
        return NormSpec(kind=self.norm, eps=self.norm_eps, plus_one=self.norm_plus_one)

    @property
    def windowed(self) -> bool:
        """Whether some layers attend to a window."""
        return any(block.mixer.window is not None for block in self.block_kinds)

    @cached_property
    def dense_widths(self) -> dict[str, int]:
        """Widths inside the feed-forward networks of dense layers by their keys, those of kinds among them."""
        kinds = {f"blocks.{name}.ffn_hidden": kind.ffn_hidden for name, kind in self.blocks.items()}
        return {"ffn_hidden": self.ffn_hidden, **{key: width for key, width in kinds.items() if width}}

    @property
    def value_width(self) -> int:
        """Width of the values, and of attention's output, over all query heads."""
        return self.heads * (self.value_head_dim if self.kv_rank else self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return self.rope_head_dim if self.kv_rank else self.rope_width or self.head_dim


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal blocks of a model."""

    block: BlockSpec
    first: int
    """Layer of the first of them."""
    count: int


@lru_cache(maxsize=64)  # the planner asks for every layout
def sequence(spec: ModelSpec) -> tuple[BlockRun, ...]:
    """The blocks of a model in order, as runs of equal ones."""
    runs = ((kind, list(layers)) for kind, layers in groupby(range(spec.layers), spec.kind))
    return tuple(BlockRun(spec.block_kinds[kind], layers[0], len(layers)) for kind, layers in runs)


def _kinds(spec: ModelSpec) -> tuple[tuple[BlockSpec, ...], tuple[int, ...]]:
    """The distinct blocks of a model, and for each layer the number of its block."""
    keys = [(name, layer >= spec.first_dense_layers) for layer, name in enumerate(kind_names(spec))]
    of_key = {key: block_of(spec, *key) for key in dict.fromkeys(keys)}
    numbers = {block: number for number, block in enumerate(dict.fromkeys(of_key.values()))}
    return tuple(numbers), tuple(numbers[of_key[key]] for key in keys)


def kind_names(spec: ModelSpec) -> tuple[str, ...]:
    """The name of each layer's kind, as the keys describe it; empty names for a model without kinds."""
    repeated = cycle(expanded(spec.pattern) or ("",))
    return (*expanded(spec.sequence or spec.first), *islice(repeated, spec.layers))[: spec.layers]


def layer_order(spec: ModelSpec) -> str:
    """The order of a model's kinds of layers on one line, `layers: 5*local, global, repeated`; empty if all are described alike."""
    if not spec.blocks:
        return ""
    first = ", ".join(spec.sequence or spec.first)
    pattern = ", ".join(spec.pattern)
    then = "then " if first else ""
    parts = [first, f"{then}{pattern}, repeated" if pattern else ""]
    return "layers: " + ", ".join(filter(None, parts))


def block_of(spec: ModelSpec, name: str = "", routed: bool = True) -> BlockSpec:
    """The block of the kind `name`; it has no experts if not `routed`, or if model or kind have none."""
    kind = spec.blocks.get(name, KindSpec())
    spec = _with_keys(spec, kind)
    norm = spec.residual_norm
    mixer = latent_attention_of(spec) if spec.kv_rank else attention_of(spec)
    has_experts = routed and spec.experts > 0 and kind.routed is not False
    feed_forward = moe_of(spec) if has_experts else feed_forward_of(spec, spec.ffn_hidden)
    norm_in = norm if spec.input_norms else None
    norm_out = norm if spec.output_norms else None
    bodies = ((mixer, feed_forward),) if spec.parallel_block else ((mixer,), (feed_forward,))
    return BlockSpec(
        hidden=spec.hidden,
        sublayers=tuple(
            SublayerSpec(norm=norm_in, bodies=added, norm_out=norm_out, factor=spec.residual_factor) for added in bodies
        ),
        std=spec.init_std,
        residual_std=spec.init_std / math.sqrt(2 * spec.layers),
        adapter=spec.adapter,
    )


def _with_keys(spec: ModelSpec, kind: KindSpec) -> ModelSpec:
    """The model with the keys that a kind sets."""
    keys = {key.name: getattr(kind, key.name) for key in fields(kind) if key.name != "routed"}
    given: dict[str, Any] = {name: value for name, value in keys.items() if value is not None}
    if "sliding_window" in given:
        given["sliding_window"] = given["sliding_window"] or None
    if any(scaling in given for scaling in SCALINGS):
        given = {**dict.fromkeys(SCALINGS), **given}  # a kind's scaling replaces the model's, of any form
    return replace(spec, **given) if given else spec


def described_bodies(spec: ModelSpec) -> tuple[BlockBody, ...]:
    """Every mixer and feed-forward network that the flat keys describe, whether a layer has it or not."""
    flat = (*block_of(spec, routed=False).bodies, *((moe_of(spec),) if spec.experts else ()))
    return tuple(dict.fromkeys((*flat, *(body for block in spec.block_kinds for body in block.bodies))))


def _layer_mistakes(spec: ModelSpec) -> Iterator[WrongKey]:
    """What is wrong between keys of layers."""
    routed = [spec.routed(layer) for layer in range(spec.layers)]
    if routed != sorted(routed):
        yield WrongKey("pattern", "dense layers behind experts", "dense layers before those with experts")
    if spec.experts and not spec.expert_hidden:
        yield WrongKey("expert_hidden", "0", "the width inside one expert", str(spec.ffn_hidden))
    if spec.norm_plus_one and spec.norm != "rmsnorm":
        yield WrongKey("norm_plus_one", "true", f"false with norm: {spec.norm}")
    for key, usual in (("output_norms", False), ("input_norms", True), ("residual_factor", 1.0)):
        if spec.parallel_block and getattr(spec, key) != usual:
            yield WrongKey(key, str(getattr(spec, key)).lower(), f"{str(usual).lower()} with parallel_block")
    if not spec.input_norms and not spec.output_norms:
        yield WrongKey("input_norms", "false", "true without output_norms")
    if spec.qk_norm_whole and not spec.qk_norm:
        yield WrongKey("qk_norm_whole", "true", "false without qk_norm")
    if spec.qk_norm_rotated and (not spec.qk_norm or spec.qk_norm_whole):
        yield WrongKey("qk_norm_rotated", "true", "false without qk_norm, or with qk_norm_whole")
    for key in ("tied", "prediction_depth") if spec.head == "score" else ():
        if value := getattr(spec, key):
            yield WrongKey(key, str(value).lower(), f"{str(type(value)(0)).lower()} with head: score")
    if len(scalings := [key for key in SCALINGS if getattr(spec, key) is not None]) > 1:
        yield WrongKey(scalings[1], "a section", f"none beside {scalings[0]}: a model has one scaling")
    if spec.mlp == "clamped_swiglu" and (not all(routed) or spec.shared_expert_hidden):
        yield WrongKey("mlp", "clamped_swiglu", "swiglu, unless every layer has experts, and none a shared one")
    for key, needed in (("expert_bias", "experts"), ("shared_expert_gate", "shared_expert_hidden")):
        if getattr(spec, key) and not getattr(spec, needed):
            yield WrongKey(key, "true", f"false, as model.{needed} is 0")
    for name, kind in spec.blocks.items():
        if kind.routed and not spec.experts:
            yield WrongKey(f"blocks.{name}.routed", "true", "false or none, as model.experts is 0")
        if kind.positions == "none" and spec.kv_rank:
            yield WrongKey(f"blocks.{name}.positions", "none", "rope with kv_rank (latent attention)")
        if kind.rope_scaling is not None and kind.yarn is not None:
            yield WrongKey(f"blocks.{name}.yarn", "a section", "none beside rope_scaling: a kind has one scaling")


def unusable_keys(spec: ModelSpec) -> Iterator[WrongKey]:
    """What is wrong with keys that no body of the model has: of experts, of latent attention, or beside it."""
    yield from pattern_mistakes(spec.layers, tuple(spec.blocks), spec.pattern, spec.first, spec.sequence)
    yield from _layer_mistakes(spec)
    yield from _adapter_mistakes(spec)
    if not spec.experts:
        yield from moe_of(spec).router.mistakes(spec.experts, spec.experts_per_token)
    if not spec.kv_rank:
        for name in ("q_rank", "rope_head_dim", "value_head_dim"):
            if value := getattr(spec, name):
                yield WrongKey(name, str(value), "0, as model.kv_rank is 0: no latent attention", "0")
        return
    for name, value in {"kv_heads": spec.heads, **BESIDE_LATENTS}.items():
        if getattr(spec, name) != value:
            found, needed = (str(one).lower() for one in (getattr(spec, name), value))
            yield WrongKey(name, found, f"{needed}, as model.kv_rank is {spec.kv_rank}: latent attention", needed)


def _adapter_mistakes(spec: ModelSpec) -> Iterator[WrongKey]:
    """What is wrong with the targets of adapters."""
    if spec.adapter is None:
        return
    known = adapter_targets(spec)
    for target in spec.adapter.targets:
        if target not in known:
            yield WrongKey("adapter.targets", target, ", ".join(known), nearest(target, known))
    if both := [name for name in spec.adapter.targets if name.rpartition(".")[0] in spec.adapter.targets]:
        found = f"{both[0]} and the whole layer {both[0].rpartition('.')[0]}"
        yield WrongKey("adapter.targets", found, "one of them")
    if spec.adapter.experts:
        if not spec.experts:
            yield WrongKey("adapter.experts", "true", "false, as model.experts is 0", "false")
        if spec.adapter.kind == "dora":
            yield WrongKey("adapter.kind", "dora", "lora or rslora with adapter.experts", "lora")
        if rest := spec.adapter.rank % EXPERT_RANKS:
            near = str(spec.adapter.rank + EXPERT_RANKS - rest)
            expected = f"a multiple of {EXPERT_RANKS} with adapter.experts"
            yield WrongKey("adapter.rank", str(spec.adapter.rank), expected, near)
    if spec.prediction_depth:
        yield WrongKey("prediction_depth", str(spec.prediction_depth), "0 with adapters", "0")


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """Attention with keys and values by head, as the flat keys describe it."""
    rotary = RotarySpec(
        width=spec.rotary_dim,
        base=spec.rope_theta,
        scaling=spec.yarn or spec.rope_scaling or spec.longrope,
        pairs=spec.rope_pairs,
        query_growth=spec.query_growth,
    )
    return AttentionSpec(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rotary=rotary if spec.positions == "rope" else None,
        window=spec.sliding_window,
        qk_norm=NormSpec(eps=spec.norm_eps, plus_one=spec.norm_plus_one) if spec.qk_norm else None,
        whole_norm=spec.qk_norm_whole,
        rotated_norm=spec.qk_norm_rotated,
        score_scale=spec.score_scale,
        score_cap=spec.score_cap,
        sinks=spec.sinks,
        qkv_bias=spec.bias or spec.qkv_bias,
        out_bias=spec.bias or spec.out_bias,
    )


def latent_attention_of(spec: ModelSpec) -> LatentAttentionSpec:
    """Latent attention, as the flat keys describe it."""
    return LatentAttentionSpec(
        heads=spec.heads,
        head_dim=spec.head_dim,
        rotary=RotarySpec(
            width=spec.rope_head_dim,
            base=spec.rope_theta,
            scaling=spec.yarn or spec.rope_scaling,
            pairs="neighbours",
        ),
        value_head_dim=spec.value_head_dim,
        kv_rank=spec.kv_rank,
        latent_norm=NormSpec(eps=LATENT_NORM_EPS),
        q_rank=spec.q_rank,
        window=spec.sliding_window,
    )


def feed_forward_of(spec: ModelSpec, width: int, *, bias: bool | None = None) -> FeedForwardSpec:
    """A feed-forward network of a width; its biases are the model's unless `bias` says otherwise."""
    return FeedForwardSpec(width=width, activation=spec.mlp, bias=spec.bias if bias is None else bias)


def moe_of(spec: ModelSpec) -> MoESpec:
    """The MoE layer, as the flat keys describe it."""
    router = RouterSpec(
        score=spec.router,
        normalised=spec.normalised_routing,
        groups=spec.expert_groups,
        groups_per_token=spec.groups_per_token,
        scale=spec.routing_scale,
        bias=spec.expert_bias,
    )
    return MoESpec(
        experts=spec.experts,
        per_token=spec.experts_per_token,
        expert=feed_forward_of(spec, spec.expert_hidden, bias=spec.expert_bias),
        router=router,
        shared=feed_forward_of(spec, spec.shared_expert_hidden) if spec.shared_expert_hidden else None,
        shared_gate=spec.shared_expert_gate,
    )


@lru_cache(maxsize=64)  # the planner calls it for every layout
def parameters(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Every weight of the model in the order the module registers them; a tied head is not listed.

    A score's weight is trained beside adapters too: it is new.
    """
    weights = [_matrix("embed.weight", spec.vocab_size, spec.hidden, spec.init_std, "rows")]
    if spec.positions == "learned":
        weights.append(_matrix("positions.weight", spec.max_seq_len, spec.hidden, spec.init_std))
    for layer in range(spec.layers):
        weights.extend(layer_parameters(spec, layer))
    weights.extend(_norm(spec, "norm"))
    if spec.head == "score":
        # So a score's deviation is 1 where the norm's weights are 1 (Stiennon et al. 2020).
        weights.append(_matrix(SCORE, 1, spec.hidden, 1 / math.sqrt(spec.hidden + 1)))
    elif not spec.tied:
        weights.append(_matrix("head.weight", spec.vocab_size, spec.hidden, spec.init_std, "rows"))
    for depth in range(spec.prediction_depth):
        weights.extend(prediction_parameters(spec, depth))
    if spec.adapter is not None:
        weights = [weight if weight.adapter or weight.name == SCORE else as_frozen(weight) for weight in weights]
    return tuple(weights)


@lru_cache(maxsize=64)
def block_parameters(spec: ModelSpec, kind: int) -> tuple[ParameterSpec, ...]:
    """Every weight of the first block of a kind; other blocks of the kind differ in names only."""
    return tuple(_named(f"layers.{spec.layer_kinds.index(kind)}", spec.block_kinds[kind]))


@lru_cache(maxsize=64)
def end_parameters(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Every weight of the embedding, the final norm, the head and the prediction modules."""
    return tuple(parameter for parameter in parameters(spec) if not parameter.name.startswith("layers."))


def layer_parameters(spec: ModelSpec, layer: int) -> Iterator[ParameterSpec]:
    """The weights of block `layer`, in registration order."""
    return _named(f"layers.{layer}", spec.block(layer))


def prediction_parameters(spec: ModelSpec, depth: int) -> Iterator[ParameterSpec]:
    """The weights of prediction module `depth`, from 0, in registration order; embedding and head are the model's."""
    prefix = f"predictions.{depth}"
    yield from _norm(spec, f"{prefix}.token_norm")
    yield from _norm(spec, f"{prefix}.hidden_norm")
    yield _matrix(f"{prefix}.project.weight", spec.hidden, 2 * spec.hidden, spec.init_std)
    yield from _named(f"{prefix}.block", spec.block(spec.layers))
    yield from _norm(spec, f"{prefix}.norm")


def _named(prefix: str, block: BlockSpec) -> Iterator[ParameterSpec]:
    """The weights of a block, with their names in the model."""
    return (replace(weight, name=f"{prefix}.{weight.name}") for weight in block.table().weights)


def parameter_count(spec: ModelSpec) -> int:
    """Stored weights; a tied head counts once."""
    return sum(parameter.count for parameter in parameters(spec))


def active_parameter_count(spec: ModelSpec) -> int:
    """Weights used for one token: of the routed experts, those that the router picks."""
    return sum(_active(spec, parameter) for parameter in parameters(spec))


@lru_cache(maxsize=64)  # a search asks for it with every plan
def trained_parameter_count(spec: ModelSpec) -> int:
    """Weights that a run trains: all, or those of its adapters and of a score."""
    return sum(parameter.count for parameter in parameters(spec) if not parameter.frozen)


def without_adapter(spec: ModelSpec) -> ModelSpec:
    """The model without its adapters: the same base."""
    return spec if spec.adapter is None else replace(spec, adapter=None)


def with_score(spec: ModelSpec) -> ModelSpec:
    """The model with a head that gives a score."""
    return replace(spec, head="score", tied=False)


def adapter_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Our names of the linear layers that can have an adapter, and of their fused parts."""
    tables = (block.table() for block in without_adapter(spec).block_kinds)
    return tuple(dict.fromkeys(name for table in tables for name in target_names(table.operations)))


def prediction_parameter_count(spec: ModelSpec) -> int:
    """Weights of the prediction modules, without the embedding and the head that they share with the model."""
    return sum(parameter.count for parameter in parameters(spec) if parameter.predicts)


@lru_cache(maxsize=64)
def flops_per_token(spec: ModelSpec, seq_len: int, *, causal: bool) -> float:
    """Training FLOPs (forward and backward) per token at `seq_len`.

    6 per weight of every matmul (the head counts also when tied, embedding look-ups do not; of routed experts
    those used for a token) plus attention scores and values: 6·layers·(heads·head_dim + value width)·length. `causal=False` counts the
    full square as torchtitan does; `causal=True` counts the unmasked half, as Megatron does. A frozen weight counts 4: its gradient is not
    computed. Norms, RoPE and
    activations are not counted. A prediction module counts as a layer, its projection and another use of the head.
    """
    predicting = (BlockRun(spec.block(spec.layers), spec.layers, spec.prediction_depth),)
    runs = (*sequence(spec), *(predicting if spec.prediction_depth else ()))
    blocks = sum(run.count * block_flops_per_token(run.block, seq_len, causal=causal) for run in runs)
    matmul = spec.prediction_depth * 2 * spec.hidden * spec.hidden
    matmul += (1 + spec.prediction_depth) * spec.outputs * spec.hidden
    return blocks + (6.0 if spec.adapter is None or spec.head == "score" else 4.0) * matmul


def block_flops_per_token(block: BlockSpec, seq_len: int, *, causal: bool) -> float:
    """`flops_per_token` of one block."""
    table = block.table()
    attention = sum(
        op.heads * (op.key_dim + op.value_dim) * mean_span(op.window, seq_len, causal) for op in table.attends
    )
    weights = (4.0 if table.frozen else 6.0) * table.multiplications
    return weights + 6.0 * (table.adapter_multiplications + attention)


def _active(spec: ModelSpec, parameter: ParameterSpec) -> int:
    if not parameter.expert:
        return parameter.count
    return parameter.count * spec.experts_per_token // spec.experts


def mean_span(window: int | None, seq_len: int, causal: bool) -> float:
    """Mean number of positions a token attends to, itself included, with at most `window` of them."""
    window = min(window or seq_len, seq_len)
    if not causal:
        return float(window)
    return window - window * window / (2.0 * seq_len)


def _matrix(name: str, out: int, inputs: int, std: float, split: TensorSplit = "whole") -> ParameterSpec:
    return ParameterSpec(name, (out, inputs), "normal", std, split=split)


def _norm(spec: ModelSpec, name: str) -> Iterator[ParameterSpec]:
    """The weights of a norm of the residual stream outside of blocks."""
    return spec.residual_norm.operation(name, "x", Value(name, spec.hidden), spec.hidden).weights()
