"""Seconds of each FSDP unit of a plan by the cost model: its compute, its collectives, and its copies.

A unit is one of these:

- the embedding,
- one transformer block,
- the final norm together with the head, the loss and the prediction modules.

Collectives over the shard and replicate axes and over pipeline stages have durations of their own. All other communication that compute
waits for (tensor, context and expert axes, copies to host memory) is included in the compute seconds. The formulas give the seconds
of all layers together; this module divides them by the number of layers to get those of one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Literal

import numpy as np

from meshwright.costs.collective_costs import (
    CollectiveGroup,
    all_reduce,
    congestion,
    copy_engine_group,
    gather,
    rank_group,
)
from meshwright.costs.compute import LayerTime, layer_times, matmul_rate
from meshwright.costs.constants import Constants
from meshwright.costs.device_rates import Machine
from meshwright.costs.layer_costs import context_traffic, layer_exposure
from meshwright.costs.offload_costs import (
    BLOCK_LAUNCH_US,
    CHUNK_LAUNCH_US,
    exposed_copy_seconds,
    exposed_sum_copies,
    exposed_updates,
    host_rate,
    rate_both_ways,
)
from meshwright.costs.optimizer_costs import matrix_seconds, update_seconds
from meshwright.costs.plan_costs import Pricing, number
from meshwright.spec.layout import gradients_final_in_backward, stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTE_MODES, RECOMPUTES_MATMULS, LayerStrategy, Linear, Plan, Recompute
from meshwright.workload.activations import saved_elements_by_layer
from meshwright.workload.buffers import staged_elements
from meshwright.workload.dtypes import (
    bytes_of,
    gathered_width,
    matmuls_accumulate_gradients,
    staging_bytes,
    state_bytes,
    summed_bytes,
)
from meshwright.workload.groups import experts_over, shard_size
from meshwright.workload.layer_matmuls import layer_matmuls
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape, shape_of
from meshwright.workload.step_shape import step_shape
from meshwright.workload.unit_parameters import UnitParameters, block_unit, end_units, trained_share

Unit = int | Literal["embed", "head"]
"""The index of a block, or "embed" for the embedding, or "head" for the final norm with the head."""

MAX_TAX = 0.9
"""Upper bound on the fraction of compute speed that is lost while a collective runs."""


@dataclass(frozen=True)
class Seconds:
    """Compute seconds of one micro-batch in one unit on one rank.

    `backward_input` computes the gradient of the unit's input (and recomputes activations), `backward_weight` the gradients of its weights.
    """

    forward: float
    backward_input: float
    backward_weight: float
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Waits that the seconds above include, by cause.

    The causes are the axes `tensor`, `context` and `expert`, `host link` (copies to and from host memory) and `host` (the device
    waits for the host to launch kernels).
    """


