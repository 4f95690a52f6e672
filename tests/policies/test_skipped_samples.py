from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.skipped_samples import SampleRange, samples_of_step, skip_step


def test_a_step_whose_samples_are_skipped_reads_the_next_ones() -> None:
    skipped = skip_step(3, 8, ())
    assert skipped == ((16, 24),)
    assert [samples_of_step(step, 8, skipped) for step in (1, 2, 3, 4)] == [(0, 8), (8, 16), (24, 32), (32, 40)]


@given(batch=st.integers(1, 9), steps=st.lists(st.integers(1, 12), max_size=6))
def test_steps_read_every_sample_once_except_those_skipped(batch: int, steps: list[int]) -> None:
    skipped: tuple[SampleRange, ...] = ()
    for step in steps:
        skipped = skip_step(step, batch, skipped)
    read = [index for step in range(1, 21) for index in range(*samples_of_step(step, batch, skipped))]
    left_out = {index for span in skipped for index in range(*span)}
    assert read == [index for index in range(batch * (20 + len(steps))) if index not in left_out]
