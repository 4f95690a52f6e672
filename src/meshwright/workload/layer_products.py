"""Matrix products of a model's layers with their shapes on one rank, for numbers and arrays alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.workload.arrays import Array
from meshwright.workload.model_shape import Shape
from meshwright.workload.step_shape import StepShape


@dataclass(frozen=True)
class Product:
    """`count` equal products (m, k) × (k, n) in one launch of a layer's forward; backward has two more each."""

    role: Literal["linear", "router", "expert"]
    """`linear` products have the plan's linear format, the others the compute dtype."""
    m: Array
    k: Array
    n: Array
    layers: Array
    """Layers of the model that have it."""
    count: Array = 1.0


def layer_products(shape: Shape, step: StepShape, width: Array) -> Iterator[Product]:
    """The products of one micro-batch in the forward of all layers on one of `width` tensor ranks."""
    tokens, gated = step.tokens, 1 + shape.gated
    yield from _attention_inputs(shape, tokens, width)
    yield Product("linear", tokens, shape.value_width / width, shape.hidden, shape.attention_layers)
    if np.any(shape.mixer_layers):  # state-space or linear-attention layers
        yield Product("linear", tokens, shape.hidden, shape.mixer_params / shape.hidden / width, shape.mixer_layers)
    for ffn, layers in ((shape.ffn, shape.dense_layers), (shape.shared_ffn, shape.moe_layers)):
        if np.any(ffn * layers):
            yield Product("linear", tokens, shape.hidden, gated * ffn / width, layers)
            yield Product("linear", tokens, ffn / width, shape.hidden, layers)
    layers = np.where(np.asarray(shape.experts) > 0, shape.moe_layers, 0.0)
    if np.any(layers):
        # `expert_in` is `hidden`, unless the model's experts work in a smaller space.
        yield Product("router", tokens / width, shape.hidden, shape.experts, layers)
        yield Product("expert", step.expert_rows, shape.expert_in, gated * shape.expert_ffn, layers, step.experts)
        yield Product("expert", step.expert_rows, shape.expert_ffn, shape.expert_in, layers, step.experts)


def _attention_inputs(shape: Shape, tokens: Array, width: Array) -> Iterator[Product]:
    """The products that make queries, keys and values; latent attention has narrow ones to latents and from them."""
    latent = np.asarray(shape.latent) > 0
    layers = shape.attention_layers * np.where(latent, 0.0, 1.0)
    if np.any(layers):
        # All of an attention layer's matrices but the output projection, which has value_width × hidden weights.
        columns = shape.attention_params / shape.hidden - shape.value_width
        yield Product("linear", tokens, shape.hidden, columns / width, layers)
    if np.any(latent):
        layers = shape.attention_layers * np.where(latent, 1.0, 0.0)
        queries_from = np.where(np.asarray(shape.query_rank) > 0, shape.query_rank, shape.hidden)
        # Tensor ranks compute the latents of their own tokens, and the heads of all tokens.
        yield Product("linear", tokens / width, shape.hidden, shape.latent, layers)
        yield Product("linear", tokens, queries_from, shape.query_width / width, layers)
        yield Product("linear", tokens, shape.kv_rank, (shape.unrotated + shape.value_width) / width, layers)
