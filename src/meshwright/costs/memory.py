"""Memory of one rank under a plan, by kind, in bytes.

Weights, gradients and optimizer state are exact. Activations count what autograd keeps of a block whose element-wise work is fused
(every matrix product's input, the attention inputs and output, the two residuals); gathered parameters and reduction buffers
follow FSDP2's two units in flight. The framework's share is a guess until a profile replaces it.
"""

from __future__ import annotations

from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import shard_rows
from meshwright.spec.model import ModelSpec, layer_parameters, parameters
from meshwright.spec.plan import LayerStrategy, Plan

FRAMEWORK_BYTES = {"cpu": 600 << 20, "cuda": 3 << 30}
"""Interpreter, library images, CUDA context, communicators and allocator slack of one rank (guess)."""
UNITS_IN_FLIGHT = 2
"""FSDP units whose gathered weights or unreduced gradients exist at once: the one computing and the one on the wire."""


def bytes_of(number_format: str) -> int:
    return {"bf16": 2, "fp32": 4, "fp64": 8}[number_format]


def memory_by_kind(model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool) -> dict[str, int]:
    """Bytes of the fullest rank: weights, gradients, optimizer, gathered, activations, logits, framework."""
    shard = plan.axis_size("shard")
    stored = 8 if plan.precision.compute == "fp64" else 4
    held = sum(len(shard_rows(row.shape[0], shard, 0)) * (row.count // row.shape[0]) for row in parameters(model))
    return {
        "weights": held * stored,
        "gradients": held * stored,
        "optimizer": 2 * held * stored,
        "gathered": _gathered(model, plan),
        "activations": _activations(model, train, plan),
        "logits": _logits(model, train, plan),
        "framework": FRAMEWORK_BYTES["cpu" if cpu else "cuda"],
    }


def _gathered(model: ModelSpec, plan: Plan) -> int:
    """Gathered compute-format weights kept or in flight, and unreduced gradients of the units in flight."""
    if plan.axis_size("shard") == 1 and plan.axis_size("replicate") == 1 and plan.precision.compute != "bf16":
        return 0
    compute, reduce = bytes_of(plan.precision.compute), bytes_of(plan.precision.reduce)
    block = sum(row.count for row in layer_parameters(model, 0))
    ends = sum(row.count for row in parameters(model) if not row.name.startswith("layers."))
    kept = sum(1 for layer in range(model.layers) if not plan.strategy(layer, model.layers).reshard)
    weights = (max(kept, min(UNITS_IN_FLIGHT, model.layers)) * block + ends) * compute
    largest = max(block, model.vocab_size * model.hidden)
    return weights + UNITS_IN_FLIGHT * largest * reduce


def _activations(model: ModelSpec, train: TrainSpec, plan: Plan) -> int:
    tokens = plan.batch.micro_batch * train.seq_len
    strategies = [plan.strategy(layer, model.layers) for layer in range(model.layers)]
    kept = sum(_kept_per_token(model, strategy) for strategy in strategies)
    # One recomputed block is whole while its backward runs.
    working = _kept_per_token(model, LayerStrategy()) if any(s.recompute != "none" for s in strategies) else 0
    return tokens * (kept + working) * bytes_of(plan.precision.compute)


def _kept_per_token(model: ModelSpec, strategy: LayerStrategy) -> int:
    """Elements autograd keeps of one block for one token."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    wide = 2 * model.ffn_hidden if model.mlp == "swiglu" else model.ffn_hidden
    if strategy.recompute == "full":
        return model.hidden
    if strategy.recompute == "selective":
        return 3 * model.hidden + 2 * heads + 2 * kv + wide
    norms = 1 if model.parallel_block else 2
    return (2 + norms) * model.hidden + 2 * heads + 2 * kv + wide + model.ffn_hidden


def _logits(model: ModelSpec, train: TrainSpec, plan: Plan) -> int:
    """The loss: one chunk of logits in compute format and fp32, the head's fp32 gradient, hidden states and their gradient."""
    tokens = plan.batch.micro_batch * train.seq_len
    chunk = min(tokens, train.loss_chunk)
    compute = bytes_of(plan.precision.compute)
    head = model.vocab_size * model.hidden * max(4, compute)
    return chunk * model.vocab_size * (compute + 4) + head + 2 * tokens * model.hidden * compute
