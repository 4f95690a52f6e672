"""The dimensions of a decoder, its parameter table, and counts derived from them.

`parameters(spec)` is the only table of a model's weights. A test compares the modules of `models/` with it; initial
values, weight decay, sharding, Hugging Face import and export and memory estimates read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from meshwright.spec.fields import Bound, NotNegative, Positive

Fill = Literal["normal", "ones", "zeros"]
MOST_PARAMETERS = 10**15
"""Weights of a model: more exceed the arithmetic of the cost model."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency-dependent RoPE scaling (Hugging Face `rope_type: llama3`)."""

    factor: Annotated[float, Bound(at_least=1)] = 8.0
    """How much longer than the original context the scaled one is."""
    low_freq_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are scaled in full."""
    high_freq_factor: Annotated[float, Bound(more_than=0)] = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor are not scaled."""
    original_max_seq_len: Positive = 8192
    """Context length before scaling, in tokens."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN scaling of RoPE (Peng et al. 2023) with DeepSeek's two factors of attention scores."""

    factor: Annotated[float, Bound(at_least=1)] = 40.0
    """How much longer than the original context the scaled one is."""
    original_max_seq_len: Positive = 4096
    """Context length before scaling, in tokens."""
    beta_fast: Annotated[float, Bound(more_than=0)] = 32.0
    """Frequencies that turn more often than this over the original context are not scaled."""
    beta_slow: Annotated[float, Bound(more_than=0)] = 1.0
    """Frequencies that turn less often than this over the original context are scaled in full."""
    mscale: Annotated[float, Bound(at_least=0)] = 1.0
    """Growth with log(factor) of the rotated part of queries and keys, over that of `mscale_all_dim`."""
    mscale_all_dim: Annotated[float, Bound(at_least=0)] = 1.0
    """Growth with log(factor) of whole queries and keys; 0 is none."""

    @property
    def rotary_scale(self) -> float:
        """Factor of the rotary tables."""
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: GPT-2/3, Llama 2/3.x, Qwen3, DeepSeek-V2/V3, MegaScale variants, mixtures of experts."""

    family: Literal["gpt2", "llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
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
    """Llama 3.1 scaling of the rotary frequencies."""
    yarn: YarnScaling | None = None
    """YaRN scaling of the rotary frequencies (DeepSeek)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the feed-forward network and before the head."""
    norm_eps: Annotated[float, Bound(more_than=0)] = 1e-5
    """Added to the variance before the square root."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Gated SiLU, or the tanh approximation of GELU."""
    bias: bool = False
    """Biases in every projection (not in the head)."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before RoPE (Qwen3)."""
    tied: bool = False
    """The head is the transposed token embedding."""
    parallel_block: bool = False
    """Attention and feed-forward network read one norm and are added together (MegaScale §3.1)."""
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
    normalised_routing: bool = True
    """Weight a token's experts by their scores divided by the sum of those picked; false: by the scores."""
    first_dense_layers: NotNegative = 0
    """Layers at the start that have a dense feed-forward network in place of experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the router. With `sigmoid` experts are picked by score plus a bias that balances their loads (DeepSeek-V3)."""
    expert_groups: Positive = 1
    """Groups of experts, of which a token uses `groups_per_token` (DeepSeek)."""
    groups_per_token: Positive = 1
    """Groups that the router picks first: by their best score, or with `sigmoid` by the sum of their two best."""
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

    def routed(self, layer: int) -> bool:
        """Whether block `layer` has experts in place of a dense feed-forward network; prediction modules have them too."""
        return self.experts > 0 and layer >= self.first_dense_layers

    @property
    def embedding_at_both_ends(self) -> bool:
        """Whether the last stage uses the token embedding too: as a tied head, or in prediction modules."""
        return self.tied or self.prediction_depth > 0

    @property
    def value_width(self) -> int:
        """Width of the values, and of attention's output, over all query heads."""
        return self.heads * (self.value_head_dim if self.kv_rank else self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return self.rope_head_dim if self.kv_rank else self.head_dim


@dataclass(frozen=True)
class ParameterSpec:
    """Stored weight of a model.

    `blocks` names the logical weights fused along dimension 0 with their sizes, in order: `(("q", 4096), ("k", 1024),
    …)`; empty for a weight that is not fused. `decay` says whether AdamW's weight decay applies. The routed experts of
    a layer are one tensor with the experts along dimension 0, as a grouped matrix product reads them:
    `moe.experts.gate_up` (experts, 2·expert_hidden, hidden), with the gate's rows first, and `moe.experts.down`
    (experts, hidden, expert_hidden). A weight that is not `trained` gets no gradient: the run itself updates it, and every
    rank of its layer has it whole, in the stored dtype.
    """

    name: str
    shape: tuple[int, ...]
    fill: Fill
    std: float
    blocks: tuple[tuple[str, int], ...] = ()
    decay: bool = True
    trained: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def before_blocks(self) -> bool:
        """Whether it is applied before the first block."""
        return self.name.startswith(("embed.", "positions."))

    @property
    def expert(self) -> bool:
        """Whether it holds the routed experts of a layer, one after another along dimension 0."""
        return ".moe.experts." in self.name

    @property
    def predicts(self) -> bool:
        """Whether it belongs to a prediction module."""
        return self.name.startswith("predictions.")

    @property
    def inside(self) -> bool:
        """Whether it belongs to a block or a prediction module, and not to the embedding, the final norm or the head."""
        return self.name.startswith(("layers.", "predictions."))

    @property
    def module(self) -> str:
        """Name of its module, without the numbered block or prediction module around it: `attention.out`, `head`."""
        if not self.inside:
            return self.name.rpartition(".")[0]
        return self.name.split(".", 2)[2].rpartition(".")[0].removeprefix("block.")


@lru_cache(maxsize=64)  # the planner calls it for every layout
def parameters(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Every weight of the model in the order the module registers them; a tied head is not listed."""
    weights = [_matrix("embed.weight", spec.vocab_size, spec.hidden, spec.init_std)]
    if spec.positions == "learned":
        weights.append(_matrix("positions.weight", spec.max_seq_len, spec.hidden, spec.init_std))
    for layer in range(spec.layers):
        weights.extend(layer_parameters(spec, layer))
    weights.extend(_norm("norm", spec, spec.hidden))
    if not spec.tied:
        weights.append(_matrix("head.weight", spec.vocab_size, spec.hidden, spec.init_std))
    for depth in range(spec.prediction_depth):
        weights.extend(prediction_parameters(spec, depth))
    return tuple(weights)


@lru_cache(maxsize=64)
def block_parameters(spec: ModelSpec, *, routed: bool) -> tuple[ParameterSpec, ...]:
    """Every weight of the first block with experts (`routed`) or without; other blocks differ in names only."""
    return tuple(layer_parameters(spec, spec.first_dense_layers if routed else 0))


@lru_cache(maxsize=64)
def end_parameters(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Every weight of the embedding, the final norm, the head and the prediction modules."""
    return tuple(parameter for parameter in parameters(spec) if not parameter.name.startswith("layers."))


def layer_parameters(spec: ModelSpec, layer: int) -> Iterator[ParameterSpec]:
    """The weights of block `layer`, in registration order."""
    return _block(f"layers.{layer}", spec, spec.routed(layer))


def prediction_parameters(spec: ModelSpec, depth: int) -> Iterator[ParameterSpec]:
    """The weights of prediction module `depth`, from 0, in registration order; embedding and head are the model's."""
    prefix = f"predictions.{depth}"
    yield from _norm(f"{prefix}.token_norm", spec, spec.hidden)
    yield from _norm(f"{prefix}.hidden_norm", spec, spec.hidden)
    yield _matrix(f"{prefix}.project.weight", spec.hidden, 2 * spec.hidden, spec.init_std)
    yield from _block(f"{prefix}.block", spec, spec.experts > 0)
    yield from _norm(f"{prefix}.norm", spec, spec.hidden)


def _block(prefix: str, spec: ModelSpec, routed: bool) -> Iterator[ParameterSpec]:
    """The weights of a block with experts (`routed`) or without."""
    residual_std = spec.init_std / math.sqrt(2 * spec.layers)
    yield from _norm(f"{prefix}.attention_norm", spec, spec.hidden)
    yield from (_latent_projections if spec.kv_rank else _projections)(f"{prefix}.attention", spec)
    yield from _linear(f"{prefix}.attention.out", spec, spec.hidden, spec.value_width, residual_std)
    if not spec.parallel_block:
        yield from _norm(f"{prefix}.mlp_norm", spec, spec.hidden)
    if routed:
        yield from _mixture(f"{prefix}.moe", spec, residual_std)
    else:
        yield from _feed_forward(f"{prefix}.mlp", spec, spec.ffn_hidden, residual_std)


def _projections(prefix: str, spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Queries, keys and values of grouped-query attention."""
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = (("q", heads), ("k", kv), ("v", kv))
    yield from _linear(f"{prefix}.qkv", spec, heads + 2 * kv, spec.hidden, spec.init_std, qkv)
    if spec.qk_norm:
        yield _scale(f"{prefix}.q_norm.weight", spec.head_dim)
        yield _scale(f"{prefix}.k_norm.weight", spec.head_dim)


def _latent_projections(prefix: str, spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Queries, keys and values of multi-head latent attention (DeepSeek-V2, §2.1), which has no biases.

    The rows of `q` and `kv_up` are ordered by head; those of a head are its unrotated part, then the rotated part or the value.
    """
    queries, rotated = spec.heads * spec.head_dim, spec.rope_head_dim
    latent = spec.kv_rank + rotated
    if spec.q_rank:
        down = (("q", spec.q_rank), ("kv", latent))
        yield ParameterSpec(f"{prefix}.down.weight", (spec.q_rank + latent, spec.hidden), "normal", spec.init_std, down)
        yield _scale(f"{prefix}.q_norm.weight", spec.q_rank)
    else:
        yield _matrix(f"{prefix}.kv_down.weight", latent, spec.hidden, spec.init_std)
    yield _matrix(f"{prefix}.q.weight", queries, spec.q_rank or spec.hidden, spec.init_std)
    yield _scale(f"{prefix}.kv_norm.weight", spec.kv_rank)
    keys_values = spec.heads * (spec.head_dim - rotated + spec.value_head_dim)
    yield _matrix(f"{prefix}.kv_up.weight", keys_values, spec.kv_rank, spec.init_std)


def _feed_forward(prefix: str, spec: ModelSpec, width: int, residual_std: float) -> Iterator[ParameterSpec]:
    if spec.mlp == "swiglu":
        gate_up = (("gate", width), ("up", width))
        yield from _linear(f"{prefix}.gate_up", spec, 2 * width, spec.hidden, spec.init_std, gate_up)
    else:
        yield from _linear(f"{prefix}.up", spec, width, spec.hidden, spec.init_std)
    yield from _linear(f"{prefix}.down", spec, spec.hidden, width, residual_std)


def _mixture(prefix: str, spec: ModelSpec, residual_std: float) -> Iterator[ParameterSpec]:
    """Router, routed experts and shared expert. Routed experts have no biases."""
    if spec.router == "sigmoid":
        yield ParameterSpec(f"{prefix}.choice_bias", (spec.experts,), "zeros", 0.0, decay=False, trained=False)
    yield _matrix(f"{prefix}.router.weight", spec.experts, spec.hidden, spec.init_std)
    first, first_width = ("gate_up", 2 * spec.expert_hidden) if spec.mlp == "swiglu" else ("up", spec.expert_hidden)
    into, out = (spec.experts, first_width, spec.hidden), (spec.experts, spec.hidden, spec.expert_hidden)
    yield ParameterSpec(f"{prefix}.experts.{first}", into, "normal", spec.init_std)
    yield ParameterSpec(f"{prefix}.experts.down", out, "normal", residual_std)
    if spec.shared_expert_hidden:
        yield from _feed_forward(f"{prefix}.shared", spec, spec.shared_expert_hidden, residual_std)


def parameter_count(spec: ModelSpec) -> int:
    """Stored weights; a tied head counts once."""
    return sum(parameter.count for parameter in parameters(spec))


def active_parameter_count(spec: ModelSpec) -> int:
    """Weights used for one token: of the routed experts, those that the router picks."""
    return sum(_active(spec, parameter) for parameter in parameters(spec))


def prediction_parameter_count(spec: ModelSpec) -> int:
    """Weights of the prediction modules, without the embedding and the head that they share with the model."""
    return sum(parameter.count for parameter in parameters(spec) if parameter.predicts)


@lru_cache(maxsize=64)
def flops_per_token(spec: ModelSpec, seq_len: int, *, causal: bool) -> float:
    """Training FLOPs (forward and backward) per token at `seq_len`.

    6 per weight of every matrix product (the head counts also when tied, embedding look-ups do not; of routed experts
    those used for a token) plus attention scores and values: 6·layers·(heads·head_dim + value width)·length. `causal=False` counts the
    full square as torchtitan does; `causal=True` counts the unmasked half, as Megatron does. Norms, RoPE and
    activations are not counted. A prediction module counts as a layer, its projection and another use of the head.
    """
    matmul = sum(
        _active(spec, parameter) for parameter in parameters(spec) if parameter.inside and len(parameter.shape) > 1
    )
    matmul += (1 + spec.prediction_depth) * spec.vocab_size * spec.hidden
    layers, span = spec.layers + spec.prediction_depth, mean_span(spec.sliding_window, seq_len, causal)
    return 6.0 * matmul + 6.0 * layers * (spec.heads * spec.head_dim + spec.value_width) * span


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


def _matrix(name: str, out: int, inputs: int, std: float) -> ParameterSpec:
    return ParameterSpec(name, (out, inputs), "normal", std)


def _scale(name: str, width: int) -> ParameterSpec:
    """The weight of an RMSNorm."""
    return ParameterSpec(name, (width,), "ones", 0.0, decay=False)


def _linear(
    name: str, spec: ModelSpec, out: int, inputs: int, std: float, blocks: tuple[tuple[str, int], ...] = ()
) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{name}.weight", (out, inputs), "normal", std, blocks)
    if spec.bias:
        yield ParameterSpec(f"{name}.bias", (out,), "zeros", 0.0, blocks, decay=False)


def _norm(name: str, spec: ModelSpec, width: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(f"{name}.weight", (width,), "ones", 0.0, decay=False)
    if spec.norm == "layernorm":
        yield ParameterSpec(f"{name}.bias", (width,), "zeros", 0.0, decay=False)
