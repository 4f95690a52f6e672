"""Training state as `StateParts`: a checkpoint of it has the bytes that the same tensors have as DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged

LAYOUTS = {
    "shards": ranks(4),  # rows that do not divide evenly
    "replicas": ranks(4, replicate=2),
    "stages": staged(4, "1f1b"),
    "one rank": ranks(1),
}


@pytest.mark.parametrize("layout", quick_first(2, list(LAYOUTS)))
def test_a_checkpoint_of_parts_is_that_of_dtensors_byte_for_byte(
    pool: Pool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, layout: str
) -> None:
    overrides = LAYOUTS[layout]
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    assignment = prepared(tiny, tmp_path, *overrides, "train.global_batch=8").assignment
    count = int(overrides[0].partition("=")[2])
    files, *_ = pool.run(cases.saved_both_ways, count, assignment, str(tmp_path))
    assert len(files) == count + 1
    for name, (parts, dtensors) in files.items():
        assert parts == dtensors, name
