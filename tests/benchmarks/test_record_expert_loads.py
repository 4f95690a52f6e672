"""The kept recordings of expert loads: read as `--replay-routing` does, as uneven as their runs were, and small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.record_expert_loads import BALANCE_LOSSES, EXPERTS, compact, run_name, write_loads

from meshwright.config.recorded_loads import read_loads
from meshwright.workload.expected_loads import busiest_of
from tests.distributed.test_equality import LLAMA

FOLDER = Path(__file__).parents[2] / "benchmarks" / "data" / "expert-loads"


def test_the_kept_recordings_have_500_steps_and_less_balance_loss_is_less_even() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 300_000
    for experts, per_token in EXPERTS.items():
        spec = replace(LLAMA, family="mixtral", layers=2, experts=experts, experts_per_token=per_token, expert_hidden=8)
        loads = [read_loads(FOLDER / f"{run_name(experts, loss)}.csv.gz", spec) for loss in BALANCE_LOSSES]
        assert [table.shape for table in loads] == [(500, 2, experts)] * 3
        none, weak, strong = (busiest_of(table[100:], 8).imbalance for table in loads)
        assert none > weak > strong > 1 and strong < 1.2


def test_compact_loads_differ_by_half_a_part_at_most(tmp_path: Path) -> None:
    loads = np.random.default_rng(0).multinomial(64 * 1000, np.full(64, 1 / 64), (3, 4))
    (tmp_path / "whole").mkdir()
    write_loads(tmp_path / "whole" / "64-experts-0.csv.gz", loads)
    compact(tmp_path / "whole", tmp_path)
    spec = replace(LLAMA, family="mixtral", layers=2, experts=64, experts_per_token=4, expert_hidden=8)
    kept = read_loads(tmp_path / "64-experts-0.csv.gz", spec)
    assert kept * 1000 / 12 == pytest.approx(loads[:, 1:3], abs=500 / 12 + 1e-9)
