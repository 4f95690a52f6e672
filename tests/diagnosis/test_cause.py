"""Causes of injected slowdowns, and silence on clean steps. The spans come from schedules played in the simulator."""

from __future__ import annotations

from dataclasses import replace as replaced

import numpy as np
import pytest

from meshwright.diagnosis.replay import measure_steps, replay
from meshwright.diagnosis.run_graph import run_graph
from meshwright.diagnosis.run_spans import table_of_spans
from meshwright.diagnosis.stragglers import FEWEST_STEPS, diagnose
from tests.diagnosis.injected import CAUSES, PIPELINES, SHARDED, Case, cases
from tests.diagnosis.played import Faults, Job, play
from tests.slow import examples

STEPS = FEWEST_STEPS
CLEAN = (
    Job(),
    Job(dp=4, micro_batches=2),
    Job(micro_batches=1),
    Job(pipeline=2, micro_batches=3),
    Job("zbv", pipeline=2, dp=1),
)
CLEAN_STEPS, WINDOW = examples(80, 200), 20


def wrong_answers(injected: list[Case], steps: int, seed: int) -> list[str]:
    """The cases whose cause, rank or stage is not found."""
    wrong = []
    for number, case in enumerate(injected):
        table = table_of_spans(play(case.job, steps, case.faults, seed + number), steps)
        found = diagnose(table, run_graph(table))
        ranked = (case.rank is None or found.rank == case.rank) and (case.stage is None or found.stage == case.stage)
        if found.cause != case.cause or not ranked:
            wrong.append(f"{case}: {found.cause}, rank {found.rank}, stage {found.stage}: {found.contributions}")
    return wrong


def test_causes_of_injected_slowdowns() -> None:
    injected = [case for number, case in enumerate(cases()) if number % 5 % 2 == 0]
    assert len(injected) >= 50
    assert {case.cause for case in injected} == CAUSES
    assert {case.job for case in injected} == {*SHARDED, *PIPELINES}
    wrong = wrong_answers(injected, STEPS, seed=0)
    assert len(wrong) <= 0.1 * len(injected), "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000, 3000])
def test_causes_of_all_injected_slowdowns(seed: int) -> None:
    injected = list(cases())
    wrong = wrong_answers(injected, 20, seed)
    assert len(wrong) <= 0.05 * len(injected), "\n".join(wrong)


def test_a_tenth_more_compute_on_a_rank_is_named() -> None:
    slower = [case for case in cases() if case.name == "rank 10% slower"]
    assert len(slower) == len(SHARDED) + len(PIPELINES)
    assert not wrong_answers(slower, WINDOW, seed=7)


def busy_host(step: int, random: np.random.Generator) -> Faults:
    """Other processes take a core now and then: any operation may take longer, and any host may launch late."""
    del step
    late = {(stage, dp): float(random.exponential(0.02)) for stage in range(2) for dp in range(2)}
    return Faults(lambda stage, dp, action: 1.0 + (random.random() < 0.15) * float(random.exponential(1.0)), gaps=late)


def test_a_busy_host_makes_no_rank_a_straggler() -> None:
    named = []
    for seed in range(20):
        for job in (Job(noise=0.1), Job(noise=0.1, pipeline=2, micro_batches=3)):
            table = table_of_spans(play(job, FEWEST_STEPS, busy_host, seed), FEWEST_STEPS)
            found = diagnose(table, run_graph(table))
            named += [f"{found.cause} of rank {found.rank}"] if found.rank is not None else []
    assert len(named) <= 2, named  # of 40


def test_too_few_steps_name_no_cause() -> None:
    (case,) = (case for case in cases() if case.name == "rank 50% slower" and case.job == SHARDED[0])
    table = table_of_spans(play(case.job, FEWEST_STEPS, case.faults), FEWEST_STEPS)
    few = table.last_steps(FEWEST_STEPS - 1)
    found = diagnose(few, run_graph(few), FEWEST_STEPS)
    assert found.cause is None and found.sentence.startswith(f"too few steps: {FEWEST_STEPS - 1} of {FEWEST_STEPS};")
    assert diagnose(table, run_graph(table), FEWEST_STEPS).cause == case.cause


LENGTH = 1024


def test_unequal_sequences_are_named_only_if_the_recorded_work_explains_the_times() -> None:
    """The same compute times; the recorded documents explain them, are of constant length, or belong to other times."""
    by_jobs: dict[str, list[str | None]] = {"explain": [], "constant": [], "other": []}
    for job in (SHARDED[1], PIPELINES[1], Job(dp=4, micro_batches=1)):
        for recorded, causes in by_jobs.items():

            def faults(step: int, random: np.random.Generator, recorded: str = recorded) -> Faults:
                """Half of a micro-batch's usual time is attention to documents of one length, cut out of `LENGTH` tokens."""
                lengths, others = (LENGTH / random.integers(1, 9, (8, 8)) for _ in range(2))
                shown = {"explain": lengths, "constant": np.full((8, 8), LENGTH), "other": others}[recorded]
                return Faults(
                    lambda stage, dp, action: 0.5 + 0.5 * float(lengths[dp, action.micro_batch]) / 256,
                    attention_work=lambda dp, number: int(LENGTH * shown[dp, number]),
                )

            table = table_of_spans(play(job, STEPS, faults), STEPS)
            causes.append(diagnose(table, run_graph(table)).cause)
    assert by_jobs == {"explain": ["sequence_imbalance"] * 3, "constant": ["compute"] * 3, "other": ["compute"] * 3}


def test_no_cause_in_clean_steps() -> None:
    """A thousand of them in `make test-all`."""
    for number, job in enumerate(CLEAN):
        noisy = replaced(job, noise=0.01 + 0.01 * (number % 2))
        table = table_of_spans(play(noisy, CLEAN_STEPS, lambda step, random: Faults(), seed=number), CLEAN_STEPS)
        for first in range(1, CLEAN_STEPS, WINDOW):
            steps = table.select((table.step >= first) & (table.step < first + WINDOW))
            found = diagnose(steps, run_graph(steps))
            assert found.cause is None, (job, first, found.contributions)


@pytest.mark.parametrize("job", [*SHARDED, *PIPELINES], ids=lambda job: f"{job.schedule}-{job.pipeline}x{job.dp}")
def test_the_replay_takes_as_long_as_the_played_steps(job: Job) -> None:
    """The graph has every dependency that delays something, and none that would delay more."""
    table = table_of_spans(play(job, 3, lambda step, random: Faults(), seed=1), 3)
    measured = measure_steps(table, run_graph(table))
    seconds = replay(measured.graph, measured.work, measured.launch_delay)
    assert seconds == pytest.approx(measured.step_seconds, rel=0.002)
    assert replay(measured.graph, measured.work) == pytest.approx(measured.step_seconds, rel=0.005)
