"""Reads the lengths of samples that a run expects, from its file of lengths or from the index of its data."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.recorded_lengths import LengthRange
from meshwright.data.lengths import length_histogram
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.run import RunSpec
from meshwright.workload.expected_lengths import LengthHistogram, mixed_histogram, recorded_histogram


def expected_histogram(run: RunSpec) -> LengthHistogram | None:
    """Return the histogram in the file `data.lengths`, or with `data.packing: none` the histogram of the data.

    None if the samples are packed or the data cannot be read. Raises BadInput if the file of lengths is invalid.
    """
    if run.data.lengths is not None:
        return recorded_histogram(run.data.lengths)
    if run.data.packing != "none":
        return None
    sources = []
    for name, weight in run.data.mix.items():
        try:
            entries = length_histogram(Path(name))["ranges"]
        except (BadInput, Damaged):
            return None
        ranges = [
            LengthRange(entry["first"], entry["last"], entry["documents"]) for entry in entries if entry["documents"]
        ]
        sources.append((weight, ranges))
    return mixed_histogram(sources) if all(ranges for _, ranges in sources) else None
