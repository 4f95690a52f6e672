"""The recorded spans of a real step: they follow the executed schedule, for every schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.events.span import SPAN_PHASES, SpanRecord, span_phase
from meshwright.events.span_ring import read_spans, starts_with_spans
from meshwright.parallel.world import World
from meshwright.schedules.action import COMPUTE, Action
from meshwright.spec.plan import BatchPlan, Plan
from meshwright.training.stop import PREEMPT
from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.distributed.test_equality import LLAMA, RATE, TRAIN, batch
from tests.distributed.test_schedules import SCHEDULES, Case
from tests.training.tiny import make_tiny, prepared, ranks

Played = tuple[tuple[Action, ...], list[int], list[SpanRecord]]
"""The schedule's actions of a rank, the indices that ran, the records of the step."""
SMALL = replace(LLAMA, layers=4, hidden=8, heads=2, kv_heads=1)
MICRO_BATCHES = 4
LAYOUTS = [
    *(Case(name, pipeline=2) for name in SCHEDULES),
    Case("breadth_first", shard=2),
    Case("1f1b", shard=2, gradients="whole"),
]


def one_step(world: World, plan: Plan) -> Played:
    from meshwright.data.loader import MicroBatch
    from meshwright.observe.recorder import StepRecorder
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    engine = build_engine(SMALL, plan, mesh, loss_chunk=5, seed=0, reference=True)
    optimizer = Optimizer(engine.model, SMALL, TRAIN, engine.weights, engine.host_offloaded)
    records: list[SpanRecord] = []
    recorder, ran = StepRecorder(torch.device("cpu"), world.rank, sink=records.extend), []
    parts = [tensor[:MICRO_BATCHES].split(1) for tensor in batch(0, SMALL)]
    batches = [MicroBatch(*tensors, valid_tokens=7 + number) for number, tensors in enumerate(zip(*parts, strict=True))]
    engine.executor.on_action = ran.append
    engine.executor._has_trained = True  # the schedule in order, not that of a first step
    recorder.begin_step(1, 123)
    train_step(engine, optimizer, mesh, batches, learning_rate=RATE, clip_norm=1.0, recorder=recorder)
    recorder.end_step()
    return engine.training.actions[engine.executor.rank_model.pipeline_rank], ran, records


def plan_of(case: Case) -> Plan:
    sizes = BatchPlan(global_batch=MICRO_BATCHES * case.shard, micro_batch=1, accumulate=MICRO_BATCHES)
    return replace(case.plan, batch=sizes)


def every_layout(world: World, plans: list[Plan]) -> list[Played]:
    return [one_step(world, plan) for plan in plans]


@pytest.fixture(scope="module")
def played(pool: Pool) -> dict[str, list[Played]]:
    """By layout, what each of two ranks did."""
    by_rank = pool.run(every_layout, 2, [plan_of(case) for case in LAYOUTS])
    return {str(case): [answer[number] for answer in by_rank] for number, case in enumerate(LAYOUTS)}


def of_phases(records: list[SpanRecord], *phases: str) -> list[SpanRecord]:
    return sorted(
        (record for record in records if record.phase in phases), key=lambda record: (record.start_ns, record.action)
    )


