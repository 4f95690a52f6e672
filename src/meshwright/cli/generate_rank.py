"""The program of a rank of `meshwright generate --tensor` or `--expert`.

Each rank loads its part of the model into the engine.

`cli.generate` starts the ranks through `training.answer_rank`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.cli.generate import SamplingFlags, continued, engine_options
from meshwright.parallel.world import join
from meshwright.serve.rank_engines import engine_of_rank
from meshwright.serve.rank_group import RankModel
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.engine import ExpertRanks, Fp8, WeightFormat
from meshwright.spec.fields import from_plain
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.worker import answer_as_rank

TIMEOUT_SECONDS = 600
"""Seconds that a rank waits for the other ranks to read their weights."""


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """What every rank receives. The fields that are not described here are options of `SamplingFlags` and `EngineOptions`."""

    folder: str
    """Checkpoint or Hugging Face folder with the weights."""
    cluster: ClusterSpec
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    tokens: int
    temperature: float
    top_k: int
    seed: int
    stops: tuple[int, ...]
    weights: WeightFormat | None
    kv_cache: Fp8 | None
    experts: ExpertRanks
    """Number of expert-parallel ranks and their settings. If there is more than one, these are all ranks of the engine."""


def continue_prompts(job: EngineJob, environment: RankEnvironment) -> list[list[int]]:
    """Return the new tokens of each prompt on rank 0. The other ranks help to compute, and return empty lists."""
    world = join(environment, job.cluster, timeout_seconds=TIMEOUT_SECONDS)
    how = SamplingFlags(**{name: getattr(job, name) for name in SamplingFlags._fields})
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    part = RankModel.load(Path(job.folder), world, dtype, job.experts, job.weights)
    options = replace(engine_options(job.prompts, how), weights=job.weights, kv_cache=job.kv_cache)
    engine = engine_of_rank(part, world, None, options, job.experts)
    new: list[list[int]] = [[] for _ in job.prompts]
    if world.leads:
        for number, update in continued(engine, job.prompts, how):
            new[number] += update.tokens
        engine.close()
    else:
        engine.follow()
    world.leave()
    return new


def main() -> None:
    """Run as a rank. Rank 0 writes the answer."""

    def answer(question: str, environment: RankEnvironment) -> str:
        return json.dumps(continue_prompts(from_plain(EngineJob, json.loads(question)), environment))

    answer_as_rank(answer)
