"""The inference engine on a group of ranks, each with a part of the model: what tensor and expert parallelism share.

Rank 0 is called by the user. Before a step it sends the other ranks one message, with its clock and the calls since the last step. All
ranks then plan the same step.

An error on one rank ends the whole group. That rank raises the error, and the others raise CommunicationFailure when they wait for it. All
processes of the group should then end.
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
    """A rank's part of a model: a part of each layer's width (tensor), or a part of the experts. `spec` describes the whole model."""

    model: Decoder
    spec: ModelSpec
    tensor: AxisPart = WHOLE
    experts: AxisPart = WHOLE

    @classmethod
    def empty(
        cls,
        spec: ModelSpec,
        world: World,
        dtype: torch.dtype,
        experts: ExpertRanks = ONE_RANK,
        prepare: Callable[[Decoder], None] | None = None,
    ) -> RankModel:
        """This rank's part of a model, on the device of `world`, without values. Raises BadInput if the ranks cannot divide the model.

        If `experts.count` is above 1, each rank has some of the experts; else each rank has a part of every layer. `prepare` may replace
        layers before the part takes memory.
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
        """This rank's part of the model in `folder`: a run, a checkpoint or a Hugging Face folder. Collective.

        `experts` is as in `empty`. Layers that the folder stores in 8 bits are computed in 8 bits, in the format `weights` if it is given.
        Raises the same error on all ranks: BadInput if the ranks cannot divide the model, Damaged for damaged files.
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
        """Copy this rank's weights of a stored model."""
        fill(self.model, stored, self.tensor, self.experts)


def use_stored_weights(
    stored: StoredModel, world: World, dtype: torch.dtype, weights: WeightFormat | None, divided: bool, model: Decoder
) -> None:
    """Replace layers of a part on the meta device by layers that compute as the folder stores them. The first rank prints which."""
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

    It is created on all ranks at the same time (collective), with the same options and tokenizer. Rank 0 calls the methods of `Engine`, and
    `close` at the end. The other ranks call `follow`, which returns after `close`. Raises BadInput for invariant results.
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
        """Calls on rank 0 that are not sent to the other ranks yet."""
        self._checksum = 0
        """Checksum of the last step's tokens, to compare it between the ranks."""
        self._failure: str | None = None

    def step(self) -> list[Update]:
        """Compute one step on all ranks, as `Engine.step`.

        An error ends the group. It is raised as a MeshwrightError; as CommunicationFailure if another rank has failed.
        """
        with self._ending_on_error("a step"):
            self._now = time.monotonic()
            self._send(now=self._now)
            return self._compute_step()

    def load_weights(self, folder: Path) -> None:
        """Use newer weights on all ranks from the next step on, as `Engine.load_weights`; all ranks raise the same errors."""
        self._send(load=str(folder))
        self._load(folder)

    def close(self) -> None:
        """Let `follow` return on the other ranks. Called on rank 0 after the last step. The engine cannot be used afterwards."""
        if self._failure is None:
            self._send(end=True)
            self._messages.wait_for_acknowledgement()
        self._runner.release_graphs()

    def follow(self) -> None:
        """Compute the steps of rank 0 until it calls `close`. For all other ranks.

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
        """Submit or abort a request on this rank; returns the number of the request."""
        self._now = call["now"]
        if "abort" in call:
            super().abort(call["abort"])
            return call["abort"]
        return super()._queue(TextRequest.from_plain(call["submit"]))

    def _take_part(self, message: Mapping[str, Any]) -> None:
        """Do this rank's part of a message from rank 0 that asks for something other than a step. A subclass has such messages."""

    def _compute_step(self) -> list[Update]:
        """Compute a step on this rank; returns its updates."""
        return super().step()

    def _load_or_report(self, folder: Path) -> None:
        """As `_load`, but ignore an error that all ranks have: rank 0 raises it to its caller, who decides what follows."""
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
            # Here tensor ranks agree on the scales of rounded weights. If a rank fails here, the others wait for it.
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
        """False on all ranks: devices end at different times, so the ranks would plan different steps."""
        return False

    def _fail(self, step: EngineStep, error: Exception, updates: list[Update]) -> None:
        """Raise the error, which ends the group: other ranks may have computed the step, so its requests cannot end on this rank only."""
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
