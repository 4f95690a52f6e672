"""Idle time against the closed forms of the papers, with every stage alike and messages free.

p ranks, m micro-batches, v stages per rank; f, i, w seconds of a stage's forward and of the two halves of its backward.
"""

from itertools import pairwise

import pytest

from meshwright.schedules.registry import build
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import uniform_timing
from tests.schedules.sizes import sizes

UNEQUAL = [(1, 1, 1), (1, 2, 0), (3, 2, 2), (2, 3, 1)]


def played(name, ranks, batches, stages, f=1.0, i=1.0, w=1.0):
    schedule = build(name, ranks, batches, stages)
    return simulate(schedule, uniform_timing(schedule.stages, forward=f, backward_input=i, backward_weight=w))


def idle(timeline):
    return timeline.window_seconds - timeline.compute_seconds[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_each(name):
    """(p - 1) (f + b); the bubble is (p - 1) / (m + p - 1) whatever f and b (arXiv 1811.06965, 2104.04473 §2.2.1)."""
    for p, m, v in sizes(name):
        f, i, w = UNEQUAL[(p + m) % 4]
        timeline = played(name, p, m, v, f, i, w)
        assert idle(timeline) == pytest.approx((p - 1) * (f + i + w))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("name", ["interleaved", "breadth_first"])
def test_several_stages_each(name):
    """The bubble is (p - 1) / (v m + p - 1) once m >= p, also where p does not divide m.

    The formula is that of arXiv 2104.04473 §2.2.2.
    """
    for p, m, v in sizes(name):
        f, i, w = UNEQUAL[(p + m) % 4]
        timeline = played(name, p, m, v, f, i, w)
        expected = (p - 1) / (v * m + p - 1)
        assert timeline.bubble == pytest.approx(expected) if m >= p or v == 1 else timeline.bubble > expected


def test_zb_h1_idles_a_third_of_1f1b():
    """(p - 1) (f + i - w): a third of 1F1B's when the three are equal (arXiv 2401.10241 §2.1; ZB1P in deepseek-ai/DualPipe)."""
    for p, m, v in sizes("zb_h1"):
        if m >= p:
            assert idle(played("zb_h1", p, m, v)) == pytest.approx(p - 1)
            assert idle(played("zb_h1", p, m, v)) == pytest.approx(idle(played("1f1b", p, m, 1)) / 3)
            assert idle(played("zb_h1", p, m, v, 3, 2, 2)) == pytest.approx((p - 1) * 3)
            assert played("zb_h1", p, m, v).bubble == pytest.approx((p - 1) / (3 * m + p - 1))


def test_zbv_idles_only_until_the_first_forward_arrives():
    """p - 1 forwards of half a stage: no rank waits between its first and last compute (arXiv 2401.10241 §6)."""
    for p, m, v in sizes("zbv"):
        timeline = played("zbv", p, m, v)
        if m >= 2 * p - 1:
            assert timeline.bubble == pytest.approx((p - 1) / (6 * m + p - 1))
            assert _longest_pause(timeline) == 0
        # 1F1B over the same model has stages twice as long.
        assert timeline.bubble <= played("1f1b", p, m, 1).bubble + 1e-9


def _longest_pause(timeline):
    """Seconds in which any rank stands still between two pieces of compute."""
    longest = 0.0
    for rank in range(timeline.schedule.ranks):
        mine = [
            (start, end)
            for r, lane, a, start, end in timeline.records
            if (r, lane) == (rank, "compute") and a.stage >= 0
        ]
        longest = max([longest, *(later[0] - earlier[1] for earlier, later in pairwise(mine))])
    return longest
