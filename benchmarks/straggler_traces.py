"""Compares the straggler analysis with the authors' results on the public traces of the OSDI'25 paper.

The folder has the files of the paper's artifact: trace-NAME.parquet, meta-NAME.yaml, result-NAME.json (or .json.gz),
ms-NAME.json and mw-NAME.json.

    python benchmarks/straggler_traces.py FOLDER --out FILE.json
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from meshwright.diagnosis.stragglers import diagnose_trace

AUTHORS_NAMES = {
    "by_type": "blocking_decompose_by_optype",
    "by_stage": "blocking_decompose_by_stage",
    "by_dp_rank": "blocking_decompose_by_dp_rank",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the files of the artifact")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    names = [path.stem.removeprefix("trace-") for path in sorted(arguments.folder.glob("trace-*.parquet"))]
    rows = [compare(arguments.folder, name) for name in names]
    command = "benchmarks/straggler_traces.py FOLDER"
    arguments.out.write_text(json.dumps({"command": command, "traces": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['trace']}: {row['cause']}, largest difference {row['largest_difference']:.1e}")


def compare(folder: Path, name: str) -> dict[str, Any]:
    """Our figures of a trace beside the authors'."""
    ours = diagnose_trace(folder / f"trace-{name}.parquet", folder / f"meta-{name}.yaml").as_plain()
    authors = _read(folder / f"result-{name}.json")
    pairs: dict[str, tuple[float, float]] = {
        "slowdown": (ours["slowdown"], authors["blocking_slowdown"]),
        "launch_slowdown": (ours["launch_slowdown"], authors["launch_slowdown"]),
        "m_s": (ours["m_s"], _read(folder / f"ms-{name}.json")["Ms"]),
        "m_w": (ours["m_w"], _read(folder / f"mw-{name}.json")["Mw"]),
    }
    for key, authors_key in AUTHORS_NAMES.items():
        for part, value in authors[authors_key].items():
            pairs[f"{key}.{part}"] = ours[key][part], value
    return {
        "trace": name,
        "steps": len(ours["steps"]),
        "cause": ours["cause"],
        "rank": ours["rank"],
        "stage": ours["stage"],
        "contributions": ours["contributions"],
        "ours_and_authors": {key: [round(value, 6) for value in pair] for key, pair in pairs.items()},
        "largest_difference": max(abs(ours_value - theirs) for ours_value, theirs in pairs.values()),
    }


def _read(path: Path) -> dict[str, Any]:
    """A JSON file, or the same file compressed."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    with gzip.open(path.with_name(f"{path.name}.gz"), "rt", encoding="utf-8") as file:
        return json.load(file)


if __name__ == "__main__":
    main()
