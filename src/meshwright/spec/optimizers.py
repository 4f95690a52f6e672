"""Optimizers of a run: the keys of `train.optimizer` for each `name`, and the state tensors that each stores for a
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from meshwright.spec.fields import Bound, Positive
from meshwright.spec.model import ParameterSpec

Decay = Annotated[float, Bound(at_least=0, less_than=1)]
Epsilon = Annotated[float, Bound(more_than=0)]
MOMENTS = ("exp_avg", "exp_avg_sq")
"""State tensors of AdamW and LAMB: the mean of the gradient and the mean of its square."""
MOMENTUM = ("momentum",)
"""State tensor of SGD, and of Muon for a matrix: the sum of earlier gradients, each decayed."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Muon's coefficients (a, b, c) of an iteration x → a · x + b · (x xᵀ) x + c · (x xᵀ)² x (Jordan et al. 2024)."""


@dataclass(frozen=True, kw_only=True)
class AdamWSpec:
    """`name: adamw`, AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    """This optimizer."""
    beta1: Decay = 0.9
    """Decay rate of the mean gradient."""
    beta2: Decay = 0.95
    """Decay rate of the mean squared gradient."""
    epsilon: Epsilon = 1e-8
    """Added to the denominator."""


@dataclass(frozen=True, kw_only=True)
class LambSpec:
    """`name: lamb`, LAMB (You et al. 2020): AdamW with a trust ratio for each decayed matrix."""

    name: Literal["lamb"] = "lamb"
    """This optimizer."""
    beta1: Decay = 0.9
    """Decay rate of the mean gradient."""
    beta2: Decay = 0.95
    """Decay rate of the mean squared gradient."""
    epsilon: Epsilon = 1e-6
    """Added to the denominator."""


@dataclass(frozen=True, kw_only=True)
class MuonSpec:
    """`name: muon`, Muon (Jordan et al. 2024) for matrices of blocks, AdamW for all other parameters."""

    name: Literal["muon"] = "muon"
    """This optimizer."""
    momentum: Decay = 0.95
    """Decay rate of a matrix's momentum."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    iterations: Positive = 5
    """Newton-Schulz iterations."""
    update_rms: Annotated[float, Bound(more_than=0)] = 0.2
    """Root mean square of an update, in units of the learning rate (Liu et al. 2025)."""
    beta1: Decay = 0.9
    """Decay rate of the mean gradient, for the parameters that AdamW updates."""
    beta2: Decay = 0.95
    """Decay rate of the mean squared gradient, for the parameters that AdamW updates."""
    epsilon: Epsilon = 1e-8
    """Added to the denominator, for the parameters that AdamW updates."""


@dataclass(frozen=True, kw_only=True)
class SgdSpec:
    """`name: sgd`, SGD with momentum and decoupled weight decay."""

    name: Literal["sgd"] = "sgd"
    """This optimizer."""
    momentum: Decay = 0.9
    """Decay rate of the momentum."""
    nesterov: bool = False
    """Nesterov's form of the momentum."""


@dataclass(frozen=True, kw_only=True)
class DecayGroup:
    """Parameters with a weight decay of their own."""

    names: str
    """Pattern of parameter names, such as `embed.*` or `layers.*.mlp.*`."""
    decay: Annotated[float, Bound(at_least=0)]
    """Their weight decay, instead of `weight_decay`."""


OptimizerSpec = AdamWSpec | LambSpec | MuonSpec | SgdSpec


def weight_decay_of(parameter: ParameterSpec, decay: float, groups: Sequence[DecayGroup]) -> float:
    """Return the weight decay of a parameter.

    The last group whose pattern matches its name decides it. If no group matches, it is `decay`, or 0 for a parameter
    that does not decay.
    """
    matches = (group.decay for group in reversed(groups) if fnmatchcase(parameter.name, group.names))
    return next(matches, decay if parameter.decay else 0.0)


def uses_muon(parameter: ParameterSpec) -> bool:
    """Return whether Muon updates a parameter: a weight matrix of a block, also of experts.

    Not the weight of a router, the gate of a shared expert (which is one row), or the biases of experts (which are
    stored as a matrix).
    """
    matrix = len(parameter.shape) >= 2 and parameter.inside
    return matrix and not parameter.name.endswith(("router.weight", "shared_gate.weight", "_bias"))


def newton_schulz_flops(shape: Sequence[int], iterations: int) -> float:
    """Return the FLOPs of the iterations of one matrix of shape (rows, columns).

    An iteration has three matmuls: two with the longer side, and one of the shorter side alone.
    """
    short = min(shape)
    long = max(shape)
    return iterations * (4.0 * short**2 * long + 2.0 * short**3)


def state_names(optimizer: OptimizerSpec, parameter: ParameterSpec) -> tuple[str, ...]:
    """Return the names of the state tensors that `optimizer` stores for `parameter`.

    Each has the parameter's shape and dtype.
    """
    if isinstance(optimizer, SgdSpec) or (isinstance(optimizer, MuonSpec) and uses_muon(parameter)):
        return MOMENTUM
    return MOMENTS
