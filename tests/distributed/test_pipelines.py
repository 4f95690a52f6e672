"""Training runs with pipeline plans: resume under other plans, validation, stop signals and failures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.observe.metrics import read_metrics
from meshwright.training.evaluate import Evaluation
from meshwright.training.stop import INTERRUPT
from tests.distributed import cases_training as cases
from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.distributed.test_training import compare, merge_tensors, same_bits, steps_on_disk, tiny, trained
from tests.slow import quick_first
from tests.training.tiny import prepared, ranks, staged

__all__ = ["tiny"]
DEEP = "model.layers=4"
ZBV = staged(4, "zbv")
"""Two pipeline ranks with two stages each, and two shards of each."""
OTHERS = {
    "shard 4": [*ranks(4), DEEP],
    "one rank": [*ranks(1), DEEP],
    "layered, shard 2": [*ranks(2), "plan.schedule=breadth_first", "plan.micro_batch=1", DEEP],
    "pipeline 4": staged(4, "1f1b", pipeline=4),
    "modular pipeline": staged(4, "breadth_first"),
}
STOP = 3


@pytest.fixture(scope="module")
def one_rank(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The four-layer run on one rank, never stopped."""
    return trained(pool, tiny, tmp_path_factory.mktemp("one"), *ranks(1), DEEP)[0]


@pytest.fixture(scope="module")
def stopped(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Seen]]:
    """A run under a pipeline that one rank of the last stage was asked to stop, and what the ranks saw."""
    runs = tmp_path_factory.mktemp("stopped")
    return runs, trained(pool, tiny, runs, *ZBV, stop_at=STOP, stop_rank=3)


def test_all_stages_stop_after_the_same_step(stopped: tuple[Path, list[Seen]]) -> None:
    runs, results = stopped
    assert [result.last for result in results] == [STOP] * 4
    assert {result.error and result.error[0] for result in results} == {"Preempted"}
    assert steps_on_disk(runs) == [STOP]


def test_a_checkpoint_holds_every_stage_bit_for_bit(stopped: tuple[Path, list[Seen]]) -> None:
    runs, results = stopped
    with CheckpointReader(runs / "tiny" / "checkpoints" / f"step-{STOP:08d}") as reader:
        saved = {name: reader.read(name) for name in reader.tensors}
    assert same_bits(saved, merge_tensors(results))


@pytest.mark.parametrize("name", quick_first(1, OTHERS))
def test_any_plan_goes_on_with_a_pipelines_run(
    pool: Pool, tiny: Path, tmp_path: Path, stopped: tuple[Path, list[Seen]], one_rank: Seen, name: str
) -> None:
    runs, first = stopped
    shutil.copytree(runs / "tiny", tmp_path / "tiny")
    assignment = prepared(tiny, tmp_path, *OTHERS[name]).assignment
    resumed: dict[str, torch.Tensor] = {}
    for step, tensors in pool.run(cases.opened, assignment.plan.ranks, assignment):
        assert step == STOP
        resumed |= tensors
    assert same_bits(resumed, merge_tensors(first))
    results = trained(pool, tiny, tmp_path, *OTHERS[name])
    assert {result.began for result in results} == {STOP}
    compare([first, results], one_rank)


@pytest.mark.slow
def test_a_plan_file_may_order_its_axes(
    pool: Pool, tiny: Path, tmp_path: Path, stopped: tuple[Path, list[Seen]], one_rank: Seen
) -> None:
    """Stages side by side and copies across: data, checkpoint, validation and norm follow the order in the file."""
    runs, first = stopped
    shutil.copytree(runs / "tiny", tmp_path / "tiny")
    file = tmp_path / "plan.yaml"
    file.write_text(
        "order: [replicate, pipeline, shard]\nreplicate: 2\npipeline: 2\nglobal_batch: 8\nmicro_batch: 1\n"
        "schedule: 1f1b\ncompute: fp32\ncompile: false\n"
    )
    results = trained(pool, tiny, tmp_path, "cluster.gpus_per_node=4", f"plan={file}", DEEP)
    layers = [{word for name in result.tensors for word in name.split(".") if word.isdigit()} for result in results]
    assert layers == [{"0", "1"}, {"2", "3"}, set(), set()]  # the first copy alone writes
    compare([first, results], one_rank)


