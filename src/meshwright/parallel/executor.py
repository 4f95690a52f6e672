"""One executor for every plan: it plays one rank's actions of the schedule on the rank's stages, action by action.

Every unit of a stage runs as a graph of its own: its input is cut off the unit before, and its gradient handed back by hand. So the
schedule alone decides the order, down to single units, whether a pipeline is there or not. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.data.loader import MicroBatch
from meshwright.events.span import Recorder
from meshwright.kernels.linear import AddProduct, WeightQueue, adding, deferring
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.models.moe import Routed
from meshwright.parallel.channels import Channels, Transfer
from meshwright.parallel.context import SplitSequences
from meshwright.parallel.fp8_weights import WeightScales
from meshwright.parallel.fsdp import Streams
from meshwright.parallel.offload import HostMemory, Moves, addresses, handed_in
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.routing import Routing
from meshwright.parallel.stages import Sharded, Unit
from meshwright.parallel.tensor import CopySums
from meshwright.parallel.tied import TiedSum
from meshwright.parallel.timetable import Visit
from meshwright.schedules.action import COMPUTE, Action, Op
from meshwright.schedules.schedule import Schedule

Where = tuple[int, int]
"""(stage, micro-batch)."""
Closing = Mapping[Op, Callable[[], None]]
"""What to do at norm_barrier and optim."""


class Executor:
    """Runs steps of one rank. `stages` maps the virtual stages of this pipeline rank to their units.

    It is given whole sequences and takes this rank's part where `context` ranks divide them. Between units a rank has one of `tensor` parts
    of that.
    """

    def __init__(
        self,
        model: Decoder,
        stages: Mapping[int, Sequence[Unit]],
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
        channels: Channels | None = None,
        replicas: ReplicaSums | None = None,
        tied: TiedSum | None = None,
        routing: Routing | None = None,
        copies: CopySums | None = None,
        tensor: int = 1,
        context: SplitSequences | None = None,
        scales: WeightScales | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.model, self.stages, self.rank = model, stages, rank
        self.dtype, self.device, self.routing, self.tensor = dtype, device, routing, tensor
        self._streams, self._channels, self._replicas, self._tied = streams, channels, replicas, tied
        self._copies, self.context = copies, context
        self._scales, self.host = scales, host
        self._has_trained = False

    def play(
        self,
        schedule: Schedule,
        batches: Sequence[MicroBatch],
        recorder: Recorder,
        valid: Tensor | None = None,
        closing: Closing | None = None,
    ) -> Tensor:
        """Run this rank's actions of an expanded schedule and return its share of the loss (float64; 0 without the last stage).

        `batches` are the step's micro-batches by number. With `valid`, the number of valid tokens over all ranks, losses are divided by it.
        Without, they are sums. Collective over every rank that the schedule or the mesh joins this one with. The first step that trains
        goes in turns, for its kernels are still to be loaded.
        """
        if schedule.trains and not self._has_trained:
            schedule, self._has_trained = schedule.in_turns(), True
        return _Play(self, schedule, batches, recorder, valid, closing or {}).run()

    def logits(self, schedule: Schedule, batches: Sequence[MicroBatch], recorder: Recorder) -> dict[int, Tensor]:
        """Run this rank's actions of a forward-only schedule on micro-batches without targets, which may differ in shape.

        Returns the logits `(batch, seq, vocab)` by micro-batch on the ranks of the last stage, nothing elsewhere. Collective as `play` is.
        """
        play = _Play(self, schedule, batches, recorder, None, {})
        play.run()
        if self.context is None:
            return play.logits
        return {number: self.context.joined(part) for number, part in play.logits.items()}


class _Play:
    """One step under way: what is kept between forward and backward, and what is travelling."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        batches: Sequence[MicroBatch],
        recorder: Recorder,
        valid: Tensor | None,
        closing: Closing,
    ) -> None:
        self.on, self.schedule, self.recorder = executor, schedule, recorder
        self.batches = batches if executor.context is None else [executor.context.part_of(batch) for batch in batches]
        self.valid, self.closing = valid, closing
        self.rank_of = schedule.rank_of
        self.rank_actions = schedule.actions[executor.rank]
        self.logits: dict[int, Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=executor.device)
        self.shared: dict[int, SharedInputs] = {}
        self.forwards_left = Counter(
            part.micro_batch
            for action in self.rank_actions
            for part in action.parts
            if part.op in ("forward", "forward_only")
        )
        self.inputs: dict[Where, Tensor] = {}
        self.gradients: dict[Where, Tensor] = {}
        self.loss_gradients: dict[int, Tensor] = {}
        # The edge of an output, not the output: its memory is the next unit's to keep, or to let go.
        self.kept: dict[Visit, tuple[Tensor | None, GradientEdge, Tensor | None]] = {}
        self.owed: dict[Visit, WeightQueue] = {}
        self.arriving: dict[tuple[str, int, int], Transfer] = {}
        self.leaving: dict[tuple[str, int, int], Tensor] = {}
        self.sent: list[Transfer] = []
        offloads = executor.host is not None
        visits = {place: self.visits(action) for place, action in enumerate(self.rank_actions)} if offloads else {}
        self.begins = {place: found for place, found in visits.items() if found}
        units = {visit: self.unit_at(visit) for found in self.begins.values() for visit in found}
        keeps = {visit: unit.keeps for visit, unit in units.items()}
        moved = {visit for visit, unit in units.items() if unit.offloads}
        self.moves = Moves(executor.host, tuple(self.begins.values()), keeps, moved, partial(_aside, recorder))
        self.alone = False
        """Whether the gradients of the action that runs are reduced before their unit makes more."""
        # Counted by what is sharded together, which for tied ends is two units.
        self.reductions_left = Counter(self.unit(a).sharded for a in self.rank_actions if a.op == "reduce_grad")

    def run(self) -> Tensor:
        if self.on._scales is not None:
            self.on._scales.refresh()
        self.on._streams.follow_compute()
        if self.on.routing is not None:
            self.on.routing.begin_step()
        if self.recorder.detail and self.on._channels is not None:
            self.on._channels.time_messages()
        taken_as_it_is = self.reduced_next()
        for place, action in enumerate(self.rank_actions):
            self.alone = place in taken_as_it_is
            if place in self.begins:
                self.moves.begin()
            for part in action.parts:
                _DO[part.op](self, part)
                if self.makes_gradients(part) and not self.alone:
                    with self.recorder.span(part.label, "compute"):  # adding up is part of making them
                        self.unit(part).sharded.accumulate()
        self.recorder.gap()
        for transfer in self.sent:
            transfer.wait()
        return self.loss

    def concurrent_span(self, action: Action, lane: str) -> AbstractContextManager[None] | None:
        """What a collective's span is taken with, in steps whose communication is recorded."""
        return _aside(self.recorder, action.label, lane)

    def visits(self, action: Action) -> tuple[Visit, ...]:
        """The visits whose forward or backward the action is; none for the loss's backward, which its forward has done, and for the weight
        half of one."""
        return tuple(
            (part.stage, part.micro_batch, part.unit or 0)
            for part in action.parts
            if part.op == "forward"
            or (part.op in ("backward", "backward_input") and not self.is_loss(part.stage, part.unit or 0))
        )

    def is_loss(self, stage: int, unit: int) -> bool:
        return stage + 1 == len(self.rank_of) and unit + 1 == len(self.on.stages[stage])

    def makes_gradients(self, part: Action) -> bool:
        """Whether the action adds to its unit's weight gradients."""
        if part.op not in COMPUTE:
            return False
        ops = ("forward",) if self.is_loss(part.stage, part.unit or 0) else ("backward", "backward_weight")
        return part.op in ops

    def reduced_next(self) -> set[int]:
        """Places of actions whose gradients are reduced before their unit makes more: the reduction takes them as they are."""
        found: set[int] = set()
        latest: dict[Sharded, int] = {}
        for place, action in enumerate(self.rank_actions):
            # Tied weights are in two places, and the reduction of the first waits for what the second adds.
            if action.op == "reduce_grad" and self.unit(action).sharded.places == 1:
                found.add(latest[self.unit(action).sharded])
            latest |= {self.unit(part).sharded: place for part in action.parts if self.makes_gradients(part)}
        return found

    def unit(self, action: Action) -> Unit:
        return self.on.stages[action.stage][action.unit or 0]

    def unit_at(self, visit: Visit) -> Unit:
        return self.on.stages[visit[0]][visit[2]]

    def forward(self, action: Action) -> None:
        stage, number, unit = action.stage, action.micro_batch, action.unit or 0
        mine, batch, shared = self.unit(action), self.batches[number], self.shared_inputs(number)
        self.forwards_left[number] -= 1
        if not self.forwards_left[number]:
            del self.shared[number]  # what a backward needs of it, autograd keeps
        mine.sharded.wait()
        trains = action.op == "forward"
        x = None if stage == unit == 0 else self.input(stage, number, unit, trains)
        parked = (
            self.moves.park((stage, number, unit), self.not_its_own(mine, shared)) if mine.offloads and trains else None
        )
        leaf, x = handed_in(x.detach()) if parked and x is not None else (x, x)
        with (
            self.recorder.span(action.label, "compute"),
            torch.set_grad_enabled(trains),
            parked.catching() if parked else nullcontext(),
        ):
            y = mine.run(x, batch, shared)
            if self.is_loss(stage, unit):
                assert isinstance(y, Tensor)
                if batch.targets is None:
                    self.logits[number] = y
                else:
                    self.take_loss(y, x, stage, number)
                return
            y, balance = self.routed(y, mine, trains)
        if trains:
            self.kept[stage, number, unit] = leaf, get_gradient_edge(y), balance
            self.moves.forward_ended((stage, number, unit))
        if unit + 1 < len(self.on.stages[stage]):
            self.inputs[stage, number] = y.detach()
        elif self.rank_of[stage + 1] == self.on.rank:
            self.inputs[stage + 1, number] = y.detach()
        else:
            self.leaving["activation", stage, number] = y.detach()

    def not_its_own(self, mine: Unit, shared: SharedInputs) -> frozenset[int]:
        """Memory that a unit's forward reads and that stays whatever becomes of what it keeps: weights, and what all blocks share."""
        return addresses([*mine.sharded.gathered, *(shared.rope or ())])

    def routed(self, y: Tensor | Routed, unit: Unit, trains: bool) -> tuple[Tensor, Tensor | None]:
        """A unit's output, and the balance loss to be differentiated with it."""
        if not isinstance(y, Routed):
            return y, None
        routing = self.on.routing
        if routing is None or not trains:
            return y.x, None
        assert unit.layer is not None, "only blocks route"
        routing.add(unit.layer, y)
        return y.x, y.balance if routing.slope else None

    def take_loss(self, y: Tensor, x: Tensor | None, stage: int, number: int) -> None:
        """Add a micro-batch's summed loss; in training run its backward at once.

        The loss makes its gradients in forward, chunk by chunk, so nothing is left to compute; waiting would hold one gradient of the
        whole vocabulary for every micro-batch under way.
        """
        y = y if self.valid is None else y / self.valid.to(y.dtype)
        self.loss += y.detach()
        if y.requires_grad:
            assert x is not None
            y.backward()
            self.loss_gradients[number] = _gradient_of(x)

    def input(self, stage: int, number: int, unit: int, trains: bool) -> Tensor:
        """A unit's input as a leaf, from the unit before or from the rank that holds the stage before."""
        arrived = self.arriving.pop(("activation", stage, number), None) if unit == 0 else None
        x = self.taken(arrived) if arrived else self.inputs.pop((stage, number))
        return x.requires_grad_(trains)

    def taken(self, arrived: Transfer) -> Tensor:
        self.recorder.gap()
        return arrived.wait()

    def shared_inputs(self, number: int) -> SharedInputs:
        if number not in self.shared:
            batch, context, dtype = self.batches[number], self.on.context, self.on.dtype
            if context is None:
                self.shared[number] = self.on.model.shared(batch.tokens, batch.positions, batch.documents, dtype)
            else:
                self.shared[number] = context.shared(batch, dtype)
        return self.shared[number]

    def backward(self, action: Action, queue: WeightQueue | None = None) -> None:
        stage, number, unit = action.stage, action.micro_batch, action.unit or 0
        if self.is_loss(stage, unit):
            with self.recorder.span(action.label, "compute"):
                self.gradients[stage, number] = self.loss_gradients.pop(number)
            return
        mine = self.unit(action)
        mine.sharded.wait()
        x, y, balance = self.kept.pop((stage, number, unit))
        y_gradient = self.gradient(stage, number, unit)
        with (
            self.moves.backward((stage, number, unit)),
            self.recorder.span(action.label, "compute"),
            deferring(queue) if queue is not None else adding(self.sum_of(mine)),
        ):
            if balance is None:
                torch.autograd.backward(y, y_gradient)
            else:
                assert self.on.routing is not None
                slope = torch.full_like(balance, self.on.routing.slope)
                torch.autograd.backward((y, get_gradient_edge(balance)), (y_gradient, slope))
        if x is None:
            return
        gradient = _gradient_of(x)
        if unit:
            self.gradients[stage, number] = gradient
        elif self.rank_of[stage - 1] == self.on.rank:
            self.gradients[stage - 1, number] = gradient
        else:
            self.leaving["gradient", stage, number] = gradient

    def gradient(self, stage: int, number: int, unit: int) -> Tensor:
        """The gradient of a unit's output."""
        last_unit = unit + 1 == len(self.on.stages[stage])
        arrived = self.arriving.pop(("gradient", stage, number), None) if last_unit else None
        return self.taken(arrived) if arrived else self.gradients.pop((stage, number))

    def backward_input(self, action: Action) -> None:
        queue = self.owed[action.stage, action.micro_batch, action.unit or 0] = WeightQueue()
        self.backward(action, queue)

    def backward_weight(self, action: Action) -> None:
        queue = self.owed.pop((action.stage, action.micro_batch, action.unit or 0))
        with self.recorder.span(action.label, "compute"):
            queue.drain(self.unit(action).sharded.whole_parameters, add=self.sum_of(self.unit(action)))

    def sum_of(self, unit: Unit) -> AddProduct:
        """What adds the products that are weight gradients of `unit` to those of earlier micro-batches."""
        return partial(unit.sharded.add_product, alone=self.alone)

    def send(self, action: Action) -> None:
        assert self.on._channels is not None and action.payload is not None
        tensor = self.leaving.pop((action.payload, action.stage, action.micro_batch))
        self.sent = [transfer for transfer in self.sent if not transfer.work.is_completed()]  # drops their buffers
        transfer = self.on._channels.send(self.rank_of[action.peer], tensor)
        self.sent.append(transfer)
        self.posted(action, transfer)

    def receive(self, action: Action) -> None:
        assert self.on._channels is not None and action.payload is not None
        batch, seq = self.batches[action.micro_batch].tokens.shape
        shape = (batch, seq // self.on.tensor, self.on.model.spec.hidden)
        transfer = self.on._channels.recv(self.rank_of[action.peer], shape, self.on.dtype)
        self.arriving[action.payload, action.stage, action.micro_batch] = transfer
        self.posted(action, transfer)

    def posted(self, action: Action, transfer: Transfer) -> None:
        if self.recorder.detail:
            self.recorder.message(action.label, f"{action.op} {self.rank_of[action.peer]}", transfer.travel)

    def unshard(self, action: Action) -> None:
        self.unit(action).sharded.unshard(self.concurrent_span(action, "unshard"))

    def reshard(self, action: Action) -> None:
        self.unit(action).sharded.reshard()

    def reduce(self, action: Action) -> None:
        sharded = self.unit(action).sharded
        self.reductions_left[sharded] -= 1
        last = not self.reductions_left[sharded]
        sharded.reduce(self.concurrent_span(action, "reduce"), place=(action.stage, action.unit), last=last)
        if last and self.on._replicas is not None:
            self.on._replicas.begin(sharded.gradient_shards, sharded.reduced, self.concurrent_span(action, "replicate"))

    def norm_barrier(self, action: Action) -> None:
        """Every gradient is complete: wait for what is travelling, then take the norm over all ranks."""
        with self.recorder.span(action.label, "compute"):
            for units in self.on.stages.values():
                for unit in units:
                    unit.sharded.finish()
            if self.on._replicas is not None:
                self.on._replicas.finish()
            if self.on._tied is not None:
                self.on._tied.sum()
            if self.on._copies is not None:
                self.on._copies.sum()
            self.closing.get("norm_barrier", _nothing)()

    def optim(self, action: Action) -> None:
        with self.recorder.span(action.label, "compute"):
            self.closing.get("optim", _nothing)()


def _nothing() -> None:
    pass


def _gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None, "every unit's output depends on its input"
    return x.grad


def _aside(recorder: Recorder, name: str, lane: str) -> AbstractContextManager[None] | None:
    """The span of a collective or of a copy to or from host memory, in steps whose communication is recorded."""
    return recorder.concurrent_span(name, lane) if recorder.detail else None


# Not the play's own: held by itself it would keep its step's tensors until Python collects garbage, many steps later.
_DO: dict[Op, Callable[[_Play, Action], None]] = {
    "forward": _Play.forward,
    "forward_only": _Play.forward,
    "backward": _Play.backward,
    "backward_input": _Play.backward_input,
    "backward_weight": _Play.backward_weight,
    "send": _Play.send,
    "recv": _Play.receive,
    "unshard": _Play.unshard,
    "reshard": _Play.reshard,
    "reduce_grad": _Play.reduce,
    "norm_barrier": _Play.norm_barrier,
    "optim": _Play.optim,
}
