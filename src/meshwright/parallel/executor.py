"""Runs the actions of a schedule on one rank; every plan trains with this executor, with or without a pipeline.

A schedule lists the actions of each pipeline rank in order: forwards, backwards, sends, receives, gathers (`schedules.action`). A stage
consists of units: the embedding, a block, or the head with the loss. Each unit runs as an autograd graph of its own. The executor detaches
a unit's input from the graph of the previous unit. After the unit's backward it passes the gradient of this input to the backward of the
previous unit. Autograd therefore never decides the order of two units; the schedule does. The host only launches work here and does not
synchronise with the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.data.loader import MicroBatch
from meshwright.events.span import Recorder
from meshwright.kernels.linear import WeightQueue
from meshwright.kernels.loss import LossSums
from meshwright.models.decoder import HeadLosses, OfLogProbabilities, SharedInputs
from meshwright.models.moe import RoutedOutput
from meshwright.parallel.block_parts import BlockParts
from meshwright.parallel.channels import Channels
from meshwright.parallel.fp8_weights import WeightScales
from meshwright.parallel.fsdp import CommunicationStreams, Span
from meshwright.parallel.gradient_offload import GradientOffload
from meshwright.parallel.gradient_sums import GradientSums
from meshwright.parallel.objective import StepObjective, losses_of_batches
from meshwright.parallel.offload import ActivationOffload, HostMemory, leaf_without_memory, storage_addresses
from meshwright.parallel.paired_blocks import PairedBlock, PairedBlocks
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.parallel.stages import StageModel, StageUnit
from meshwright.parallel.timetable import Visit
from meshwright.parallel.unit_exchange import UnitExchange
from meshwright.schedules.action import COMPUTE, FORWARD, Action, Op
from meshwright.schedules.schedule import Schedule

StepEndCallbacks = Mapping[Op, Callable[[], None]]
"""Functions that run at the actions `norm_barrier` and `optim`, the last two actions of a training step."""


class Executor:
    """Runs training, evaluation and log-probability steps on one rank.

    - `rank_model`: the rank's part of the model.
    - `streams`: the CUDA streams on which parameters are gathered and gradients are reduced.
    - `sums`: all-reduces that a unit's reduce-scatter does not include: over replicas, and over ranks with copies of a tied weight.
    - `scales`: fp8 scales of the weights that are gathered in fp8, or None.
    - `channels`: connections to the other pipeline ranks; None on a single pipeline rank.
    - `host`: host buffers for offloaded activations, or None.
    - `sums_on_host`: host buffers for offloaded gradient sums, or None.
    """

    def __init__(
        self,
        rank_model: StageModel,
        streams: CommunicationStreams,
        sums: GradientSums,
        *,
        scales: WeightScales | None = None,
        channels: Channels | None = None,
        host: HostMemory | None = None,
        sums_on_host: HostMemory | None = None,
    ) -> None:
        self.rank_model = rank_model
        self.streams = streams
        self.sums = sums
        self.scales = scales
        self.channels = channels
        self.host = host
        self.sums_on_host = sums_on_host
        self.on_action: Callable[[int], None] = _ignore
        """Called with the index of each action, before it runs."""
        self.before_gather: Callable[[ShardedUnit | None], bool] = _nothing_left
        """Launches the deferred optimizer update of a unit, or of all units for None. Called before the unit's weights are read.

        Returns whether it launched an update.
        """
        self.launch_copies: Callable[[], None] = lambda: None
        """Called before each action: launches the next copies of optimizer state between the device and host memory."""
        self.z_loss = torch.zeros((), dtype=torch.float64, device=rank_model.device)
        """This rank's share of the z-loss of the latest training step, not yet multiplied by its weight; 0 if the rank has no share."""
        self._has_trained = False

    def play(
        self,
        schedule: Schedule,
        batches: Sequence[MicroBatch],
        recorder: Recorder,
        valid: Tensor | None = None,
        callbacks: StepEndCallbacks | None = None,
        real: Tensor | None = None,
        objective: StepObjective | None = None,
    ) -> Tensor:
        """Run this rank's actions of a schedule and return its share of the loss (float64 scalar; 0 on ranks without the last stage).

        - `schedule`: its stages are already divided into units.
        - `batches`: the step's micro-batches by number, with whole sequences. A rank may have fewer micro-batches than the schedule if
          all ranks number the micro-batches in one common order (`batch.common`). The rank then leaves out the actions of the others.
        - `valid`: number of valid tokens over all ranks, by which the losses are divided. None: the losses are summed.
        - `real`: number of tokens over all ranks that are not filler tokens, by which router losses are divided. None if the micro-batches
          do not mark filler tokens.
        - `objective`: a loss that replaces the cross-entropy of the tokens; it has its own divisor.

        Collective: every rank of the job makes the same call. The first training step posts each message only when it is needed, because
        lazy kernel loading can deadlock otherwise.
        """
        if schedule.trains and not self._has_trained:
            schedule = schedule.in_turns()
            self._has_trained = True
        numbers = [batch.common.number for batch in batches if batch.common is not None]
        if numbers and len(numbers) < schedule.micro_batches:
            # After `in_turns`, which must see the order of the whole schedule: all ranks of a stage then leave out parts of one order.
            schedule = schedule.only(numbers)
        of_batches = None if objective is None else losses_of_batches(objective, batches, self.rank_model, valid)
        step = _Step(self, schedule, batches, recorder, valid, callbacks or {}, real, of_batches)
        loss = step.run()
        self.z_loss = step.z_loss
        return loss

    def logits(self, schedule: Schedule, batches: Sequence[MicroBatch], recorder: Recorder) -> dict[int, Tensor]:
        """Run a forward-only schedule on micro-batches without targets. The micro-batches may differ in shape.

        Ranks of the last stage return the logits `(batch, seq, vocab)` of each micro-batch by its number. Other ranks return an empty
        dictionary. Collective: every rank of the job makes the same call.
        """
        step = _Step(self, schedule, batches, recorder, None, {})
        step.run()
        return {number: self.rank_model.whole_logits(logits) for number, logits in step.logits.items()}

    def log_probabilities(
        self, schedule: Schedule, batches: Sequence[MicroBatch], recorder: Recorder
    ) -> dict[int, Tensor]:
        """Run a forward-only schedule and return the log-probability of each target token.

        Ranks of the last stage return a tensor `(batch, seq)` of whole sequences for each micro-batch, by its number. An element is 0 where
        the target is -1. On hybrid ranks the tensor has the tokens of this rank's slot instead. Other ranks return an empty dictionary.
        Collective: every rank of the job makes the same call.
        """
        found: dict[int, Tensor] = {}
        context = self.rank_model.context

        def keep(number: int, local: Tensor) -> tuple[Tensor, Tensor]:
            found[number] = local if context is None else context.gather_tokens(local)
            return local.new_zeros(()), local

        of_batches = [partial(keep, number) for number in range(len(batches))]
        _Step(self, schedule, batches, recorder, None, {}, of_log_probabilities=of_batches).run()
        return found


