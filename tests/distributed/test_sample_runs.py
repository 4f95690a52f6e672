"""Runs on samples of any length: they resume on another number of ranks, and leave out the samples of a bad step."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from meshwright.data.show import show_step
from meshwright.data.source import open_data
from meshwright.launch.corpus import skipped_samples
from meshwright.spec.run import RunSpec
from meshwright.training.stop import PREEMPT
from tests.distributed import cases_numerics, cases_training
from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.training.tiny import make_tiny, prepared, ranks, tiny_run

TOKENS = 300
SAMPLES = [
    "data.packing=none",
    "train.global_batch=none",
    f"train.global_batch_tokens={TOKENS}",
    "train.seq_len=60",
    "model.max_seq_len=64",
    "plan.compute=fp64",
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def trained(pool: Pool, tiny: Path, runs: Path, count: int, stop_at: int = 0) -> Seen:
    """Train, and return the first rank's records."""
    assignment = prepared(tiny, runs, *SAMPLES, *ranks(count)).assignment
    return pool.run(cases_training.run, count, assignment, stop_at, 0, PREEMPT)[0]


def sample_numbers(run: RunSpec, step: int) -> list[int]:
    """The samples that `data show` names."""
    source = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed)
    shown = show_step(source, step, 1, global_batch_tokens=TOKENS)["samples"]
    assert sum(sample["tokens"] for sample in shown) <= TOKENS
    return [sample["global_index"] for sample in shown]


def test_a_run_resumes_on_another_number_of_ranks_with_the_next_sample(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    whole = trained(pool, tiny, tmp_path / "whole", 1)
    parts = [trained(pool, tiny, tmp_path / "parts", count, stop_at) for count, stop_at in ((2, 2), (3, 4), (1, 0))]
    assert [part.began for part in parts] == [0, 2, 4]
    steps = [record for part in parts for record in part.steps]
    for key in ("step", "token_sum", "tokens", "samples", "lr"):
        assert [record[key] for record in steps] == [record[key] for record in whole.steps]
    assert [record["loss"] for record in steps] == pytest.approx(whole.losses, rel=1e-9)
    assert [record["grad_norm"] for record in steps] == pytest.approx([r["grad_norm"] for r in whole.steps], rel=1e-8)
    run = tiny_run(tiny, *SAMPLES)
    numbers = [sample_numbers(run, step) for step in range(1, 7)]
    assert [record["samples"] for record in steps] == list(map(len, numbers))
    assert list(chain.from_iterable(numbers)) == list(range(numbers[-1][-1] + 1)), "no sample is read twice or left out"
    for record, before in zip(steps, [{"tokens": 0}, *steps], strict=False):
        tokens = record["tokens"] - before["tokens"]
        assert TOKENS - 60 < tokens <= TOKENS
        assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(tokens)


@pytest.mark.slow
def test_a_rollback_leaves_out_the_samples_of_its_step(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    overrides = [*SAMPLES, *ranks(2), "train.on_nonfinite=rollback_skip", "checkpoint.every=2"]
    assignment = prepared(tiny, tmp_path, *overrides).assignment
    answers = pool.run(partial(cases_numerics.run_with_nan, nan_at=(4,)), 2, assignment)
    numbers = sample_numbers(tiny_run(tiny, *overrides), 4)
    first, end = numbers[0], numbers[-1] + 1
    assert skipped_samples(tmp_path / "tiny") == ((first, end),)
    assert any(f"samples {first} to {end - 1} are left out" in text for text in answers[0][3])
    assert [step for step, _ in answers[0][1]][-1] == 6
