import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.events.ring_buffer import Ring


@given(st.lists(st.integers()), st.integers(1, 8))
def test_keeps_the_newest_in_order_and_counts_the_rest(items, capacity):
    ring = Ring(capacity)
    for item in items:
        ring.append(item)
    assert list(ring) == items[-capacity:]
    assert len(ring) + ring.dropped == len(items)


def test_iterating_while_appending_sees_one_moment():
    ring = Ring(4)
    ring.append(1)
    for item in ring:
        ring.append(item + 1)
    assert list(ring) == [1, 2]


def test_refuses_a_ring_that_holds_nothing():
    with pytest.raises(ValueError, match="capacity 0"):
        Ring(0)