class _Step:
    """One call of the executor: the loss so far, the tensors kept between forward and backward, and the tensors passed between units."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        batches: Sequence[MicroBatch],
        recorder: Recorder,
        valid: Tensor | None,
        callbacks: StepEndCallbacks,
        real: Tensor | None = None,
        of_log_probabilities: Sequence[OfLogProbabilities] | None = None,
    ) -> None:
        self.executor = executor
        self.rank_model = executor.rank_model
        self.recorder = recorder
        objectives = [None] * len(batches) if of_log_probabilities is None else of_log_probabilities
        self.batches = [
            self.rank_model.local_batch(batch, trains=schedule.trains, objective=objective)
            for batch, objective in zip(batches, objectives, strict=True)
        ]
        self.valid = valid
        self.callbacks = callbacks
        self.real = real
        # `log_probabilities` must give exactly the bits that training gives, so its blocks run with autograd although no backward follows.
        # Without autograd a compiled block keeps other values in registers and rounds at other places.
        self.as_trained = of_log_probabilities is not None
        """Whether a forward without backward must give the bits of a training step."""
        self.rank_of = schedule.rank_of
        self.rank_actions = schedule.actions[self.rank_model.pipeline_rank]
        self.logits: dict[int, Tensor] = {}
        device = self.rank_model.device
        self.loss, self.z_loss = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        self.sequences = sum(len(batch.tokens) for batch in batches)
        self.seq = batches[0].tokens.shape[1] if batches else 1
        self.shared: dict[int, SharedInputs] = {}
        self.forwards_left = Counter(
            part.micro_batch for action in self.rank_actions for part in action.parts if part.op in FORWARD
        )
        """Number of forwards of each micro-batch that have not run yet."""
        self.exchange = UnitExchange(self.rank_model, self.rank_of, executor.channels, recorder)
        self.paired = PairedBlocks(self.exchange)
        # A visit is the forward and the backward of one micro-batch in one unit. For each visit: input of the forward, graph edge of its
        # output, loss of its router. The edge is saved instead of the output, because the output's memory belongs to the next unit, which
        # may free it.
        self.saved_for_backward: dict[Visit, tuple[Tensor | None, GradientEdge | None, Tensor | None]] = {}
        self.deferred: dict[Visit, WeightQueue] = {}
        """The weight gradients of split backwards, between `backward_input` and `backward_weight`."""
        visits = {} if executor.host is None else dict(enumerate(map(self.visits, self.rank_actions)))
        self.visits_at = {index: visits_here for index, visits_here in visits.items() if visits_here}
        """The visits of each action that has some, by the action's index. Empty without offload of activations."""
        units = {visit: self.unit_of(visit) for visits_here in self.visits_at.values() for visit in visits_here}
        self.offload = ActivationOffload(
            executor.host,
            tuple(self.visits_at.values()),
            {visit: unit.kept_elements * batches[visit[1]].tokens.numel() for visit, unit in units.items()},
            {visit for visit in units if self.offloads(visit)},
            partial(_communication_span, recorder),
        )
        self.gradient_offload = self.offload_of_gradients()
        self.reductions_left = self._count_by_unit("reduce_grad")
        self.frees_left = self._count_by_unit("reshard")
        self.index = -1
        """Index of the action that runs now."""
        self.tokens = [batch.valid_tokens for batch in batches]
        """Number of valid tokens of each micro-batch."""
        self.host_blocks = self.rank_model.device.type == "cpu"

    def _count_by_unit(self, op: Op) -> Counter[ShardedUnit]:
        """Return how many actions of this rank with this `op` each unit has in the step."""
        return Counter(self.unit(action).sharded for action in self.rank_actions if action.op == op)

    def offload_of_gradients(self) -> GradientOffload | None:
        """Return the object that moves gradient sums to host memory during this step; None if the plan keeps them on the device."""
        if self.executor.sums_on_host is None:
            return None
        additions = {
            index: [self.unit(part).sharded for part in action.parts if self.makes_weight_gradients(part)]
            for index, action in enumerate(self.rank_actions)
            if action.op in COMPUTE
        }
        return GradientOffload(
            self.executor.sums_on_host, list(additions.values()), partial(_communication_span, self.recorder)
        )

    def run(self) -> Tensor:
        if self.executor.scales is not None:
            self.executor.before_gather(None)
            self.executor.scales.refresh()
        self.executor.streams.follow_compute()
        if self.rank_model.routing is not None:
            slots = bool(self.batches) and self.batches[0].slot is not None
            self.rank_model.routing.begin_step(self.sequences, self.seq, self.valid if slots else self.real)
        if self.rank_model.predictions is not None:
            self.rank_model.predictions.begin_step()
        if self.recorder.detail and self.executor.channels is not None:
            self.executor.channels.time_messages()
        reduced_next = self.reduced_next()
        for index, action in enumerate(self.rank_actions):
            self.executor.on_action(index)
            self.executor.launch_copies()
            self.index = index
            if index in self.visits_at:
                self.offload.begin_compute()
            if self.gradient_offload is not None and action.op in COMPUTE:
                self.gradient_offload.begin_compute()
            self.run_parts(action, skip_accumulate=index in reduced_next)
        self.recorder.gap()
        self.exchange.finish_sends()
        return self.loss

    def run_parts(self, action: Action, *, skip_accumulate: bool) -> None:
        """Run an action of one or two micro-batches. `skip_accumulate` as in `GradientAccumulator`: no later backward adds gradients."""
        if action.paired and (parts := self.unit(action).parts) is not None:
            self.run_paired(action, self.unit(action), parts)
            return
        for part in action.parts:
            # The gradients of two micro-batches are added before the reduction.
            follows = action.paired and part is not action.parts[-1]
            self.run_action(part, skip_accumulate=skip_accumulate and not follows)

    def run_paired(self, action: Action, unit: StageUnit, parts: BlockParts) -> None:
        """Run an action of two micro-batches in a block with experts, whose parts overlap with the exchange of tokens."""
        visits = [_visit_of(part) for part in action.parts]
        self.wait_for_gather(action)
        with self.action_span(action):
            if action.op == "backward":
                unit.sharded.begin_backward(skip_accumulate=False)
                self.paired.backward(visits, unit.sharded.accumulate)
                return
            chooses = [partial(self.rank_model.choose_experts, unit, number) for _, number, _ in visits]
            shared = [self.take_shared_inputs(number) for _, number, _ in visits]
            router_loss = partial(self.router_loss, unit)
            self.paired.forward(visits, [PairedBlock(parts, router_loss, choose) for choose in chooses], shared)

    def run_action(self, action: Action, *, skip_accumulate: bool) -> None:
        """Run an action of one micro-batch; afterwards add its weight gradients to the unit's sums unless `skip_accumulate`."""
        if not self.makes_weight_gradients(action):
            _RUN[action.op](self, action)
            return
        sharded = self.unit(action).sharded
        sharded.begin_backward(skip_accumulate=skip_accumulate)
        _RUN[action.op](self, action)
        if not skip_accumulate:
            with self.action_span(action):  # the sum is part of the backward's time
                sharded.accumulate()

    def action_span(self, action: Action) -> Span:
        """Profiler span around the compute of an action. If two micro-batches run together, both get one common span."""
        if self.rank_actions[self.index].paired:
            action = self.rank_actions[self.index]
        parts = action.parts if action.stage >= 0 else ()
        return self.recorder.action(self.index, action, sum(self.tokens[part.micro_batch] for part in parts))

    def span(self, action: Action, lane: str) -> Span | None:
        """Profiler span around a collective.

        On a CPU the host blocks in the collective, so the span is recorded as a wait. On a GPU the span exists only in steps that record
        communication.
        """
        if self.host_blocks and not self.recorder.detail:
            return self.recorder.waiting(
                "collective_wait", self.index, action, self.unit(action).sharded.gathered_bytes
            )
        return _communication_span(self.recorder, action.label, lane)

    def wait_for_gather(self, action: Action) -> None:
        """Make compute wait for the weights of the action's unit."""
        sharded = self.unit(action).sharded
        if sharded.reads_shards_in_use:
            self.executor.before_gather(sharded)
        if not self.host_blocks and sharded.gathering:
            with self.recorder.waiting("collective_wait", self.index, action, sharded.gathered_bytes):
                sharded.wait_for_collectives()
        sharded.wait_for_gather()

    def visits(self, action: Action) -> tuple[Visit, ...]:
        """The visits of an action, `(stage, micro-batch, unit)` each. A visit is the forward and the backward of a micro-batch in a unit.

        Two kinds of action have no visit: the backward of the loss, because it already ran inside the loss's forward, and the weight half
        of a split backward.
        """
        return tuple(
            _visit_of(part)
            for part in action.parts
            if part.op == "forward"
            or (part.op in ("backward", "backward_input") and not self.is_loss(part.stage, part.unit or 0))
        )

    def is_loss(self, stage: int, unit: int) -> bool:
        return stage + 1 == len(self.rank_of) and unit + 1 == len(self.rank_model.stages[stage])

    def makes_weight_gradients(self, action: Action) -> bool:
        """Whether the action adds to the weight gradients of its unit."""
        if action.op not in COMPUTE:
            return False
        ops = ("forward",) if self.is_loss(action.stage, action.unit or 0) else ("backward", "backward_weight")
        return action.op in ops

    def reduced_next(self) -> set[int]:
        """Indices of the actions whose weight gradients are reduced before the unit computes weight gradients again.

        For these actions the reduction reads the gradients in place, so `GradientAccumulator` need not add them to a sum first.
        """
        indices: set[int] = set()
        latest: dict[ShardedUnit, int] = {}
        for index, action in enumerate(self.rank_actions):
            # Tied weights have two users, embedding and head; the reduction waits until both have added their gradients.
            if action.op == "reduce_grad" and self.unit(action).sharded.uses == 1:
                indices.add(latest[self.unit(action).sharded])
            latest |= {self.unit(part).sharded: index for part in action.parts if self.makes_weight_gradients(part)}
        return indices

    def unit(self, action: Action) -> StageUnit:
        return self.unit_of(_visit_of(action))

    def unit_of(self, visit: Visit) -> StageUnit:
        return self.rank_model.stages[visit[0]][visit[2]]

    def forward(self, action: Action) -> None:
        stage, number, unit_index = visit = _visit_of(action)
        unit = self.unit_of(visit)
        batch = self.batches[number]
        shared = self.take_shared_inputs(number)
        self.wait_for_gather(action)
        trains = action.op == "forward"
        records = trains or (self.as_trained and not self.is_loss(stage, unit_index))
        x = None if stage == unit_index == 0 else self.exchange.take("activation", visit).requires_grad_(records)
        saved = (
            self.offload.saved_activations(visit, self.excluded_storages(unit, shared))
            if trains and self.offloads(visit)
            else None
        )
        leaf, x = leaf_without_memory(x.detach()) if saved and x is not None else (x, x)
        with (
            self.action_span(action),
            torch.set_grad_enabled(records),
            saved.collect() if saved else nullcontext(),
        ):
            self.rank_model.choose_experts(unit, number if trains else None)
            y = unit.run(x, batch, shared)
            if self.is_loss(stage, unit_index):
                if isinstance(y, (LossSums, HeadLosses)):
                    self.add_loss(y, x, visit)
                else:
                    assert isinstance(y, Tensor)
                    self.logits[number] = y
                return
            assert not isinstance(y, (LossSums, HeadLosses))
            router_loss = self.router_loss(unit, y) if trains and isinstance(y, RoutedOutput) else None
            y = y.x if isinstance(y, RoutedOutput) else y
        if trains:
            # The output of a frozen embedding has no gradient.
            self.saved_for_backward[visit] = leaf, get_gradient_edge(y) if y.requires_grad else None, router_loss
            self.offload.end_forward(visit)
        self.exchange.pass_on("activation", visit, y.detach())

    def offloads(self, visit: Visit) -> bool:
        """Whether the plan offloads the visit's activations.

        It does if it offloads the unit for all micro-batches, or if the micro-batch's slot offloads the layer of this block.
        """
        unit = self.unit_of(visit)
        slot = self.batches[visit[1]].slot
        layers = 0 if slot is None else slot.offloaded_layers
        return unit.offloads or (unit.layer is not None and unit.layer < layers)

    def excluded_storages(self, unit: StageUnit, shared: SharedInputs) -> frozenset[int]:
        """Addresses of storages that stay on the device: the unit's gathered weights, and the rotary tables, which all blocks share."""
        return storage_addresses([*unit.sharded.gathered_tensors, *shared.rotary_tensors])

    def router_loss(self, unit: StageUnit, y: RoutedOutput) -> Tensor | None:
        """Add a block's routing statistics to the step's. Returns the weighted router loss, or None if the loss has no weight.

        The backward differentiates this loss together with the block's output.
        """
        routing = self.rank_model.routing
        if routing is None:
            return None
        assert unit.layer is not None, "only blocks route"
        routing.add(unit.layer, y)
        return routing.weighted_loss(y)

    def add_loss(self, losses: LossSums | HeadLosses, x: Tensor | None, visit: Visit) -> None:
        """Add a micro-batch's summed losses to the step's; in training also run their backward at once.

        The loss computes its gradients during forward, chunk by chunk, so its backward only multiplies them by a scalar. If this backward
        ran later, the head's weight gradient `(vocab, hidden)` would stay in memory for every micro-batch in flight.
        """
        y, z = losses.tokens if isinstance(losses, HeadLosses) else losses
        if self.valid is not None:
            valid = self.valid.to(y.dtype)
            y = y / valid
            z = z / valid
        self.loss += y.detach()
        self.z_loss += z
        if isinstance(losses, HeadLosses):
            assert self.rank_model.predictions is not None
            y = y + self.rank_model.predictions.add(losses, self.valid, self.rank_model.routing)
        if y.requires_grad:
            assert x is not None
            y.backward()
            self.exchange.pass_on("gradient", visit, _gradient_of(x))

    def take_shared_inputs(self, number: int) -> SharedInputs:
        """Return the inputs that all blocks of a micro-batch share. The last forward of the micro-batch frees the step's reference."""
        if number not in self.shared:
            self.shared[number] = self.rank_model.shared_inputs(self.batches[number])
        self.forwards_left[number] -= 1
        # Autograd keeps the tensors that a backward still needs.
        return self.shared[number] if self.forwards_left[number] else self.shared.pop(number)

    def backward(self, action: Action, queue: WeightQueue | None = None) -> None:
        """Run a unit's backward. With `queue` the gradients of linear weights are not computed now but put into the queue."""
        stage, _, unit_index = visit = _visit_of(action)
        if self.is_loss(stage, unit_index):
            with self.action_span(action):
                return  # `add_loss` already ran this backward; the empty span shows the action in timelines
        sharded = self.unit_of(visit).sharded
        self.wait_for_gather(action)
        x, y, router_loss = self.saved_for_backward.pop(visit)
        y_gradient = self.exchange.take("gradient", visit)
        with (
            self.offload.backward(visit),
            self.action_span(action),
            nullcontext() if queue is None else sharded.gradient_sink.defer_to(queue),
        ):
            if y is None:
                pass
            elif router_loss is None:
                torch.autograd.backward(y, y_gradient)
            else:
                torch.autograd.backward((y, get_gradient_edge(router_loss)), (y_gradient, torch.ones_like(router_loss)))
        if x is not None:
            self.exchange.pass_on("gradient", visit, _gradient_of(x))

    def backward_input(self, action: Action) -> None:
        """Run the first half of a split backward: the gradient of the input. The weight gradients of linear layers are queued."""
        queue = self.deferred[_visit_of(action)] = WeightQueue()
        self.backward(action, queue)

    def backward_weight(self, action: Action) -> None:
        """Run the second half of a split backward: compute the queued weight gradients."""
        queue = self.deferred.pop(_visit_of(action))
        sharded = self.unit(action).sharded
        with self.action_span(action):
            queue.drain(sharded.gathered_weights, add=sharded.add_matmul)

    def send(self, action: Action) -> None:
        """Start to send the activation or gradient that the action names to another pipeline rank."""
        self.exchange.send(self.index, action)

    def receive(self, action: Action) -> None:
        """Start to receive the activation or gradient that the action names from another pipeline rank."""
        self.exchange.receive(self.index, action, self.rank_model.message_shape(self.batches[action.micro_batch]))

    def unshard(self, action: Action) -> None:
        """Start to gather the weights of a unit, after its deferred optimizer update."""
        sharded = self.unit(action).sharded
        if not sharded.reads_shards_in_use and self.executor.before_gather(sharded):
            self.executor.streams.follow_compute()
        sharded.gather(self.span(action, "unshard"))

    def reshard(self, action: Action) -> None:
        """Free the gathered weights of a unit when all users of the unit have freed them."""
        sharded = self.unit(action).sharded
        self.frees_left[sharded] -= 1
        sharded.free_gathered(last=not self.frees_left[sharded])

    def reduce(self, action: Action) -> None:
        """Start the reduce-scatter of a unit's gradients; after the last one of the step, also the sum over replicas."""
        sharded = self.unit(action).sharded
        self.reductions_left[sharded] -= 1
        last = not self.reductions_left[sharded]
        if last and self.gradient_offload is not None:
            self.gradient_offload.ensure_on_device(sharded)
        reduced = sharded.reduce(self.span(action, "reduce"), user=(action.stage, action.unit), last=last)
        if reduced and not last and self.gradient_offload is not None:
            self.gradient_offload.send(sharded)
        if last and self.executor.sums.over_replicas:
            self.executor.sums.start(sharded, self.span(action, "replicate"))

    def norm_barrier(self, action: Action) -> None:
        """Wait until every gradient is complete, then compute the norm over all ranks."""
        with self.action_span(action):
            with self.recorder.waiting("collective_wait", self.index, action):
                for units in self.rank_model.stages.values():
                    for unit in units:
                        unit.sharded.finish_reductions()
                self.executor.sums.finish()
            self.run_callback(action)

    def optim(self, action: Action) -> None:
        with self.action_span(action):
            self.run_callback(action)

    def run_callback(self, action: Action) -> None:
        if action.op in self.callbacks:
            self.callbacks[action.op]()


def _visit_of(action: Action) -> Visit:
    return action.stage, action.micro_batch, action.unit or 0


def _ignore(index: int) -> None:
    pass


def _nothing_left(unit: ShardedUnit | None) -> bool:
    del unit
    return False


def _gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None, "every unit's output depends on its input"
    return x.grad


def _communication_span(recorder: Recorder, name: str, lane: str) -> Span | None:
    """Span of a collective or of a copy to or from host memory, in steps whose communication is recorded."""
    return recorder.concurrent_span(name, lane) if recorder.detail else None


# A table of functions, not of bound methods in an attribute: a step that refers to itself would keep its tensors until Python collects
# garbage, many steps later.
_RUN: dict[Op, Callable[[_Step, Action], None]] = {
    "forward": _Step.forward,
    "forward_only": _Step.forward,
    "backward": _Step.backward,
    "backward_input": _Step.backward_input,
    "backward_weight": _Step.backward_weight,
    "send": _Step.send,
    "recv": _Step.receive,
    "unshard": _Step.unshard,
    "reshard": _Step.reshard,
    "reduce_grad": _Step.reduce,
    "norm_barrier": _Step.norm_barrier,
    "optim": _Step.optim,
}
