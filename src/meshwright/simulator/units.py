"""Seconds of one unit of a plan, from the closed-form cost model: its arithmetic, its gather, its reductions.

A unit is the embedding, one block, or the final norm with head and loss. Communication inside it (tensor, context) and recomputation are
part of its arithmetic; the closed form gives all layers together, and a block takes its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from meshwright.costs.collectives import all_reduce, crowding, gather, group
from meshwright.costs.compute import LayerTime, layer_times, product, rate
from meshwright.costs.inputs import Layouts
from meshwright.costs.memory import bytes_of
from meshwright.costs.of_plan import RECOMPUTE, Pricing, number, shard_size
from meshwright.costs.step import step_cost
from meshwright.spec.model import ModelSpec, layer_parameters, parameters
from meshwright.spec.plan import Plan

Unit = int | Literal["embed", "head"]
"""A block by its number, or one end of the model."""


@dataclass(frozen=True)
class Seconds:
    """One micro-batch through one unit on one rank."""

    forward: float
    backward_input: float
    backward_weight: float
    inside: Mapping[str, float] = field(default_factory=dict)
    """Communication in them that its own arithmetic does not hide, by axis."""


class UnitCosts:
    """Prices of the units of one plan. `tied_apart`: a tied head has a copy of its weight, on another rank than the embedding."""

    def __init__(self, model: ModelSpec, plan: Plan, priced: Pricing, *, tied_apart: bool = False) -> None:
        self.model, self.plan, self.priced = model, plan, priced
        self._tied_apart = tied_apart
        self._blocks: dict[str, Seconds] = {}
        self._counts: dict[Unit, int] = {}
        self._split = cache(lambda size: number(gather(self._shards, priced.constants, size)))
        self._summed = cache(lambda size: number(all_reduce(self._replicas, priced.constants, size)))
        machine, layout, k = priced.machine, priced.layout, priced.constants
        nodes = np.log2(np.maximum(1.0, layout.ranks / machine.per_node))
        self.jitter = number(1 + k.jitter * nodes)
        """Times that everything takes longer on many nodes."""
        self.host_micro = number(k.host_micro_us) * 1e-6 * self.jitter
        """Host seconds of one micro-batch on one rank, beside its units."""
        self.constant = number(k.step_ms + k.sync_ms * nodes) * 1e-3
        """Seconds of one step that depend on nothing."""
        crowd, inner = crowding(machine, layout, k), float(plan.axis_size("tensor"))
        self._shards = group(machine, k, float(shard_size(plan)), inner, crowd)
        self._replicas = group(machine, k, float(plan.axis_size("replicate")), inner * shard_size(plan), crowd)

    def compute(self, unit: Unit) -> Seconds:
        """Arithmetic of one micro-batch."""
        if unit == "embed":
            both = number(self._times("none").embed) * self.jitter
            return Seconds(both / 3, 0.0, both * 2 / 3)
        if unit == "head":  # its forward makes its gradients too (kernels.loss)
            return Seconds(number(self._times("none").head) * self.jitter, 0.0, 0.0)
        mode = self.plan.strategy(unit, self.model.layers).recompute
        if mode not in self._blocks:
            self._blocks[mode] = self._block(mode)
        return self._blocks[mode]

    def gather(self, unit: Unit) -> float:
        """Seconds to gather the unit's weights over the shard axis."""
        return self._split(self.count(unit) * bytes_of(self.plan.precision.compute))

    def reduce(self, unit: Unit) -> float:
        """Seconds to reduce-scatter its gradients over the shard axis."""
        return self._split(self.count(unit) * bytes_of(self.plan.precision.reduce))

    def replicate(self, unit: Unit) -> float:
        """Seconds to sum its gradient shards over replicas."""
        width = bytes_of(self.plan.precision.reduce_replicas or self.plan.precision.stored)
        return self._summed(self.count(unit) / shard_size(self.plan) * width)

    def count(self, unit: Unit) -> int:
        """Parameters of the unit on one tensor rank, before sharding."""
        alike = 0 if isinstance(unit, int) else unit
        if alike not in self._counts:
            self._counts[alike] = self._parameters(alike) // self.plan.axis_size("tensor")
        return self._counts[alike]

    def optimizer(self, owned: float, layers: int) -> float:
        """Seconds to update `owned` parameters of a rank that runs `layers` blocks."""
        machine, k = self.priced.machine, self.priced.constants
        return number(owned * k.update / (machine.hbm * k.hbm) + k.step_layer_us * 1e-6 * layers)

    def _parameters(self, unit: Unit) -> int:
        if isinstance(unit, int):
            return sum(row.count for row in layer_parameters(self.model, unit))
        wanted = ("embed", "positions") if unit == "embed" else ("norm", "head")
        total = sum(row.count for row in parameters(self.model) if row.name.partition(".")[0] in wanted)
        shared = unit == "head" and self.model.tied and self._tied_apart
        return total + (self.model.vocab_size * self.model.hidden if shared else 0)

    def _times(self, mode: str) -> LayerTime:
        return layer_times(self.priced.shape, self.priced.machine, self._lone(mode), self.priced.constants)

    def _lone(self, mode: str) -> Layouts:
        """One micro-batch of one replica in one piece."""
        layout = self.priced.layout
        return replace(
            layout, pipeline=1.0, virtual=1.0, data=1.0, shards=1.0, zero=0.0, layered=0.0,
            global_batch=layout.micro_batch, recompute=RECOMPUTE[mode],
        )  # fmt: skip

    def _block(self, mode: str) -> Seconds:
        times, k = self._times(mode), self.priced.constants
        cost = step_cost(self.priced.shape, self.priced.machine, self._lone(mode), k)
        tensor, context = number(cost.exposed["tensor"]), number(cost.exposed["context"])
        forward = number(times.forward)
        # Repeating the forward repeats its two collectives; a ring passes keys and values once forward and twice backward.
        forward += tensor * (1 / 3 if mode == "full" else 1 / 2)
        forward += context * (1 / 2 if number(self.priced.layout.all_to_all) else 1 / 3)
        work = number(times.forward + times.backward) + tensor + context
        backward = work - forward
        host = number(cost.host) - number(k.host_micro_us) * 1e-6
        each = (work + host) / work * self.jitter / self.model.layers
        weight = min(self._weight_products() * self.model.layers, backward)
        return Seconds(
            forward=forward * each,
            backward_input=(backward - weight) * each,
            backward_weight=weight * each,
            inside={"tensor": tensor * each, "context": context * each},
        )

    def _weight_products(self) -> float:
        """Seconds of one block's weight gradients: of each matrix a product as large as its forward."""
        machine, k, layout = self.priced.machine, self.priced.constants, self.priced.layout
        tokens = layout.micro_batch * layout.seq / layout.context
        speed, width = rate(machine, k), layout.tensor
        matrices = [row.shape for row in layer_parameters(self.model, 0) if len(row.shape) == 2]
        return sum(number(product(speed, k, tokens, inner, out / width)) for out, inner in matrices)
