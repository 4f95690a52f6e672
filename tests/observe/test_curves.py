import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.observe.curves import (
    bucket_means,
    indices_of_extremes,
    median,
    tick_labels,
    ticks,
    time_labels,
    time_ticks,
    trend,
    value_range,
)

magnitudes = st.floats(-1e15, 1e15).filter(lambda v: v == 0 or abs(v) > 1e-12)
values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=60)


@given(magnitudes, magnitudes, st.integers(2, 10))
def test_ticks_are_round_even_and_inside(low, high, count):
    low, high = sorted((low, high))
    assume(high - low > 1e-6 * max(abs(low), abs(high)))
    marks = ticks(low, high, count)
    air = 1e-6 * (high - low)
    assert 1 <= len(marks) <= count + 1
    assert low - air <= marks[0] and marks[-1] <= high + air
    if len(marks) > 1:
        step = marks[1] - marks[0]
        assert all(b - a == pytest.approx(step, rel=1e-6) for a, b in pairwise(marks))
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert any(mantissa == pytest.approx(nice, rel=1e-4) for nice in (1, 2, 2.5, 5, 10))
        assert marks[0] - step < low + air and marks[-1] + step > high - air, "no tick inside the range was left out"


@given(magnitudes, magnitudes)
def test_every_tick_has_its_own_label_that_reads_back(low, high):
    low, high = sorted((low, high))
    assume(high - low > 1e-3 * max(abs(low), abs(high)))
    marks = ticks(low, high)
    labels = tick_labels(marks)
    assert len(set(labels)) == len(labels)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    read = [float(label.rstrip("kMBT")) * scale.get(label[-1], 1.0) for label in labels]
    assert read == pytest.approx(marks, rel=2e-3, abs=1e-6 * (high - low))


@given(st.floats(1e-3, 1e9))
def test_time_ticks_start_at_zero_and_stay_inside(high):
    marks = time_ticks(high)
    assert marks[0] == 0 and marks[-1] <= high * (1 + 1e-9) and 2 <= len(marks) <= 13
    assert len(set(time_labels(marks))) == len(marks)


def test_labels_read_well():
    assert tick_labels([0.0, 10_000.0, 20_000.0]) == ["0", "10k", "20k"]
    assert tick_labels([0.0, 0.5e9, 1e9]) == ["0", "0.5B", "1.0B"]
    assert tick_labels([0.0, 1e-4, 2.5e-4]) == ["0", "1e-4", "2.5e-4"]
    assert tick_labels([2.25, 2.5]) == ["2.25", "2.50"]
    assert time_labels([0.0, 900.0, 1800.0]) == ["0", "15 min", "30 min"]


@given(values, st.booleans())
def test_a_value_range_is_never_empty_and_starts_where_it_should(curve, from_zero):
    low, high = value_range(curve, from_zero=from_zero)
    known = [value for value in curve if value is not None]
    assert low < high and ticks(low, high)
    assert not known or low <= min(known)
    assert not from_zero or low <= 0
    if 0 < len(known) < 20:
        assert high >= max(known)


def test_one_spike_does_not_flatten_the_curve():
    curve = [1.0 + 0.01 * (i % 7) for i in range(200)]
    assert value_range([*curve, 500.0], from_zero=True)[1] < 2
    assert value_range([*curve, 500.0], from_zero=True, outliers=True)[1] > 500
    falling = [10 * math.exp(-i / 300) + 2 for i in range(1000)]
    assert value_range(falling, from_zero=False)[1] > 12, "a loss that falls from high is no spike"


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(8, 60))
def test_kept_indices_keep_ends_and_extremes(curve, limit):
    other = curve[::-1]
    rows = indices_of_extremes(len(curve), [curve, other], limit)
    assert rows == sorted(set(rows)) and len(rows) <= max(limit, 2)
    assert rows[0] == 0 and rows[-1] == len(curve) - 1
    for shape in (curve, other):
        known = [value for value in shape if value is not None]
        kept = [shape[row] for row in rows if shape[row] is not None]
        if known:
            assert (min(kept), max(kept)) == (min(known), max(known))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_bucket_means_lie_within_the_curve_and_cover_it(curve, buckets):
    means = bucket_means(curve, buckets)
    assert len(means) == min(buckets, len(curve))
    assert all(min(curve) - 1e-6 <= mean <= max(curve) + 1e-6 for mean in means)
    if len(curve) % len(means) == 0:
        assert sum(means) / len(means) == pytest.approx(sum(curve) / len(curve), rel=1e-9, abs=1e-6)


def test_bucket_means_skip_gaps():
    assert bucket_means([1.0, None, None, None], 2) == [1.0, None]


def test_trend_of_a_straight_line_is_itself_and_ignores_a_spike():
    line = [float(i) for i in range(600)]
    rows = list(range(585))
    assert trend(line, rows) == pytest.approx(line[:585])
    flat: list[float | None] = [2.0] * 600
    flat[300], flat[301] = 1e6, None
    assert trend(flat, range(600)) == [2.0] * 600
    assert trend([None, None], [0, 1]) == [None, None]


def test_median_is_a_value_of_the_list():
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([4.0, 1.0]) == 1.0