def expected_spans(actions: tuple[Action, ...], layered: bool) -> list[tuple[int, str, int, int]]:
    """(index of the first action, phase, stage, micro-batch) of the spans of a rank's compute, in order.

    A span ends at a send, and at the first use of a message.
    """
    received: set[tuple[object, int, int]] = set()
    groups: list[list[tuple[int, Action]]] = [[]]
    for index, action in enumerate(actions):
        if action.op == "send":
            groups.append([])
        elif action.op == "recv":
            received.add((action.payload, action.stage, action.micro_batch))
        for part in action.parts if action.op in COMPUTE else ():
            message = ("activation" if part.op == "forward" else "gradient", part.stage, part.micro_batch)
            last = groups[-1][-1][1] if groups[-1] else None
            same = last is not None and (last.op, last.stage) == (part.op, part.stage)
            along = last is not None and (last.unit == part.unit if layered else last.micro_batch == part.micro_batch)
            if not (same and along) or (message in received and part.op != "backward_weight"):
                groups.append([])
            received.discard(message)
            groups[-1].append((index, part))
    spans = []
    for members in filter(None, groups):
        index, part = members[0]
        several = len({other.micro_batch for _, other in members}) > 1
        spans.append((index, str(span_phase(part.op)), part.stage, -1 if several else part.micro_batch))
    return spans


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_spans_follow_the_executed_schedule(played: dict[str, list[Played]], case: Case) -> None:
    layered = case.schedule == "breadth_first"
    for actions, ran, records in played[str(case)]:
        assert ran == list(range(len(actions)))
        compute = of_phases(records, "forward", "backward", "weight_gradient")
        found = [(record.action, record.phase, record.stage, record.micro_batch) for record in compute]
        assert found == expected_spans(actions, layered)
        ends = [record.start_ns + record.duration_ns for record in compute]
        assert all(end <= after.start_ns + 1000 for end, after in zip(ends, compute[1:], strict=False)), "spans overlap"
        for phase, op in (("send", "send"), ("receive", "recv")):
            messages = [index for index, action in enumerate(actions) if action.op == op]
            transferred = {record.action for record in records if record.phase == phase}
            assert transferred == set(messages)
        (step,), (norm,), (optimizer,) = (of_phases(records, name) for name in ("step", "gradient_norm", "optimizer"))
        assert actions[norm.action].op == "norm_barrier" and actions[optimizer.action].op == "optim"
        assert step.amount == 123 and step.step == 1
        end = step.start_ns + step.duration_ns
        assert all(
            step.start_ns - 1000 <= r.start_ns and r.start_ns + r.duration_ns <= end + 1000
            for r in records
            if r.phase != "clock"
        )


def test_both_ends_of_a_message_are_recorded_with_its_size(played: dict[str, list[Played]]) -> None:
    first, second = (records for _, _, records in played["1f1b pipeline=2"])
    sent = {(r.stage, r.peer, r.micro_batch): r for r in first + second if r.phase == "send" and r.amount}
    received = {(r.peer, r.stage, r.micro_batch): r for r in first + second if r.phase == "receive"}
    assert sent.keys() == received.keys() and len(sent) > 4
    assert all(sent[key].amount == received[key].amount > 0 for key in sent)
    assert all(received[key].start_ns + received[key].duration_ns > sent[key].start_ns for key in sent), (
        "one host, one clock"
    )


def test_gathers_between_ranks_are_waits_and_tokens_are_counted(played: dict[str, list[Played]]) -> None:
    for actions, _, records in played["1f1b shard=2 gradients=whole"]:
        waits = [record for record in records if record.phase == "collective_wait" and record.stage >= 0]
        assert Counter(actions[record.action].op for record in waits) == Counter(
            action.op for action in actions if action.op in ("unshard", "reduce_grad")
        )
        assert all(record.amount > 0 and record.unit >= 0 for record in waits)
        forwards = of_phases(records, "forward")
        assert [record.amount for record in forwards] == [7 + record.micro_batch for record in forwards]


def test_a_run_leaves_a_file_for_each_rank_and_start(pool: Pool, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    assignment = prepared(tiny, tmp_path, *ranks(2), "checkpoint.every=2").assignment
    pool.run(cases.run, 2, assignment, 3, 0, PREEMPT)
    pool.run(cases.run, 2, replace(assignment, attempt=2))
    first, second = starts_with_spans(Path(assignment.folder))
    (spans, other), notes = read_spans(second)
    assert not notes and (spans.rank, other.rank) == (0, 1)
    assert spans.header["coordinates"]["shard"] == 0 and other.header["coordinates"]["shard"] == 1
    assert spans.header["attempt"] == 2 and tuple(spans.header["phases"]) == SPAN_PHASES
    assert spans.of_phase("step")["step"].tolist() == [4, 5, 6]
    assert set(other.of_phase("checkpoint")["step"]) == {4, 6} and len(spans.of_phase("validation"))
    assert [rank.of_phase("step")["step"].tolist() for rank in read_spans(first)[0]] == [[1, 2, 3]] * 2


def test_without_spans_no_file_is_written(pool: Pool, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    assignment = prepared(tiny, tmp_path, *ranks(1), "observe.spans=false", "train.steps=3").assignment
    (seen,) = pool.run(cases.run, 1, assignment)
    assert not (Path(assignment.folder) / "spans").exists() and seen.steps[0]["phases"]
