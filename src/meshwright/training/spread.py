"""Generation and evaluation with a trained model that is distributed over ranks, for models too large for one device.

A local launch starts ranks through `training.answer_rank`. Under torchrun and similar launchers `meshwright generate` and `meshwright eval`
call `join_and_answer` themselves.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

from meshwright.data.loader import open_data
from meshwright.parallel.apply import build_engine
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.world import World, join
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import DataSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.training.evaluate import Evaluation, HeldOut, evaluate, undivided_samples
from meshwright.training.generate import GenerationSampling, generate_under_plan
from meshwright.training.run_state import load_initial
from meshwright.training.worker import answer_as_rank

TIMEOUT_SECONDS = 600
"""Seconds that a rank waits for the other ranks, for example while they read their weights."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Text to generate: prompts as token ids, and sampling parameters."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: GenerationSampling


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Held-out text to evaluate, as sequences of `seq_len` tokens, `micro_batch` at a time. `data` says how many tokens are read."""

    data: DataSpec
    seq_len: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class SpreadJob:
    """What every rank of the job computes. `weights` is `hf:DIR` or `checkpoint:DIR`."""

    model: ModelSpec
    weights: str
    plan: Plan
    cluster: ClusterSpec
    continuation: Continuation | None = None
    measurement: Measurement | None = None


@dataclass(frozen=True, kw_only=True)
class SpreadAnswer:
    """The answer to a job: new token ids for each prompt, or an evaluation; the other one is None."""

    tokens: tuple[tuple[int, ...], ...] | None = None
    evaluation: Evaluation | None = None


def compute_answer(job: SpreadJob, world: World) -> SpreadAnswer:
    """Load each rank's part of the model and run the job. Collective; every rank returns the answer.

    Raises BadInput if the plan is for another number of ranks or the weights belong to another model.
    """
    # Every text has another length, and compiled blocks would be compiled again for each length.
    plan = replace(job.plan, compile=False)
    mesh = build_mesh(plan, world)
    engine = build_engine(job.model, plan, mesh, loss_chunk=4096, seed=0)
    load_initial(engine.weights, job.model, job.weights)
    tokens = measured = None

    def progress(generated_tokens: int, end: str = "") -> None:
        if world.leads and sys.stderr.isatty() and job.continuation:
            sys.stderr.write(f"\r{generated_tokens} of {job.continuation.sampling.tokens} tokens{end}")
            sys.stderr.flush()

    if job.continuation:
        request = job.continuation
        texts = generate_under_plan(engine, mesh, request.prompts, request.sampling, progress=progress)
        tokens = tuple(map(tuple, texts))
        progress(request.sampling.tokens, end="\n")
    if job.measurement:
        text = job.measurement
        source = open_data(text.data, seq_len=text.seq_len, seed=0, vocab_size=job.model.vocab_size, split="validation")
        pass_tokens = None
        if text.data.packing == "none":
            plan = replace(plan, samples=plan.samples or undivided_samples(text.seq_len))
            pass_tokens = text.micro_batch * text.seq_len * mesh.data_ranks
        held_out = HeldOut.of(source, text.data.validation_tokens, pass_tokens)
        measured = evaluate(engine, held_out, mesh=mesh, micro_batch=text.micro_batch, device=world.device, plan=plan)
    return SpreadAnswer(tokens=tokens, evaluation=measured)


def join_and_answer(job: SpreadJob, environment: RankEnvironment) -> SpreadAnswer:
    """Run one rank of the job, from joining the other ranks to leaving them."""
    world = join(environment, job.cluster, timeout_seconds=TIMEOUT_SECONDS)
    answer = compute_answer(job, world)
    world.leave()
    return answer


def main() -> None:
    """Run a locally launched rank; rank 0 writes the answer."""

    def answer(question: str, environment: RankEnvironment) -> str:
        return json.dumps(to_plain(join_and_answer(from_plain(SpreadJob, json.loads(question)), environment)))

    answer_as_rank(answer)
