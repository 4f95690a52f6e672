"""Moves experts between the ranks of a stage. The rows of their state change places along dimension 0, bit for bit.

A move renumbers the experts of a layer: their weights, moments and averages, and the rows of the router that choose them. The model
computes the same function before and after. A checkpoint has the model with the new numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.ranks import RankGroup
from meshwright.models.decoder import Decoder
from meshwright.optim.optimizer import Optimizer
from meshwright.parallel.blocks import numbered_blocks
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.shared_ranks import STAGE_AXES
from meshwright.spec.layout import Box
from meshwright.state.parts import StateParts


@dataclass(frozen=True)
class RowTransfers:
    """By rank of the group, the local rows of a tensor that this rank sends to it, and the local rows that it receives from it."""

    sent: tuple[list[int], ...]
    received: tuple[list[int], ...]


class ExpertMoves:
    """Exchanges the state of this rank's MoE layers with the other ranks of its stage, in its copy of the model.

    Creation is collective over all ranks of the job, `move` over the ranks of the stage and model copy.
    """

    def __init__(self, model: Decoder, mesh: Mesh, optimizer: Optimizer, weights: Mapping[str, StateParts]) -> None:
        self._optimizer = optimizer
        self._device = mesh.device
        self._group = mesh.group_over(STAGE_AXES)
        self._parameters = dict(_expert_parameters(model))
        boxes = {name: weights[name].boxes for name in self._parameters}
        by_rank = RankGroup(mesh.world.control).run_on_all("places of experts", lambda: boxes)
        members = [mesh.rank] if self._group is None else dist.get_process_group_ranks(self._group)
        self._index = members.index(mesh.rank)
        self._boxes = [by_rank[rank] for rank in members]

    @torch.no_grad()
    def move(self, orders: Mapping[int, np.ndarray]) -> None:
        """Move experts: position p of each layer in `orders` gets the expert that is now at position `orders[layer][p]`."""
        self._optimizer.wait_for_copies()
        parameter_of_state = self._optimizer.parameter_of_state()
        states: dict[str, list[StateParts]] = defaultdict(list)
        for parts in self._optimizer.state():
            states[parameter_of_state[parts.name]].append(parts)
        for name, layer in self._parameters.items():
            if layer in orders:
                transfers = row_transfers([boxes[name] for boxes in self._boxes], orders[layer].tolist(), self._index)
                for parts in states[name]:
                    self._exchange(parts, transfers)

    def _exchange(self, parts: StateParts, transfers: RowTransfers) -> None:
        assert parts.encoded is None, "the planner refuses moves of state that is in host memory"
        rows = parts.local.view(parts.local.shape[0], prod(parts.local.shape[1:]))  # also without rows
        sent = self._selected(rows, transfers.sent).view(torch.uint8).flatten()
        received = torch.empty_like(self._selected(rows, transfers.received))
        if self._group is None:
            received.view(torch.uint8).flatten().copy_(sent)
        else:
            counts = ([rows[:1].nbytes * len(part) for part in side] for side in (transfers.received, transfers.sent))
            dist.all_to_all_single(received.view(torch.uint8).flatten(), sent, *counts, group=self._group)
        rows[_flat(transfers.received)] = received

    def _selected(self, matrix: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        return matrix[_flat(parts)].contiguous()


def row_transfers(boxes: Sequence[Sequence[Box]], order: Sequence[int], index: int) -> RowTransfers:
    """Return which rows rank `index` sends and receives, for a tensor whose boxes on each rank are `boxes`.

    Row p becomes the old row `order[p]`. If a rank has this old row itself, it takes its own; otherwise the first rank with the row sends
    it.
    """
    holders: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, own in enumerate(boxes):
        for box in own:
            for row in range(box.sizes[0]):
                columns = (*box.offsets[1:], *box.sizes[1:])
                holders[box.offsets[0] + row, *columns].append((rank, box.first_row + row))
    sent: tuple[list[int], ...] = tuple([] for _ in boxes)
    received: tuple[list[int], ...] = tuple([] for _ in boxes)
    for (row, *columns), places in holders.items():
        if order[row] == row:
            continue
        sources = dict(reversed(holders[order[row], *columns]))
        first = holders[order[row], *columns][0][0]
        for target, local_row in places:
            source = target if target in sources else first
            if source == index:
                sent[target].append(sources[source])
            if target == index:
                received[source].append(local_row)
    return RowTransfers(sent, received)


def _expert_parameters(model: Decoder) -> Iterator[tuple[str, int]]:
    """Yield name and layer of each parameter of an MoE layer whose dimension 0 is the experts. Includes the router."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer, block in numbered_blocks(model):
        if block.routed:
            for name, parameter in block.moe.named_parameters():
                if not name.startswith("shared."):
                    yield names[id(parameter)], layer


def _flat(parts: Sequence[Sequence[int]]) -> list[int]:
    return [row for part in parts for row in part]
