"""The dimensions of a decoder, the table of its parameters, and numbers that follow from them.

`parameters(spec)` is the only table of a model's weights. A test compares the modules of `models/` with it. Initial
values, weight decay, sharding, import and export of Hugging Face folders, and memory estimates read it.
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
"""Epsilon of the norms of latents: DeepSeek does not use the model's own epsilon there."""
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
"""Values that other keys must have with latent attention. In addition, `kv_heads` must equal `heads`."""
SCALINGS = ("rope_scaling", "yarn", "longrope")
"""Keys of scalings of the rotary frequencies. A model, and each kind of layer, has at most one of them."""
EXPERT_RANKS = 8
"""The rank of adapters of experts is a multiple of this, because grouped matmuls read rows of 16 bytes."""
SCORE = "head.score"
"""Name of the weight of a head that gives a score."""
MOST_PARAMETERS = 10**15
"""Largest number of weights of a model. With more, numbers of the cost model would overflow."""


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """A kind of block (`model.blocks.NAME`): the keys in which it differs from the other keys of `model`.

    A key that is none is the model's.
    """

    sliding_window: NotNegative | None = None
    """Each token attends to at most this many tokens, itself included; 0 is full causal attention."""
    positions: Literal["rope", "none"] | None = None
    """Rotary embedding, or attention without positions."""
    rope_theta: Annotated[float, Bound(more_than=0)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies: Llama 3.1's, or linear."""
    yarn: YarnScaling | None = None
    """YaRN scaling of the rotary frequencies."""
    ffn_hidden: Positive | None = None
    """Inner width of the feed-forward network of a dense layer."""
    routed: bool | None = None
    """Whether the layer has the model's experts instead of a dense feed-forward network."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: GPT-2/3, Llama 2/3.x, Qwen2.5, Qwen3, DeepSeek-V2/V3, MegaScale variants, MoE models."""

    family: Annotated[str, Name("family")]
    """Model family, which decides parameter names and config keys of Hugging Face folders for import and export."""
    layers: Annotated[int, Bound(at_least=1, at_most=1000)]
    """Number of transformer blocks. It is limited, because the planner times every block of every layout."""
    hidden: Positive
    """Width of the residual stream."""
    heads: Positive
    """Number of query heads."""
    kv_heads: Positive
    """Number of key heads, and of value heads; fewer than `heads` is grouped-query attention."""
    head_dim: Positive
    """Width of one head."""
    ffn_hidden: Positive
    """Inner width of the feed-forward network of a dense layer."""
    vocab_size: NotNegative = 0
    """Rows of the embedding; 0 is the tokenizer's size, rounded up to a multiple of 128."""
    max_seq_len: Positive = 2048
    """Longest sequence for which the model is built, in tokens."""
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
    """Number of elements at the start of each query and key head that are rotated; 0 rotates whole heads."""
    rope_pairs: Pairs = "halves"
    """Which elements are rotated together: i and i + width / 2 (halves), or 2i and 2i + 1 (neighbours; GLM-4, Ernie
    4.5).
    """
    query_growth: Annotated[float, Bound(at_least=0)] = 0.0
    """Growth of queries with their position p: they are multiplied by 1 + this · log(1 + ⌊p /
    yarn.original_max_seq_len⌋) (Ministral 3).
    """
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the feed-forward network and before the head."""
    norm_eps: Annotated[float, Bound(more_than=0)] = 1e-5
    """Added to the variance before the square root."""
    norm_plus_one: bool = False
    """RMSNorm multiplies by 1 + weight, and weights start from zero (Gemma)."""
    input_norms: bool = True
    """Whether the inputs of attention and feed-forward network are normed; false needs `output_norms` (OLMo 2)."""
    output_norms: bool = False
    """Whether the outputs of attention and feed-forward network are normed before they are added (Gemma)."""
    residual_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of the outputs of attention and feed-forward network before they are added (Granite)."""
    mlp: Literal["swiglu", "geglu", "clamped_swiglu", "gelu"] = "swiglu"
    """Gated SiLU, gated GELU, gpt-oss's clamped gated SiLU, or GELU without a gate; GELU is its tanh approximation."""
    bias: bool = False
    """Biases in every projection (not in the head)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, which `bias` also has (Qwen2)."""
    out_bias: bool = False
    """A bias of attention's output projection, which `bias` also has (gpt-oss)."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before RoPE (Qwen3)."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` is over all heads of a token together (OLMo 2)."""
    qk_norm_rotated: bool = False
    """Whether `qk_norm` comes after RoPE, not before it (Hunyuan)."""
    embedding_scale: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of token embeddings, rounded to their dtype (Gemma: √hidden)."""
    logit_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of the head's input, and so of the logits (Granite)."""
    tied: bool = False
    """Whether the head's weight is the token embedding."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What the head computes for a token: a logit for each row of the vocabulary, or one number, the score of the text
    up to this token. Only `preference.loss: reward` trains a score, and sets this key.
    """
    parallel_block: bool = False
    """Whether attention and feed-forward network read the same norm and are added together (MegaScale §3.1)."""
    score_scale: Annotated[float, Bound(more_than=0)] | None = None
    """Factor of attention scores before the softmax; none is 1 / √head_dim."""
    score_cap: Annotated[float, Bound(more_than=0)] | None = None
    """Attention scores s become cap · tanh(s / cap) before the softmax; none does not cap them (Gemma 2)."""
    logit_cap: Annotated[float, Bound(more_than=0)] | None = None
    """Logits z become cap · tanh(z / cap); none does not cap them (Gemma 2)."""
    sinks: bool = False
    """Whether each head has a trained score that takes part in every softmax and has no value (gpt-oss)."""
    sliding_window: Positive | None = None
    """Each token attends to at most this many tokens, itself included; none is full causal attention."""
    experts: NotNegative = 0
    """Number of routed experts of a layer, which replace its feed-forward network.

    A router chooses some of them for each token. 0 is a dense model.
    """
    experts_per_token: NotNegative = 0
    """Number of experts that the router chooses for each token."""
    expert_hidden: NotNegative = 0
    """Inner width of one routed expert."""
    shared_expert_hidden: NotNegative = 0
    """Inner width of the shared expert, which computes every token; 0 is no shared expert."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid that depends on the token (Qwen2-MoE)."""
    expert_bias: bool = False
    """Biases of the router and of the experts' linear layers (gpt-oss)."""
    normalised_routing: bool = True
    """Whether the weights of a token's experts are their scores divided by the sum of the chosen scores; otherwise they
    are the scores.
    """
    first_dense_layers: NotNegative = 0
    """Number of layers at the start that have a dense feed-forward network instead of experts."""
    router: RouterScore = "softmax"
    """Scores of the router.

    `sigmoid` (DeepSeek-V3) and `biased_softmax` (ERNIE 4.5) choose experts by score plus a bias, which balances their
    loads.
    """
    expert_groups: Positive = 1
    """Number of groups of experts. The experts of a token are in `groups_per_token` of them (DeepSeek)."""
    groups_per_token: Positive = 1
    """Number of groups that the router chooses first: by their best score, or if the choice has a bias by the sum of
    their two best scores.
    """
    routing_scale: Annotated[float, Bound(more_than=0)] = 1.0
    """Factor of the experts' weights."""
    kv_rank: NotNegative = 0
    """Width of the latent from which keys and values are computed (multi-head latent attention, DeepSeek); 0 is other
    attention.
    """
    q_rank: NotNegative = 0
    """Width of the latent from which queries are computed; 0 computes them from the residual stream."""
    rope_head_dim: NotNegative = 0
    """Rotated part of `head_dim` in latent attention; all heads share this part of the key."""
    value_head_dim: NotNegative = 0
    """Width of a value head in latent attention."""
    prediction_depth: Annotated[int, Bound(at_least=0, at_most=16)] = 0
    """Number of modules after the last block.

    Module k predicts the token k + 1 positions ahead (multi-token prediction, DeepSeek-V3).
    """
    init_std: Annotated[float, Bound(more_than=0)] = 0.02
    """Standard deviation of initial weights; projections back into the residual stream use it / √(2·layers)."""
    blocks: dict[str, KindSpec] = field(default_factory=dict)
    """Kinds of blocks by name, for a model whose layers differ. A kind has the keys above unless it sets its own."""
    pattern: tuple[str, ...] = ()
    """Kinds of the layers in order, repeated and cut at `layers`: `[5*local, global]`."""
    first: tuple[str, ...] = ()
    """Kinds of the first layers, before `pattern`."""
    sequence: tuple[str, ...] = ()
    """Kinds of all layers, instead of `pattern`."""
    adapter: AdapterSpec | None = None
    """Low-rank adapters of linear layers. A run with adapters trains only them; all other weights do not change."""

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the cached values, because the hash of a text differs in another process."""
        return {key.name: getattr(self, key.name) for key in fields(self)}

    @cached_property
    def _hash(self) -> int:
        """Return the hash. It is computed once, because the planner's caches look up a model for every layout."""
        values = [
            tuple(value.items()) if isinstance(value := getattr(self, key.name), dict) else value
            for key in fields(self)
        ]
        return hash(tuple(values))

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """Return for each layer the index of its block in `block_kinds`."""
        return _kinds(self)[1]

    @cached_property
    def block_kinds(self) -> tuple[BlockSpec, ...]:
        """Return the different blocks, in the order in which layers first have them."""
        return _kinds(self)[0]

    def kind(self, layer: int) -> int:
        """Return the index of a layer's block in `block_kinds`.

        Prediction modules have the numbers from `layers` on; their block is the block of the last layer.
        """
        return self.layer_kinds[min(layer, self.layers - 1)]

    def block(self, layer: int) -> BlockSpec:
        """Return the block of a layer, or of a prediction module as in `kind`."""
        return self.block_kinds[self.kind(layer)]

    def routed(self, layer: int) -> bool:
        """Return whether block `layer` has experts instead of a dense feed-forward network.

        Prediction modules are numbered as in `kind`.
        """
        return self.block(layer).moe is not None

    @property
    def routed_layers(self) -> int:
        """Return the number of layers with experts, without prediction modules."""
        return sum(map(self.routed, range(self.layers)))

    @property
    def embedding_at_both_ends(self) -> bool:
        """Return whether the last pipeline stage also uses the token embedding: as a tied head, or in prediction
        modules.
        """
        return self.tied or self.prediction_depth > 0

    @property
    def outputs(self) -> int:
        """Return how many numbers the head computes for a token."""
        return 1 if self.head == "score" else self.vocab_size

    @property
    def residual_norm(self) -> NormSpec:
        """Return the norm of the residual stream."""
        return NormSpec(kind=self.norm, eps=self.norm_eps, plus_one=self.norm_plus_one)

    @property
    def windowed(self) -> bool:
        """Return whether some layers attend to a window."""
        return any(block.mixer.window is not None for block in self.block_kinds)

    @cached_property
    def dense_widths(self) -> dict[str, int]:
        """Return the inner widths of the feed-forward networks of dense layers by their keys, also of kinds."""
        kinds = {f"blocks.{name}.ffn_hidden": kind.ffn_hidden for name, kind in self.blocks.items()}
        return {"ffn_hidden": self.ffn_hidden, **{key: width for key, width in kinds.items() if width}}

    @property
    def value_width(self) -> int:
        """Return the width of attention's output: the values of all query heads."""
        return self.heads * (self.value_head_dim if self.kv_rank else self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Return the width of the rotated part of a head."""
        return self.rope_head_dim if self.kv_rank else self.rope_width or self.head_dim


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal blocks of a model."""

    block: BlockSpec
    """Each of the blocks."""
    first: int
    """Number of the layer of the first of them."""
    count: int
    """Number of blocks."""


@lru_cache(maxsize=64)  # cached, because the planner asks for every layout
def sequence(spec: ModelSpec) -> tuple[BlockRun, ...]:
    """Return the blocks of a model in order; consecutive equal blocks are one entry."""
    runs = ((kind, list(layers)) for kind, layers in groupby(range(spec.layers), spec.kind))
    return tuple(BlockRun(spec.block_kinds[kind], layers[0], len(layers)) for kind, layers in runs)


def _kinds(spec: ModelSpec) -> tuple[tuple[BlockSpec, ...], tuple[int, ...]]:
    """Return the different blocks of a model, and for each layer the index of its block."""
    keys = [(name, layer >= spec.first_dense_layers) for layer, name in enumerate(kind_names(spec))]
    of_key = {key: block_of(spec, *key) for key in dict.fromkeys(keys)}
    numbers = {block: number for number, block in enumerate(dict.fromkeys(of_key.values()))}
    return tuple(numbers), tuple(numbers[of_key[key]] for key in keys)


def kind_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the name of each layer's kind, as the keys describe it; empty names for a model without kinds."""
    repeated = cycle(expanded(spec.pattern) or ("",))
    return (*expanded(spec.sequence or spec.first), *islice(repeated, spec.layers))[: spec.layers]


def layer_order(spec: ModelSpec) -> str:
    """Return the order of a model's kinds of layers on one line: `layers: 5*local, global, repeated`.

    It is empty without kinds.
    """
    if not spec.blocks:
        return ""
    first = ", ".join(spec.sequence or spec.first)
    pattern = ", ".join(spec.pattern)
    then = "then " if first else ""
    parts = [first, f"{then}{pattern}, repeated" if pattern else ""]
    return "layers: " + ", ".join(filter(None, parts))


def block_of(spec: ModelSpec, name: str = "", routed: bool = True) -> BlockSpec:
    """Return the block of the kind `name`.

    It has experts if `routed` is true and both the model and the kind have experts.
    """
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
    """Return the model with the keys that a kind sets."""
    keys = {key.name: getattr(kind, key.name) for key in fields(kind) if key.name != "routed"}
    given: dict[str, Any] = {name: value for name, value in keys.items() if value is not None}
    if "sliding_window" in given:
        given["sliding_window"] = given["sliding_window"] or None
    if any(scaling in given for scaling in SCALINGS):
        given = {**dict.fromkeys(SCALINGS), **given}  # a scaling of a kind replaces any scaling of the model
    return replace(spec, **given) if given else spec


def described_bodies(spec: ModelSpec) -> tuple[BlockBody, ...]:
    """Return every mixer and feed-forward network that the keys describe, whether a layer has it or not."""
    flat = (*block_of(spec, routed=False).bodies, *((moe_of(spec),) if spec.experts else ()))
    return tuple(dict.fromkeys((*flat, *(body for block in spec.block_kinds for body in block.bodies))))


def _layer_mistakes(spec: ModelSpec) -> Iterator[WrongKey]:
    """Yield what is wrong between keys of layers."""
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
    for key in ("tied", "prediction_depth"):
        if spec.head == "score" and (value := getattr(spec, key)):
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
    """Yield what is wrong with keys that do not belong to one body of the model.

    These are the order of layers, keys of experts or of latent attention in a model without them, and keys that latent
    attention excludes.
    """
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
    """Yield what is wrong with the adapters."""
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
    """Return attention with keys and values for each head, as the keys describe it."""
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
    """Return latent attention, as the keys describe it."""
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
    """Return a feed-forward network with inner width `width`.

    Whether it has biases is the model's choice, unless `bias` is given.
    """
    return FeedForwardSpec(width=width, activation=spec.mlp, bias=spec.bias if bias is None else bias)


def moe_of(spec: ModelSpec) -> MoESpec:
    """Return the MoE layer, as the keys describe it."""
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


@lru_cache(maxsize=64)  # cached, because the planner asks for every layout
def parameters(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Return all weights of the model in the order in which its modules register them. A tied head is not among them.

    With adapters, only they are trained, and the weight of a score, because it is new.
    """
    weights = [_matrix("embed.weight", spec.vocab_size, spec.hidden, spec.init_std, "rows")]
    if spec.positions == "learned":
        weights.append(_matrix("positions.weight", spec.max_seq_len, spec.hidden, spec.init_std))
    for layer in range(spec.layers):
        weights.extend(layer_parameters(spec, layer))
    weights.extend(_norm(spec, "norm"))
    if spec.head == "score":
        # With this deviation, scores have a standard deviation of 1 if the norm's weights are 1 (Stiennon et al.
        # 2020).
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
    """Return all weights of the first block of a kind.

    Other blocks of the kind differ only in the names of their weights.
    """
    return tuple(_named(f"layers.{spec.layer_kinds.index(kind)}", spec.block_kinds[kind]))


@lru_cache(maxsize=64)
def end_parameters(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Return all weights of the embedding, the final norm, the head and the prediction modules."""
    return tuple(parameter for parameter in parameters(spec) if not parameter.name.startswith("layers."))


def layer_parameters(spec: ModelSpec, layer: int) -> Iterator[ParameterSpec]:
    """Return the weights of block `layer`, in the order of their registration."""
    return _named(f"layers.{layer}", spec.block(layer))


def prediction_parameters(spec: ModelSpec, depth: int) -> Iterator[ParameterSpec]:
    """Yield the weights of prediction module `depth`, counted from 0, in the order of their registration.

    Embedding and head are not among them, because the modules use the model's embedding and head.
    """
    prefix = f"predictions.{depth}"
    yield from _norm(spec, f"{prefix}.token_norm")
    yield from _norm(spec, f"{prefix}.hidden_norm")
    yield _matrix(f"{prefix}.project.weight", spec.hidden, 2 * spec.hidden, spec.init_std)
    yield from _named(f"{prefix}.block", spec.block(spec.layers))
    yield from _norm(spec, f"{prefix}.norm")


def _named(prefix: str, block: BlockSpec) -> Iterator[ParameterSpec]:
    """Return the weights of a block with their names in the model."""
    return (replace(weight, name=f"{prefix}.{weight.name}") for weight in block.table().weights)


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of stored weights. A tied head counts once."""
    return sum(parameter.count for parameter in parameters(spec))


def active_parameter_count(spec: ModelSpec) -> int:
    """Return the number of weights that are used for one token. Of the routed experts, only the chosen ones count."""
    return sum(_active(spec, parameter) for parameter in parameters(spec))


@lru_cache(maxsize=64)  # cached, because a search asks for it with every plan
def trained_parameter_count(spec: ModelSpec) -> int:
    """Return the number of weights that a run trains: all of them, or with adapters only the adapters and the weight of
    a score.
    """
    return sum(parameter.count for parameter in parameters(spec) if not parameter.frozen)


def without_adapter(spec: ModelSpec) -> ModelSpec:
    """Return the model without its adapters."""
    return spec if spec.adapter is None else replace(spec, adapter=None)


def with_score(spec: ModelSpec) -> ModelSpec:
    """Return the model with a head that gives a score."""
    return replace(spec, head="score", tied=False)


def adapter_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Return our names of the linear layers that can have an adapter, and of their fused parts."""
    tables = (block.table() for block in without_adapter(spec).block_kinds)
    return tuple(dict.fromkeys(name for table in tables for name in target_names(table.operations)))


def prediction_parameter_count(spec: ModelSpec) -> int:
    """Return the number of weights of the prediction modules, without the embedding and the head that they share with
    the model.
    """
    return sum(parameter.count for parameter in parameters(spec) if parameter.predicts)


@lru_cache(maxsize=64)
def flops_per_token(spec: ModelSpec, seq_len: int, *, causal: bool) -> float:
    """Return the training FLOPs (forward and backward) of one token in sequences of `seq_len` tokens.

    - Each weight of a matmul counts 6 FLOPs. Of the routed experts, only the chosen ones count. A tied head counts too;
      looking up embeddings does not.
    - A frozen weight counts 4 FLOPs, because its gradient is not computed.
    - Attention scores and values count 6 · layers · (heads · head_dim + value width) · length. With `causal=True`, the
      length is half of `seq_len`, as Megatron counts. With `causal=False`, it is `seq_len`, as torchtitan counts.
    - A prediction module counts as a layer, its projection, and one more use of the head.
    - Norms, RoPE and activation functions do not count.
    """
    predicting = (BlockRun(spec.block(spec.layers), spec.layers, spec.prediction_depth),)
    runs = (*sequence(spec), *(predicting if spec.prediction_depth else ()))
    blocks = sum(run.count * block_flops_per_token(run.block, seq_len, causal=causal) for run in runs)
    matmul = spec.prediction_depth * 2 * spec.hidden * spec.hidden
    matmul += (1 + spec.prediction_depth) * spec.outputs * spec.hidden
    return blocks + (6.0 if spec.adapter is None or spec.head == "score" else 4.0) * matmul


def block_flops_per_token(block: BlockSpec, seq_len: int, *, causal: bool) -> float:
    """Return the `flops_per_token` of one block."""
    table = block.table()
    attention = sum(
        op.heads * (op.key_dim + op.value_dim) * mean_span(op.window, seq_len, causal) for op in table.attends
    )
    weights = (4.0 if table.frozen else 6.0) * table.multiplications
    return weights + 6.0 * (table.adapter_multiplications + attention)


def _active(spec: ModelSpec, parameter: ParameterSpec) -> int:
    """Return the number of a parameter's weights that are used for one token."""
    if not parameter.expert:
        return parameter.count
    return parameter.count * spec.experts_per_token // spec.experts


def mean_span(window: int | None, seq_len: int, causal: bool) -> float:
    """Return the mean number of positions to which a token attends, with at most `window` of them (None: all).

    With `causal`, it is about half of `seq_len` without a window: 4,096 tokens have a mean of 2,048.
    """
    window = min(window or seq_len, seq_len)
    if not causal:
        return float(window)
    return window - window * window / (2.0 * seq_len)


def _matrix(name: str, out: int, inputs: int, std: float, split: TensorSplit = "whole") -> ParameterSpec:
    return ParameterSpec(name, (out, inputs), "normal", std, split=split)


def _norm(spec: ModelSpec, name: str) -> Iterator[ParameterSpec]:
    """Return the weights of a norm of the residual stream outside the blocks."""
    return spec.residual_norm.operation(name, "x", Value(name, spec.hidden), spec.hidden).weights()
