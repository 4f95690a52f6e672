"""Notations of layer ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.plan import layer_range


@given(st.integers(1, 200), st.data())
def test_a_range_names_both_ends(layers: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layers - 1))
    last = data.draw(st.integers(first, layers - 1))
    assert list(layer_range(f"{first}-{last}", layers)) == list(range(first, last + 1))
    assert list(layer_range(str(first), layers)) == [first]
    assert list(layer_range("all", layers)) == list(range(layers))


@pytest.mark.parametrize("text", ["", "-", "-3", "a-b", "1-2-3", "3-1", "0-4", "4", "1.5", "All", " 1", "0x1"])
def test_invalid_ranges_of_four_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        layer_range(text, 4)