class UnitCosts:
    """Computes the seconds of the units of one plan.

    `tied_copies`: embedding and head share a weight but are on different pipeline ranks, so the head's rank has a copy of the weight.
    """

    def __init__(self, model: ModelSpec, plan: Plan, cost_inputs: Pricing, *, tied_copies: bool = False) -> None:
        self.model = model
        self.plan = plan
        self.cost_inputs = cost_inputs
        self._tied_copies = tied_copies
        without_range = {strategy: replace(strategy, range="all") for strategy in plan.layers}
        self._strategies = [without_range[strategy] for strategy in plan.strategies(model.layers)]
        table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
        rank_blocks = ([block for stage in stages for block in stage] for stages in table)
        self._rank_blocks = {block: blocks for blocks in rank_blocks for block in blocks}
        """By index of a block, the indices of all blocks on the same pipeline rank."""
        self._block_seconds: dict[tuple[Recompute, int, Linear], Seconds] = {}
        self._exposed_copies: dict[int, tuple[float, float]] = {}
        self._parameters_by_kind: dict[int | str, UnitParameters] = {}
        self._representatives: dict[tuple[int, LayerStrategy, int | None], int] = {}
        machine = cost_inputs.machine
        layout = cost_inputs.layout
        k = cost_inputs.constants
        self._gather_seconds = cache(
            lambda copied, size: number(gather(self._group_for_engine(self._shard_group, copied), k, size))
        )
        self._all_reduce_seconds = cache(lambda size: number(all_reduce(self._replica_group, k, size)))
        nodes = np.log2(np.maximum(1.0, layout.ranks / machine.per_node))
        self.jitter = number(1 + k.jitter * nodes)
        """Factor by which compute and host work take longer on several nodes; 1 on one node, and more with each doubling."""
        self.host_seconds = number(k.host_micro_us) * 1e-6 * self.jitter
        """Seconds that the host needs for each micro-batch on one rank, in addition to the units."""
        self.fixed_seconds = number(k.step_ms + k.sync_ms * nodes) * 1e-3
        """Seconds of each step that do not depend on the units."""
        network_congestion = congestion(machine, layout, k)
        self._shard_group = rank_group(machine, k, float(shard_size(plan)), layout.shard_step, network_congestion)
        self._copy_engine = plan.gather_transport == "copy_engine"
        self._copies_experts = number(layout.expert) <= 1
        """Whether the copy engine may gather expert weights. With expert parallelism NCCL kernels gather them, in a group of their own."""
        self._replica_group = rank_group(
            machine, k, float(plan.axis_size("replicate")), layout.replicate_step, network_congestion
        )

    def representative(self, unit: Unit) -> Unit:
        """Return the first unit with the same seconds as `unit`, so that callers compute equal units once.

        For a block this is the first block with the same structure and strategy; the embedding and the head represent themselves.
        """
        if isinstance(unit, str):
            return unit
        strategy = self._strategy(unit)
        # How much of the activation copies is exposed depends on all blocks of a rank, so offloading blocks are equal only within a rank.
        rank = self._rank_blocks[unit][0] if strategy.activations_offloaded else None
        return self._representatives.setdefault((self.model.kind(unit), strategy, rank), unit)

    def compute(self, unit: Unit) -> Seconds:
        """Return the compute seconds of one micro-batch in the unit, including exposed copies over the host link."""
        if unit == "embed":
            total = number(self._ends.embed) * self.jitter
            copied = self._exposed_sums(unit, total * 2 / 3)
            return Seconds(total / 3, copied, total * 2 / 3, {"host link": copied} if copied else {})
        if unit == "head":  # its forward computes its gradients too (kernels.loss)
            head = self._head()
            return _with_link_time(head, "forward", self._exposed_sums(unit, head.forward))
        block = self._block_without_offload(unit)
        copied = self._exposed_sums(unit, block.backward_input + block.backward_weight)
        block = _with_link_time(block, "backward_input", copied)
        if not self._strategy(unit).activations_offloaded:
            return block
        to_host, from_host = self._exposed_copy_seconds(unit)
        exposed = {**block.exposed, "host link": block.exposed.get("host link", 0.0) + to_host + from_host}
        return replace(
            block, forward=block.forward + to_host, backward_input=block.backward_input + from_host, exposed=exposed
        )

    def gather(self, unit: Unit) -> float:
        """Return the seconds of the all-gather of the unit's weights over the shard axis."""
        return self._shard_collective(unit, self._gathered_width(unit), copied=self._copy_engine)

    def reduce(self, unit: Unit) -> float:
        """Return the seconds of the reduce-scatter of the unit's gradients over the shard axis."""
        seconds = self._shard_collective(unit, bytes_of(self.plan.precision.reduce))
        return self._beside_backward(unit, self._shard_group, seconds)

    def replicate(self, unit: Unit) -> float:
        """Return the seconds of the all-reduce of the unit's gradient shards over the replicate axis."""
        width = bytes_of(self.plan.precision.reduce_replicas or self.plan.precision.stored)
        seconds = self._all_reduce_seconds(self.trained(unit) * width)
        return self._beside_backward(unit, self._replica_group, seconds)

    def tied_gradient(self) -> float:
        """Return the seconds to all-reduce the gradient of a tied embedding between the first and the last pipeline rank.

        It is 0 unless these two ranks both have a copy of the embedding.
        """
        if not (self._tied_copies and self.model.embedding_at_both_ends):
            return 0.0
        machine = self.cost_inputs.machine
        layout = self.cost_inputs.layout
        k = self.cost_inputs.constants
        ends = rank_group(machine, k, 2.0, layout.pipeline_step * (layout.pipeline - 1))
        elements = self.model.vocab_size * self.model.hidden / shard_size(self.plan) / self.plan.axis_size("tensor")
        return number(all_reduce(ends, k, elements * bytes_of(self.plan.precision.stored)))

    def slowdown(self, collective: Literal["gather", "reduce", "replicate"]) -> float:
        """Return the factor (1 or more) by which compute takes longer while this collective runs on the same device."""
        ranks = self._replica_group if collective == "replicate" else self._shard_group
        k = self.cost_inputs.constants
        tax = k.net_tax if number(ranks.domains) > 1 else k.overlap_tax
        if collective == "gather" and self._copy_engine and self._copies_experts:
            tax = k.overlap_tax * k.copy_tax
        return 1 / (1 - min(number(tax), MAX_TAX))

    def copy_out(self, unit: Unit) -> float:
        """Return the compute seconds lost to the two copies of an all-gather of the unit's weights.

        The shards are cast to the format of the collective on another stream, and the result is copied out of the buffer of the collective.
        Without sharding, frozen weights are neither cast nor copied (`parallel.fsdp.unsharded_weights`).
        """
        width = self._gathered_width(unit)
        shards = shard_size(self.plan)
        count = self.parameters(unit).count
        count *= self._trained_share(unit) if shards == 1 else 1
        cast = (bytes_of(self.plan.precision.stored) + width) / shards
        if self._casts_once:
            return self._memory_seconds(count * cast)
        return self._memory_seconds(count * 2 * width, count * cast)

    @property
    def _casts_once(self) -> bool:
        """Whether weights are not sharded, so the cast directly writes the weights that compute reads, without a buffer."""
        return shard_size(self.plan) == 1 and not self.cost_inputs.constants.lone_copies

    def _gathered_width(self, unit: Unit) -> int:
        return gathered_width(self.plan, None if isinstance(unit, str) else unit, self.model.layers)

    def copy_in(self, unit: Unit) -> float:
        """Return the compute seconds lost to the two copies of a reduction of the unit's gradients.

        The gradients are copied into the buffer of the reduce-scatter. On another stream, the result is added to the gradient shard.
        """
        precision = self.plan.precision
        shards = shard_size(self.plan)
        sent = bytes_of(self.plan.precision.reduce)
        if self._casts_once:
            return self._copy_in_of_one_rank(unit)
        parameters = self.parameters(unit)
        width = bytes_of(precision.compute) + sent
        count = parameters.count
        # Without sharding, the rank writes its scaled gradients to a second buffer and copies that buffer: two reads and two writes.
        side_bytes = 4.0 * sent if shards == 1 else 0.0
        if self._sums_every_micro_batch(unit):
            side_bytes += (bytes_of(precision.stored) + 2 * self._summed_bytes) / shards
        padding = parameters.dense * (1 / number(self.cost_inputs.constants.packing) - 1) if shards > 1 else 0.0
        return self._memory_seconds((count + padding) * width, count * side_bytes)

    def _copy_in_of_one_rank(self, unit: Unit) -> float:
        """Return `copy_in` for weights that are not sharded, where no collective runs.

        If every micro-batch adds its gradients to the stored sum, that is an accumulation. Otherwise the final gradients are cast to the
        stored format; this costs nothing if they have that format already, or if the backward writes final gradients.
        """
        precision = self.plan.precision
        if self._sums_every_micro_batch(unit):
            return self.accumulate(unit)
        before = bytes_of(precision.reduce if self.plan.batch.accumulate > 1 else precision.compute)
        stored = bytes_of(precision.stored)
        if before == stored or gradients_final_in_backward(self.model, self.plan):
            return 0.0
        return self._memory_seconds(self._trained_share(unit) * self.parameters(unit).count * (before + stored))

    def _sums_every_micro_batch(self, unit: Unit) -> bool:
        """Whether the unit's gradients are reduced after every micro-batch and added to the gradient shard."""
        return self.plan.batch.accumulate > 1 and not self.plan.layered and self._strategy(unit).gradients == "shard"

    def accumulate(self, unit: Unit) -> float:
        """Return the compute seconds to add the unit's gradients of one micro-batch to the sum of the earlier micro-batches.

        Reads the gradient and the sum, and writes the sum. Where the weight-gradient matmul itself adds to the sum, only a part of these
        bytes costs time (`Constants.matmul_sums`), except for experts.
        """
        on_one_rank = shard_size(self.plan) == 1 and self.plan.sums_shards(self._strategy(unit))
        summed = self._summed_bytes if on_one_rank else bytes_of(self.plan.precision.reduce)
        width = bytes_of(self.plan.precision.compute) + 2 * summed
        parameters = self.parameters(unit)
        count = float(parameters.count)
        if not isinstance(unit, str) and matmuls_accumulate_gradients(self.plan, unit, self.model.layers):
            count = parameters.experts + parameters.dense * number(self.cost_inputs.constants.matmul_sums)
        return self._memory_seconds(self._trained_share(unit) * count * width)

    @property
    def _summed_bytes(self) -> int:
        return summed_bytes(self.plan.precision, self.plan.accumulation)

    def parameters(self, unit: Unit) -> UnitParameters:
        """Return the parameters of the unit on one rank, before and after sharding."""
        kind = self.model.kind(unit) if isinstance(unit, int) else unit
        if kind not in self._parameters_by_kind:
            self._parameters_by_kind[kind] = self._parameters(kind)
        return self._parameters_by_kind[kind]

    def _parameters(self, unit: int | str) -> UnitParameters:
        """Return the `parameters` of a kind of block (its number), of the embedding or of the head."""
        tensor = self.plan.axis_size("tensor")
        shards = shard_size(self.plan)
        if isinstance(unit, int):
            return block_unit(self.model, kind=unit, tensor=tensor, shards=shards, expert=experts_over(self.plan))
        ends = end_units(self.model, tensor=tensor, shards=shards, expert=experts_over(self.plan))
        if unit == "embed":
            return ends.embed
        copied = self.model.embedding_at_both_ends and self._tied_copies
        return ends.final + ends.table if copied else ends.final

    def trained(self, unit: Unit) -> float:
        """Return how many parameters of the unit the first shard rank updates; frozen parameters do not count."""
        return self.parameters(unit).shard * self._trained_share(unit)

    def _trained_share(self, unit: Unit) -> float:
        return trained_share(self.model, self.model.kind(unit) if isinstance(unit, int) else None)

    def optimizer(self, units: Sequence[Unit]) -> float:
        """Return the seconds of a rank's optimizer step for `units`, including exposed copies of the state that is in host memory."""
        machine = self.cost_inputs.machine
        k = self.cost_inputs.constants
        on_device, on_host = (
            sum(self.trained(unit) for unit in units if self._strategy(unit).optimizer_offloaded is offloaded)
            for offloaded in (False, True)
        )
        blocks = sum(isinstance(unit, int) for unit in units)
        launches = k.step_layer_us * 1e-6 * blocks
        layout = self.cost_inputs.layout
        device_update, host_update = (update_seconds(layout, machine, k, count) for count in (on_device, on_host))
        device_update = device_update + matrix_seconds(layout, machine, k, float(blocks))
        host_update = np.maximum(host_update, self._exposed_updates(units, on_host)) if on_host else 0.0
        return number(device_update + launches + host_update)

    def _exposed_updates(self, units: Sequence[Unit], on_host: float) -> float:
        """Return the seconds by which the optimizer's host copies, or the launches of its updates, delay the first forward.

        `units` are the rank's units in the order of their forwards; `on_host` of their parameters have an offloaded optimizer.
        """
        precision = self.plan.precision
        width = state_bytes(precision)
        # `on_device` counts parameters whose state needs no copy at the update: those kept on the device and, below, those fetched ahead.
        on_device = (1 - self.plan.offload_fraction) * on_host
        staged = min(staging_bytes(self.plan.offload_staging, precision) / width, on_host - on_device)
        seconds_per_parameter = width / number(rate_both_ways(self.cost_inputs.machine))
        all_copies = (on_host - on_device) * seconds_per_parameter
        on_device += staged
        passes = self.plan.batch.accumulate if self.plan.layered else 1
        copies = []
        launches = []
        forwards = []
        compute = 0.0
        for unit in units:
            streamed = self.trained(unit) * self._strategy(unit).optimizer_offloaded
            kept = min(on_device, streamed)
            on_device -= kept
            copies.append((streamed - kept) * seconds_per_parameter)
            launches.append(self._launch_seconds(unit, streamed))
            seconds = self.compute(unit)
            forwards.append(passes * max(0.0, seconds.forward - self._activation_copy_seconds(unit)))
            compute += seconds.forward + seconds.backward_input + seconds.backward_weight
        # An fp8 gather needs scales from all weights, so all updates end before the first gather.
        exposed = sum(copies) if precision.gather == "fp8" else exposed_updates(copies, forwards)
        exposed = max(
            exposed, exposed_updates(launches, forwards)
        )  # copies of one chunk overlap with launches for other chunks
        # Copies of state that is fetched ahead overlap with the whole step. They are exposed if all copies take longer than its compute.
        return max(exposed, all_copies - self.plan.batch.accumulate * compute)

    def _launch_seconds(self, unit: Unit, streamed: float) -> float:
        """Return the host seconds to launch the unit's forward and its optimizer updates.

        `streamed` is the number of its parameters whose optimizer state is on the host. Without such parameters, and on a CPU, it is 0.
        """
        if not streamed or not number(self.cost_inputs.constants.host_us):
            return 0.0
        chunks = streamed / float(staged_elements(state_bytes(self.plan.precision)))
        return (CHUNK_LAUNCH_US * chunks + BLOCK_LAUNCH_US * isinstance(unit, int)) * 1e-6

    def _activation_copy_seconds(self, unit: Unit) -> float:
        """Return the seconds that the host link needs to copy the unit's activations of one micro-batch in one direction."""
        if isinstance(unit, str) or not self._strategy(unit).activations_offloaded:
            return 0.0
        layout = self.cost_inputs.layout
        tokens = layout.micro_batch * layout.seq / layout.context / layout.tensor
        copied = tokens * self._saved_elements[unit] * bytes_of(self.plan.precision.compute)
        return number(copied / host_rate(self.cost_inputs.machine))

    @cached_property
    def _saved_elements(self) -> list[float]:
        return saved_elements_by_layer(self.model, self.plan)

    def _exposed_sums(self, unit: Unit, backward: float) -> float:
        """Return the exposed seconds of copies of the unit's gradient sums to and from the host during `backward` seconds of backward."""
        if self.plan.accumulation != "host" or not self.plan.sums_shards(self._strategy(unit)):
            return 0.0
        size = self.trained(unit) * bytes_of(self.plan.precision.stored)
        copied = size / rate_both_ways(self.cost_inputs.machine)
        return number(exposed_sum_copies(copied, backward, self.plan.batch.accumulate))

    def _beside_backward(self, unit: Unit, ranks: CollectiveGroup, seconds: float) -> float:
        """Return the seconds of a reduction that runs during the backward of a unit like `unit`; alone it takes `seconds`.

        A reduction within a node takes no longer than alone. A reduction across nodes takes longer, by `Constants.net_yield` times the
        seconds in which both run. The backward is that of one micro-batch. In layered order, where all micro-batches run through a unit
        before the next unit, it is the backward of all micro-batches.
        """
        if number(ranks.domains) == 1:
            return seconds
        compute = self.compute(unit)
        micro_batches = self.plan.batch.accumulate if self.plan.layered else 1
        backward = micro_batches * (compute.backward_input + compute.backward_weight)
        return seconds + number(self.cost_inputs.constants.net_yield) * min(backward, seconds)

    def _memory_seconds(self, size: float, side_bytes: float = 0.0) -> float:
        """Return the compute seconds lost to copies in device memory.

        `size`: bytes that the compute stream reads and writes in total. `side_bytes`: those of another stream, which count in part.
        """
        machine = self.cost_inputs.machine
        k = self.cost_inputs.constants
        return number(k.own_engine * (size + k.side_copies * side_bytes) / (machine.hbm * k.hbm)) * self.jitter

    def _strategy(self, unit: Unit) -> LayerStrategy:
        """Return the strategy of a unit. The embedding has that of the first block, the head that of the last block."""
        return self._strategies[{"embed": 0, "head": -1}[unit] if isinstance(unit, str) else unit]

    def _shard_collective(self, unit: Unit, width: int, *, copied: bool = False) -> float:
        """Return the seconds to gather or reduce-scatter the unit with `width` bytes per parameter.

        Expert weights have a shard group of their own, so they need a second collective. `copied`: the copy engine gathers.
        """
        parameters = self.parameters(unit)
        dense = self._gather_seconds(copied, parameters.dense * width)
        if not parameters.experts:
            return dense
        layout = self.cost_inputs.layout
        k = self.cost_inputs.constants
        ranks = rank_group(self.cost_inputs.machine, k, layout.expert_shard, layout.expert)
        ranks = self._group_for_engine(ranks, copied and self._copies_experts)
        return dense + number(gather(ranks, k, parameters.experts * width))

    def _group_for_engine(self, ranks: CollectiveGroup, copied: bool) -> CollectiveGroup:
        """Return `ranks`, with the rates of the copy engine instead of NCCL kernels if `copied`."""
        return copy_engine_group(ranks, self.cost_inputs.machine, self.cost_inputs.constants) if copied else ranks

    def _head(self) -> Seconds:
        """Return the compute seconds of one micro-batch in the head and the prediction modules, all counted in the forward.

        The block of a prediction module counts like the model's last block.
        """
        head = number(self._ends.head) * self.jitter
        if not (modules := self.model.prediction_depth):
            return Seconds(head, 0.0, 0.0)
        block = self._block_without_offload(self.model.layers - 1)
        seconds = head + modules * (block.forward + block.backward_input + block.backward_weight)
        return Seconds(seconds, 0.0, 0.0, {axis: modules * exposed for axis, exposed in block.exposed.items()})

    def _block_without_offload(self, unit: int) -> Seconds:
        """Return the compute seconds of one micro-batch in block `unit`, without copies to host memory."""
        strategy = self._strategy(unit)
        key = strategy.recompute, self.model.kind(unit), strategy.linear or self.plan.precision.linear
        if key not in self._block_seconds:
            self._block_seconds[key] = self._compute_block(*key)
        return self._block_seconds[key]

    def _exposed_copy_seconds(self, unit: int) -> tuple[float, float]:
        """Return the exposed seconds of the block's activation copies: to host memory (in the forward), and back (in the backward).

        The copies overlap with the compute of all blocks of the rank. Each offloading block gets an equal share of what is exposed.
        """
        blocks = self._rank_blocks[unit]
        if blocks[0] not in self._exposed_copies:
            offloaded = [block for block in blocks if self._strategy(block).activations_offloaded]
            copied = sum(self._activation_copy_seconds(block) for block in offloaded)
            computes = [self._block_without_offload(block) for block in blocks]
            forward = sum(compute.forward for compute in computes)
            backward = sum(compute.backward_input + compute.backward_weight for compute in computes)
            to_host, from_host = exposed_copy_seconds(copied, forward, backward)
            self._exposed_copies[blocks[0]] = number(to_host) / len(offloaded), number(from_host) / len(offloaded)
        return self._exposed_copies[blocks[0]]

    @cached_property
    def _ends(self) -> LayerTime:
        """The seconds of embedding and head. The other fields of `LayerTime` are not used."""
        inputs = self.cost_inputs
        return _end_times(inputs.shape, inputs.machine, _single_rank_layout(inputs.layout, "none"), inputs.constants)

    def _compute_block(self, mode: Recompute, kind: int, linear: Linear) -> Seconds:
        """Return the compute seconds of one micro-batch in a block of structure `kind`, with this recompute mode and matmul format."""
        inputs = self.cost_inputs.for_format(linear)
        shape = shape_of(self.model, round(number(inputs.layout.seq)), kind=kind)
        work = _layer_work(shape, inputs.machine, _single_rank_layout(inputs.layout, mode), inputs.constants)
        # Collectives run once in the forward and once in the backward, and once more in the backward if it recomputes matmuls. So the
        # forward has 1/2 or 1/3 of them.
        share = 1 / 3 if mode in RECOMPUTES_MATMULS else 1 / 2
        forward = work.forward + work.tensor * share + work.context_forward + work.expert * share
        total = work.total + work.tensor + work.context + work.expert
        backward = total - forward
        per_layer = self.jitter / self.model.layers
        scale = (total + work.host) / total * per_layer
        weight = min(work.weight_gradients, backward)
        return Seconds(
            forward=forward * scale,
            backward_input=(backward - weight) * scale,
            backward_weight=weight * scale,
            exposed={
                "tensor": work.tensor * per_layer,
                "context": work.context * per_layer,
                "expert": work.expert * per_layer,
                "host link": 0.0,
                "host": work.host * per_layer,
            },
        )


