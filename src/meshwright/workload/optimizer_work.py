"""What an optimizer needs for a model: state tensors, memory traffic, and the matmuls and exchanges of Muon."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.spec.model import ModelSpec, ParameterSpec, end_parameters, parameters
from meshwright.spec.optimizers import MuonSpec, OptimizerSpec, newton_schulz_flops, state_names, uses_muon

ADAMW_BYTES = 28.0
"""Bytes that AdamW's kernel moves per fp32 parameter: it reads the gradient, and reads and writes the weight and two
moments.
"""
UPDATE_BYTES = {"adamw": ADAMW_BYTES, "sgd": 76.0, "lamb": 148.0, "muon": 84.0}
"""Bytes that an update moves per fp32 parameter, by optimizer, counted from its operations.

Muon's iterations are not included.
"""
EXCHANGE_BYTES = 2.0
"""Bytes of an element that ranks send to each other for Muon (bf16)."""
MUON_BUFFERS = 8
"""Number of copies of a rank's whole matrices that exist at the same time: messages, matrix, batch, and the matmuls of
an iteration.
"""


@dataclass(frozen=True)
class OptimizerWork:
    """What an optimizer needs for a model.

    Values per layer are means over the layers; the matrices of prediction modules are spread over them.

    The fields from `flops` on are 0 unless the optimizer is Muon.
    """

    block_states: float = 2.0
    """Number of state tensors per parameter of the blocks."""
    embed_head_states: float = 2.0
    """Number of state tensors per parameter of embedding, final norm, head and prediction modules."""
    update_bytes: float = ADAMW_BYTES
    """Bytes that an update moves per fp32 parameter."""
    flops: float = 0.0
    """FLOPs of Muon's iterations for the matrices of one layer."""
    largest_flops: float = 0.0
    """FLOPs of Muon's iterations for the largest matrix, which one rank computes alone."""
    largest: float = 0.0
    """Number of elements of the largest matrix."""
    matrices: float = 0.0
    """Number of matrices of a layer."""
    exchanged: float = 0.0
    """Number of elements of a layer's matrices.

    The ranks send their parts of a matrix to one rank, and get the result back.
    """


@lru_cache(maxsize=16)  # cached, because the planner asks for every layout
def optimizer_work(model: ModelSpec, optimizer: OptimizerSpec) -> OptimizerWork:
    """Return what `optimizer` needs for `model`."""
    blocks = [parameter for parameter in parameters(model) if parameter.inside and not parameter.predicts]
    common = {
        "block_states": _mean_states(blocks, optimizer),
        "embed_head_states": _mean_states(list(end_parameters(model)), optimizer),
        "update_bytes": UPDATE_BYTES[optimizer.name],
    }
    if not isinstance(optimizer, MuonSpec):
        return OptimizerWork(**common)
    shapes = [shape for parameter in parameters(model) if uses_muon(parameter) for shape in matrix_shapes(parameter)]
    flops = [newton_schulz_flops(shape, optimizer.iterations) for shape in shapes]
    sizes = [rows * columns for rows, columns in shapes]
    return OptimizerWork(
        **common,
        flops=sum(flops) / model.layers,
        largest_flops=max(flops),
        largest=max(sizes),
        matrices=len(shapes) / model.layers,
        exchanged=sum(sizes) / model.layers,
    )


def optimizer_columns(model: ModelSpec, optimizer: OptimizerSpec) -> dict[str, float]:
    """Return the columns of `workload.layouts.Layouts` that the optimizer decides."""
    work = optimizer_work(model, optimizer)
    return {
        "update_bytes": work.update_bytes,
        "muon_flops": work.flops,
        "muon_largest_flops": work.largest_flops,
        "muon_elements": work.exchanged,
    }


def matrix_shapes(parameter: ParameterSpec) -> list[tuple[int, int]]:
    """Return the shapes (rows, columns) of a parameter's matrices: one for each part of a fused weight, and for each
    expert.

    The fused queries, keys and values of Llama-3-8B are three matrices:

    >>> from meshwright.config.presets import MODEL_PRESETS
    >>> from meshwright.spec.fields import from_plain
    >>> from meshwright.spec.model import block_parameters
    >>> llama = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    >>> matrix_shapes(next(p for p in block_parameters(llama, 0) if p.name.endswith("qkv.weight")))
    [(4096, 4096), (1024, 4096), (1024, 4096)]
    """
    if parameter.expert:
        experts, rows, columns = parameter.shape
        parts = 2 if parameter.name.endswith("gate_up") else 1
        return [(rows // parts, columns)] * (experts * parts)
    columns = parameter.shape[1]
    return [(size, columns) for _, size in parameter.blocks] or [(parameter.shape[0], columns)]


def _mean_states(of: list[ParameterSpec], optimizer: OptimizerSpec) -> float:
    """Return the number of state tensors per parameter, as a mean over all elements of the parameters."""
    states = sum(parameter.count * len(state_names(optimizer, parameter)) for parameter in of)
    return states / max(1, sum(parameter.count for parameter in of))
