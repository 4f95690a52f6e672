"""The inference engine on a group of expert ranks: each rank has its own requests and cache, and some of the experts.

Attention is data-parallel; MoE layers exchange tokens between ranks (CloudMatrix-Infer, arXiv 2506.12708, §4.2). Rank 0 gives each request
to the rank with the fewest requests. It sends calls and its clock before a step, and collects the ranks' updates after it. All ranks
compute their steps at the same time, because every exchange needs all ranks. A rank without requests computes its experts for the others.
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
    """The engine of a rank that has some experts of each MoE layer. The sizes in the options are for each rank.

    Steps have no CUDA graphs, because the host must read how many tokens an exchange moves. With several `micro_batches` the decodes of a
    step are divided: the tokens of one micro-batch travel while another is computed. Raises BadInput for speculation.
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
        """On rank 0: the rank of each unfinished request."""
        self._sum = EngineFigures()
        super().__init__(part, world, tokenizer, replace(options, graphs=False))
        self._micro_batch_runner.micro_batches = micro_batches

    @property
    def unfinished(self) -> int:
        """Requests of all ranks that have not ended; for rank 0."""
        return len(self._rank_of)

    def figures(self) -> EngineFigures:
        """The load of all ranks after the last step; for rank 0."""
        return self._sum

    def abort(self, number: int) -> None:
        """End a request, as `Engine.abort`."""
        if (rank := self._rank_of.get(number)) is not None:
            self._give({"now": time.monotonic(), "rank": rank, "number": number, "abort": number})

    def _queue(self, request: TextRequest) -> int:
        self._now = time.monotonic()
        number = self._next_number
        self._prepare(request)  # raises here what its rank would raise
        rank = self._rank_for(request)
        self._give({"now": self._now, "rank": rank, "number": number, "submit": request.to_plain()})
        self._next_number = number + 1
        self._rank_of[number] = rank
        return number

    def _rank_for(self, request: TextRequest) -> int:
        """The rank that has the prompt's other samples, or else the rank with the fewest requests."""
        if request.samples_of in self._rank_of:
            return self._rank_of[request.samples_of]
        requests = [0] * self._world.ranks
        for rank in self._rank_of.values():
            requests[rank] += 1
        return requests.index(min(requests))

    def _give(self, call: dict[str, Any]) -> None:
        """Apply a call on this rank, or send it to its rank before the next step."""
        if call["rank"] == self._world.rank:
            self._apply(call)
        else:
            self._calls.append(call)

    def _apply(self, call: Mapping[str, Any]) -> int:
        """Submit or abort a request on this rank, if it is one of its own; returns the number of the request."""
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
    """Figures of all ranks together; the usage of the cache is that of the fullest."""
    sums = EngineFigures(*(sum(values) for values in zip(*ranks, strict=True)))
    return sums._replace(cache_usage=max(figures.cache_usage for figures in ranks))
