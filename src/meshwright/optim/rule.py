"""The interface of an update rule: how one optimizer changes weights and its state tensors from gradients, in place.

`optim.optimizer` owns the tensors and decides which parameters are updated when; a rule knows one method. A step may update groups of
parameters one after another, so that a snapshot's copies of a later group continue meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.optim.fused import UpdateInputs
from meshwright.spec.model import ParameterSpec


@dataclass(frozen=True)
class RuleTensors:
    """A rank's tensors on the device, by parameter name: `states` by state name first, `counts` of updates, and `decays`."""

    specs: Mapping[str, ParameterSpec]
    weights: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    counts: Mapping[str, Tensor]
    decays: Mapping[str, float]

    def of(self, names: Sequence[str], state: str) -> list[Tensor]:
        """A state tensor of each parameter."""
        return [self.states[state][name] for name in names]


class UpdateRule(Protocol):
    """Update of an optimizer for the parameters that its state was created for."""

    collective: bool
    """Whether `update` communicates: all ranks that share parameters then update the same groups in the same order."""

    def bundles(self) -> Sequence[Sequence[str]]:
        """All parameters in the order of their update; those of one bundle are in one call of `update`."""
        ...

    def update(self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """Update `names`; those without a gradient are left out, unless their update is collective. Overwrites gradients.

        A skipped update (`inputs.skip`) changes no tensor.
        """
        ...


def usable_gradients(gradients: Sequence[Tensor], inputs: UpdateInputs, dtype: torch.dtype) -> list[Tensor]:
    """The gradients in `dtype` times their factor; zeros if the update is skipped, as a skipped gradient may have NaN."""
    wide = [gradient.to(dtype) for gradient in gradients]
    if wide:
        torch._foreach_mul_(wide, inputs.factor.to(dtype))
    skipped = inputs.skip.bool()
    for gradient in wide:
        gradient.masked_fill_(skipped, 0.0)
    return wide


def unless_skipped(value: float, otherwise: float, inputs: UpdateInputs, dtype: torch.dtype) -> Tensor:
    """A scalar on the device: `value`, or `otherwise` if the update is skipped."""
    skip = inputs.skip.to(dtype)  # `torch.where` of two numbers has the default dtype
    return otherwise * skip + value * (1 - skip)


def subtract_updates(names: Sequence[str], updates: list[Tensor], tensors: RuleTensors, inputs: UpdateInputs) -> None:
    """Decay the weights and subtract the updates times the learning rate. Overwrites the updates."""
    for decay in dict.fromkeys(tensors.decays[name] for name in names):
        of_decay = [index for index, name in enumerate(names) if tensors.decays[name] == decay]
        weights = [tensors.weights[names[index]] for index in of_decay]
        selected = [updates[index] for index in of_decay]
        dtype = weights[0].dtype
        if decay:
            torch._foreach_mul_(weights, unless_skipped(1 - inputs.learning_rate * decay, 1.0, inputs, dtype))
        torch._foreach_mul_(selected, unless_skipped(inputs.learning_rate, 0.0, inputs, dtype))
        torch._foreach_sub_(weights, selected)
