from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.skipped_samples import SampleRange, samples_of_step, skip_step
from meshwright.spec.batch_sizes import BatchSizes, BatchStage

STAGES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3)
"""Steps and batch of each stage of a ramp."""


def sizes(stages: list[tuple[int, int]], batch: int) -> BatchSizes:
    ends = accumulate(steps for steps, _ in stages)
    return BatchSizes(
        batch, [BatchStage(until=until, batch=size) for until, (_, size) in zip(ends, stages, strict=True)]
    )


def test_a_step_whose_samples_are_skipped_reads_the_next_ones() -> None:
    skipped = skip_step(3, BatchSizes(8), ())
    assert skipped == ((16, 24),)
    steps = [samples_of_step(step, BatchSizes(8), skipped) for step in (1, 2, 3, 4)]
    assert steps == [(0, 8), (8, 16), (24, 32), (32, 40)]


@given(stages=STAGES, batch=st.integers(1, 9), skips=st.lists(st.integers(1, 12), max_size=6))
def test_steps_read_every_sample_once_except_those_skipped(
    stages: list[tuple[int, int]], batch: int, skips: list[int]
) -> None:
    batches = sizes(stages, batch)
    skipped: tuple[SampleRange, ...] = ()
    for step in skips:
        skipped = skip_step(step, batches, skipped)
    read = [index for step in range(1, 21) for index in range(*samples_of_step(step, batches, skipped))]
    left_out = {index for span in skipped for index in range(*span)}
    assert read == [index for index in range(batches.samples_before(20 + len(skips))) if index not in left_out]


@given(stages=STAGES, batch=st.integers(1, 9))
def test_the_first_sample_of_a_step_tells_its_size(stages: list[tuple[int, int]], batch: int) -> None:
    batches = sizes(stages, batch)
    expected = [size for steps, size in stages for _ in range(steps)] + [batch] * 20
    starts = list(accumulate(expected, initial=0))
    assert [batches.samples_before(step) for step in range(len(starts))] == starts
    for step, (start, end) in enumerate(pairwise(starts)):
        assert batches.at(start) == end - start
        assert {batches.steps_before(sample) for sample in range(start, end)} == {step}
        assert batches.steps_of(start + 1) == batches.steps_of(end) == step + 1


def test_ramps_are_compared_up_to_a_sample() -> None:
    constant, raised = BatchSizes(4), BatchSizes(8, [BatchStage(until=3, batch=4)])
    assert constant.equal_until(raised, 12) and raised.equal_until(constant, 12)
    assert not constant.equal_until(raised, 16)
    assert BatchSizes(4, [BatchStage(until=2, batch=4)]).equal_until(constant, 1 << 40)
