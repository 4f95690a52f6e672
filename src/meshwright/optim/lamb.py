"""LAMB (You et al. 2020) as an update rule: AdamW's updates times norm(weight) / norm(update) of a matrix.

Each matrix has a trust ratio, the norm of its weights divided by the norm of its update. The norms are those of whole matrices: each rank
sums the squares of its pieces, and one all-reduce adds the sums over the ranks of the stage. Each matrix of a fused weight has its own
ratio, and so has each expert. Parameters without weight decay (norms, biases) have the ratio 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.optim.fused import Coefficients, UpdateInputs, count_updates
from meshwright.optim.matrices import MatrixPiece, matrices_of, pieces_of
from meshwright.optim.norms import norms
from meshwright.optim.rule import RuleTensors, unless_skipped, usable_gradients
from meshwright.spec.optimizers import MOMENTS
from meshwright.state.shared_ranks import SharedRanks


class LambRule:
    """The update of all parameters. Collective: the ranks of a stage must update the same groups in the same order."""

    collective = True

    def __init__(self, tensors: RuleTensors, coefficients: Coefficients, ranks: SharedRanks) -> None:
        self._tensors = tensors
        self._coefficients = coefficients
        self._ranks = ranks
        self._matrix_counts: dict[str, int] = {}
        self._pieces: dict[str, list[MatrixPiece]] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}
        for name, spec in tensors.specs.items():
            if spec.decay:
                matrices = matrices_of(spec)
                self._matrix_counts[name] = len(matrices)
                self._pieces[name] = list(pieces_of(matrices, ranks.boxes(spec)[ranks.index]))

    def bundles(self) -> Sequence[Sequence[str]]:
        """See `UpdateRule`. Each parameter is a bundle of its own."""
        return [[name] for name in self._tensors.weights]

    def update(self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """See `UpdateRule`."""
        with_gradient = [name for name in names if name in gradients]
        updates = self._adam_updates(with_gradient, gradients, inputs)
        self._scale_by_trust(names, updates, inputs)
        weights = [self._tensors.weights[name] for name in with_gradient]
        if weights:
            selected = [updates[name] for name in with_gradient]
            torch._foreach_mul_(selected, unless_skipped(inputs.learning_rate, 0.0, inputs, weights[0].dtype))
            torch._foreach_sub_(weights, selected)

    def _adam_updates(
        self, names: Sequence[str], gradients: Mapping[str, Tensor], inputs: UpdateInputs
    ) -> dict[str, Tensor]:
        """Update the moments, and return AdamW's update of each parameter, including weight decay, without the learning rate."""
        if not names:
            return {}
        first, second = (self._tensors.of(names, moment) for moment in MOMENTS)
        dtype = first[0].dtype
        betas = self._coefficients.betas
        usable = usable_gradients([gradients[name] for name in names], inputs, dtype)
        counts = [self._tensors.counts[name] for name in names]
        with count_updates(counts, inputs.skip):
            torch._foreach_mul_(first, unless_skipped(betas[0], 1.0, inputs, dtype))
            torch._foreach_add_(first, usable, alpha=1 - betas[0])
            torch._foreach_mul_(second, unless_skipped(betas[1], 1.0, inputs, dtype))
            torch._foreach_addcmul_(second, usable, usable, 1 - betas[1])
            steps = torch.stack(counts).double()
            first_scale, second_scale = (1 / (1 - beta**steps) for beta in betas)
        updates: dict[str, Tensor] = {}
        for index, name in enumerate(names):
            update = torch.mul(
                first[index], first_scale[index].to(dtype), out=usable[index]
            )  # it needs no memory of its own
            update /= (second[index] * second_scale[index].to(dtype)).sqrt_().add_(self._coefficients.epsilon)
            updates[name] = update.add_(self._tensors.weights[name], alpha=self._tensors.decays[name])
        return updates

    def _scale_by_trust(self, names: Sequence[str], updates: Mapping[str, Tensor], inputs: UpdateInputs) -> None:
        """Multiply the updates of each matrix by the matrix's trust ratio, in place."""
        names = [name for name in names if name in self._pieces]
        offsets = {}
        total = 0
        for name in names:
            offsets[name] = total
            total = total + self._matrix_counts[name]
        squares = torch.zeros(2, total, dtype=torch.float64, device=inputs.skip.device)
        located = [(name, piece) for name in names if name in updates for piece in self._pieces[name]]
        counted = [(name, piece) for name, piece in located if piece.primary]
        if counted:
            index = self._on_device(tuple(offsets[name] + piece.matrix for name, piece in counted), squares.device)
            for row, tensors in enumerate((self._tensors.weights, updates)):
                of_pieces = norms([piece.of(tensors[name]) for name, piece in counted])
                squares[row].index_add_(0, index, of_pieces.square())
        if self._ranks.group is not None and total:
            dist.all_reduce(squares, group=self._ranks.group)
        weight_norm, update_norm = squares.sqrt()
        ratios = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        if located:  # all pieces are scaled, also those that another rank counts
            by_matrix = ratios.to(next(iter(updates.values())).dtype).unbind()
            torch._foreach_mul_(
                [piece.of(updates[name]) for name, piece in located],
                [by_matrix[offsets[name] + piece.matrix] for name, piece in located],
            )

    def _on_device(self, index: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the numbers as a tensor on the device. It is kept for later steps, because the host would wait for a new copy."""
        if index not in self._indices:
            self._indices[index] = torch.tensor(index, device=device)
        return self._indices[index]
