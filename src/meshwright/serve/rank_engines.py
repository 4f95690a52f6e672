"""The engine of a rank, by what its group divides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.parallel.world import World
from meshwright.serve.expert_group import ExpertEngine
from meshwright.serve.rank_group import RankEngine, RankModel
from meshwright.serve.tensor_group import TensorEngine
from meshwright.spec.engine import EngineOptions, ExpertRanks

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def engine_of_rank(
    part: RankModel, world: World, tokenizer: Tokenizer | None, options: EngineOptions, experts: ExpertRanks
) -> RankEngine:
    """The engine of this rank's part of a model: of a tensor rank or, with several `experts`, of one of these. Collective."""
    if experts.count > 1:
        return ExpertEngine(part, world, tokenizer, options, micro_batches=experts.micro_batches)
    return TensorEngine(part, world, tokenizer, options)
