"""Layers of pipeline ranks as columns of a search, against the stage table of each plan."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshwright.spec.layout import balanced_stages
from meshwright.spec.plan import ScheduleName
from meshwright.workload.rank_layers import balanced_layers, table_layers


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("zbv", 2), ("interleaved", 3), ("breadth_first", 7)])
def test_columns_are_those_of_the_stage_table(name: ScheduleName, virtual: int) -> None:
    head_rank = 0 if name == "zbv" else -1
    for layers, head in product((28, 32, 61, 126), (0.0, 0.4, 2.2, 5.7)):
        ranks = [count for count in (1, 2, 3, 4, 8) if layers >= count * virtual]
        columns = balanced_layers(layers, head, np.array(ranks), virtual, float(name == "zbv"))
        for index, count in enumerate(ranks):
            table = balanced_stages(name, count, layers, head, virtual)
            counts = [sum(map(len, stages)) for stages in table]
            assert columns.with_head[index] == counts[head_rank]
            assert max(columns.fullest[index], columns.with_head[index]) == max(counts)
            assert tuple(column[index] for column in columns) == table_layers(table)
