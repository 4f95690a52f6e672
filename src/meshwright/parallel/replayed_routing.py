"""Replaces the choices of routers so that experts get recorded loads (`train --replay-routing`).

All T tokens of a step, of all ranks and micro-batches, are numbered. The experts are written in a row in which each expert occurs as often
as it is to be chosen. Token p gets the experts at positions p, p + T, p + 2T and so on. These are different experts, because no expert
occurs more than T times. Example: 2 tokens with 2 experts each, and loads 2, 1, 1 give the row 0 0 1 2; token 0 gets experts 0 and 1, token
1 gets 0 and 2. Before that the token numbers are multiplied by a stride modulo T, so that every rank and micro-batch gets nearly the same
share of each load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.moe import MoELayer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.routing import RoutingStatistics
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import CONTEXT_AXES, Plan

GOLDEN = (math.sqrt(5) - 1) / 2
"""The golden section. Its multiples modulo 1 are spread most evenly."""


def replay_loads(
    model: Decoder, routing: RoutingStatistics, loads: np.ndarray, plan: Plan, mesh: Mesh, seq: int
) -> ReplayedRouting:
    """Make the routers of `model` choose experts with the recorded `loads`, in training on sequences of `seq` tokens.

    Raises BadInput if the run has samples of any length, because the number of tokens then differs between steps.
    """
    if plan.samples is not None:
        raise BadInput("--replay-routing: expected data.packing other than none: steps of it differ in tokens")
    blocks = {int(number): block for number, block in model.layers.items()}
    moe_layers = {layer: block.moe for layer, block in blocks.items() if isinstance(block, Block) and block.routed}
    routed = [layer for layer in range(model.spec.layers) if model.spec.routed(layer)]
    replay = ReplayedRouting(loads, moe_layers, routed, plan, mesh, seq)
    routing.choose = replay.choose
    return replay


class ReplayedRouting:
    """Chooses the experts of this rank's tokens.

    `loads` `(steps, routed layers, experts)` are scaled to the number of tokens of this run; after the last recorded step they start again.
    Raises BadInput if an expert would have more rows than a step has tokens.
    """

    def __init__(
        self,
        loads: np.ndarray,
        moe_layers: Mapping[int, MoELayer],
        routed: list[int],
        plan: Plan,
        mesh: Mesh,
        seq: int,
    ) -> None:
        self._moe_layers = moe_layers
        self._routed = {layer: index for index, layer in enumerate(routed)}
        self._tokens = plan.batch.global_batch * seq
        self._per_token = next(iter(moe_layers.values())).per_token if moe_layers else 1
        self._loads = _scaled(loads, self._tokens * self._per_token) if moe_layers else loads
        largest = int(self._loads.max()) if moe_layers else 0
        if largest > self._tokens:
            raise BadInput(
                f"--replay-routing: an expert would get {largest:,} rows of {self._tokens:,} tokens; a token goes to "
                f"{self._per_token} different experts, so no expert may have more than 1/{self._per_token} of a layer's load"
            )
        part = mesh.data_rank
        parts = mesh.data_ranks
        for axis in (*CONTEXT_AXES, "tensor"):
            part = part * mesh.axis_size(axis) + mesh.coordinate(axis)
            parts = parts * mesh.axis_size(axis)
        self._first_block = part * plan.batch.accumulate
        self._blocks = parts * plan.batch.accumulate
        self._stride = _stride(self._tokens)
        self._device = mesh.device
        self._ends = torch.zeros(0)
        self.positions: torch.Tensor | None = None
        """The position of each expert in the model, `(routed layers, experts)`, if the run moves experts. None if no expert has moved."""

    def begin_step(self, step: int) -> None:
        """Use the loads of `step`; steps count from 1."""
        counts = self._loads[(step - 1) % len(self._loads)]
        self._ends = torch.from_numpy(counts.cumsum(1)).to(self._device)

    def choose(self, layer: int, micro_batch: int | None) -> None:
        """Set the choices of a layer's router for a micro-batch of this rank. With None the router chooses by itself again."""
        moe = self._moe_layers.get(layer)
        if moe is None:
            return
        if micro_batch is None:
            moe.replayed = None
            return
        count = self._tokens // self._blocks
        first = (self._first_block + micro_batch) * count
        numbers = torch.arange(first, first + count, device=self._device) * self._stride % self._tokens
        copies = torch.arange(self._per_token, device=self._device)
        ends = self._ends[self._routed[layer]]
        chosen = torch.searchsorted(ends, numbers[:, None] + copies * self._tokens, right=True)
        if self.positions is not None:
            chosen = self.positions[self._routed[layer]][chosen]
        # The scores of a token's experts differ, so that their order is the same on every device.
        scores = (self._per_token - copies).to(torch.float32).expand(chosen.shape)
        moe.replayed = torch.zeros(count, len(ends), device=self._device).scatter_(1, chosen, scores)


def _scaled(loads: np.ndarray, total: int) -> np.ndarray:
    """Scale the loads of each layer to integers with the sum `total`. What rounding down leaves goes to the largest fractions."""
    exact = loads * (total / loads.sum(2, keepdims=True))
    whole = np.floor(exact).astype(np.int64)
    order = (whole - exact).argsort(2, kind="stable").argsort(2, kind="stable")
    return whole + (order < total - whole.sum(2, keepdims=True))


def _stride(tokens: int) -> int:
    """Return a number near `tokens` · `GOLDEN` that has no common divisor with `tokens`."""
    stride = max(1, round(tokens * GOLDEN))
    while math.gcd(stride, tokens) > 1:
        stride += 1
    return stride
