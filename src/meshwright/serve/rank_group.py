"""The inference engine on a group of ranks that each have a part of the model. It is the base of tensor and expert parallelism.

The user calls the engine of rank 0. Before each step, rank 0 sends one message to the other ranks. It has the time of rank 0's clock and
the calls (submit, abort) since the last step. All ranks apply these calls.

An error on one rank ends the whole group. This rank raises the error; the other ranks raise CommunicationFailure when they wait for this
rank. Then all processes of the group should end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.checkpoint.models.stored_model import StoredModel, check_head
from meshwright.checkpoint.ranks import RankGroup
from meshwright.events.terminal import write_line
from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.models.decoder import Decoder
from meshwright.parallel.expert_inference import distribute_for_inference
from meshwright.parallel.tensor_inference import divide_for_inference
from meshwright.parallel.world import World, world_group
from meshwright.policies.batch_request import EngineStep
from meshwright.serve.engine import Engine
from meshwright.serve.engine_sizes import blocks_that_fit
from meshwright.serve.formats import assign_parameter, rounded_parameters, use_formats, use_stored_formats
from meshwright.serve.generation import Update
from meshwright.serve.load import fill, loading_sentence
from meshwright.serve.step_messages import StepMessages
from meshwright.serve.text_request import TextRequest
from meshwright.serve.weights import check_same_model, open_newer
from meshwright.spec.engine import ONE_RANK, EngineOptions, ExpertRanks, WeightFormat
from meshwright.spec.errors import BadInput, CommunicationFailure, MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.layout import WHOLE, AxisPart
from meshwright.spec.model import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class RankModel:
    """A rank's part of a model: a part of each layer (tensor parallelism), or some experts of each MoE layer (expert parallelism)."""

    model: Decoder
    """The rank's part."""
    spec: ModelSpec
    """The dimensions of the whole model."""
    tensor: AxisPart = WHOLE
    """Which part of each layer the rank has; `WHOLE` with expert parallelism."""
    experts: AxisPart = WHOLE
    """Which part of the experts the rank has; `WHOLE` with tensor parallelism."""

    @classmethod
    def empty(
        cls,
        spec: ModelSpec,
        world: World,
        dtype: torch.dtype,
        experts: ExpertRanks = ONE_RANK,
        prepare: Callable[[Decoder], None] | None = None,
    ) -> RankModel:
        """Make this rank's part of a model on the device of `world`, with uninitialised weights.

        If `experts.count` is above 1, each rank has some of the experts; else each rank has a part of every layer. `prepare` is called with
        the part on the meta device, before its memory is allocated, and may replace layers. Raises BadInput if the model cannot be divided
        by the number of ranks.
        """
        with torch.device("meta"):
            model = Decoder(spec)
        part = AxisPart(world.rank, world.ranks)
        if experts.count > 1:
            distribute_for_inference(model, part, world_group(), experts.dispatch)
        else:
            divide_for_inference(model, part, world_group())
        parts = (WHOLE, part) if experts.count > 1 else (part, WHOLE)
        model.to(dtype)
        if prepare is not None:
            prepare(model)
        return cls(model.to_empty(device=world.device), spec, *parts)

    @classmethod
    def load(
        cls,
        folder: Path,
        world: World,
        dtype: torch.dtype,
        experts: ExpertRanks = ONE_RANK,
        weights: WeightFormat | None = None,
    ) -> RankModel:
        """Load this rank's part of the model in `folder`: a run, a checkpoint or a Hugging Face folder. Collective.

        `experts` is as in `empty`. Layers that the folder stores in 8 bits are computed in 8 bits, in the format `weights` if it is given.
        All ranks raise the same error: BadInput if the model cannot be divided by the number of ranks, Damaged for damaged files.
        """
        loaded: list[RankModel] = []

        def load() -> None:
            with open_newer(folder, device=world.device) as stored:
                check_head(stored.spec, folder)
                prepare = partial(use_stored_weights, stored, world, dtype, weights, experts.count == 1)
                loaded.append(cls.empty(stored.spec, world, dtype, experts, prepare))
                loaded[0].copy_from(stored)

        RankGroup(world.control).run_on_all(f"loading {folder}", load)
        return loaded[0]

    def copy_from(self, stored: StoredModel) -> None:
        """Copy this rank's part of the weights of a stored model."""
        fill(self.model, stored, self.tensor, self.experts)


def use_stored_weights(
    stored: StoredModel, world: World, dtype: torch.dtype, weights: WeightFormat | None, divided: bool, model: Decoder
) -> None:
    """Replace layers of a rank's part by layers with the 8-bit weights that the folder stores. Rank 0 prints which are replaced.

    `model` is the part on the meta device. `divided` says whether ranks have a part of each layer (tensor parallelism).
    """
    if stored.quantised is None:
        return
    ranks = world_group() if divided and world.ranks > 1 else None
    count = 1 if ranks is None else world.ranks
    formats = partial(stored.format_of, ranks=count)
    use_stored_formats(model, formats, world.device, weights=weights, ranks=ranks)
    if world.rank == 0:
        write_line(loading_sentence(stored, model, world.device, dtype, weights, count), sys.stderr)


