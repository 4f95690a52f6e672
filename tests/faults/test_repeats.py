"""Failures that repeat in a run of real processes: samples are skipped, or the run goes back further and then stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.chaos.code_faults import with_code
from meshwright.launch.state_file import STATE_FILE, read_state
from meshwright.policies.supervision import State
from meshwright.spec.errors import EXIT_REPEATED
from meshwright.spec.fields import to_plain, to_sealed_json
from tests.faults.test_restart import losses
from tests.training.test_processes import Job
from tests.training.tiny import make_tiny

WORDS = ["cluster.gpus_per_node=2", "plan.replicate=2", "train.steps=18", "checkpoint.every=4"]


def start(tiny: Path, runs: Path, *arguments: str, faults: str = "", skipped: tuple[tuple[int, int], ...] = ()) -> Job:
    """A run with `faults` in its code, or one that leaves out the samples `skipped` from its start."""
    run = runs / "tiny"
    run.mkdir(parents=True)
    if skipped:
        state = to_plain(State(status="finished", skipped=skipped))
        (run / STATE_FILE).write_text(to_sealed_json({"time": 1.0, "term": 1, **state}) + "\n")
    env = with_code(runs, faults) if faults else {}
    return Job(["train", tiny, *WORDS, *arguments, "--runs", runs], run, env)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


@pytest.mark.slow
def test_skipped_samples_of_a_rollback_and_of_a_repeated_failure_give_the_run_that_never_read_them(
    tiny: Path, tmp_path: Path
) -> None:
    """Only one replica's reduced gradients are NaN in step 6; after its 8 samples are skipped, step 15 reads 120 to 127."""
    policies = ["train.on_nonfinite=rollback_skip", "supervision.on_repeated_failure=skip_data"]
    job = start(tiny, tmp_path / "a", *policies, faults="gradient:1:6;crash:0:15:2")
    calm = start(tiny, tmp_path / "b", skipped=((40, 48), (120, 128)))
    assert (job.process.wait(120), calm.process.wait(120)) == (0, 0), job.output() + calm.output()
    state, output = read_state(job.run), job.output()
    assert state is not None and state.skipped == ((40, 48), (120, 128)) and state.attempt == 3
    assert "1 of 2 replicas of the model skipped the update; back to step 4" in output
    assert "without the samples of step 15" in output
    assert losses(job.run) == losses(calm.run) and losses(job.run)[-1][0] == 18


@pytest.mark.slow
def test_a_failure_that_repeats_takes_the_older_checkpoint_and_then_stops_the_run_with_a_diagnosis(
    tiny: Path, tmp_path: Path
) -> None:
    job = start(tiny, tmp_path, faults="crash:1:15:9")
    assert job.process.wait(120) == EXIT_REPEATED, job.output()
    output = job.output()
    assert "restart 1 of 3 from the checkpoint of step 12" in output
    assert "restart 2 of 3 from the checkpoint of step 8" in output
    assert "the same failure occurred 3 times at step 15: rank 1 was killed by signal 9" in output
    assert losses(job.run)[-1][0] == 14
