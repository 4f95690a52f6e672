"""A trained model spread over ranks by a plan, to sample from or to measure: one that a single device cannot hold.

`python -m meshwright.training.spread JOB ANSWER` is one rank of a local launch; under torchrun and its kin `meshwright generate` and
`meshwright eval` call `answered` themselves.
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
from meshwright.training.evaluate import Evaluation, HeldOut, evaluate
from meshwright.training.generate import Sampling, generate_under_plan
from meshwright.training.run_state import load_initial
from meshwright.training.worker import answer_as_rank

TIMEOUT_SECONDS = 600
"""How long a rank waits for the others, who read their weights meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Prompts as token ids, and how they go on."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Held-out text, and how much of it: `samples` sequences of `seq_len` tokens at most, `micro_batch` at a time."""

    data: DataSpec
    seq_len: int
    samples: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class SpreadJob:
    """What every rank is told. `weights` is `hf:DIR` or `checkpoint:DIR`."""

    model: ModelSpec
    weights: str
    plan: Plan
    cluster: ClusterSpec
    continuation: Continuation | None = None
    measurement: Measurement | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """New token ids by prompt, or a measurement; what was not asked for is None."""

    tokens: tuple[tuple[int, ...], ...] | None = None
    evaluation: Evaluation | None = None


def answered(job: SpreadJob, world: World) -> Answer:
    """Load each rank's part of the model and do what the job asks; collective, and every rank has the answer.

    Raises BadInput when the plan is not for this many ranks or the weights are another model's.
    """
    # Every text has a length of its own, for each of which blocks would be compiled again.
    plan = replace(job.plan, compile=False)
    mesh = build_mesh(plan, world)
    engine = build_engine(job.model, plan, mesh, loss_chunk=4096, seed=0)
    load_initial(engine.weights, job.model, job.weights)
    tokens = measured = None

    def told(made: int, end: str = "") -> None:
        if world.leads and sys.stderr.isatty() and job.continuation:
            sys.stderr.write(f"\r{made} of {job.continuation.sampling.tokens} tokens{end}")
            sys.stderr.flush()

    if job.continuation:
        asked = job.continuation
        tokens = tuple(map(tuple, generate_under_plan(engine, mesh, asked.prompts, asked.sampling, told=told)))
        told(asked.sampling.tokens, end="\n")
    if job.measurement:
        text = job.measurement
        source = open_data(text.data, seq_len=text.seq_len, seed=0, vocab_size=job.model.vocab_size, split="validation")
        held_out = HeldOut.of(source, text.samples)
        measured = evaluate(engine, held_out, mesh=mesh, micro_batch=text.micro_batch, device=world.device)
    return Answer(tokens=tokens, evaluation=measured)


def join_and_answer(job: SpreadJob, environment: RankEnvironment) -> Answer:
    """Be one rank of the job, from joining to leaving."""
    world = join(environment, job.cluster, timeout_seconds=TIMEOUT_SECONDS)
    answer = answered(job, world)
    world.leave()
    return answer


def main() -> None:
    """Entry of a locally launched rank; rank 0 writes the answer."""

    def answer(question: str, environment: RankEnvironment) -> str:
        return json.dumps(to_plain(join_and_answer(from_plain(SpreadJob, json.loads(question)), environment)))

    answer_as_rank(answer)


if __name__ == "__main__":
    main()
