"""The time of sampling is that of decode steps whose batch shrinks as answers end, beside a plain loop over steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.costs.serve_costs import ServeCosts
from meshwright.planner.rollout_time import expected_lengths, rl_seconds
from meshwright.planner.search import search
from meshwright.spec.deployment import InstanceSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from meshwright.spec.rl import RewardSpec, RlSpec
from meshwright.spec.run import RunSpec
from meshwright.workload.rollout_memory import rollout_options

WORDS = [
    "model=llama3-8b",
    "train.steps=10",
    "train.global_batch=64",
    "train.seq_len=1024",
    "cluster={gpu: H200, gpus_per_node: 1}",
    "data.mix=stdlib",
    "rl={reward: {file: judge.py}, new_tokens: 768, presumed_answer: 128, presumed_question: 32}",
    "model.adapter.rank=16",
]


def planned(*words: str) -> tuple[RunSpec, Plan]:
    run = load_run(None, [*WORDS, *words])
    return run, search(run).best.plan


def test_expected_lengths_are_geometric_with_the_presumed_mean() -> None:
    rl = RlSpec(reward=RewardSpec(file="judge.py"), new_tokens=4096, presumed_answer=128)
    lengths = sorted(tokens for _, *answers in expected_lengths(rl, 64, 8192) for tokens in answers)
    assert len(lengths) == 512 and sum(lengths) / 512 == pytest.approx(128, rel=0.01)
    assert lengths[-1] == 888 and lengths[256] == pytest.approx(128 * math.log(2), rel=0.03)
    for mean in (20, 64, 200):  # a mean near the limit: the longest are cut there
        cut = replace(rl, new_tokens=256, presumed_answer=mean)
        lengths = [tokens for _, *answers in expected_lengths(cut, 64, 8192) for tokens in answers]
        assert sum(lengths) / 512 == pytest.approx(mean, rel=0.03) and max(lengths) <= 256
    assert max(question for question, *_ in expected_lengths(rl, 4, 8192)) == 2048


def test_sampling_takes_the_decode_steps_of_a_shrinking_batch() -> None:
    run, plan = planned()
    lengths = [[32, 40, 80, 400, 10], [16, 200, 100, 30, 5]] * 8
    run = replace(run, train=replace(run.train, global_batch=16), rl=replace(run.rl, samples=4))
    seconds = rl_seconds(run, plan, lengths)
    options = rollout_options(run, 1)
    costs = ServeCosts(replace(run.model, adapter=None), run.cluster, settings=options)
    times = costs.of(InstanceSpec(token_budget=options.step_tokens)).times
    answers = [(question, tokens) for question, *of in lengths for tokens in of]
    total = 0.0
    for step in range(1, 400):
        positions = [question + step for question, tokens in answers if tokens > step]
        total += times.seconds(len(positions), sum(positions), (), max(positions))
    assert seconds.rollout == pytest.approx(total, rel=0.05) and seconds.rollout > total
    assert seconds.longest == 400 and seconds.mean_tokens == sum(tokens for _, tokens in answers) / 64
    # Equal answers of the same mean take less than half: the longest decides.
    mean = [[question, *[108] * 4] for question, *_ in lengths]
    assert rl_seconds(run, plan, mean).rollout < 0.45 * seconds.rollout


def test_phases_of_several_ranks_and_updates() -> None:
    run, plan = planned()
    one = rl_seconds(run, plan)
    assert one.rows == pytest.approx(512 * (128 + 32) / 1024, rel=0.02)
    assert 0.0 < one.handover < 0.05 and 2 < one.training < 8 and 3 < one.rollout < 12
    assert one.total == one.handover + one.rollout + one.training
    each = plan.batch.global_batch // plan.batch.accumulate
    fewer = rl_seconds(run, plan, rows=4 * each).training
    assert fewer == pytest.approx(one.training * 4 / math.ceil(one.rows / each), rel=0.1)
    several = replace(run, rl=replace(run.rl, updates=4))
    batch = rl_seconds(several, plan)
    assert batch.handover == one.handover / 4 and batch.training == pytest.approx(one.training, rel=0.15)
    assert 0.3 * one.rollout < batch.rollout < one.rollout  # more answers at a time
    wide, wide_plan = planned("cluster.gpus_per_node=4", "plan.shard=4")
    four = rl_seconds(wide, wide_plan)
    assert 0.4 * one.rollout < four.rollout < one.rollout  # each rank has a quarter, and one of them the longest
    assert four.handover > one.handover


def test_what_cannot_be_predicted_says_why() -> None:
    run, plan = planned()
    with pytest.raises(BadInput, match="exact engines"):
        rl_seconds(replace(run, rl=replace(run.rl, exact=True)), plan)
    with pytest.raises(BadInput, match="CPU times are not predicted"):
        rl_seconds(replace(run, cluster=replace(run.cluster, gpu="cpu")), plan)
