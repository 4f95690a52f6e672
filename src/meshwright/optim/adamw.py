"""AdamW (Loshchilov & Hutter 2019) as an update rule. On CUDA a group of parameters needs one kernel launch per weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.optim.fused import MOMENTS, Coefficients, UpdateInputs, count_updates, update
from meshwright.optim.rule import RuleTensors


class AdamWRule:
    """The update of the parameters `names`. The update of an element depends only on the element's own gradient."""

    collective = False

    def __init__(self, tensors: RuleTensors, coefficients: Coefficients, names: Sequence[str]) -> None:
        self._tensors = tensors
        self._coefficients = coefficients
        self._names = list(names)

    def bundles(self) -> Sequence[Sequence[str]]:
        """See `UpdateRule`. Each parameter is a bundle of its own."""
        return [[name] for name in self._names]

    def update(self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """See `UpdateRule`."""
        names = [name for name in names if name in gradients]
        if not names:  # for example because all state is in host memory
            return
        tensors = self._tensors
        by_name = (tensors.weights, gradients, *(tensors.states[moment] for moment in MOMENTS), tensors.counts)
        with count_updates([tensors.counts[name] for name in names], inputs.skip):
            for weight_decay in dict.fromkeys(tensors.decays[name] for name in names):
                selected = [name for name in names if tensors.decays[name] == weight_decay]
                update(
                    *([tensor[name] for name in selected] for tensor in by_name),
                    coefficients=self._coefficients,
                    weight_decay=weight_decay,
                    inputs=inputs,
                )
