"""Histograms of lengths in run files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.config.recorded_lengths import read_lengths
from meshwright.spec.errors import BadConfig, BadInput

WORDS = ["model.preset=llama3-8b", "cluster.gpu=H100"]


def ranges(*entries: tuple[int, int, float]) -> dict[str, object]:
    return {"ranges": [{"first": first, "last": last, "documents": count} for first, last, count in entries]}


def test_ranges_without_samples_are_left_out_and_the_longest_sample_ends_the_last(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(ranges((1, 64, 5), (65, 128, 0), (129, 256, 2)) | {"longest": 200}))
    assert read_lengths(file, "data.lengths") == [(1, 64, 5), (129, 200, 2)]
    assert load_run(None, [*WORDS, f"data.lengths={file}"]).data.lengths == str(file)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"documents": 3}, "expected what `meshwright data lengths --json` prints"),
        (ranges((5, 4, 1)), "range 5 to 4"),
        (ranges((1, 4, -1)), "-1 documents"),
        (ranges((1, 4, 0)), "at least one sample"),
        (ranges((1, 4, 1), (5, 8, 1)) | {"longest": 4}, "a longest one in the last range"),
    ],
)
def test_other_files_are_refused_with_their_problem(tmp_path: Path, content: object, problem: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=problem):
        read_lengths(file, "data.lengths")
    with pytest.raises(BadConfig, match="data.lengths: expected a file that `meshwright data lengths --json` wrote"):
        load_run(None, [*WORDS, f"data.lengths={file}"])
