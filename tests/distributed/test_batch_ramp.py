"""Runs whose batch grows: equal to runs of constant batches one after another, resumed with equal bits, the same on every layout."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from meshwright.data.show import show_step
from meshwright.launch import prepare as launching
from meshwright.launch.prepare import open_run_data
from meshwright.spec.errors import BadInput
from meshwright.training.stop import PREEMPT
from tests.distributed import cases_training as cases
from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.distributed.test_training import LAYOUT_BOUND, merge_tensors, same_bits, samples_by_step
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged, tiny_run

SIZES = [2, 2, 4, 4, 8, 8]
RAMP = ["train.global_batch=8", "train.batch_ramp=[{until: 2, batch: 2}, {until: 4, batch: 4}]", "plan.micro_batch=1"]
PARTS = [("train.global_batch=2", 2), ("train.global_batch=4", 4), ("train.global_batch=8", 0)]
"""Batches of runs one after another, and the step after which each stops."""
EXPERTS = [
    "model.family=qwen3_moe",
    "model.experts=4",
    "model.experts_per_token=2",
    "model.expert_hidden=32",
    "train.balance_loss=0.1",
]
LAYOUTS = {
    "pipeline": staged(2, "1f1b"),
    "experts": [*ranks(2), *EXPERTS, "train.router_z_loss=0.1"],
    "two ranks": ranks(2),
    "pipeline of halved backwards": staged(2, "zbv"),
    "one rank": ranks(1),
    "layered": [*ranks(2), "plan.schedule=breadth_first"],
    "replicas": ranks(2, replicate=2),
    "gradients added in host memory": [*ranks(2), "plan.accumulation=host"],
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def trained(pool: Pool, tiny: Path, runs: Path, *overrides: str, stop_at: int = 0) -> list[Seen]:
    """Train `runs/tiny` from the state of its folder to the end or to step `stop_at`, and return every rank's records."""
    assignment = prepared(tiny, runs, *overrides).assignment
    return pool.run(cases.run, assignment.plan.ranks, assignment, stop_at, 0, PREEMPT)


def records(attempts: list[list[Seen]], *keys: str) -> list[tuple]:
    """The values of `keys` in each step of the first rank."""
    return [tuple(record.get(key) for key in keys) for attempt in attempts for record in attempt[0].steps]


@pytest.mark.parametrize("name", quick_first(1, LAYOUTS))
def test_a_ramp_equals_runs_of_constant_batches_one_after_another(
    pool: Pool, tiny: Path, tmp_path: Path, name: str
) -> None:
    whole = trained(pool, tiny, tmp_path / "whole", *RAMP, *LAYOUTS[name])
    first = trained(pool, tiny, tmp_path / "resumed", *RAMP, *LAYOUTS[name], stop_at=3)
    resumed = [first, trained(pool, tiny, tmp_path / "resumed", *RAMP, *LAYOUTS[name])]
    with patch.object(
        launching, "continues", lambda run, folder: folder.exists()
    ):  # batches of done steps are not compared
        constant = [
            trained(pool, tiny, tmp_path / "constant", batch, *RAMP[2:], *LAYOUTS[name], stop_at=stop_at)
            for batch, stop_at in PARTS
        ]
    assert [attempt[0].began for attempt in (*resumed, *constant)] == [0, 3, 0, 2, 4]
    keys = ("step", "loss", "grad_norm", "tokens", "token_sum", "lr", "balance_loss", "router_z_loss")
    for attempts in (resumed, constant):
        assert records(attempts, *keys) == records([whole], *keys)
        assert same_bits(merge_tensors(attempts[-1]), merge_tensors(whole))
    for record, size in zip(whole[0].steps, SIZES, strict=True):
        assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(16 * size)


def test_every_layout_reads_the_samples_of_data_show(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    run = tiny_run(tiny, *RAMP)
    source = open_run_data(run)
    shown = [show_step(source, step, 8, batch_ramp=run.train.batch_ramp)["samples"] for step in range(1, 7)]
    numbers = [[sample["global_index"] for sample in samples] for samples in shown]
    assert list(map(len, numbers)) == SIZES and list(chain.from_iterable(numbers)) == list(range(sum(SIZES)))
    one, two = (trained(pool, tiny, tmp_path / str(count), *RAMP, *ranks(count)) for count in (1, 2))
    assert records([two], "token_sum", "tokens") == records([one], "token_sum", "tokens")
    assert two[0].losses == pytest.approx(one[0].losses, rel=LAYOUT_BOUND)
    assert list(chain.from_iterable(one[0].indices))[: sum(SIZES)] == list(range(sum(SIZES)))


def test_the_batch_of_a_run_changes_for_the_steps_to_come(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    layout = [*ranks(2), "plan.micro_batch=1"]
    first = trained(pool, tiny, tmp_path, "train.global_batch=4", *layout, stop_at=3)
    refused = (
        r"  train.global_batch: 4 there, 8 now \(the 3 steps that are done keep their batch; another one after them: "
        r"train.global_batch=8 'train.batch_ramp=\[\{until: 3, batch: 4\}\]'\)\n"
    )
    with pytest.raises(BadInput, match=refused):
        prepared(tiny, tmp_path, "train.global_batch=8", *layout)
    second = trained(pool, tiny, tmp_path, "train.global_batch=8", "train.batch_ramp=[{until: 3, batch: 4}]", *layout)
    assert [attempt[0].began for attempt in (first, second)] == [0, 3]
    read = [samples for seen in (first, second) for samples in samples_by_step(seen)]
    assert read == [list(range(start, end)) for start, end in pairwise([0, 4, 8, 12, 20, 28, 36])]
    with pytest.raises(
        BadInput, match=r"batch_ramp: .* keep their batch; .*\[\{until: 3, batch: 4\}, \{until: 6, batch: 8\}\]'"
    ):
        prepared(tiny, tmp_path, "train.global_batch=8", "train.batch_ramp=[{until: 2, batch: 4}]", *layout)


def test_a_ramp_that_the_plan_cannot_divide_is_refused(tiny: Path, tmp_path: Path) -> None:
    cases = {
        (
            *ranks(2),
            "train.batch_ramp=[{until: 2, batch: 3}]",
        ): r"batch 3: expected a multiple of the 2 data ranks \(nearest: 4\)",
        (*ranks(2), "plan.micro_batch=2", "train.batch_ramp=[{until: 2, batch: 2}]"): (
            r"batch 2: expected a multiple of 2 data ranks x micro-batch 2 \(nearest: 4, or plan.micro_batch=1\)"
        ),
    }
    for overrides, expected in cases.items():
        with pytest.raises(BadInput, match=f"train.batch_ramp: {expected}"):
            prepared(tiny, tmp_path, *overrides)
    plan = prepared(tiny, tmp_path, *ranks(2), "train.batch_ramp=[{until: 2, batch: 2}]").assignment.plan
    assert plan.batch.micro_batch == 1, "the planner takes micro-batches that divide the ramp"
