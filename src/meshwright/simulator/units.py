"""Seconds of one unit of a plan, from the closed-form cost model: its arithmetic, its gather, its reductions.

A unit is the embedding, one block, or the final norm with head and loss. Communication inside it (tensor, context, expert), copies to
host memory that it does not hide and recomputation are part of its arithmetic; the closed form gives all layers together, and a block
takes its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np

from meshwright.costs.collective_costs import Group, all_reduce, congestion, copy_engine_group, gather, rank_group
from meshwright.costs.compute import LayerTime, layer_times, product_rate
from meshwright.costs.offload_costs import exposed_copy_seconds, host_optimizer, host_rate
from meshwright.costs.plan_costs import Pricing, number
from meshwright.costs.step import context_traffic, layer_exposure
from meshwright.spec.layout import gradients_final_in_backward, stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTE_MODES, RECOMPUTES_PRODUCTS, LayerStrategy, Linear, Plan, Recompute
from meshwright.workload.activations import saved_elements_by_layer
from meshwright.workload.dtypes import accumulated_by_products, bytes_of, gathered_width, state_bytes
from meshwright.workload.groups import experts_over, shard_size
from meshwright.workload.layer_products import layer_products
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape, with_blocks
from meshwright.workload.step_shape import step_shape
from meshwright.workload.unit_parameters import UnitParameters, block_unit, end_units

Unit = int | Literal["embed", "head"]
"""A block by its number, or one end of the model."""

MOST_TAX = 0.9
"""Of compute's speed, what a collective beside it may take at most."""


@dataclass(frozen=True)
class Seconds:
    """One micro-batch through one unit on one rank."""

    forward: float
    backward_input: float
    backward_weight: float
    inside: Mapping[str, float] = field(default_factory=dict)
    """Communication in them that its own arithmetic does not hide, by axis; `host` is what the device waits for its launches."""


