"""Samples of streamed text do not depend on the number of ranks, nor on when a run was stopped."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.spec.errors import BadInput
from meshwright.spec.job import DataSpec
from tests.data.streams.made import (
    BATCH,
    cursors_of,
    json_lines,
    open_ranks,
    spec_of,
    whole_steps,
    write_parquet,
)


@pytest.fixture
def mixed(tmp_path: Path, prepared: Path) -> DataSpec:
    """Two streams and a prepared source, whose tokenizer is that of the streams."""
    write_parquet(tmp_path / "web")
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress(json_lines(500, 560)) + gzip.compress(json_lines(560, 600)))
    streams = {"web": (f"{tmp_path}/web/*.parquet", "content"), "code": (f"{tmp_path}/code.jsonl.gz", "text")}
    return spec_of(streams, None, tmp_path / "cache", mix={"web": 2.0, str(prepared): 1.0})


def test_a_run_of_four_ranks_goes_on_with_three(mixed: DataSpec) -> None:
    reference = list(whole_steps(open_ranks(mixed, 1), 0, 14))
    four = open_ranks(mixed, 4)
    before = list(whole_steps(four, 0, 6))
    cursors = cursors_of(four, 6 * BATCH)
    list(whole_steps(four, 6, 8))  # steps that are read ahead, or lost with the ranks
    assert cursors_of(four, 6 * BATCH) == cursors
    three = open_ranks(mixed, 3)
    for data, _ in three:
        data.restore_cursors(cursors, data.record())
    after = list(whole_steps(three, 6, 14))
    for number, (one, many) in enumerate(zip(reference, before + after, strict=True)):
        assert np.array_equal(one, many), f"step {number}"


def test_samples_that_are_skipped_are_passed_over(mixed: DataSpec) -> None:
    reference = list(whole_steps(open_ranks(mixed, 1), 0, 10))
    two = open_ranks(mixed, 2)
    read = [*whole_steps(two, 0, 3), *whole_steps(two, 7, 10)]
    for one, many in zip(reference[:3] + reference[7:], read, strict=True):
        assert np.array_equal(one, many)


def test_lanes_may_change_ranks(mixed: DataSpec) -> None:
    """With a batch that does not divide the lanes evenly over steps, as in a ramp, each rank reads other lanes in each step."""
    reference = list(whole_steps(open_ranks(mixed, 1), 0, 6))
    uneven = open_ranks(mixed, 1)[0][0]
    for start in range(0, 6 * BATCH, 9):
        batch = uneven.samples(range(start, min(start + 9, 6 * BATCH)))
        for offset, tokens in enumerate(batch.tokens):
            step, within = divmod(start + offset, BATCH)
            assert np.array_equal(tokens, reference[step][0][within])


def test_a_changed_source_begins_again(mixed: DataSpec, tmp_path: Path) -> None:
    """With `data.changed: accept`; without, the run is refused."""
    ranks = open_ranks(mixed, 1)
    list(whole_steps(ranks, 0, 4))
    cursors, record = cursors_of(ranks, 4 * BATCH), ranks[0][0].record()
    write_parquet(tmp_path / "web", documents=120)
    ((data, _),) = open_ranks(mixed, 1)
    assert data.record()["web"] != record["web"] and data.record()["code"] == record["code"]
    with pytest.raises(BadInput, match="data.mix: web: changed since the checkpoint"):
        data.restore_cursors(cursors, record)
    data.restore_cursors(cursors, record, accept=True)
    now = data.cursors(4 * BATCH)
    assert not now["web"][:, 1:].any() and (now["web"][:, 0] == np.array(cursors["web"])[:, 0]).all()
    assert now["code"].tolist() == cursors["code"]


def test_another_seed_is_another_order(mixed: DataSpec) -> None:
    (one,), (other,) = (list(whole_steps(open_ranks(mixed, 1, seed), 0, 1)) for seed in (1, 2))
    assert not np.array_equal(one, other)


def test_a_cache_that_is_too_small_costs_time_only(mixed: DataSpec) -> None:
    reference = list(whole_steps(open_ranks(mixed, 1), 0, 3))
    small = replace(mixed, cache_gib=1e-6)
    for one, other in zip(reference, whole_steps(open_ranks(small, 1), 0, 3), strict=True):
        assert np.array_equal(one, other)
