"""Probes (short runs that measure plans): which plans are run, when a probe ends early, and that the fastest is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.events.messages import FailureMessage
from meshwright.launch.probe import STEPS, Probe, Watch, check_here, failure_text, leading, too_slow, with_fastest_probe
from meshwright.observe.prediction_check import WARM_UP, TypicalStep
from meshwright.planner.candidate import Candidate, SearchResult
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_INTERNAL, EXIT_NO_RESOURCES, BadInput, OutOfResources
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, Predicted, SchedulePlan

PREDICTED = Predicted(memory_peak_bytes=10**9, step_seconds=1.0, low_seconds=0.9, high_seconds=1.1)


def probed_plan(axis: str, size: int = 2, micro_batch: int = 1) -> Plan:
    batch = BatchPlan(
        global_batch=8, micro_batch=micro_batch, accumulate=8 // micro_batch // (1 if axis == "pipeline" else size)
    )
    schedule = SchedulePlan(name="1f1b", stages=(("0-0",), ("1-1",))) if axis == "pipeline" else SchedulePlan()
    return Plan(
        mesh=(MeshAxis(axis=axis, size=size),), batch=batch, schedule=schedule, predicted=PREDICTED, compile=False
    )  # type: ignore[arg-type]


def ran(plan: Plan, seconds: float) -> Probe:
    return Probe(
        plan,
        TypicalStep(
            steps=(6, 15),
            seconds=seconds,
            tokens_per_second_per_gpu=None,
            mfu=None,
            memory_bytes=1,
            resident=True,  # memory_bytes is the resident set of a CPU process
            phases={},
        ),
    )


ANSWER = SearchResult(
    Candidate(probed_plan("shard")),
    (
        Candidate(probed_plan("shard", micro_batch=2)),
        Candidate(probed_plan("replicate"), simulated=False),
        Candidate(probed_plan("pipeline")),
        Candidate(probed_plan("shard", micro_batch=4)),
    ),
    considered=9,
    seconds=0.1,
)


def test_the_best_plan_comes_first_then_other_plan_types_then_the_next_best() -> None:
    plans = [candidate.plan for candidate in leading(ANSWER, 4)]
    assert plans == [
        probed_plan("shard"),
        probed_plan("pipeline"),
        probed_plan("shard", micro_batch=2),
        probed_plan("shard", micro_batch=4),
    ]
    assert [candidate.plan for candidate in leading(ANSWER, 2)] == plans[:2]


def test_the_fastest_measured_is_taken_and_says_so() -> None:
    probes = [
        ran(probed_plan("shard"), 1.3),
        ran(probed_plan("pipeline"), 1.2),
        Probe(probed_plan("shard", micro_batch=2), ended="out of memory"),
    ]
    answer = with_fastest_probe(ANSWER, probes)
    assert answer.best.plan.axis_size("pipeline") == 2
    assert answer.best.plan.why[0] == (
        "measured on this machine: 1.2 s a step over steps 6 to 15, the fastest of 2 plans that ran (the others 1.3 s)"
    )
    assert [candidate.plan for candidate in answer.others] == [
        ANSWER.best.plan,
        *(candidate.plan for candidate in ANSWER.others if candidate.plan != probed_plan("pipeline")),
    ]
    assert probes[0].error == pytest.approx(0.3)


def test_no_plan_ran() -> None:
    with pytest.raises(OutOfResources, match="no probe ran: out of memory"):
        with_fastest_probe(
            ANSWER,
            [Probe(probed_plan("shard"), ended="out of memory"), Probe(probed_plan("pipeline"), ended="out of memory")],
        )


def write(file: Path, seconds: list[float]) -> None:
    lines = [
        {"kind": "step", "step": number, "step_seconds": step_seconds, "memory_peak_bytes": 5}
        for number, step_seconds in enumerate(seconds, 1)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_hopeless_plan_is_ended_early_and_a_slow_warm_up_is_not(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    watch = Watch(file, PREDICTED)
    assert not watch.enough()
    write(file, [9.0] * WARM_UP + [1.4, 1.6])
    assert not watch.enough()
    write(file, [9.0] * WARM_UP + [1.4, 1.6, 1.7])
    assert watch.enough() and watch.measured is not None and watch.measured.seconds == 1.6
    assert watch.why == "ended after 8 steps: more than 1.5 s a step"
    good = Watch(file, PREDICTED)
    write(file, [9.0] * WARM_UP + [1.2] * (STEPS - WARM_UP - 1))
    assert not good.enough()
    write(file, [9.0] * WARM_UP + [1.2] * (STEPS - WARM_UP + 3))
    assert (
        good.enough() and good.why == "" and good.measured is not None and good.measured.steps == (WARM_UP + 1, STEPS)
    )


def test_long_steps_need_fewer(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "metrics.jsonl", None)
    for steps_counted, is_enough in ((4, False), (5, True)):
        write(watch.file, [6.0] * (WARM_UP + steps_counted))
        assert watch.enough() is is_enough


def test_a_plan_within_its_wide_band_is_not_ended_early() -> None:
    assert too_slow(PREDICTED) == 1.5
    assert too_slow(replace(PREDICTED, high_seconds=3.0)) == 3.0
    assert too_slow(None) is None and too_slow(Predicted(memory_peak_bytes=1)) is None


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (ClusterSpec(gpu="cpu", nodes=2), "cluster.nodes is 2"),
        (ClusterSpec(gpu="H200", gpus_per_node=8), "which is 4 H200; the cluster says 8 H200"),
        (ClusterSpec(gpu="H100", gpus_per_node=4), "which is 4 H200; the cluster says 4 H100"),
    ],
)
def test_only_the_machine_it_runs_on_is_probed(
    cluster: ClusterSpec, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster = {"gpu": "H200", "gpus_per_node": 4}
    with pytest.raises(BadInput, match=message):
        check_here(cluster, local_cluster)
    check_here(ClusterSpec(gpu="H200", gpus_per_node=2), local_cluster)
    check_here(ClusterSpec(gpu="cpu", gpus_per_node=64), local_cluster)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(BadInput, match="outside of the launcher"):
        check_here(ClusterSpec(gpu="cpu"), local_cluster)


def test_a_failed_probe_says_why_in_its_ranks_words() -> None:
    peer_failure = FailureMessage(EXIT_COMMUNICATION, "communication failed")
    full = FailureMessage(EXIT_NO_RESOURCES, "out of memory: tried to allocate 2 GiB; lower plan.micro_batch")
    assert failure_text(EXIT_NO_RESOURCES, [peer_failure, full]) == full.message
    assert failure_text(EXIT_NO_RESOURCES, []) == "out of memory"
    internal = FailureMessage(EXIT_INTERNAL, "internal error: KeyError: 3", "/log")
    assert failure_text(EXIT_INTERNAL, [internal]) == "failed with exit code 1: internal error: KeyError: 3"
    assert failure_text(EXIT_COMMUNICATION, []) == "failed with exit code 5"
