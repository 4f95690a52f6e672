"""The updates of all optimizers for one whole parameter, written from the papers without the code of `meshwright.optim`."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.spec.model import ParameterSpec
from meshwright.spec.optimizers import LambSpec, MuonSpec, OptimizerSpec, SgdSpec


def update(
    parameter: ParameterSpec,
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    optimizer: OptimizerSpec,
    rate: float,
    decay: float,
) -> None:
    """One in-place update; `state` is empty before the first."""
    decay *= parameter.decay
    state["step"] = state.get("step", torch.zeros(())) + 1
    if isinstance(optimizer, SgdSpec) or (isinstance(optimizer, MuonSpec) and _is_block_matrix(parameter)):
        state["m"] = optimizer.momentum * state.get("m", torch.zeros_like(weight)) + gradient
        change = gradient + optimizer.momentum * state["m"] if optimizer.nesterov else state["m"].clone()
        if isinstance(optimizer, MuonSpec):
            for matrix in logical_matrices(parameter, change):
                matrix.copy_(
                    newton_schulz(matrix, optimizer.iterations) * optimizer.update_rms * max(matrix.shape) ** 0.5
                )
        weight.mul_(1 - rate * decay).sub_(rate * change)
        return
    step = int(state["step"])
    state["m"] = optimizer.beta1 * state.get("m", torch.zeros_like(weight)) + (1 - optimizer.beta1) * gradient
    state["v"] = optimizer.beta2 * state.get("v", torch.zeros_like(weight)) + (1 - optimizer.beta2) * gradient**2
    change = state["m"] / (1 - optimizer.beta1**step)
    change = change / ((state["v"] / (1 - optimizer.beta2**step)).sqrt() + optimizer.epsilon)
    if isinstance(optimizer, LambSpec) and parameter.decay:
        change += decay * weight
        for matrix, weights in zip(
            logical_matrices(parameter, change), logical_matrices(parameter, weight), strict=True
        ):
            matrix.mul_(torch.linalg.norm(weights) / torch.linalg.norm(matrix))
        weight.sub_(rate * change)
    else:
        weight.mul_(1 - rate * decay).sub_(rate * change)


def _is_block_matrix(parameter: ParameterSpec) -> bool:
    return parameter.name.startswith("layers.") and len(parameter.shape) > 1 and "router" not in parameter.name


def logical_matrices(parameter: ParameterSpec, tensor: Tensor) -> list[Tensor]:
    """Views of the matrices: q, k, v and gate, up apart, and each expert."""
    if tensor.dim() == 3:
        parts = 2 if "gate_up" in parameter.name else 1
        return [matrix for expert in tensor for matrix in expert.chunk(parts)]
    return list(tensor.split([size for _, size in parameter.blocks])) if parameter.blocks else [tensor]


def newton_schulz(matrix: Tensor, iterations: int) -> Tensor:
    """The quintic iteration, by the singular values: each is mapped by the polynomial as often as there are iterations."""
    u, singular, vt = torch.linalg.svd(matrix, full_matrices=False)
    singular = singular / (singular.norm() + 1e-7)
    for _ in range(iterations):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return u @ torch.diag(singular) @ vt
