"""AdamW's update of packed records, one segment of a parameter at a time: one kernel on a GPU, otherwise unpack, update and pack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.optim.fused import MOMENTS, Coefficients, UpdateInputs, corrected_rates, update
from meshwright.optim.packing import MASTER, ChunkPacking, pack, seed_of, unpack


@dataclass(frozen=True)
class StepTable:
    """Inputs that all segments of one step share, by parameter.

    It is made once per step, so that the update of a segment is one launch and copies nothing from the host.
    """

    inputs: UpdateInputs
    coefficients: Coefficients
    counts: tuple[Tensor, ...]
    indices: Mapping[str, int]
    """Index of each parameter in `counts`, `rates` and `seeds`."""
    rates: Tensor
    """`(2, parameters)`; see `fused.corrected_rates`."""
    seeds: Tensor
    """`(parameters,)`; see `packing.seed_of`."""
    factor: Tensor
    """Factor of the gradients (`UpdateInputs.factor`), in fp32."""

    @classmethod
    def of(cls, counts: Mapping[str, Tensor], coefficients: Coefficients, inputs: UpdateInputs) -> StepTable:
        """Make the table for the parameters in `counts`, of which there must be at least one. The counts already include this step."""
        listed = list(counts.values())
        rates = corrected_rates(listed, coefficients, inputs)
        seeds = seed_of(torch.stack(listed))
        indices = {name: index for index, name in enumerate(counts)}
        return cls(inputs, coefficients, tuple(listed), indices, rates, seeds, inputs.factor.float())


def update_segment(
    packing: ChunkPacking,
    fields: Mapping[str, Tensor],
    weights: Tensor,
    gradient: Tensor,
    table: StepTable,
    *,
    name: str,
    position: int,
    weight_decay: float,
) -> None:
    """Update a segment of the parameter `name` in place.

    - `fields`: the segment's part of the record, in whole blocks; padding stays 0.
    - `weights` `(count,)`: the bf16 values of the master weights if the record has their remainders, else the weights in the stored dtype.
    - `gradient` `(count,)`.
    - `position`: position of the segment's first element among all elements of the optimizer.
    """
    if weights.is_cuda and packing.stored == torch.float32:
        from meshwright.optim.packing_triton import update_record

        inputs = table.inputs
        coefficients = table.coefficients
        update_record(
            packing,
            fields,
            weights,
            gradient,
            position,
            rates=table.rates,
            seeds=table.seeds,
            index=table.indices[name],
            factor=table.factor,
            skip=inputs.skip,
            betas=coefficients.betas,
            epsilon=coefficients.epsilon,
            decay_factor=1 - inputs.learning_rate * weight_decay,
        )
        return
    _update_in_passes(packing, fields, weights, gradient, table, name, position, weight_decay)


def _update_in_passes(
    packing: ChunkPacking,
    fields: Mapping[str, Tensor],
    weights: Tensor,
    gradient: Tensor,
    table: StepTable,
    name: str,
    position: int,
    weight_decay: float,
) -> None:
    """Update a segment in three passes: unpack, update, pack."""
    count = gradient.numel()
    padded = fields[MOMENTS[0]].numel()
    states = dict(fields)
    rounded = None
    if not packing.plain:
        states = {state: weights.new_empty(padded, dtype=packing.stored) for state in packing.states}
        if packing.master:
            rounded = weights.new_zeros(padded)
            rounded[:count] = weights
        unpack(packing, fields, rounded, states)
    index = table.indices[name]
    update(
        [weights if rounded is None else states[MASTER][:count]],
        [gradient],
        [states[MOMENTS[0]][:count]],
        [states[MOMENTS[1]][:count]],
        [table.counts[index]],
        coefficients=table.coefficients,
        weight_decay=weight_decay,
        inputs=table.inputs,
    )
    if not packing.plain:
        pack(packing, states, fields, rounded, table.seeds[index], position)
    if rounded is not None:
        weights.copy_(rounded[:count])
