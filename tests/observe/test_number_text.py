import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe import number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9.999, "10.0"),
        (999.6, "1.00k"),
        (48_213, "48.2k"),
        (8.03e9, "8.03B"),
        (1e13, "10.0T"),
        (0.0123, "0.0123"),
    ],
)
def test_short(value, text):
    assert number_text.short(value) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (2 << 30, "2.15 GB")])
def test_size(count, text):
    assert number_text.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text", "clock"),
    [
        (2e-5, "20.0 µs", "0:00"),
        (0.82, "820 ms", "0:01"),
        (12.44, "12.4 s", "0:12"),
        (59.97, "1m 00s", "1:00"),
        (185, "3m 05s", "3:05"),
        (7654, "2h 07m", "2:07:34"),
        (270_000, "3d 03h", "3d 03:00"),
    ],
)
def test_duration_and_clock(seconds, text, clock):
    assert (number_text.duration(seconds), number_text.clock(seconds)) == (text, clock)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.0123"), (16.364, "16.4"), (99.96, "100"), (1042.3, "1,042"), (12345, "12,345")],
)
def test_rate(value, text):
    assert number_text.rate(value) == text


def test_percent_and_scientific():
    assert number_text.percent(0.41346) == "41.3%"
    assert (number_text.scientific(3e-4), number_text.scientific(0.0), number_text.scientific(2.5)) == (
        "3.00e-4",
        "0.00e0",
        "2.50e0",
    )


@given(st.floats(min_value=1e-3, max_value=1e14))
def test_short_keeps_three_digits(value):
    text = number_text.short(value)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * scale == pytest.approx(value, rel=5.1e-3)
    assert "e" not in text
