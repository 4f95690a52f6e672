"""Resume from host memory: what is loaded from the arenas equals the trained state, and damage leads to storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.verify import list_checkpoints
from meshwright.spec.plan import MeshAxis
from tests.distributed import cases_memory as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged

ASYNC = ("checkpoint.mode=async", "checkpoint.every=3")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


@pytest.mark.parametrize(
    "layout",
    quick_first(1, [ranks(4, replicate=2), ranks(2), staged(2, "1f1b")]),
    ids=["replicated", "sharded", "staged"],
)
def test_a_restart_loads_the_newest_snapshot_without_storage(
    pool: Pool, tiny: Path, tmp_path: Path, layout: list[str]
) -> None:
    assignment = prepared(tiny, tmp_path, *layout, *ASYNC, "model.tied=true").assignment
    count = assignment.run.cluster.ranks
    assert pool.run(cases.restarted, count, assignment, cases.delete_checkpoints) == [("host memory", 6, True)] * count


def test_ranks_that_change_places_load_what_each_has_in_its_memory(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), *ASYNC).assignment
    assert pool.run(cases.restarted, 2, assignment, cases.exchange_arenas) == [("host memory", 6, True)] * 2


@pytest.mark.parametrize(
    ("change", "tier"),
    quick_first(
        3,
        [
            (cases.nothing, "host memory"),
            (cases.corrupt_byte, "storage"),
            (cases.begin_next_snapshot, "storage"),
            (cases.corrupt_record, "storage"),
            (cases.lose_arena, "storage"),
        ],
        unpack=True,
    ),
)
def test_a_snapshot_that_is_not_complete_and_intact_on_all_ranks_is_not_used(
    pool: Pool, tiny: Path, tmp_path: Path, change: cases.Change, tier: str
) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), *ASYNC).assignment
    assert pool.run(cases.restarted, 2, assignment, change) == [(tier, 6, True)] * 2


def test_a_snapshot_beyond_the_step_to_resume_from_is_not_used(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), *ASYNC).assignment
    assert pool.run(cases.restarted, 2, assignment, cases.nothing, 5) == [("storage", 3, False)] * 2


def test_damaged_memory_without_storage_leaves_the_initial_weights(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), *ASYNC).assignment
    assert pool.run(cases.restarted, 2, assignment, cases.corrupt_and_delete) == [(None, 0, True)] * 2


TWO_HOSTS = ("cluster.nodes=2", "cluster.gpus_per_node=1", "plan.shard=2", "checkpoint.partner=host")


@pytest.mark.parametrize(
    ("change", "tier"),
    quick_first(
        2,
        [(cases.keep_hosts, "partner memory"), (cases.corrupt_copy, "storage"), (cases.end_server, "storage")],
        unpack=True,
    ),
)
def test_after_the_loss_of_a_host_its_ranks_load_the_copy_of_their_partner(
    pool: Pool, tiny: Path, tmp_path: Path, change: cases.HostChange, tier: str
) -> None:
    once = ("checkpoint.every=5", "checkpoint.at_end=false", "train.steps=8")
    assignment = prepared(tiny, tmp_path, *TWO_HOSTS, *once).assignment
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(cases.TOKEN)
    assert pool.run(cases.after_lost_host, 2, assignment, token, change) == [(tier, 5, True)] * 2


REPLICAS = ("cluster.nodes=2", "cluster.gpus_per_node=2", "plan.replicate=2", "plan.shard=2", "checkpoint.partner=host")
ACROSS_HOSTS = (MeshAxis(axis="replicate", size=2, crosses="node"), MeshAxis(axis="shard", size=2))


@pytest.mark.parametrize("lost", quick_first(1, [1, 0]))
def test_after_the_loss_of_a_host_its_replica_has_all_state_and_nothing_was_sent(
    pool: Pool, tiny: Path, tmp_path: Path, lost: int
) -> None:
    assignment = prepared(tiny, tmp_path, *REPLICAS, "checkpoint.every=5", "train.steps=8").assignment
    assignment = replace(assignment, plan=replace(assignment.plan, mesh=ACROSS_HOSTS))
    assert pool.run(cases.after_lost_replica, 4, assignment, lost) == [("partner memory", 8, True)] * 4


def test_the_next_start_saves_in_the_same_memory(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), *ASYNC).assignment
    expected = [("host memory", 4), ("host memory", 6)]
    assert pool.run(cases.resumed_losses, 2, assignment) == [expected] * 2
    assert [entry["step"] for entry in list_checkpoints(tmp_path / "tiny") if entry["ok"]] == [3, 4, 6]
