"""Dimensions of decoders as numbers or arrays, of this program's models and of published models that it cannot build."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.spec.model import ModelSpec, mean_span
from meshwright.workload.arrays import Array


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's dimensions. Widths are per token and layer, over all heads."""

    layers: Array
    hidden: Array
    vocab: Array
    heads: Array
    query_width: Array
    """heads × query-key head size."""
    value_width: Array
    """heads × value head size."""
    kv_width: Array
    """Keys and values together, as they are saved and exchanged."""
    attention_params: Array
    """Matrix weights of one attention layer."""
    attention_layers: Array
    full_attention: Array
    """Computed attention scores relative to full causal attention. Short windows of published models count as 0."""
    mixer_layers: Array
    """State-space or linear-attention layers."""
    mixer_params: Array
    ffn: Array
    """Width of dense feed-forward layers."""
    dense_layers: Array
    moe_layers: Array
    experts: Array
    top_k: Array
    expert_ffn: Array
    shared_ffn: Array
    expert_in: Array
    """Width an expert reads and writes (hidden, unless experts work in a smaller space)."""
    gated: Array
    """1 when a feed-forward layer has a gate matrix beside up and down."""
    tied: Array
    """1 when the head shares the embedding's weights."""
    expert_bias: Array = 0.0
    """1 when experts have biases."""
    kv_head_width: Array = 0.0
    """Width of keys and values of one head; 0 if unknown."""
    parallel: Array = 0.0
    """1 if attention and feed-forward network of a layer run in parallel on one norm's output (parallel block)."""
    rotary: Array = 1.0
    """1 when queries and keys are rotated by their positions."""
    latent: Array = 0.0
    """Width of latents and the shared part of keys, from which latent attention expands queries, keys and values; else 0."""
    query_rank: Array = 0.0
    """Width of the latent of queries; 0 if they are projected from the token."""
    kv_rank: Array = 0.0
    """Width of the latent of keys and values."""
    latent_gathered: Array = 0.0
    """Width that tensor ranks gather before attention; 0 is `hidden`."""
    unrotated: Array = 0.0
    """Width of the part of keys that latent attention does not rotate."""
    padding: Array = 0.0
    """Width by which context ranks pad values to that of keys."""
    predictions: Array = 0.0
    """Modules after the layers that predict further tokens."""

    @property
    def dense_params(self) -> Array:
        """Weights of all layers outside the routed experts."""
        matrices = 2 + self.gated
        attention = self.attention_layers * self.attention_params + self.mixer_layers * self.mixer_params
        feed_forward = self.dense_layers * matrices * self.hidden * self.ffn
        router = self.hidden * self.experts + 2 * self.hidden * self.expert_in * (self.expert_in < self.hidden)
        return attention + feed_forward + self.moe_layers * (matrices * self.hidden * self.shared_ffn + router)

    @property
    def expert_params(self) -> Array:
        """Weights of all routed experts of all layers."""
        return self.moe_layers * self.experts * (2 + self.gated) * self.expert_in * self.expert_ffn

    @property
    def inner_dense_params(self) -> Array:
        """`dense_params` with those of prediction modules: the projection and a layer, with experts if the model has some."""
        matrices, routed = (2 + self.gated) * self.hidden, np.asarray(self.experts) > 0
        feed_forward = np.where(routed, matrices * self.shared_ffn + self.hidden * self.experts, matrices * self.ffn)
        return self.dense_params + self.predictions * (2 * self.hidden**2 + self.attention_params + feed_forward)

    @property
    def inner_expert_params(self) -> Array:
        """`expert_params` with those of prediction modules."""
        return (
            self.expert_params + self.predictions * self.experts * (2 + self.gated) * self.expert_in * self.expert_ffn
        )

    @property
    def table_params(self) -> Array:
        """Weights of the embedding (the head has as many unless tied)."""
        return self.vocab * self.hidden

    @property
    def params(self) -> Array:
        return self.dense_params + self.expert_params + (2 - self.tied) * self.table_params


def embedding_at_both_ends(shape: Shape) -> Array:
    """1 where the last stage uses the embedding too (`ModelSpec.embedding_at_both_ends`)."""
    return np.maximum(shape.tied, np.asarray(shape.predictions) > 0)


def shape_of(model: ModelSpec, seq_len: int) -> Shape:
    """The dimensions of a model of this program."""
    routed = sum(model.routed(layer) for layer in range(model.layers))
    heads, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    shape = Shape(
        layers=model.layers, hidden=model.hidden, vocab=model.vocab_size, heads=model.heads, query_width=heads, value_width=heads,
        kv_width=kv, attention_params=model.hidden * (2 * heads + kv), attention_layers=model.layers,
        full_attention=2 * mean_span(model.sliding_window, seq_len, causal=True) / seq_len, mixer_layers=0, mixer_params=0,
        ffn=model.ffn_hidden, dense_layers=model.layers - routed, moe_layers=routed, experts=model.experts, top_k=model.experts_per_token,
        expert_ffn=model.expert_hidden, shared_ffn=model.shared_expert_hidden, expert_in=model.hidden,
        gated=float(model.mlp == "swiglu"), tied=float(model.tied),
        kv_head_width=2 * model.head_dim, parallel=float(model.parallel_block), rotary=float(model.positions == "rope"),
        predictions=model.prediction_depth,
    )  # fmt: skip
    return _with_latent_attention(model, shape) if model.kv_rank else shape


def _with_latent_attention(model: ModelSpec, shape: Shape) -> Shape:
    """The shape with the widths of multi-head latent attention in its training form: keys and values of all heads exist."""
    queries, values, shared = model.heads * model.head_dim, model.value_width, model.rope_head_dim
    unrotated = queries - model.heads * shared
    latent = model.q_rank + model.kv_rank + shared
    attention_params = (
        model.hidden * (latent + values)
        + (model.q_rank or model.hidden) * queries
        + model.kv_rank * (unrotated + values)
    )
    return replace(
        shape,
        value_width=values,
        kv_width=queries + values,
        attention_params=attention_params,
        latent=latent,
        query_rank=model.q_rank,
        kv_rank=model.kv_rank,
        latent_gathered=latent if model.q_rank else latent + model.hidden,
        unrotated=unrotated,
        padding=queries - values,
    )


def with_blocks(shape: Shape, *, routed: bool) -> Shape:
    """The shape of a model in which all blocks have experts (`routed`), or none has."""
    return replace(
        shape,
        moe_layers=shape.layers * routed,
        dense_layers=shape.layers * (not routed),
        experts=shape.experts * routed,
    )
