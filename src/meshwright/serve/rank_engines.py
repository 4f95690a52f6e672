"""Creates the engine of a rank, for tensor or expert parallelism."""

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
    """Return the engine for this rank's part of the model. All ranks call this together.

    It is an ExpertEngine if several ranks share the experts, otherwise a TensorEngine.
    """
    if experts.count > 1:
        return ExpertEngine(part, world, tokenizer, options, micro_batches=experts.micro_batches)
    return TensorEngine(part, world, tokenizer, options)
