"""The histogram of documents' lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.lengths import histogram_lines, length_histogram
from meshwright.spec.errors import BadInput
from tests.data import megatron


def test_lengths_are_counted_by_ranges_of_documents_and_of_their_tokens(tmp_path: Path) -> None:
    """Two files; a document of two sequences counts once, with the tokens of both."""
    megatron.write(tmp_path / "a", [[[1] * 64], [[1] * 65], [[1] * 100, [1] * 28]], code=8)
    megatron.write(tmp_path / "b", [[[1]], [[1] * 300]], code=8)
    histogram = length_histogram(tmp_path)
    assert histogram == {
        "documents": 5,
        "tokens": 64 + 65 + 128 + 1 + 300,
        "longest": 300,
        "ranges": [
            {"first": 1, "last": 64, "documents": 2, "tokens": 65},
            {"first": 65, "last": 128, "documents": 2, "tokens": 193},
            {"first": 129, "last": 256, "documents": 0, "tokens": 0},
            {"first": 257, "last": 512, "documents": 1, "tokens": 300},
        ],
    }
    lines = histogram_lines(histogram)
    assert lines[0] == "5 documents, 558 tokens, the longest 300"
    assert lines[3].split()[:4] == ["128", "2", "80.0%", "46.2%"] and lines[-1].split()[2:4] == ["100.0%", "100.0%"]


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no prepared data here"):
        length_histogram(tmp_path)
