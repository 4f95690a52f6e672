"""Runs on text that is streamed: the same losses on any number of ranks, before and after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.launch.prepare import check_unchanged, data_lines, open_run_data
from meshwright.spec.errors import BadInput
from meshwright.training.stop import PREEMPT
from tests.data.streams.made import write_parquet
from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.training.tiny import make_tiny, prepared, ranks, tiny_run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


@pytest.fixture
def streamed(tiny: Path, tmp_path: Path) -> list[str]:
    """Overrides: two thirds of the samples are streamed, one third is prepared."""
    write_parquet(tmp_path / "web")
    web = f'{{files: "{tmp_path}/web/*.parquet", text: content, weight: 2}}'
    settings = ["data.lanes=24", "data.loaders=1", f"data.cache={tmp_path}/cache", "train.global_batch=12"]
    return [f'data.mix={{web: {web}, "{tiny.parent}/data": 1}}', *settings]


def test_a_run_of_four_ranks_goes_on_with_three(pool: Pool, tiny: Path, tmp_path: Path, streamed: list[str]) -> None:
    (whole,) = pool.run(cases.run, 1, prepared(tiny, tmp_path / "one", *ranks(1), *streamed).assignment)
    assert len(whole.losses) == 6 and whole.error is None
    first = pool.run(cases.run, 4, prepared(tiny, tmp_path / "runs", *ranks(4), *streamed).assignment, 3, 0, PREEMPT)
    assert first[0].error is not None and first[0].last == 3
    again = prepared(tiny, tmp_path / "runs", *ranks(3), *streamed)
    second = pool.run(cases.run, 3, again.assignment)
    assert second[0].began == first[0].last and second[0].error is None
    losses = first[0].losses + second[0].losses
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert [step["tokens"] for step in first[0].steps + second[0].steps] == [step["tokens"] for step in whole.steps]


def test_a_changed_source_is_refused(pool: Pool, tiny: Path, tmp_path: Path, streamed: list[str]) -> None:
    pool.run(cases.run, 1, prepared(tiny, tmp_path / "runs", *ranks(1), *streamed).assignment, 2, 0, PREEMPT)
    run = tiny_run(tiny, *ranks(1), *streamed)
    write_parquet(tmp_path / "web", documents=120)
    with pytest.raises(BadInput, match="data.mix: web: changed since .*: content") as refused:
        check_unchanged(run, tmp_path / "runs" / "tiny", open_run_data(run), print)
    assert "\n" not in str(refused.value)


def test_a_start_says_what_it_streams(tiny: Path, streamed: list[str]) -> None:
    run = tiny_run(tiny, *streamed)
    _, line, *_ = data_lines(run, open_run_data(run))
    assert line.startswith("streamed: web: ") and "3 files, 12 row groups" in line and "24 lanes" in line
