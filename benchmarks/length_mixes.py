"""The length mixes of data/document-lengths.csv."""

from __future__ import annotations

import csv
from pathlib import Path

from meshwright.workload.expected_lengths import LengthHistogram

LENGTHS = Path(__file__).parent / "data" / "document-lengths.csv"


def length_mix(name: str) -> LengthHistogram:
    """The mix `name` of the file: `public` or `long`."""
    with LENGTHS.open(encoding="utf-8") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return LengthHistogram.of(
            (int(line["first"]), int(line["last"]), float(line["share"])) for line in lines if line["mix"] == name
        )
