"""The timeline of the offloaded optimizer against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.simulator.update_timeline import StepWork, UpdateOperation, play, step_seconds

WORK = StepWork(units=12, chunks=10, copy=2.0, update=0.2, forward=6.0, backward=18.0, buffers=6)
COMPUTE = 12 * 24.0
COPIES = (120 - 6 + 1) * 2.0
"""From the norm until the last chunk is on the device.

Six were fetched before; the seventh waits for the first to leave its buffer.
"""


def test_an_engine_serves_the_operation_that_is_ready_first() -> None:
    operations = [
        UpdateOperation("a", 3.0, engine="link"),
        UpdateOperation("a", 1.0, engine="link"),
        UpdateOperation("b", 1.0),
        UpdateOperation("b", 2.0, engine="link"),
        UpdateOperation("c", 1.0, (3,)),
    ]
    assert play(operations) == [(0, 3), (5, 6), (0, 1), (3, 5), (5, 6)]


def test_updates_after_the_backward_take_the_time_of_their_copies() -> None:
    """And of the first and the last update; the last chunk is sent beside the next forward."""
    assert step_seconds(WORK, "after_backward") == pytest.approx(COMPUTE + COPIES + 2 * 0.2)


def test_updates_beside_the_forward_hide_it_but_for_two_units() -> None:
    assert step_seconds(WORK, "update_stream") == pytest.approx(12 * 18.0 + COPIES + 2 * 0.2 + 2 * 6.0)


def test_the_forward_is_the_longer_part_if_copies_are_short() -> None:
    """Then only the first two units' updates are exposed."""
    short = StepWork(units=12, chunks=10, copy=0.1, update=0.01, forward=6.0, backward=18.0, buffers=6)
    assert step_seconds(short, "update_stream") == pytest.approx(COMPUTE + (20 - 6 + 1) * 0.1 + 2 * 0.01)


def test_tables_that_queue_behind_chunks_expose_part_of_the_forward() -> None:
    """A copy of addresses waits for a chunk's copy, so the compute stream never catches up with the link after a forward."""
    tables = StepWork(units=12, chunks=10, copy=2.0, update=0.6, forward=6.0, backward=18.0, buffers=6, tables=0.02)
    assert step_seconds(tables, "compute_stream") > step_seconds(WORK, "update_stream") + 12


@pytest.mark.parametrize("buffers", [6, 60, 100])
def test_chunks_with_staging_buffers_are_fetched_during_the_step(buffers: int) -> None:
    """From the norm on the link fetches only the others; those in staging buffers leave them beside the next forward."""
    staged = replace(WORK, buffers=buffers)
    fetched_after = (120 - buffers + 1) * 2.0
    exposed = max(fetched_after + 2 * 0.2 + 2 * 6.0, 20 * 0.2 + 12 * 6.0)
    assert step_seconds(staged, "update_stream") == pytest.approx(12 * 18.0 + exposed)


def test_with_a_buffer_for_each_chunk_only_the_updates_of_two_units_delay_a_step() -> None:
    assert step_seconds(replace(WORK, buffers=120), "update_stream") == pytest.approx(COMPUTE + 20 * 0.2)


def test_a_step_is_no_shorter_than_its_copies() -> None:
    short = replace(WORK, buffers=120, forward=2.0, backward=4.0)
    assert step_seconds(short, "update_stream", steps=8) == pytest.approx(120 * 2.0, rel=0.02)