class RankEngine(Engine):
    """The engine of one rank of a group.

    All ranks create it at the same time (collective), with the same options and tokenizer. On rank 0, the user calls the methods of
    `Engine`, and `close` at the end. On the other ranks, the user calls `follow`, which returns after rank 0 has called `close`. Raises
    BadInput if `options.invariant` is set.
    """

    def __init__(
        self,
        part: RankModel,
        world: World,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        options = options or EngineOptions()
        if options.invariant:
            raise BadInput("invariant results are for an engine on one device", key="invariant")
        use_formats(part.model, weights=options.weights, ranks=world_group() if part.tensor.count > 1 else None)
        self._part = part
        self._world = world
        self._ranks = RankGroup(world.control)
        self._now = 0.0
        # The ranks' devices may have different amounts of free memory.
        blocks = min(self._ranks.run_on_all("sizing the cache", lambda: blocks_that_fit(part.model, options)))
        super().__init__(part.model, tokenizer, replace(options, cache_blocks=blocks), clock=lambda: self._now)
        self.spec = part.spec
        self._messages = StepMessages()
        self._calls: list[dict[str, Any]] = []
        """On rank 0: calls that are not sent to the other ranks yet."""
        self._checksum = 0
        """Checksum of the tokens of the last step. Rank 0 sends it, and the other ranks compare it with theirs."""
        self._failure: str | None = None
        """Message of the error that has ended the group; None if there was none."""

    def step(self) -> list[Update]:
        """Compute one step on all ranks, as `Engine.step`. For rank 0.

        An error ends the group. It raises CommunicationFailure if another rank has failed, and else MeshwrightError.
        """
        with self._ending_on_error("a step"):
            self._now = time.monotonic()
            self._send(now=self._now)
            return self._compute_step()

    def load_weights(self, folder: Path) -> None:
        """Load new weights on all ranks, as `Engine.load_weights`. For rank 0. An error is raised on all ranks."""
        self._send(load=str(folder))
        self._load(folder)

    def close(self) -> None:
        """End `follow` on the other ranks. For rank 0, after the last step. The engine cannot be used afterwards."""
        if self._failure is None:
            self._send(end=True)
            self._messages.wait_for_acknowledgement()
        self._runner.release_graphs()

    def follow(self) -> None:
        """Take part in the steps of rank 0, until rank 0 calls `close`. For all other ranks.

        Raises MeshwrightError if a step fails, CommunicationFailure if another rank has failed.
        """
        while True:
            with self._ending_on_error("a step"):
                message = self._messages.receive()
                if message["checksum"] != self._checksum:
                    raise MeshwrightError("drew other tokens than rank 0")
                for call in message["calls"]:
                    self._apply(call)
                if "now" in message:
                    self._now = message["now"]
                    self._compute_step()
                self._take_part(message)
            if "load" in message:
                self._load_or_report(Path(message["load"]))
            if "end" in message:
                self._messages.acknowledge()
                self._runner.release_graphs()
                return

    def _send(self, **message: Any) -> None:
        if self._failure is not None:
            raise CommunicationFailure(f"the engine's ranks have ended: {self._failure}")
        self._messages.send({"checksum": self._checksum, "calls": self._calls, **message})
        self._calls = []

    def _apply(self, call: Mapping[str, Any]) -> int:
        """Apply a call of submit or abort on this rank. Returns the number of the request."""
        self._now = call["now"]
        if "abort" in call:
            super().abort(call["abort"])
            return call["abort"]
        return super()._queue(TextRequest.from_plain(call["submit"]))

    def _take_part(self, message: Mapping[str, Any]) -> None:
        """Do this rank's part of a message that asks for something else than a step. Only subclasses have such messages."""

    def _compute_step(self) -> list[Update]:
        """Compute a step on this rank. Returns the updates of its requests."""
        return super().step()

    def _load_or_report(self, folder: Path) -> None:
        """Load weights as `_load`, but ignore an error that all ranks have. Rank 0 raises this error to its caller, who handles it."""
        try:
            self._load(folder)
        except CommunicationFailure:
            raise
        except MeshwrightError:
            return

    def _load(self, folder: Path) -> None:
        activity = f"loading {folder}"
        with ExitStack() as files:
            opened: list[StoredModel] = []

            def verify() -> None:
                opened.append(files.enter_context(open_newer(folder, device=self._world.device)))
                check_same_model(self.spec, opened[0].spec, folder)
                opened[0].verify()

            self._ranks.run_on_all(activity, verify)
            self._policy.forget_cache()
            self._weights_whole = False
            # During this call, tensor ranks exchange the scales of rounded weights. So if one rank fails here, the others wait for it.
            self._ranks.run_on_all(
                activity,
                lambda: self._assign(
                    opened[0].tensors(self._part.tensor, self._part.experts, rounded_parameters(self._model))
                ),
            )
            self._weights_whole = True

    def _assign(self, tensors: Iterable[tuple[str, Tensor | RoundedMatrix]]) -> None:
        for name, value in tensors:
            assign_parameter(self._model, name, value)

    def _tokens_have_come(self) -> bool:
        """Return false on all ranks. The devices complete a step at different times, so otherwise the ranks would plan different steps."""
        return False

    def _fail(self, step: EngineStep, error: Exception, updates: list[Update]) -> None:
        """Raise the error, which ends the group. Other ranks may have completed the step, so its requests cannot end on this rank only."""
        raise error

    @contextmanager
    def _ending_on_error(self, activity: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = f"rank {self._world.rank} of {self._world.ranks}, {activity}"
            failure = as_meshwright_error(error, name)
            self._failure = str(failure)
            raise failure from error
