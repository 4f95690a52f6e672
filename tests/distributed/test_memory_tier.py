"""Resume from host memory: what is loaded from the snapshot buffers equals the trained state, and damage leads to storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.format.verify import list_checkpoints
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
    answers = pool.run(cases.restarted, count, assignment, [(cases.delete_checkpoints, None)])
    assert answers == [[("host memory", 6, True)]] * count


STARTS = {
    "unchanged": (cases.nothing, None, ("host memory", 6, True)),
    "exchanged": (cases.exchange_buffers, None, ("host memory", 6, True)),
    "corrupt byte": (cases.corrupt_byte, None, ("storage", 6, True)),
    "next snapshot begun": (cases.begin_next_snapshot, None, ("storage", 6, True)),
    "corrupt record": (cases.corrupt_record, None, ("storage", 6, True)),
    "lost snapshot buffer": (cases.lose_buffer, None, ("storage", 6, True)),
    "beyond the step": (cases.nothing, 5, ("storage", 3, False)),
    "nothing intact": (cases.corrupt_and_delete, None, (None, 0, True)),
}
"""By name: what changes after a run on two ranks, the newest step to resume from, and the start then."""


@pytest.fixture(scope="module")
def starts(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[cases.Start]]:
    """By name, what each rank found at its start."""
    assignment = prepared(tiny, tmp_path_factory.mktemp("starts"), *ranks(2), *ASYNC).assignment
    by_rank = pool.run(cases.restarted, 2, assignment, [(change, at_most) for change, at_most, _ in STARTS.values()])
    return {name: list(answers) for name, answers in zip(STARTS, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_only_a_snapshot_that_is_complete_intact_and_not_too_new_is_used(
    starts: dict[str, list[cases.Start]], name: str
) -> None:
    """From the ranks' memory, also where hosts changed places; else all ranks load from storage, or begin anew."""
    assert starts[name] == [STARTS[name][2]] * 2


TWO_HOSTS = ("cluster.nodes=2", "cluster.gpus_per_node=1", "plan.shard=2", "checkpoint.partner=host")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "tier"),
    [(cases.keep_hosts, "partner memory"), (cases.corrupt_copy, "storage"), (cases.end_server, "storage")],
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


@pytest.mark.slow
def test_the_next_start_saves_in_the_same_memory(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), *ASYNC).assignment
    expected = [("host memory", 4), ("host memory", 6)]
    assert pool.run(cases.resumed_losses, 2, assignment) == [expected] * 2
    assert [entry["step"] for entry in list_checkpoints(tmp_path / "tiny") if entry["ok"]] == [3, 4, 6]
