"""Runs on several ranks with asynchronous saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.observe.metrics import read_metrics
from tests.distributed.pool import Pool
from tests.distributed.test_training import merge_tensors, same_bits, steps_on_disk, trained
from tests.slow import quick_first
from tests.training.tiny import make_tiny, ranks, staged

STEPS = 6
ASYNC = "checkpoint.mode=async"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def files(runs: Path, step: int) -> dict[str, bytes]:
    folder = runs / "tiny" / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


PLANS = {
    "fsdp": ranks(2),
    "offloaded optimizer": [*ranks(2), "plan.compute=bf16", "plan.offload=optimizer"],
    "pipeline": staged(2, "zbv"),
    "replicas": ranks(2, replicate=2),
    "tensor": ["cluster.gpus_per_node=2", "plan.tensor=2"],
}


@pytest.mark.parametrize("name", quick_first(1, PLANS))
def test_a_checkpoint_written_beside_training_is_that_of_a_save_that_training_waits_for(
    pool: Pool, tiny: Path, tmp_path: Path, name: str
) -> None:
    """The steps that ran beside its save are the same too, and a run that continues from it ends alike."""
    sync = trained(pool, tiny, tmp_path / "sync", *PLANS[name], "checkpoint.every=3")
    asynchronous = trained(pool, tiny, tmp_path / "async", *PLANS[name], "checkpoint.every=3", ASYNC)
    assert steps_on_disk(tmp_path / "async") == [3, STEPS]
    assert all(files(tmp_path / "async", step) == files(tmp_path / "sync", step) != {} for step in (3, STEPS))
    assert [result.losses for result in asynchronous] == [result.losses for result in sync] and same_bits(
        merge_tensors(asynchronous), merge_tensors(sync)
    )
    events = [
        line["text"] for line in read_metrics(tmp_path / "async" / "tiny" / "metrics.jsonl") if line["kind"] == "event"
    ]
    assert sum("beside training (seconds: staging" in text for text in events) == 2


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_waits_for_its_checkpoint(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    uninterrupted = trained(pool, tiny, tmp_path / "whole", *ranks(2))
    first = trained(pool, tiny, tmp_path / "parts", *ranks(2), "checkpoint.every=2", ASYNC, stop_at=5)
    assert steps_on_disk(tmp_path / "parts")[-1] == 5 and {result.error for result in first} == {first[0].error}
    second = trained(pool, tiny, tmp_path / "parts", *ranks(2), "checkpoint.every=2", ASYNC)
    assert [result.began for result in second] == [5, 5] and same_bits(
        merge_tensors(second), merge_tensors(uninterrupted)
    )
    checkpoints = list_checkpoints(tmp_path / "parts" / "tiny")
    assert [entry["step"] for entry in checkpoints][-2:] == [5, STEPS] and all(entry["ok"] for entry in checkpoints)


@pytest.mark.slow
def test_saves_that_are_due_while_one_is_in_flight_are_skipped_and_counted(
    pool: Pool, tiny: Path, tmp_path: Path
) -> None:
    longer = [*ranks(2), "train.steps=20", "checkpoint.every=1", "checkpoint.keep=50", ASYNC]
    results = trained(pool, tiny, tmp_path, *longer)
    assert [result.error for result in results] == [None, None] and [result.last for result in results] == [20, 20]
    steps = steps_on_disk(tmp_path)
    lines = read_metrics(tmp_path / "tiny" / "metrics.jsonl")
    texts = [line["text"] for line in lines if line["kind"] == "event" and "beside training" in line["text"]]
    skipped = sum(int(text.rpartition("; ")[2].split()[0]) for text in texts if "skipped" in text)
    assert steps[-1] == 20 and len(steps) == len(texts) and len(steps) + skipped == 20 and skipped > 0
