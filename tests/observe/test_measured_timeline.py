"""Recorded steps as timelines: spans reproduce a simulated step's totals, and a real run follows its schedule."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.config.load import load_run
from meshwright.events.span import Span, StepSpans
from meshwright.launch.prepare import plan_for
from meshwright.observe.measured_timeline import measured_timeline
from meshwright.observe.timeline_files import RecordedSteps, Recording, on_one_clock, summary, table, trace_spans
from meshwright.parallel.world import World
from meshwright.schedules.action import COMPUTE
from meshwright.schedules.expand import expand
from meshwright.schedules.plan_schedule import training_schedule
from meshwright.schedules.registry import SCHEDULES, build
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.predicted_step import predicted_step
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timeline import Timeline
from meshwright.simulator.timing import Link, Timing
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Layout
from meshwright.spec.run import Assignment
from meshwright.training.loop import train
from meshwright.training.reporting import Reporter
from meshwright.training.session import open_session
from meshwright.training.stop import StopRequest
from tests.cli.command import meshwright
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import cpu_profile, make_tiny, prepared

UNITS = 2


def simulated(name: str, ranks: int = 4, micro_batches: int = 8) -> Timeline:
    """A step in which messages, gathers and reductions all have exposed time."""
    entry_stages = build(name, ranks, micro_batches)
    schedule = expand(entry_stages, UNITS, gather="stretch", reduce="stretch")

    def column(seconds: float) -> list[list[float]]:
        return [[seconds * (1 + 0.1 * (stage % 3)), seconds] for stage in range(schedule.stages)]

    timing = Timing(
        forward=column(1.0),
        backward_input=column(1.1),
        backward_weight=column(0.9),
        boundary_bytes=[1.0] * (schedule.stages - 1),
        link=Link(0.2, 1.5),
        unshard=column(0.7),
        reduce=column(1.3),
        replicate=column(0.4),
        norm_seconds=0.25,
        optim_seconds=[0.5] * ranks,
    )
    return simulate(schedule, timing)


def as_recorded(timeline: Timeline, late: float = 0.0) -> list[StepSpans]:
    """Return a simulated step as its ranks would have recorded it: spans in the order each lane issued them."""
    spans_by_rank: dict[int, list[Span]] = defaultdict(list)
    for rank, lane, action, start, end in timeline.records:
        if action.paired or not action.pair:
            spans_by_rank[rank].append(Span(action.label, late + start, end - start, 1, rank, lane))
            continue
        half = (end - start) / 2  # the executor runs one part after the other
        for number, part in enumerate(action.parts):
            spans_by_rank[rank].append(Span(part.label, late + start + number * half, half, 1, rank, lane))
    return [
        StepSpans(1, late, timeline.step_seconds, tuple(spans_by_rank[rank])) for rank in range(timeline.schedule.ranks)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_spans_of_a_step_reproduce_its_totals(name: str) -> None:
    ranks = 1 if name == "paired" else 4
    expected = simulated(name, ranks=ranks)
    found, start_seconds = measured_timeline(expected.schedule, as_recorded(expected, late=7.0))
    assert start_seconds == pytest.approx(7.0)
    assert found.bubble == pytest.approx(expected.bubble)
    assert found.compute_seconds == pytest.approx(expected.compute_seconds)
    assert found.closing_seconds == pytest.approx(expected.closing_seconds)
    assert found.breakdown == pytest.approx(expected.breakdown)
    assert all(found.exposed[axis] > 0 for axis in ("pipeline", "shard")[ranks == 1 :])
    for mine, theirs in zip(found.exposed_seconds, expected.exposed_seconds, strict=True):
        assert mine == pytest.approx(theirs)


def test_a_rank_that_deviates_from_its_schedule_is_named() -> None:
    timeline = simulated("1f1b", ranks=2, micro_batches=2)
    rows = as_recorded(timeline)
    swapped = list(rows[1].spans)
    indices = [index for index, span in enumerate(swapped) if span.lane == "compute"][:2]
    swapped[indices[0]], swapped[indices[1]] = swapped[indices[1]], swapped[indices[0]]
    with pytest.raises(ValueError, match=r"pipeline rank 1 ran forward 1.0/1 where its schedule says forward 1.0/0"):
        measured_timeline(timeline.schedule, [rows[0], replace(rows[1], spans=tuple(swapped))])
    with pytest.raises(ValueError, match="ran nothing where its schedule says optim"):
        measured_timeline(
            timeline.schedule, [rows[0], replace(rows[1], spans=tuple(s for s in rows[1].spans if s.name != "optim"))]
        )


def test_a_message_begins_when_sender_and_receiver_are_ready() -> None:
    """An early receive does not start the transfer; a send span without an end takes that of its receive."""
    timeline = simulated("gpipe", ranks=2, micro_batches=1)
    rows = as_recorded(timeline)
    early = [
        replace(s, start=s.start - 0.5, duration=s.duration + 0.5) if s.name == "recv 1.0" else s for s in rows[1].spans
    ]
    without_end = [replace(s, duration=0.0) if s.name == "send 0.0" else s for s in rows[0].spans]
    found, _ = measured_timeline(
        timeline.schedule, [replace(rows[0], spans=tuple(without_end)), replace(rows[1], spans=tuple(early))]
    )
    assert found.exposed == pytest.approx(timeline.exposed)
    both = [
        (start, end)
        for _, _, act, start, end in found.records
        if act.op in ("send", "recv") and act.payload == "activation"
    ]
    assert both[0] == pytest.approx(both[1])


def recording(marks: tuple[float, ...], first: float) -> Recording:
    return Recording((StepSpans(3, first, 1.0, (Span("forward 0.0", first, 0.5, 3, 0, "compute"),)),), marks)


def test_clocks_are_shifted_to_where_marks_fit_best() -> None:
    (first, second), error = on_one_clock([recording((100.0, 110.0), 101.0), recording((5.0, 15.004), 6.0)])
    assert first.steps[0].start == pytest.approx(1.0)
    assert second.steps[0].start == pytest.approx(0.998) and second.steps[0].spans[0].start == pytest.approx(0.998)
    assert error == pytest.approx(0.002)


def test_a_recording_survives_serialisation() -> None:
    sent = recording((1.0, 2.0), 1.5)
    assert Recording.from_bytes(sent.to_bytes()) == sent


def test_the_trace_and_the_table_have_measured_and_predicted_steps() -> None:
    timeline = simulated("zbv", ranks=2, micro_batches=4)
    rows = as_recorded(timeline, late=3.0)
    ranks = [Recording((replace(row, step=9),), (2.5, 40.0)) for row in rows]
    layout = Layout((("pipeline", 2), ("shard", 1)), 2)
    measured = RecordedSteps.of(timeline.schedule, layout, ranks)
    spans = list(trace_spans(measured, timeline))
    begins = {rank: min(s.start for s in spans if s.rank == rank) for rank in range(4)}
    assert begins[0] == begins[2] and {s.step for s in spans} == {9}
    found = summary(measured, timeline, None)
    assert found["measured"] == pytest.approx(found["predicted"])
    assert table(found).count(f"{timeline.bubble:.1%}") == 2


def test_only_a_known_chip_has_a_prediction(tmp_path: Path) -> None:
    words = ["model=llama3-8b", "train.seq_len=8192", "train.global_batch=32", "plan.pipeline=2", "plan.schedule=1f1b"]
    run = load_run(None, [*words, "cluster.gpu=H200", "cluster.gpus_per_node=8"])
    plan, _ = plan_for(run)
    timeline, why_not = predicted_step(run, plan)
    assert timeline is not None and why_not is None and 0 < timeline.bubble < 1
    unknown = replace(run, cluster=replace(run.cluster, gpu="T4"))
    timeline, why_not = predicted_step(unknown, plan)
    assert timeline is None and why_not is not None and "no figures for T4" in why_not


def train_rank(world: World, assignment: Assignment) -> str | None:
    session = open_session(assignment, world)
    try:
        train(session, Reporter(None, None, None), StopRequest())
    except BadInput as refusal:
        return str(refusal)
    return None


def record_timeline(pool: Pool, tmp_path: Path, ranks: int, *overrides: str) -> tuple[Path, Schedule, Assignment]:
    file = make_tiny(tmp_path / "tiny")
    words = (f"cluster.gpus_per_node={ranks}", "model.layers=4", "plan.micro_batch=1", "train.steps=4", *overrides)
    assignment = replace(prepared(file, tmp_path, *words).assignment, timeline=(2, 3))
    assert pool.run(train_rank, ranks, assignment) == [None] * ranks
    plan, layers = assignment.plan, assignment.run.model.layers
    return (
        Path(assignment.folder) / "timelines" / "steps-2-3.json.gz",
        training_schedule(plan, layers),
        assignment,
    )


def read_trace(file: Path) -> tuple[dict[int, str], list[dict]]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return names, [{**e, "lane": lanes[e["pid"], e["tid"]]} for e in events if e["ph"] == "X"]


def measured_rank(names: dict[int, str]) -> dict[int, int]:
    """The process of every measured rank in a trace."""
    ranks = [pid for pid, name in names.items() if name.startswith("measured: rank ")]
    return {int(names[pid].removeprefix("measured: rank ").partition(" ")[0]): pid for pid in ranks}


@pytest.mark.parametrize("schedule", quick_first(1, ["zbv", "1f1b"]))
def test_the_timeline_of_a_pipeline_run_follows_its_schedule(pool: Pool, tmp_path: Path, schedule: str) -> None:
    profile = f"cluster.profile={cpu_profile(tmp_path / 'cpu.json')}"
    file, expected_schedule, _ = record_timeline(
        pool, tmp_path, 2, "plan.pipeline=2", f"plan.schedule={schedule}", profile
    )
    names, events = read_trace(file)
    assert [names[rank] for rank in (0, 1)] == ["predicted: pipeline rank 0", "predicted: pipeline rank 1"]
    process = measured_rank(names)
    assert list(process) == [0, 1]
    for rank in (0, 1):
        for step in (2, 3):
            mine = [e for e in events if e["pid"] == process[rank] and e["args"]["step"] == step]
            parts = [part for action in expected_schedule.actions[rank] for part in action.parts]
            run = [e["name"] for e in mine if e["lane"] == "compute"]
            assert run == [p.label for p in parts if p.op in COMPUTE or p.op in ("norm_barrier", "optim")]
            begins = [e["ts"] for e in mine if e["lane"] == "compute"]
            assert begins == sorted(begins)
            for op in ("send", "recv"):
                assert [e["name"] for e in mine if e["lane"] == f"{op} {1 - rank}"] == [
                    p.label for p in parts if p.op == op
                ]
    found = json.loads(file.with_name("steps-2-3.summary.json").read_text())
    assert found["steps"] == [2, 3] and found["ranks"] == 2
    assert found["predicted"].keys() == found["measured"].keys() and found["not_predicted"] is None
    for totals in (found["measured"], found["predicted"], *found["by_step"]):
        assert 0 <= totals["bubble"] < 1
        parts = [totals[key] for key in totals if key not in ("step", "step_seconds", "bubble")]
        assert sum(parts) == pytest.approx(totals["step_seconds"])


def test_a_step_of_a_cpu_without_a_profile_is_drawn_without_a_prediction(pool: Pool, tmp_path: Path) -> None:
    file, *_ = record_timeline(pool, tmp_path, 1)
    found = json.loads(file.with_name("steps-2-3.summary.json").read_text())
    assert found["predicted"] is None and found["not_predicted"].startswith("CPU times are not predicted without a")
    assert list(measured_rank(read_trace(file)[0])) == [0]


@pytest.mark.parametrize("pipeline", quick_first(1, [1, 2]))
def test_collectives_are_drawn_in_their_lanes(pool: Pool, tmp_path: Path, pipeline: int) -> None:
    ranks = 2 * pipeline
    words = (f"plan.pipeline={pipeline}", "plan.schedule=breadth_first", "plan.shard=1", "plan.replicate=2")
    file, expected_schedule, _ = record_timeline(pool, tmp_path / "replicate", ranks, *words)
    sums = [action.label for action in expected_schedule.actions[0] if action.op == "reduce_grad"]
    names, events = read_trace(file)
    first = measured_rank(names)[0]
    of_step = [e for e in events if e["pid"] == first and e["args"]["step"] == 2]
    assert [e["name"] for e in of_step if e["lane"] == "replicate"] == sums
    assert not [e for e in of_step if e["lane"] in ("unshard", "reduce")]  # one shard rank: nothing to gather

    words = (f"plan.pipeline={pipeline}", "plan.schedule=1f1b", "plan.shard=2", "plan.reshard=true")
    file, expected_schedule, _ = record_timeline(pool, tmp_path / "shard", ranks, *words)
    names, events = read_trace(file)
    for rank, process in measured_rank(names).items():
        of_step = [e for e in events if e["pid"] == process and e["args"]["step"] == 3]
        for lane, op in (("unshard", "unshard"), ("reduce", "reduce_grad")):
            labels = [action.label for action in expected_schedule.actions[rank // 2] if action.op == op]
            assert [e["name"] for e in of_step if e["lane"] == lane] == labels
    exposed = json.loads(file.with_name("steps-2-3.summary.json").read_text())["measured"]["exposed_shard"]
    assert exposed > 0  # under Gloo the host blocks during a gather


def test_steps_before_the_resumed_step_are_refused(pool: Pool, tmp_path: Path) -> None:
    _, _, assignment = record_timeline(pool, tmp_path, 2, "plan.pipeline=2", "checkpoint.every=2")
    more = replace(assignment, run=replace(assignment.run, train=replace(assignment.run.train, steps=6)))
    for output in pool.run(train_rank, 2, more):
        assert (
            output
            == "--timeline 2:3: the run goes on after step 4; choose steps from 5 to 6, or start anew with --fresh"
        )


@pytest.mark.parametrize("option", ["--timeline", "--profile-steps"])
@pytest.mark.parametrize(
    ("steps", "output"),
    [("3:9", " 3:9: the run ends with step 6"), ("3", " 3: expected A:B"), ("3:2", " 3:2: expected A:B")],
)
def test_steps_outside_the_run_are_refused_before_the_start(
    tmp_path: Path, option: str, steps: str, output: str
) -> None:
    file = make_tiny(tmp_path / "tiny")
    answer = meshwright("train", file, option, steps, "--runs", tmp_path / "runs")
    assert answer.code == 2 and option + output in answer.err
    assert not (tmp_path / "runs").exists()


RUN = """
model: {family: llama, layers: 4, hidden: 1024, heads: 8, kv_heads: 8, ffn_hidden: 4096, max_seq_len: 1024}
data: {mix: stdlib, validation_tokens: 8192}
train: {steps: 6, global_batch: 8, seq_len: 1024, learning_rate: 1e-3, warmup_steps: 1}
cluster: {gpu: H200, gpus_per_node: 2}
checkpoint: {at_end: false}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [["plan.pipeline=2", "plan.schedule=1f1b"], ["plan.shard=2", "plan.reshard=true"]])
def test_communication_is_timed_on_its_own_streams(tmp_path: Path, layout: list[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["plan.micro_batch=1", *layout, "--timeline", "4:5", "--runs", str(tmp_path)]
    command = [sys.executable, "-m", "meshwright", "train", str(tmp_path / "run.yaml"), *words]
    subprocess.run(command, check=True, timeout=300)
    found = json.loads((tmp_path / "run" / "timelines" / "steps-4-5.summary.json").read_text())
    assert found["clock_error_seconds"] < 1e-3
    assert 0 <= found["measured"]["bubble"] < 1
    names, events = read_trace(tmp_path / "run" / "timelines" / "steps-4-5.json.gz")
    measured = [e for e in events if names[e["pid"]].startswith("measured")]
    lanes = ("send", "recv") if "pipeline" in layout[0] else ("unshard", "reduce")
    for lane in lanes:
        spans = [e for e in measured if e["lane"].partition(" ")[0] == lane]
        assert spans and all(0 < e["dur"] < 1e5 for e in spans)