class UnitCosts:
    """Prices of the units of one plan. `tied_apart`: a tied head has a copy of its weight, on another rank than the embedding."""

    def __init__(self, model: ModelSpec, plan: Plan, priced: Pricing, *, tied_apart: bool = False) -> None:
        self.model, self.plan, self.priced = model, plan, priced
        self._tied_apart = tied_apart
        named = {one: replace(one, range="all") for one in plan.layers}
        self._strategies = [named[one] for one in plan.strategies(model.layers)]
        table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
        ranks = ([layer for stage in row for layer in stage] for row in table)
        self._together = {layer: held for held in ranks for layer in held}
        self._blocks: dict[tuple[Recompute, bool, Linear], Seconds] = {}
        self._late: dict[int, tuple[float, float]] = {}
        self._first: dict[tuple[bool, LayerStrategy, int | None], int] = {}
        self._split = cache(
            lambda copied, size: number(gather(self._over(self._shards, copied), priced.constants, size))
        )
        self._summed = cache(lambda size: number(all_reduce(self._replicas, priced.constants, size)))
        machine, layout, k = priced.machine, priced.layout, priced.constants
        nodes = np.log2(np.maximum(1.0, layout.ranks / machine.per_node))
        self.jitter = number(1 + k.jitter * nodes)
        """Times that everything takes longer on many nodes."""
        self.host_micro = number(k.host_micro_us) * 1e-6 * self.jitter
        """Host seconds of one micro-batch on one rank, beside its units."""
        self.constant = number(k.step_ms + k.sync_ms * nodes) * 1e-3
        """Seconds of one step that depend on nothing."""
        crowd = congestion(machine, layout, k)
        self._shards = rank_group(machine, k, float(shard_size(plan)), layout.shard_step, crowd)
        self._copied = plan.gather_engine == "copy"
        self._experts_too = number(layout.expert) <= 1  # else they are another group's to gather, by kernels
        self._replicas = rank_group(machine, k, float(plan.axis_size("replicate")), layout.replicate_step, crowd)

    def alike(self, unit: Unit) -> Unit:
        """The first block of the unit's kind and strategy, or the end itself: they cost the same."""
        if isinstance(unit, str):
            return unit
        strategy = self._strategy(unit)
        # What hides the copies of a block that is moved are all blocks of its rank.
        rank = self._together[unit][0] if strategy.activations_offloaded else None
        return self._first.setdefault((self.model.routed(unit), strategy, rank), unit)

    def compute(self, unit: Unit) -> Seconds:
        """Arithmetic of one micro-batch."""
        if unit == "embed":
            both = number(self._ends.embed) * self.jitter
            return Seconds(both / 3, 0.0, both * 2 / 3)
        if unit == "head":  # its forward makes its gradients too (kernels.loss)
            return Seconds(number(self._ends.head) * self.jitter, 0.0, 0.0)
        block = self._priced_block(unit)
        if not self._strategy(unit).activations_offloaded:
            return block
        out, back = self._late_copies(unit)
        inside = {**block.inside, "host link": out + back}
        return replace(block, forward=block.forward + out, backward_input=block.backward_input + back, inside=inside)

    def gather(self, unit: Unit) -> float:
        """Seconds to gather the unit's weights over the shard axis."""
        return self._over_shards(unit, self._gathered_width(unit), copied=self._copied)

    def reduce(self, unit: Unit) -> float:
        """Seconds to sum its gradients over the shard axis."""
        alone = self._over_shards(unit, bytes_of(self.plan.precision.reduce))
        return self._beside(unit, self._shards, alone)

    def replicate(self, unit: Unit) -> float:
        """Seconds to sum its gradient shards over replicas."""
        width = bytes_of(self.plan.precision.reduce_replicas or self.plan.precision.stored)
        return self._beside(unit, self._replicas, self._summed(self.parameters(unit).shard * width))

    def tied_sum(self) -> float:
        """Seconds in which the first and the last pipeline rank sum the gradients of a tied weight: an all-reduce of two."""
        if not (self._tied_apart and self.model.tied):
            return 0.0
        machine, layout, k = self.priced.machine, self.priced.layout, self.priced.constants
        ends = rank_group(machine, k, 2.0, layout.pipeline_step * (layout.pipeline - 1))
        elements = self.model.vocab_size * self.model.hidden / shard_size(self.plan) / self.plan.axis_size("tensor")
        return number(all_reduce(ends, k, elements * bytes_of(self.plan.precision.stored)))

    def slowdown(self, collective: Literal["gather", "reduce", "replicate"]) -> float:
        """How many times as long compute takes while such a collective runs beside it."""
        group, k = self._replicas if collective == "replicate" else self._shards, self.priced.constants
        tax = k.net_tax if number(group.domains) > 1 else k.overlap_tax
        if collective == "gather" and self._copied and self._experts_too:
            tax = k.overlap_tax * k.copy_tax
        return 1 / (1 - min(number(tax), MOST_TAX))

    def copy_out(self, unit: Unit) -> float:
        """Seconds by which a gather's copies hold compute up: shards cast on another stream, whole weights copied to their places."""
        width = self._gathered_width(unit)
        cast = (bytes_of(self.plan.precision.stored) + width) / shard_size(self.plan)
        if self._casts_once:
            return self._moved(self.parameters(unit).count * cast)
        return self._moved(self.parameters(unit).count * 2 * width, self.parameters(unit).count * cast)

    @property
    def _casts_once(self) -> bool:
        """Whether the rank has its weights to itself, so that nothing lies between them and what computes."""
        return shard_size(self.plan) == 1 and not self.priced.constants.lone_copies

    def _gathered_width(self, unit: Unit) -> int:
        return gathered_width(self.plan, None if isinstance(unit, str) else unit, self.model.layers)

    def copy_in(self, unit: Unit) -> float:
        """The same for a reduction: gradients copied into its buffer and, on another stream, added to the shard's sum."""
        precision, shards, sent = self.plan.precision, shard_size(self.plan), bytes_of(self.plan.precision.reduce)
        added = self.plan.batch.accumulate > 1 and not self.plan.layered and self._strategy(unit).gradients == "shard"
        parameters, moved = self.parameters(unit), bytes_of(precision.compute) + sent
        count = parameters.count
        if self._casts_once and gradients_final_in_backward(self.model, self.plan):
            return 0.0
        if self._casts_once:
            return self.accumulate(unit) if added else self._moved(count * moved)
        beside = 4.0 * sent if shards == 1 else 0.0  # a lone rank scales them into another buffer, and copies that
        if added:
            beside += 3 * bytes_of(precision.stored) / shards
        laid = parameters.dense * (1 / number(self.priced.constants.packing) - 1) if shards > 1 else 0.0
        return self._moved((count + laid) * moved, count * beside)

    def accumulate(self, unit: Unit) -> float:
        """Compute seconds to accumulate a micro-batch's gradients in the dtype of the reduction: two reads, one write.

        If the product accumulates, it reads and writes the sum in place of the gradient.
        """
        both = bytes_of(self.plan.precision.compute) + 2 * bytes_of(self.plan.precision.reduce)
        parameters = self.parameters(unit)
        count = float(parameters.count)
        if not isinstance(unit, str) and accumulated_by_products(self.plan, unit, self.model.layers):
            count = parameters.experts + parameters.dense * number(self.priced.constants.product_sums)
        return self._moved(count * both)

    def parameters(self, unit: Unit) -> UnitParameters:
        """Parameters of the unit on one rank."""
        tensor, shards = self.plan.axis_size("tensor"), shard_size(self.plan)
        if isinstance(unit, int):
            routed, expert = self.model.routed(unit), experts_over(self.plan)
            return block_unit(self.model, routed=routed, tensor=tensor, shards=shards, expert=expert)
        ends = end_units(self.model, tensor=tensor, shards=shards)
        if unit == "embed":
            return ends.embed
        return ends.final + ends.table if self.model.tied and self._tied_apart else ends.final

    def optimizer(self, units: Sequence[Unit]) -> float:
        """Seconds of a rank's update of `units`; the state of those in host memory comes and goes meanwhile."""
        machine, k = self.priced.machine, self.priced.constants
        here, there = (
            sum(self.parameters(unit).shard for unit in units if self._strategy(unit).optimizer_offloaded is on_host)
            for on_host in (False, True)
        )
        blocks = sum(isinstance(unit, int) for unit in units)
        launches = k.step_layer_us * 1e-6 * blocks
        here, sweep = (count * k.update / (machine.hbm * k.hbm) for count in (here, there))
        return number(here + launches + host_optimizer(machine, there, state_bytes(self.plan.precision), sweep))

    def _beside(self, unit: Unit, group: Group, alone: float) -> float:
        """Seconds of a reduction during the backward of an equal unit, given its seconds `alone`.

        Of one micro-batch, or in layered order of all.
        """
        if number(group.domains) == 1:
            return alone
        one, times = self.compute(unit), self.plan.batch.accumulate if self.plan.layered else 1
        beside = times * (one.backward_input + one.backward_weight)
        return alone + number(self.priced.constants.net_yield) * min(beside, alone)

    def _moved(self, size: float, beside: float = 0.0) -> float:
        """Seconds to read and write `size` bytes in all, while another stream does `beside` bytes."""
        machine, k = self.priced.machine, self.priced.constants
        return number(k.copies * (size + k.side_copies * beside) / (machine.hbm * k.hbm)) * self.jitter

    def _strategy(self, unit: Unit) -> LayerStrategy:
        """The strategy of a block, or of the one beside an end."""
        return self._strategies[{"embed": 0, "head": -1}[unit] if isinstance(unit, str) else unit]

    def _over_shards(self, unit: Unit, width: int, *, copied: bool = False) -> float:
        """Seconds to gather or scatter a unit of `width` bytes an element: its experts among the ranks that each is split over."""
        parameters = self.parameters(unit)
        dense = self._split(copied, parameters.dense * width)
        if not parameters.experts:
            return dense
        layout, k = self.priced.layout, self.priced.constants
        group = rank_group(self.priced.machine, k, layout.expert_shard, layout.expert)
        return dense + number(gather(self._over(group, copied and self._experts_too), k, parameters.experts * width))

    def _over(self, group: Group, copied: bool) -> Group:
        return copy_engine_group(group, self.priced.machine, self.priced.constants) if copied else group

    def _priced_block(self, unit: int) -> Seconds:
        """Arithmetic of one micro-batch in a block, without copies to host memory."""
        strategy = self._strategy(unit)
        kind = strategy.recompute, self.model.routed(unit), strategy.linear or self.plan.precision.linear
        if kind not in self._blocks:
            self._blocks[kind] = self._block(*kind)
        return self._blocks[kind]

    def _late_copies(self, unit: int) -> tuple[float, float]:
        """Seconds by which a moved block's copies out and back hold its rank up, each block's the same part of all."""
        blocks = self._together[unit]
        if blocks[0] not in self._late:
            layout, saved = self.priced.layout, saved_elements_by_layer(self.model, self.plan)
            moved = [block for block in blocks if self._strategy(block).activations_offloaded]
            tokens = layout.micro_batch * layout.seq / layout.context / layout.tensor
            copied = tokens * sum(saved[block] for block in moved) * bytes_of(self.plan.precision.compute)
            computes = [self._priced_block(block) for block in blocks]
            forward = sum(compute.forward for compute in computes)
            backward = sum(compute.backward_input + compute.backward_weight for compute in computes)
            out, back = exposed_copy_seconds(copied / host_rate(self.priced.machine), forward, backward)
            self._late[blocks[0]] = number(out) / len(moved), number(back) / len(moved)
        return self._late[blocks[0]]

    @cached_property
    def _ends(self) -> LayerTime:
        """Of these the embedding's and the head's count."""
        return layer_times(self.priced.shape, self.priced.machine, self._lone("none"), self.priced.constants)

    def _lone(self, mode: Recompute) -> Layouts:
        """One micro-batch of one replica in one piece."""
        layout = self.priced.layout
        return replace(
            layout, pipeline=1.0, virtual=1.0, data=1.0, shards=1.0, zero=0.0, layered=0.0,
            global_batch=layout.micro_batch, recompute=float(RECOMPUTE_MODES.index(mode)),
        )  # fmt: skip

    def _block(self, mode: Recompute, routed: bool, linear: Linear) -> Seconds:
        priced = self.priced.of(linear)
        shape, lone, machine, k = (
            with_blocks(self.priced.shape, routed=routed),
            self._lone(mode),
            priced.machine,
            priced.constants,
        )
        times = layer_times(shape, machine, lone, k)
        inside = layer_exposure(shape, machine, lone, k, times)
        tensor, context, expert, host = (
            number(one) for one in (inside.tensor, inside.context, inside.expert, inside.host)
        )
        forward = number(times.forward)
        # Repeating the forward repeats its two collectives; tokens go to their experts and back in either direction.
        forward += tensor * (1 / 3 if mode in RECOMPUTES_PRODUCTS else 1 / 2)
        forward += number(context_traffic(shape, machine, lone, k)[0])
        forward += expert * (1 / 3 if mode in RECOMPUTES_PRODUCTS else 1 / 2)
        work = number(times.forward + times.backward) + tensor + context + expert
        backward = work - forward
        apart = self.jitter / self.model.layers
        each = (work + host) / work * apart
        weight = min(self._weight_products(priced, shape), backward)
        return Seconds(
            forward=forward * each,
            backward_input=(backward - weight) * each,
            backward_weight=weight * each,
            inside={
                "tensor": tensor * apart,
                "context": context * apart,
                "expert": expert * apart,
                "host link": 0.0,
                "host": host * apart,
            },
        )

    def _weight_products(self, priced: Pricing, shape: Shape) -> float:
        """Seconds of all layers' weight gradients: a product for each matrix."""
        speed, width = product_rate(priced.machine, priced.constants), priced.layout.tensor
        return sum(
            number(product.layers * speed.seconds(product.k, product.m, product.n, product.count))
            for product in layer_products(shape, step_shape(shape, priced.layout), width)
        )
