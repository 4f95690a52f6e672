"""Muon (Jordan et al. 2024) as an update rule for the matrices of blocks, with the scale of Moonlight (Liu et al. 2025).

The momentum of each matrix is orthogonalised by Newton-Schulz iterations. Then it is scaled to the RMS `update_rms`, which AdamW's updates
have, so that both can share learning rate and weight decay. Embedding, head, learned positions, routers, norms and biases are updated by
AdamW. The momentum is sharded like the weight; whole matrices exist only during the update (`optim.matrix_exchange`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.optim.adamw import AdamWRule
from meshwright.optim.fused import Coefficients, UpdateInputs
from meshwright.optim.matrices import matrices_of
from meshwright.optim.matrix_exchange import MatrixExchange
from meshwright.optim.newton_schulz import compute_dtype, orthogonalise
from meshwright.optim.rule import RuleTensors, subtract_updates, usable_gradients
from meshwright.optim.sgd import momentum_updates
from meshwright.spec.model import ParameterSpec
from meshwright.spec.optimizers import MOMENTUM, MuonSpec, newton_schulz_flops, uses_muon
from meshwright.state.shared_ranks import SharedRanks


class MuonRule:
    """The update of all parameters. Collective: the ranks of a stage must update the same groups in the same order.

    Matrices are exchanged in bundles of whole blocks. A bundle is large enough to give all ranks similar work.
    """

    collective = True

    def __init__(self, tensors: RuleTensors, spec: MuonSpec, ranks: SharedRanks) -> None:
        self._tensors = tensors
        self._spec = spec
        matrices = {name: parameter for name, parameter in tensors.specs.items() if uses_muon(parameter)}
        others = [name for name in tensors.weights if name not in matrices]
        self._adamw = AdamWRule(tensors, Coefficients((spec.beta1, spec.beta2), spec.epsilon), others)
        size = 1 if ranks.group is None else ranks.group.size()
        loads = [0.0] * size
        self._exchanges: dict[str, tuple[list[str], MatrixExchange]] = {}
        for bundle in bundles_of_blocks(list(matrices.values()), size):
            names = [parameter.name for parameter in bundle]
            self._exchanges[names[0]] = names, MatrixExchange(bundle, ranks, loads)

    def bundles(self) -> Sequence[Sequence[str]]:
        """See `UpdateRule`. Each parameter of AdamW is a bundle; the matrices of an exchange are a bundle."""
        return [*self._adamw.bundles(), *(names for names, _ in self._exchanges.values())]

    def update(self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """See `UpdateRule`."""
        self._adamw.update([name for name in names if not uses_muon(self._tensors.specs[name])], gradients, inputs)
        for name in names:
            if name in self._exchanges:
                self._update_matrices(*self._exchanges[name], gradients, inputs)

    def _update_matrices(
        self, names: list[str], exchange: MatrixExchange, gradients: Mapping[str, Tensor], inputs: UpdateInputs
    ) -> None:
        momenta = self._tensors.of(names, MOMENTUM[0])
        dtype = momenta[0].dtype
        # Every rank takes part in the exchange, also if its experts got no token and so have no gradient.
        present = [
            gradients.get(name, momentum.new_zeros(())).expand_as(momentum)
            for name, momentum in zip(names, momenta, strict=True)
        ]
        usable = usable_gradients([gradient.contiguous() for gradient in present], inputs, dtype)
        updates = momentum_updates(momenta, usable, self._spec.momentum, inputs, nesterov=self._spec.nesterov)
        parts = dict(zip(names, updates, strict=True))
        exchange.apply(parts, self._direction, compute_dtype(dtype, momenta[0].device))
        subtract_updates(names, list(parts.values()), self._tensors, inputs)

    def _direction(self, matrices: list[Tensor]) -> list[Tensor]:
        """Return the scaled updates of whole matrices, given their momenta."""
        return [
            matrix * (self._spec.update_rms * max(matrix.shape) ** 0.5)
            for matrix in orthogonalise(matrices, self._spec.iterations)
        ]


def bundles_of_blocks(parameters: Sequence[ParameterSpec], ranks: int) -> list[list[ParameterSpec]]:
    """Divide parameters into bundles of consecutive blocks. A bundle has at least `ranks` times the work of its largest matrix."""
    bundles: list[list[ParameterSpec]] = []
    work = 0.0
    largest = 0.0
    block = ""
    for parameter in parameters:
        its_block = ".".join(parameter.name.split(".")[:2])
        if its_block != block and work >= ranks * largest:
            bundles.append([])
            work = largest = 0.0
        block = its_block
        bundles[-1].append(parameter)
        costs = [newton_schulz_flops(matrix.sizes[-2:], 1) for matrix in matrices_of(parameter)]
        work = work + sum(costs)
        largest = max(largest, *costs)
    return bundles
