"""SGD with momentum (Sutskever et al. 2013) and decoupled weight decay as an update rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.optim.fused import UpdateInputs
from meshwright.optim.rule import RuleTensors, subtract_updates, unless_skipped, usable_gradients
from meshwright.spec.optimizers import MOMENTUM


def momentum_updates(
    momenta: list[Tensor], gradients: list[Tensor], beta: float, inputs: UpdateInputs, *, nesterov: bool
) -> list[Tensor]:
    """Decay the momenta by `beta` and add the gradients to them. Returns the updates, which use the memory of the gradients.

    An update is the new momentum m; with `nesterov` it is g + beta · m, where g is the gradient.
    """
    torch._foreach_mul_(momenta, unless_skipped(beta, 1.0, inputs, momenta[0].dtype))
    torch._foreach_add_(momenta, gradients)
    if nesterov:
        torch._foreach_add_(gradients, momenta, alpha=beta)
    else:
        torch._foreach_copy_(gradients, momenta)
    return gradients


class SgdRule:
    """The update of all parameters. The update of an element depends only on the element's own gradient."""

    collective = False

    def __init__(self, tensors: RuleTensors, momentum: float, *, nesterov: bool) -> None:
        self._tensors = tensors
        self._momentum = momentum
        self._nesterov = nesterov

    def bundles(self) -> Sequence[Sequence[str]]:
        """See `UpdateRule`. Each parameter is a bundle of its own."""
        return [[name] for name in self._tensors.weights]

    def update(self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """See `UpdateRule`."""
        names = [name for name in names if name in gradients]
        if not names:
            return
        momenta = self._tensors.of(names, MOMENTUM[0])
        usable = usable_gradients([gradients[name] for name in names], inputs, momenta[0].dtype)
        updates = momentum_updates(momenta, usable, self._momentum, inputs, nesterov=self._nesterov)
        subtract_updates(names, updates, self._tensors, inputs)
