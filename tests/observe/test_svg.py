import re

from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.svg import WIDTH, Axis, Chart, Series, draw, numbers

AXIS = Axis("step", "Steps", 0.0, 10.0, ((0.0, "0"), (5.0, "5"), (10.0, "10")))


def draw_chart(*series, **options):
    chart = Chart("c", "Title", "unit", "short", tuple(series), **options)
    table = [float(i) for i in range(11)]
    tables = {"steps": {"step": table}, "edges": {"step": [0.0, 5.0, 10.0]}}
    return draw(chart, tables, AXIS)


def paths(text):
    return [d for css, d in re.findall(r'<path class="([^"]+)" data-series="\d+" d="([^"]*)"', text)]


@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=11, max_size=11))
def test_every_point_is_inside_and_every_gap_is_a_gap(values):
    (path,) = paths(draw_chart(Series("a", "x", "steps", values), from_zero=False))
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.e+]+),(-?[\d.e+]+)", path)]
    assert len(points) == sum(value is not None for value in values)
    assert all(0 <= x <= WIDTH and 0 <= y <= 200 for x, y in points)
    runs = sum(a is None and b is not None for a, b in zip([None, *values], values, strict=False))
    assert path.count("M") == runs


def test_greater_values_stand_higher():
    (path,) = paths(draw_chart(Series("a", "x", "steps", [float(i) for i in range(11)])))
    heights = [float(y) for y in re.findall(r",([\d.]+)", path)]
    assert heights == sorted(heights, reverse=True) and heights[0] == 200.0


def test_columns_stack_without_gap_or_overlap():
    lower, upper = paths(
        draw_chart(Series("a", "x", "edges", [1.0, 3.0], "column"), Series("b", "y", "edges", [1.0, 1.0], "column"))
    )
    tops = [float(y) for y in re.findall(r"V([\d.]+)H", lower)][:2]
    bases = [float(y) for y in re.findall(r"V([\d.]+)H", upper)][2:]
    assert tops == bases[::-1]
    assert lower.startswith("M0,200V") and lower.endswith("H0Z")


def test_points_are_dots_of_no_length():
    (path,) = paths(draw_chart(Series("a", "x", "steps", [None] * 9 + [1.0, 2.0], "points")))
    assert path.count("M") == 2 and path.count("h0") == 2 and "L" not in path


def test_equal_values_of_two_series_are_both_visible():
    ones = [1.0] * 11
    text = draw_chart(Series("a", "x", "steps", ones, "rings"), Series("b", "y", "steps", ones, "points"))
    ring, dot = paths(text)
    order = [text.index(f'class="{name}"') for name in ("rings x", "holes", "points y")]
    assert ring == dot and order == sorted(order) and f'class="holes" d="{ring}"' in text
    line, dashed = paths(draw_chart(Series("a", "x", "steps", ones), Series("b", "y", "steps", ones, "dashes")))
    assert line == dashed and "L" in dashed


def test_hidden_spikes_are_said():
    values = [1.0] * 60 + [90.0]
    chart = Chart("c", "t", "u", "short", (Series("a", "x", "s", values),))
    assert "1 value above the chart, up to 90.0" in draw(chart, {"s": {"step": [0.0] * 61}}, AXIS)


def test_titles_and_labels_are_escaped():
    text = draw_chart(Series("<i>", "x", "steps", [1.0] * 11), reference=("<b>", 2.0))
    assert "<i>" not in text and "<b>" not in text and "&lt;b&gt; 2.00" in text


def test_numbers_for_the_script_match_the_drawing():
    chart = Chart("c", "t", "u", "loss", (Series("a", "x", "steps", [1.0, None, 1 / 3]),))
    data = numbers(chart)
    assert data["series"] == [{"table": "steps", "kind": "line", "values": [1.0, None, 0.33333]}]
    assert (data["low"], data["high"], data["height"]) == (*chart.limits, 200)