@dataclass(frozen=True)
class _LayerWork:
    """Seconds of one micro-batch in all layers, for a model whose layers are all like one block."""

    forward: float
    """Compute seconds of the forward, without communication."""
    total: float
    """Compute seconds of forward and backward, without communication."""
    tensor: float
    """Exposed communication of the tensor axis, forward and backward."""
    context: float
    """Exposed communication of the context axes, forward and backward."""
    context_forward: float
    """The part of the context communication that counts in the forward."""
    expert: float
    """Exposed exchanges of tokens between expert ranks, forward and backward."""
    host: float
    """Seconds in which the device waits for kernel launches."""
    weight_gradients: float
    """The part of `total` that the matmuls of weight gradients take."""


# The result is cached, because many plans of a search differ only in schedule, sharding or offload, which do not matter here.
@lru_cache(maxsize=512)
def _layer_work(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> _LayerWork:
    times = layer_times(shape, machine, layout, k)
    exposed = layer_exposure(shape, machine, layout, k, times)
    rate = matmul_rate(machine, k)
    weight_gradients = sum(
        number(matmul.layers * rate.seconds(matmul.k, matmul.m, matmul.n, matmul.count))
        for matmul in layer_matmuls(shape, step_shape(shape, layout), layout.tensor)
        if not np.any(shape.frozen)  # the backward of adapters is not split
    )
    return _LayerWork(
        forward=number(times.forward),
        total=number(times.forward + times.backward),
        tensor=number(exposed.tensor),
        context=number(exposed.context),
        context_forward=number(context_traffic(shape, machine, layout, k)[0] * (1 + layout.further_forwards)),
        expert=number(exposed.expert),
        host=number(exposed.host),
        weight_gradients=weight_gradients,
    )


@lru_cache(maxsize=512)
def _end_times(shape: Shape, machine: Machine, layout: Layouts, k: Constants) -> LayerTime:
    return layer_times(shape, machine, layout, k, module_blocks=0.0)


def _single_rank_layout(layout: Layouts, mode: Recompute) -> Layouts:
    """Return `layout` without pipeline, sharding and offload, with one micro-batch and the recompute mode `mode`.

    Plans that differ only in the removed settings then have equal layouts, and share cached results.
    """
    return replace(
        layout,
        pipeline=1.0,
        virtual=1.0,
        data=1.0,
        shards=1.0,
        zero=0.0,
        layered=0.0,
        global_batch=layout.micro_batch,
        recompute=float(RECOMPUTE_MODES.index(mode)),
        **_OF_OTHER_COSTS,
    )


_OF_OTHER_COSTS = dict.fromkeys(
    (
        "fill",
        "in_flight",
        "in_flight_last",
        "forwards_first",
        "vee",
        "fullest_layers",
        "head_layers",
        "slowest_layers",
        "slowest_head_layers",
        "keep_gathered",
        "gather_once",
        "reduce_once",
        "weights_by_copy_engine",
        "replica_bytes",
        "offload",
        "offload_activations",
        "state_bytes",
        "staging",
        "sums_on_host",
        "shard_stride",
        "replicate_stride",
        "pipeline_stride",
    ),
    0.0,
)
"""Columns of `Layouts` that do not affect the compute of a block. All are set to 0, so plans that differ in them share cached results."""


def _with_link_time(seconds: Seconds, part: Literal["forward", "backward_input"], added: float) -> Seconds:
    """Return `seconds` with `added` seconds of exposed copies over the host link in its field `part`.

    Copies of half a second in the forward:

    >>> _with_link_time(Seconds(1.0, 2.0, 0.0, {"tensor": 0.25}), "forward", 0.5)
    Seconds(forward=1.5, backward_input=2.0, backward_weight=0.0, exposed={'tensor': 0.25, 'host link': 0.5})
    """
    if not added:
        return seconds
    exposed = {**seconds.exposed, "host link": seconds.exposed.get("host link", 0.0) + added}
    return replace(seconds, exposed=exposed, **{part: getattr(seconds, part) + added})
