"""The interface of an update rule: how one optimizer changes weights and state tensors in place, given gradients.

`optim.optimizer` owns the tensors and decides which parameters are updated when; a rule knows only the method. A step may update groups of
parameters one after another, so that a snapshot can copy a later group meanwhile.
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
    """A rank's tensors on the device, by parameter name.

    `states` is indexed by the name of the state first, then by parameter. `counts` has the number of updates, `decays` the weight decays.
    """

    specs: Mapping[str, ParameterSpec]
    weights: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    counts: Mapping[str, Tensor]
    decays: Mapping[str, float]

    def of(self, names: Sequence[str], state: str) -> list[Tensor]:
        """Return the state tensor `state` of each parameter in `names`."""
        return [self.states[state][name] for name in names]


class UpdateRule(Protocol):
    """The update of an optimizer, for the parameters whose state tensors it was created with."""

    collective: bool
    """Whether `update` communicates. If so, all ranks that share parameters must update the same groups in the same order."""

    def bundles(self) -> Sequence[Sequence[str]]:
        """Return all parameters in the order of their update. The parameters of one bundle must be updated in one call of `update`."""
        ...

    def update(self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """Update `names`. Parameters without a gradient are left out, unless the update is collective. Gradients are overwritten.

        If the update is skipped (`inputs.skip`), no tensor changes.
        """
        ...


def usable_gradients(gradients: Sequence[Tensor], inputs: UpdateInputs, dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients in `dtype`, multiplied by their factor. If the update is skipped they are zeros, because they may have NaN."""
    wide = [gradient.to(dtype) for gradient in gradients]
    if wide:
        torch._foreach_mul_(wide, inputs.factor.to(dtype))
    skipped = inputs.skip.bool()
    for gradient in wide:
        gradient.masked_fill_(skipped, 0.0)
    return wide


def unless_skipped(value: float, otherwise: float, inputs: UpdateInputs, dtype: torch.dtype) -> Tensor:
    """Return `value`, or `otherwise` if the update is skipped, as a scalar on the device."""
    skip = inputs.skip.to(dtype)  # `torch.where` of two numbers has the default dtype
    return otherwise * skip + value * (1 - skip)


def subtract_updates(names: Sequence[str], updates: list[Tensor], tensors: RuleTensors, inputs: UpdateInputs) -> None:
    """Decay the weights, and subtract the updates multiplied by the learning rate. The updates are overwritten."""
    for decay in dict.fromkeys(tensors.decays[name] for name in names):
        of_decay = [index for index, name in enumerate(names) if tensors.decays[name] == decay]
        weights = [tensors.weights[names[index]] for index in of_decay]
        selected = [updates[index] for index in of_decay]
        dtype = weights[0].dtype
        if decay:
            torch._foreach_mul_(weights, unless_skipped(1 - inputs.learning_rate * decay, 1.0, inputs, dtype))
        torch._foreach_mul_(selected, unless_skipped(inputs.learning_rate, 0.0, inputs, dtype))
        torch._foreach_sub_(weights, selected)
