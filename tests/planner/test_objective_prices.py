"""Runs whose loss is a function of log-probabilities are priced with what their head and their further forwards compute."""

from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.costs.plan_costs import plan_time
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.simulator.predicted_step import predicted_step
from meshwright.spec.chips import CHIPS
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.run import RunSpec

QUESTION = (
    "model=llama3-1b cluster.gpu=H200 cluster.gpus_per_node=1 train.seq_len=2048 train.global_batch=16 "
    "plan.micro_batch=4 plan.recompute=none plan.offload=none"
)
PLAIN = load_run(None, QUESTION.split())
PLAN = search(PLAIN).best.plan
TOKENS = PLAIN.train.tokens_per_step
FLOP_RATE = CHIPS["H200"].peak_flops["bf16"]
LOGITS = 2 * TOKENS * PLAIN.model.hidden * PLAIN.model.vocab_size / FLOP_RATE
"""Seconds of one product of all tokens with the head at the peak rate."""
FORWARD = 2 * TOKENS * 1.24e9 / FLOP_RATE
"""Seconds of a forward through all of the model's 1.24e9 parameters at the peak rate."""
KINDS = {
    "dpo": (("preference.loss=dpo",), LOGITS),
    "kto": (("preference.loss=kto",), FORWARD + LOGITS),
    "rl": (("rl.reward.file=judge.py", "rl.samples=4", "rl.new_tokens=256"), LOGITS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_includes_what_the_objective_computes(kind: str) -> None:
    words, least = KINDS[kind]
    run = load_run(None, [*QUESTION.split(), *words])
    seconds, plain = (reprice(of, PLAN).predicted for of in (run, PLAIN))
    assert seconds is not None and plain is not None and seconds.step_seconds and plain.step_seconds
    assert least < seconds.step_seconds - plain.step_seconds < 2 * least
    by_formula, plain_formula = (plan_time(of.model, of.train, PLAN, of.cluster) for of in (run, PLAIN))
    assert by_formula is not None and plain_formula is not None
    assert by_formula.seconds - plain_formula.seconds == pytest.approx(
        seconds.step_seconds - plain.step_seconds, rel=0.1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_and_ranks_price_it_alike(kind: str) -> None:
    run = load_run(None, [*QUESTION.split(), *KINDS[kind][0]])
    best = search(run).best
    timeline, _ = predicted_step(from_plain(RunSpec, to_plain(run)), best.plan)  # a rank's copy of the run
    assert timeline is not None and timeline.step_seconds == pytest.approx(best.seconds, rel=1e-6)
    assert best.seconds > search(PLAIN).best.seconds + KINDS[kind][1]
