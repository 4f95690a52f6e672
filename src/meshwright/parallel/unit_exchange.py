"""Passes activations and gradients between units: inside a stage, between stages of one rank, or between ranks.

A unit is a part of a stage with parameters of its own (`parallel.stages`). Its output is the next unit's input; the gradient of its input
is the gradient of the previous unit's output. If the other unit is on another pipeline rank, send and receive actions of the schedule
transfer the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.events.span import Recorder
from meshwright.parallel.channels import Channels, PipelineTransfer
from meshwright.parallel.stages import StageModel
from meshwright.parallel.timetable import Visit
from meshwright.schedules.action import Action, Payload

Message = tuple[Payload, int, int]
"""(payload, stage, micro-batch). The payload is an activation or a gradient. On the sender the stage is the one that sends it, on the
receiver the one that uses it."""

_Posted = tuple[int, Action, PipelineTransfer]
"""A message that may still be in transfer: the index of its action in the schedule, the action, and the transfer."""


class UnitExchange:
    """The tensors between units of one rank in one step, and the messages that may still be in transfer.

    `rank_of` has the pipeline rank of each stage. `channels` is None if there is only one pipeline rank.
    """

    def __init__(
        self, rank_model: StageModel, rank_of: Sequence[int], channels: Channels | None, recorder: Recorder
    ) -> None:
        self._rank_model = rank_model
        self._rank_of = rank_of
        self._recorder = recorder
        self._channels = channels
        self._local: dict[Message, Tensor] = {}
        self._to_send: dict[Message, Tensor] = {}
        self._sending: list[_Posted] = []
        self._receiving: dict[Message, _Posted] = {}

    def pass_on(self, payload: Payload, visit: Visit, tensor: Tensor) -> None:
        """Keep the output of a unit for the next unit, or the gradient of its input for the previous unit."""
        stage, micro_batch, unit = visit
        step = 1 if payload == "activation" else -1
        if 0 <= unit + step < len(self._rank_model.stages[stage]):
            self._local[payload, stage, micro_batch] = tensor
        elif self._rank_of[stage + step] == self._rank_model.pipeline_rank:
            self._local[payload, stage + step, micro_batch] = tensor
        else:
            self._to_send[payload, stage, micro_batch] = tensor

    def take(self, payload: Payload, visit: Visit) -> Tensor:
        """Return a unit's input, or the gradient of its output, and forget it. If another rank sends it, compute waits for the message."""
        stage, micro_batch, _ = visit
        posted = self._receiving.pop((payload, stage, micro_batch), None)
        if posted is None:
            return self._local.pop((payload, stage, micro_batch))
        index, action, transfer = posted
        with self._recorder.waiting("receive", index, action, transfer.tensor.nbytes):
            return transfer.wait()

    def send(self, index: int, action: Action) -> None:
        """Start to send the tensor of a send action to the rank of its peer stage."""
        assert self._channels is not None and action.payload is not None
        tensor = self._to_send.pop((action.payload, action.stage, action.micro_batch))
        # A completed transfer is dropped from the list, which frees its buffer.
        self._sending = [posted for posted in self._sending if not posted[2].work.is_completed()]
        self._recorder.posted(index, action, tensor.nbytes)
        transfer = self._channels.send(self._rank_of[action.peer], tensor)
        self._sending.append((index, action, transfer))
        self._record(action, transfer)

    def receive(self, index: int, action: Action, shape: Sequence[int]) -> None:
        """Start to receive the tensor of a receive action, of this shape, from the rank of its peer stage."""
        assert self._channels is not None and action.payload is not None
        transfer = self._channels.recv(self._rank_of[action.peer], shape, self._rank_model.dtype)
        self._receiving[action.payload, action.stage, action.micro_batch] = index, action, transfer
        self._record(action, transfer)

    def finish_sends(self) -> None:
        """Make compute wait until all messages of this step have been sent."""
        for peer in {action.peer: None for _, action, _ in self._sending}:
            pending = [posted for posted in self._sending if posted[1].peer == peer]
            with self._recorder.waiting("send", *pending[0][:2]):
                for _, _, transfer in pending:
                    transfer.wait()

    def _record(self, action: Action, transfer: PipelineTransfer) -> None:
        if self._recorder.detail:
            self._recorder.message(action.label, f"{action.op} {self._rank_of[action.peer]}", transfer.timing)
