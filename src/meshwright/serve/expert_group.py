"""The inference engine on a group of expert ranks. Each rank has its own requests, its own cache, and some of the experts.

Attention is data-parallel. MoE layers exchange tokens between ranks (CloudMatrix-Infer, arXiv 2506.12708, §4.2). Every exchange needs all
ranks, so all ranks compute their steps at the same time. A rank without requests computes its experts for the tokens of the other ranks.

Rank 0 gives each request to the rank with the fewest requests. Before a step, rank 0 sends the calls and the time of its clock to the other
ranks. After the step, it collects the updates of all ranks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshwright.parallel.world import World
from meshwright.serve.engine import Engine
from meshwright.serve.figures import EngineFigures
from meshwright.serve.generation import Update
from meshwright.serve.micro_batches import MicroBatchRunner
from meshwright.serve.rank_group import RankEngine, RankModel
from meshwright.serve.readback import LaunchedStep
from meshwright.serve.text_request import TextRequest
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer


class ExpertEngine(RankEngine):
    """The engine of one expert rank. Sizes in the options, such as `sequences`, are for each rank.

    Steps have no CUDA graphs, because the host must read how many tokens an exchange sends. With several `micro_batches` the decodes of a
    step are divided: while the tokens of one micro-batch are exchanged, another one is computed. Raises BadInput if `options.speculation`
    is set.
    """

    runner_class = MicroBatchRunner

    def __init__(
        self,
        part: RankModel,
        world: World,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        *,
        micro_batches: int = 1,
    ) -> None:
        options = options or EngineOptions()
        if options.speculation is not None:
            raise BadInput("speculation is for an engine on one device", key="speculate")
        self._rank_of: dict[int, int] = {}
        """On rank 0: the rank of each unfinished request, by request number."""
        self._sum = EngineFigures()
        """On rank 0: the load of all ranks after the last step."""
        super().__init__(part, world, tokenizer, replace(options, graphs=False))
        self._micro_batch_runner.micro_batches = micro_batches

    @property
    def unfinished(self) -> int:
        """Number of requests of all ranks that have not ended. For rank 0."""
        return len(self._rank_of)

    def figures(self) -> EngineFigures:
        """Return the load of all ranks after the last step. For rank 0."""
        return self._sum

    def abort(self, number: int) -> None:
        """End a request, as `Engine.abort`."""
        if (rank := self._rank_of.get(number)) is not None:
            self._give({"now": time.monotonic(), "rank": rank, "number": number, "abort": number})

    def _queue(self, request: TextRequest) -> int:
        self._now = time.monotonic()
        number = self._next_number
        self._prepare(request)  # This raises the errors that the request's rank would raise, here on rank 0.
        rank = self._rank_for(request)
        self._give({"now": self._now, "rank": rank, "number": number, "submit": request.to_plain()})
        self._next_number = number + 1
        self._rank_of[number] = rank
        return number

    def _rank_for(self, request: TextRequest) -> int:
        """Return the rank for a request: the rank that has other samples of the same prompt, or else the rank with the fewest requests."""
        if request.samples_of in self._rank_of:
            return self._rank_of[request.samples_of]
        requests = [0] * self._world.ranks
        for rank in self._rank_of.values():
            requests[rank] += 1
        return requests.index(min(requests))

    def _give(self, call: dict[str, Any]) -> None:
        """Apply a call now if it is for this rank (rank 0). Otherwise send it with the message of the next step."""
        if call["rank"] == self._world.rank:
            self._apply(call)
        else:
            self._calls.append(call)

    def _apply(self, call: Mapping[str, Any]) -> int:
        """Apply a call of submit or abort if the request belongs to this rank. Returns the number of the request."""
        number = call["number"]
        if call["rank"] != self._world.rank:
            return number
        if "submit" in call:
            self._next_number = number
        return super()._apply(call)

    def _compute_step(self) -> list[Update]:
        updates = super()._compute_step()
        leads = self._world.leads
        reports: list[Any] | None = [None] * self._world.ranks if leads else None
        dist.gather_object((updates, Engine.figures(self)), reports, dst=0, group=self._world.control)
        if reports is None:
            return updates
        updates = [update for report, _ in reports for update in report]
        for update in updates:
            if update.reason is not None:
                del self._rank_of[update.number]
        self._sum = _sum_of([figures for _, figures in reports])
        return updates

    def _launch(self, updates: list[Update], drafting: bool) -> LaunchedStep | None:
        launched = super()._launch(updates, drafting)
        if launched is None:
            self._micro_batch_runner.compute_nothing()
        return launched

    @property
    def _micro_batch_runner(self) -> MicroBatchRunner:
        assert isinstance(self._runner, MicroBatchRunner)
        return self._runner


def _sum_of(ranks: list[EngineFigures]) -> EngineFigures:
    """Add up the figures of all ranks. The cache usage is the largest of the ranks."""
    sums = EngineFigures(*(sum(values) for values in zip(*ranks, strict=True)))
    return sums._replace(cache_usage=max(figures.cache_usage for figures in ranks))
