"""What host memory holds and what that costs: activations, copied behind other layers' compute, and the optimizer.

A layer's activations go out after its forward and come back before its backward. Two layers of one micro-batch stay on the device: the
one that computes and the one on the link. So a layer takes the longer of its compute and its copy, and only the difference shows. What
is copied is what fused blocks keep: inputs of both norms, what attention reads and writes, the feed-forward's halves and their product;
with full recompute, the layer's input alone.
"""

from __future__ import annotations

import numpy as np

from meshwright.costs.inputs import Array, Layouts, Machine, Shape

HOST_SHARE = 0.4
"""Share of its host link that a device gets while all of its node copy (measured on 8×H200: 20 of 50 GB/s, host memory is the limit)."""

HOST_PARAMS = 1e9
"""Parameters a second that the host steps for each of its devices (measured: 8.1e9 in all by 64 threads beside 8×H200, fused AdamW)."""


def copied_bytes(shape: Shape, layout: Layouts) -> Array:
    """Bytes of one layer and micro-batch that a rank copies each way, on average over layers."""
    tokens = layout.micro_batch * layout.seq / layout.context
    attention = shape.attention_layers * (shape.query_width + shape.kv_width + shape.value_width)
    feed = shape.dense_layers * (2 + shape.gated) * shape.ffn
    experts = shape.moe_layers * (2 + shape.gated) * (shape.shared_ffn + shape.top_k * shape.expert_ffn)
    kept = 2 * shape.hidden + (attention + feed + experts) / shape.layers
    elements = np.where(layout.recompute == 2, shape.hidden, kept)
    return 2.0 * tokens * elements / layout.tensor


def exposed_copies(shape: Shape, machine: Machine, layout: Layouts, forward: Array, backward: Array) -> Array:
    """Seconds of all layers' copies of one micro-batch that their compute (`forward`, `backward`, over all layers) does not hide."""
    each = shape.layers * copied_bytes(shape, layout) / (machine.host * HOST_SHARE)
    shown = np.maximum(0.0, each - forward) + np.maximum(0.0, each - backward)
    return np.where(layout.offload_activations > 0, shown, 0.0)


def host_optimizer(machine: Machine, owned: Array, gradient_bytes: Array) -> Array:
    """Seconds of an optimizer in host memory that owns `owned` parameters: gradients out, the step, 16-bit weights back, one by one."""
    return owned * ((gradient_bytes + 2.0) / (machine.host * HOST_SHARE) + 1 / HOST_PARAMS)
