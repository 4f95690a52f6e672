"""Silent corruption: a flipped bit of any state is found, its rank is named, and the run recovers its losses."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import cases_state_check as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged

LAST = 6
WEIGHT, MOMENT = "model.layers.1.mlp.down.weight", "optimizer.exp_avg_sq.norm.weight"
TENSOR = ["cluster.gpus_per_node=2", "plan.tensor=2", "plan.shard=1"]
EXPERTS = [
    "plan.expert=2",
    "model.family=mixtral",
    "model.experts=4",
    "model.experts_per_token=2",
    "model.expert_hidden=16",
]
KV_COPIES = ["cluster.gpus_per_node=4", "plan.tensor=4", "plan.shard=1"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def run(pool: Pool, tiny: Path, runs: Path, *overrides: str, count: int, **disturbance: Any) -> Any:
    assignment = prepared(tiny, runs, *overrides).assignment
    return pool.run(partial(cases.run_with_flip, **disturbance), count, assignment)


@pytest.mark.parametrize(
    ("overrides", "count", "groups", "shared"),
    [
        pytest.param(ranks(2), 2, 0, (), id="fsdp", marks=pytest.mark.slow),
        pytest.param(
            ranks(4, replicate=2),
            4,
            2,
            ("model.layers.0.mlp.down.weight", "optimizer.exp_avg.norm.weight"),
            id="hsdp",
            marks=pytest.mark.slow,
        ),
        pytest.param(ranks(2, replicate=2), 2, 1, ("model.embed.weight",), id="replicas", marks=pytest.mark.slow),
        pytest.param(
            TENSOR, 2, 1, ("model.norm.weight", "optimizer.exp_avg_sq.layers.0.attention_norm.weight"), id="tensor"
        ),
        pytest.param(KV_COPIES, 4, 3, ("model.layers.0.attention.qkv.weight",), id="kv-heads", marks=pytest.mark.slow),
        pytest.param(
            [*staged(2, "1f1b"), "model.tied=true"], 2, 1, ("model.embed.weight",), id="tied", marks=pytest.mark.slow
        ),
    ],
)
def test_a_flip_of_each_piece_is_found(
    pool: Pool, tiny: Path, tmp_path: Path, overrides: list[str], count: int, groups: int, shared: tuple[str, ...]
) -> None:
    answers = pool.run(cases.differences, count, prepared(tiny, tmp_path, *overrides).assignment)
    assert [len(answer[0]) for answer in answers] == [groups] * count
    assert [answer[2] for answer in answers] == [[]] * count
    labels = {label.partition(" ")[0] for answer in answers for label, is_shared in answer[1] if is_shared}
    assert labels.issuperset(shared) and (shared or not labels)


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        pytest.param(ranks(4, replicate=2), 4, id="hsdp"),
        pytest.param([*ranks(2, replicate=2), "plan.reduce_replicas=bf16"], 2, id="bf16-sums", marks=pytest.mark.slow),
        pytest.param(KV_COPIES, 4, id="tensor", marks=pytest.mark.slow),
        pytest.param([*staged(4, "zbv"), "model.tied=true"], 4, id="tied", marks=pytest.mark.slow),
        pytest.param(
            ["cluster.gpus_per_node=2", "plan.shard=1", "plan.context_ring=2"], 2, id="context", marks=pytest.mark.slow
        ),
        pytest.param(
            [*ranks(2, replicate=2), "plan.compute=bf16", "plan.offload=optimizer"],
            2,
            id="offload",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["cluster.gpus_per_node=4", "plan.shard=2", "plan.tensor=2", *EXPERTS],
            4,
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nothing_is_found_in_clean_steps(
    pool: Pool, tiny: Path, tmp_path: Path, overrides: list[str], count: int
) -> None:
    answers = run(pool, tiny, tmp_path, *overrides, "supervision.check_state_every=1", count=count)
    assert [answer[0] for answer in answers] == [""] * count and len(answers[0][1]) == LAST
    assert not any("corruption" in text for text in answers[0][3])
    assert ("the state in host memory is not checked" in answers[0][3][0]) == ("plan.offload=optimizer" in overrides)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    quick_first(1, [(ranks(2), "async"), (ranks(2), "sync"), (ranks(2, replicate=2), "async")], unpack=True),
    ids=["fsdp-async", "fsdp-sync", "replicas-async"],
)
def test_a_flip_at_rest_is_found_in_its_step(
    pool: Pool, tiny: Path, tmp_path: Path, overrides: list[str], mode: str
) -> None:
    overrides = [*overrides, "supervision.check_state_every=1", "checkpoint.every=2", f"checkpoint.mode={mode}"]
    calm = run(pool, tiny, tmp_path / "calm", *overrides, count=2)
    assert not any("corruption" in text for text in calm[0][3])
    answers = run(pool, tiny, tmp_path / "flip", *overrides, count=2, step=5, name=MOMENT)
    assert [answer[0] for answer in answers] == [""] * 2
    line = next(text for text in answers[0][3] if "silent corruption" in text)
    assert line.startswith("step 5: silent corruption: on rank 1 (host ") and "changed between two updates" in line
    assert MOMENT in line and "back to step " in line
    assert_equal(answers, calm)


@pytest.mark.slow
def test_a_flip_before_a_saves_copy_is_in_no_checkpoint(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """The save is given up, and the run goes back to an earlier one. Saves that are due while one is in flight are skipped."""
    words = [*ranks(2), "train.steps=100", "supervision.check_state_every=100", "checkpoint.every=10"]
    words.append("checkpoint.mode=async")
    calm = run(pool, tiny, tmp_path / "calm", *words, count=2)
    answers = run(pool, tiny, tmp_path / "flip", *words, count=2, step=30, name=WEIGHT, saved=True)
    line = next(text for text in answers[0][3] if "silent corruption" in text)
    steps = [int(step) for step in re.findall(r"step (\d+)", line)]
    assert f"{WEIGHT}" in line and steps[0] > max(30, steps[1])
    assert_equal(answers, calm)


@pytest.mark.slow
def test_a_majority_names_the_rank_whose_update_went_wrong(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    overrides = [
        *ranks(3, replicate=3),
        "train.global_batch=9",
        "supervision.check_state_every=2",
        "checkpoint.every=2",
    ]
    calm = run(pool, tiny, tmp_path / "calm", *overrides, count=3)
    answers = run(pool, tiny, tmp_path / "flip", *overrides, count=3, step=3, rank=2, name=WEIGHT, at_rest=False)
    line = next(text for text in answers[0][3] if "silent corruption" in text)
    assert (
        line.startswith("step 4: silent corruption: on rank 2 (host ") and f") {WEIGHT} differs from the copies" in line
    )
    assert "back to step 2 from storage" in line
    assert_equal(answers, calm)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "bit"), [(1, 27), (0, 27), (1, 2)])
def test_recomputing_names_the_wrong_one_of_two_copies(
    pool: Pool, tiny: Path, tmp_path: Path, rank: int, bit: int
) -> None:
    overrides = [*ranks(2, replicate=2), "supervision.check_state_every=3", "checkpoint.every=3"]
    calm = run(pool, tiny, tmp_path / "calm", *overrides, count=2)
    flip = {"step": 5, "rank": rank, "name": WEIGHT, "bit": bit, "at_rest": False}
    answers = run(pool, tiny, tmp_path / "flip", *overrides, count=2, **flip)
    lines = [text for text in answers[0][3] if "silent corruption" in text]
    assert len(lines) == 2 and f"step {LAST}: silent corruption: {WEIGHT} differs between rank 0" in lines[0], lines
    assert "back to step 3 from storage" in lines[0]
    assert f"recomputed {WEIGHT}: rank {rank} (host " in lines[1] and "had the wrong copy" in lines[1]
    assert_equal(answers, calm)


def test_a_run_says_what_its_checks_cover(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """And a run without a checkpoint to go back to ends, so that supervision starts it again."""
    overrides = ["supervision.check_state_every=4", "train.steps=4"]
    without_replicas = run(pool, tiny, tmp_path / "plain", *ranks(2), *overrides, count=2)
    assert "so nothing is compared between ranks, and state on the devices is checked" in without_replicas[0][3][0]
    replicas = run(pool, tiny, tmp_path / "replicas", *ranks(2, replicate=2), *overrides, count=2)
    assert "every 4 steps 100.00% of the state's bytes are compared" in replicas[0][3][0]
    with_flip = run(pool, tiny, tmp_path / "lost", *ranks(2, replicate=2), *overrides, count=2, step=1, name=WEIGHT)
    assert with_flip[0][0].startswith("StateCorrupted: step 1: silent corruption")
    assert "there is no checkpoint to go back to" in with_flip[0][0]


def assert_equal(answers: Any, expected: Any) -> None:
    """Both runs have the same losses and the same state on every rank, bit for bit."""
    for answer, expectation in zip(answers, expected, strict=True):
        assert dict(answer[1]) == dict(expectation[1])
        assert all(torch.equal(answer[2][name], expectation[2][name]) for name in expectation[2])
