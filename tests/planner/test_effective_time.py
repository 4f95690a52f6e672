"""The effective training time that follows from a run, its plan and its cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.launch.prepare import plan_for
from meshwright.planner.checkpoint_cost import checkpoint_cost
from meshwright.planner.effective_time import (
    Assumptions,
    effective_sentence,
    host_loss_alternatives,
    predict_effective_time,
)
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import MeshAxis, Plan
from meshwright.spec.run import RunSpec

STEP = 5.0
WORDS = [
    "model=llama3-8b",
    "cluster.gpu=H100",
    "cluster.gpus_per_node=8",
    "train.seq_len=8192",
    "train.global_batch=128",
]


@pytest.fixture(scope="module")
def planned() -> tuple[RunSpec, Plan]:
    run = load_run(None, [*WORDS, "cluster.nodes=2"])
    return run, plan_for(run)[0]


def on_hosts(run: RunSpec, hosts: int, mttf_hours: float) -> RunSpec:
    """The run on a cluster of other size whose jobs fail every `mttf_hours`."""
    return replace(run, cluster=replace(run.cluster, nodes=hosts, host_mtbf_hours=mttf_hours * hosts))


@pytest.mark.parametrize(("hosts", "mttf_hours"), [(1536, 2.78), (16_384, 0.23)])
def test_large_jobs_agree_with_the_budget_formula(planned: tuple[RunSpec, Plan], hosts: int, mttf_hours: float) -> None:
    """12,288 and 131,072 GPUs with spares, against 1 − δ/T − (detection + restart + T/2)/MTTF within 0.5 points."""
    run, plan = planned
    run = on_hosts(replace(run, supervision=replace(run.supervision, spares=8)), hosts, mttf_hours)
    prediction = predict_effective_time(run, plan, STEP)
    assert prediction is not None
    cost = checkpoint_cost(run, plan, STEP)
    assert cost is not None and cost.interval_seconds and cost.cost_seconds is not None
    crash = 0.85 * (0.78 * 10 + 0.22 * 1)
    detection, restart = crash + 0.15 * 30, 30 + prediction.model.mean(lambda failure: failure.load_seconds)
    formula = (
        1
        - cost.cost_seconds / cost.interval_seconds
        - (detection + restart + cost.interval_seconds / 2) / (mttf_hours * 3600)
    )
    assert prediction.effective == pytest.approx(formula, abs=0.005)


def test_a_process_restarts_from_memory_and_a_lost_host_from_storage(planned: tuple[RunSpec, Plan]) -> None:
    run, plan = planned
    prediction = predict_effective_time(run, plan, STEP)
    assert prediction is not None
    process, hang, host = prediction.model.classes
    assert process.load_seconds < host.load_seconds and process.lag_seconds < host.lag_seconds
    assert hang.detect_seconds == 30 and process.detect_seconds == 1 and host.detect_seconds == 10
    assert sum(failure.share for failure in prediction.model.classes) == pytest.approx(1)
    slow = predict_effective_time(run, plan, 20.0)
    assert slow is not None and slow.model.classes[1].detect_seconds == 65, "3 steps and 5 s"
    waits = replace(run, checkpoint=replace(run.checkpoint, mode="sync"))
    stopped = predict_effective_time(waits, plan, STEP)
    assert stopped is not None and len({failure.load_seconds for failure in stopped.model.classes}) == 1
    assert stopped.effective < prediction.effective


def test_a_partner_host_has_newer_steps_than_storage(planned: tuple[RunSpec, Plan]) -> None:
    run, plan = planned
    with_partner = replace(run, checkpoint=replace(run.checkpoint, partner="host"))
    alone, partner = predict_effective_time(run, plan, STEP), predict_effective_time(with_partner, plan, STEP)
    cost = checkpoint_cost(with_partner, plan, STEP)
    assert alone is not None and partner is not None and cost is not None
    assert cost.partner_seconds is not None and cost.copy_seconds is not None
    assert partner.model.classes[2].lag_seconds == cost.copy_seconds + cost.partner_seconds
    assert partner.model.classes[2].load_seconds < alone.model.classes[2].load_seconds
    assert partner.model.classes[:2] == alone.model.classes[:2]


def test_replicas_on_another_host_have_what_was_copied_whatever_is_sent_to_partners(
    planned: tuple[RunSpec, Plan],
) -> None:
    run, plan = planned
    with_partner = replace(run, checkpoint=replace(run.checkpoint, partner="host", partner_every=5))
    assert plan.ranks == 2 * run.cluster.gpus_per_node
    replicated = replace(plan, mesh=(MeshAxis(axis="replicate", size=2), MeshAxis(axis="shard", size=plan.ranks // 2)))
    prediction = predict_effective_time(with_partner, replicated, STEP)
    cost = checkpoint_cost(with_partner, replicated, STEP)
    assert prediction is not None and cost is not None
    assert prediction.model.classes[2].lag_seconds == cost.copy_seconds


def test_spares_and_fewer_hosts_keep_a_run_going(planned: tuple[RunSpec, Plan]) -> None:
    run, plan = planned
    prediction = predict_effective_time(on_hosts(run, 1536, 2.78), plan, STEP)
    assert prediction is not None
    alone, shrinking, spared = (model for _, model in host_loss_alternatives(prediction.model))
    assert (alone.wait_seconds, shrinking.wait_seconds, spared.spares) == (None, 0.0, prediction.spares_needed)
    assert "every 2.8 hours (lost: " in effective_sentence(prediction)
    assert "missing hosts" in effective_sentence(prediction)


def test_a_run_without_periodic_checkpoints_is_not_predicted(planned: tuple[RunSpec, Plan]) -> None:
    run, plan = planned
    assert predict_effective_time(replace(run, checkpoint=replace(run.checkpoint, every=0)), plan, STEP) is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("restart_second=5", "nearest: restart_seconds"),
        ("restart_seconds=soon", "expected a number, e.g. restart_seconds=30"),
        ("hang_share=2", "expected a number from 0 to 1"),
        ("restart_seconds=-1", "of at least 0"),
        ("restart_seconds=nan", "of at least 0"),
    ],
)
def test_assumptions_are_checked(word: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Assumptions.parse([word])
    assert Assumptions.parse(["restart_seconds=60"]) == Assumptions(restart_seconds=60)
