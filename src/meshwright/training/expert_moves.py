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
    """Which rows of a tensor this rank exchanges with each rank of the group. Rows are numbered in this rank's local tensor."""

    sent: tuple[list[int], ...]
    """`sent[rank]` are the local rows that this rank sends to `rank`."""
    received: tuple[list[int], ...]
    """`received[rank]` are the local rows that `rank` sends to this rank."""


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
        assert parts.memory == "device", "the planner refuses moves of state that is in host memory"
        # `view(rows, -1)` would fail on a rank that has no rows of this parameter.
        rows = parts.local.view(parts.local.shape[0], prod(parts.local.shape[1:]))
        sent = self._selected(rows, transfers.sent).view(torch.uint8).flatten()
        received = torch.empty_like(self._selected(rows, transfers.received))
        if self._group is None:
            received.view(torch.uint8).flatten().copy_(sent)
        else:
            row_bytes = rows[:1].nbytes
            received_bytes = [row_bytes * len(local_rows) for local_rows in transfers.received]
            sent_bytes = [row_bytes * len(local_rows) for local_rows in transfers.sent]
            dist.all_to_all_single(
                received.view(torch.uint8).flatten(), sent, received_bytes, sent_bytes, group=self._group
            )
        rows[_flat(transfers.received)] = received

    def _selected(self, matrix: Tensor, rows_by_rank: Sequence[Sequence[int]]) -> Tensor:
        return matrix[_flat(rows_by_rank)].contiguous()


def row_transfers(boxes: Sequence[Sequence[Box]], order: Sequence[int], index: int) -> RowTransfers:
    """Return which rows rank `index` sends and receives, for a tensor whose boxes on each rank are `boxes`.

    Row p becomes the old row `order[p]`. A rank that has this old row copies it from its own tensor. To other ranks, the first rank with
    the old row sends it.
    """
    # By a row of the whole tensor and the columns that a rank has of it: the ranks, each with the row's number in its local tensor.
    places: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for rank, rank_boxes in enumerate(boxes):
        for box in rank_boxes:
            first_row_of_whole, *column_offsets = box.offsets
            count, *column_sizes = box.sizes
            for row in range(count):
                key = (first_row_of_whole + row, *column_offsets, *column_sizes)
                places[key][rank] = box.first_row + row
    sent: tuple[list[int], ...] = tuple([] for _ in boxes)
    received: tuple[list[int], ...] = tuple([] for _ in boxes)
    for (row, *columns), targets in places.items():
        if order[row] == row:
            continue
        sources = places[order[row], *columns]
        first_source = next(iter(sources))
        for target, local_row in targets.items():
            source = target if target in sources else first_source
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


def _flat(rows_by_rank: Sequence[Sequence[int]]) -> list[int]:
    return [row for rows in rows_by_rank for row in rows]
