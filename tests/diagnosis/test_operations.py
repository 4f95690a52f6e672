"""The table of recorded operations."""

from __future__ import annotations

import pytest

from meshwright.diagnosis.operations import OperationTable, operation_table
from meshwright.spec.errors import BadInput


def small_table(names: tuple[str, ...] = ("forward-compute", "backward-compute", "forward-compute")) -> OperationTable:
    return operation_table(
        type_names=names,
        rank=[0] * 3,
        dp=[0] * 3,
        stage=[0] * 3,
        step=[4, 4, 5],
        start_ns=[20, 0, 10],
        duration_ns=[1, 2, 3],
    )


def test_sequence_numbers_count_by_type_rank_and_step_in_the_order_of_start() -> None:
    table = operation_table(
        type_names=["data", "optimizer", "data", "data", "data"],
        rank=[0, 0, 0, 1, 0],
        dp=[0, 0, 0, 1, 0],
        stage=[0] * 5,
        step=[1, 1, 1, 1, 2],
        start_ns=[50, 0, 20, 30, 70],
        duration_ns=[1] * 5,
    )
    assert table.sequence.tolist() == [1, 0, 0, 0, 0]
    assert table.dp_size == 2


def test_selected_steps_keep_their_operations() -> None:
    table = small_table()
    assert table.steps.tolist() == [4, 5]
    last = table.last_steps(1)
    assert (last.step.tolist(), last.duration_ns.tolist()) == ([5], [3])
    assert table.is_type("backward-compute").tolist() == [False, True, False]


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="unknown operation type 'foward-compute'; the nearest is 'forward-compute'"):
        small_table(("foward-compute", "data", "data"))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(BadInput, match="must have one length"):
        operation_table(type_names=["data"], rank=[0, 1], dp=[0], stage=[0], step=[1], start_ns=[0], duration_ns=[1])