@pytest.mark.slow
def test_a_pipeline_goes_on_with_any_plans_run(pool: Pool, tiny: Path, tmp_path: Path, one_rank: Seen) -> None:
    """From plan to plan in one run, each but the first a pipeline."""
    attempts = [
        trained(pool, tiny, tmp_path, *OTHERS["layered, shard 2"], stop_at=2),
        trained(pool, tiny, tmp_path, *ZBV, stop_at=4, stop_rank=2, flag=INTERRUPT),
        trained(pool, tiny, tmp_path, *staged(2, "zb_h1")),
    ]
    assert [ranks_seen[0].began for ranks_seen in attempts] == [0, 2, 4]
    compare(attempts, one_rank)


Validations = dict[tuple[str, ...], list[tuple[int, Evaluation]]]


@pytest.fixture(scope="module")
def validated_alone() -> Validations:
    """Validations of one rank by the overrides of their size; filled by the first test that needs them."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [[], pytest.param(["train.global_batch=128", "train.seq_len=15"], marks=pytest.mark.slow)],
    ids=["two batches", "less text than one batch"],
)
@pytest.mark.parametrize("plan", [ZBV, staged(2, "1f1b"), staged(4, "breadth_first")], ids=["zbv", "1f1b", "modular"])
def test_validation_is_that_of_one_rank(
    pool: Pool, tiny: Path, tmp_path: Path, validated_alone: Validations, plan: list[str], size: list[str]
) -> None:
    precise = ["plan.compute=fp64", "train.steps=2", "train.warmup_steps=0", "train.validate_every=1", *size]
    if (key := tuple(size)) not in validated_alone:
        validated_alone[key] = trained(pool, tiny, tmp_path / "one", *ranks(1), DEEP, *precise)[0].validations
    one_rank = validated_alone[key]
    results = trained(pool, tiny, tmp_path / "pipeline", *plan, *precise)
    assert all(result.validations == results[0].validations for result in results)
    assert [step for step, _ in results[0].validations] == [1, 2]
    for (_, actual), (_, truth) in zip(results[0].validations, one_rank, strict=True):
        assert actual.loss == pytest.approx(truth.loss, rel=1e-12) and actual.tokens == truth.tokens


@pytest.mark.slow
def test_validation_does_not_touch_the_training(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    plan, steps = staged(2, "zbv"), "train.steps=3"
    without_validation = trained(pool, tiny, tmp_path / "without", *plan, steps, "train.validate_every=0")
    with_it = trained(pool, tiny, tmp_path / "with", *plan, steps, "train.validate_every=1")
    assert (len(without_validation[0].validations), len(with_it[0].validations)) == (1, 3)
    assert with_it[0].losses == without_validation[0].losses and same_bits(
        merge_tensors(with_it), merge_tensors(without_validation)
    )


def test_one_stage_that_is_not_a_number_ends_all_and_changes_nothing(
    pool: Pool, tiny: Path, tmp_path: Path, stopped: tuple[Path, list[Seen]]
) -> None:
    """One NaN in a layer of pipeline rank 1 (whose shards are ranks 2 and 3)."""
    runs, state_before = stopped
    shutil.copytree(runs / "tiny", tmp_path / "tiny")
    name = "model.layers.2.mlp.down.weight"
    poison = name.removeprefix("model.")
    results = trained(pool, tiny, tmp_path, *ZBV, "checkpoint.every=1", poison=poison, poison_rank=2)
    for result in results:
        assert result.error and result.error[0] == "NumericalFailure" and f"step {STOP + 1}" in result.error[1]
        assert [record["step"] for record in result.steps] == [STOP + 1]
    healthy, state_after = (
        merge_tensors(state_before),
        {key: tensor for result in results for key, tensor in result.tensors.items()},
    )
    changed = (state_after.pop(name) != healthy.pop(name)).flatten().nonzero().flatten().tolist()
    assert changed == [0] and same_bits(state_after, healthy)
    assert steps_on_disk(tmp_path) == [STOP]
    last = read_metrics(tmp_path / "tiny" / "metrics.jsonl")[-1]
    assert last["step"] == STOP + 1 and last["loss"] is None and last["nonfinite"]["loss"] == "nan"
