"""Compares dense models with torchtitan: runs every row of a table on both sides, on one machine in one session.

    python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --budget 500 --out one-gpu.jsonl
    python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --only '1b-*' --passes 3 --out one-gpu.jsonl
    python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --out one-gpu.jsonl --show     # prints the stored results, runs nothing

A table runs in passes. In the first pass, each row runs torchtitan (the "peer") and then our side; in the second pass the order is
reversed, so that both sides meet the machine equally warm. A row's figure is the median over the counted steps of all passes. In the first
pass both sides also record two steps after the counted ones, which give the time by kernel class. Then the benchmark measures the device at
the row's shapes and compares the step with its roofline.

Every run appends a JSON line to --out, so the same command continues a table that was stopped or ran out of --budget. A row that failed
runs again with --again.

A file of tables has these keys:

    run        the run file, beside this script
    gpus       of this host; `=gpus` in the words stands for it
    sequences  per step
    steps      per run; skip: first steps that are not counted; limit: seconds per run; log_every: steps per line of torchtitan's log
    ours       key=value words of all our runs
    peer       torchtitan's arguments for all its runs
    rows       name → any of these keys, with `ours` and `peer` appended to those of all rows; `peer_batch`, torchtitan's sequences per GPU
               and micro-batch, of which the first that fits into memory is used (without it: no peer); `against`, a row whose `ours` side
               replaces the peer. `ours` may be several lists of words, of which the first that fits is used
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dense_comparisons import Comparison, Visit, read_comparisons, visits
from dense_runs import MIN_RUN_SECONDS, print_run, run_visit
from dense_table import OURS, PEER, Line, show
from kernel_times import Breakdown
from roofline import roofline
from sides import KERNELS, LOG_TAIL, MESHWRIGHT, TORCHTITAN, run_logged

from meshwright.config.load import load_plan, load_resolved
from meshwright.config.profile_file import load_profile
from meshwright.observe.environment import environment
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.fields import from_plain, to_plain
from meshwright.workload.device_work import step_work


def main() -> None:
    options = arguments()
    try:
        comparisons = [comparison for comparison in read_comparisons(options) if matches(comparison.name, options.only)]
    except MeshwrightError as error:
        sys.exit(f"{options.table}: {error}")
    if not comparisons:
        sys.exit(f"{options.table}: no row is called {options.only}")
    book = ResultFile(options.out)
    if not options.show:
        options.logs.mkdir(parents=True, exist_ok=True)
        run_missing(comparisons, options, book)
    show(
        options.table.stem,
        [comparison.name for comparison in comparisons],
        book.lines,
        {comparison.name: comparison.against for comparison in comparisons},
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--only", default="*", help="names of the rows, by comma; * and ? stand for others")
    parser.add_argument("--sides", default=f"{PEER},{OURS}", help="which of the two to run")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything; it stops cleanly before")
    parser.add_argument("--again", action="store_true", help="run what failed once more")
    parser.add_argument("--show", action="store_true", help="print the tables of what is in --out, run nothing")
    parser.add_argument("--no-trace", action="store_true", help="record no steps")
    parser.add_argument("--no-rates", action="store_true", help="do not measure the machine at the rows' shapes")
    parser.add_argument("--rates-seconds", type=float, default=20.0, help="for measuring at one row's shapes")
    parser.add_argument("--keep-traces", type=Path, help="a folder for the traces, which are deleted otherwise")
    parser.add_argument("--gpus", type=int, help="leave out rows that need more GPUs than this")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further words of all our runs")
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("dense.jsonl"))
    return parser.parse_args()


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(",") if pattern)


class ResultFile:
    """The JSON lines of the file --out, with a method to append one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        existing_lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.lines: list[Line] = [json.loads(line) for line in existing_lines]

    def add(self, line: Line) -> None:
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, line_kind: str, name: str, side: str | None = None) -> list[Line]:
        return [
            line
            for line in self.lines
            if line["kind"] == line_kind and line["row"] == name and (side is None or line["side"] == side)
        ]


def run_missing(comparisons: list[Comparison], options: argparse.Namespace, book: ResultFile) -> None:
    """Run what is missing in --out, pass by pass, within the budget."""
    start = time.monotonic()
    peer_is_installed = importlib.util.find_spec("torchtitan") is not None
    if not peer_is_installed and PEER in options.sides:
        print(
            f"torchtitan {TORCHTITAN} cannot be imported here, so rows have our side only (benchmarks/peers/README.md)"
        )
    session = time.strftime("%Y-%m-%dT%H:%M:%S")
    book.add(
        {
            "kind": "session",
            "row": None,
            "date": session,
            "command": " ".join(sys.argv),
            "kernels": KERNELS,
            "table": options.table.stem,
            "torchtitan": TORCHTITAN if peer_is_installed else None,
            "environment": environment(),
        }
    )

    def seconds_left() -> float:
        return options.budget - (time.monotonic() - start)

    for number in range(1, options.passes + 1):
        for visit in visits(comparisons, number):
            if (
                visit.side not in options.sides
                or (visit.side == PEER and not peer_is_installed)
                or is_done(visit, book, options)
            ):
                continue
            if seconds_left() < expected_seconds(visit, book):
                print(
                    f"{seconds_left():.0f} s are left: {visit.comparison.name} is not run; the same command goes on from here"
                )
                return
            for line in run_visit(visit, options, seconds_left()):
                book.add({**line, "session": session})
                print_run(line)
        if number == 1 and not options.no_trace and not options.no_rates:
            for comparison in comparisons:
                compare_with_device(comparison, options, book, seconds_left)


def is_done(visit: Visit, book: ResultFile, options: argparse.Namespace) -> bool:
    """Whether --out has this run, or all runs of this side have failed."""
    earlier_lines = book.of("run", visit.comparison.name, visit.side)
    successful_lines = [line for line in earlier_lines if "error" not in line]
    return any(line["pass"] == visit.number for line in successful_lines) or (
        bool(earlier_lines) and not successful_lines and not options.again
    )


def expected_seconds(visit: Visit, book: ResultFile) -> float:
    """Expected seconds of this run: the shortest earlier run of the same side and a tenth, at least `MIN_RUN_SECONDS`."""
    earlier_seconds = [
        line["wall_seconds"] for line in book.of("run", visit.comparison.name, visit.side) if "error" not in line
    ]
    return max(MIN_RUN_SECONDS, 1.1 * min(earlier_seconds, default=0.0))


def compare_with_device(
    comparison: Comparison, options: argparse.Namespace, book: ResultFile, seconds_left: Callable[[], float]
) -> None:
    """Measure the device at the shapes of our run and compare both sides' traced steps with the roofline.

    Rows that are compared with another row of ours are skipped.
    """
    breakdowns = {line["side"]: line for line in book.of("breakdown", comparison.name) if "error" not in line}
    folder = next((Path(line["folder"]) for line in book.of("run", comparison.name, OURS) if "folder" in line), None)
    if (
        comparison.against
        or not breakdowns
        or book.of("rates", comparison.name)
        or folder is None
        or not (folder / "plan.yaml").exists()
    ):
        return
    if seconds_left() < MIN_RUN_SECONDS + options.rates_seconds:
        print(f"{seconds_left():.0f} s are left: the device is not measured at the shapes of {comparison.name}")
        return
    file = folder / "rates.json"
    command = [
        *MESHWRIGHT,
        "profile",
        "--shapes-of",
        str(folder),
        "--seconds",
        str(options.rates_seconds),
        "--out",
        str(file),
    ]
    log = options.logs / f"{comparison.name}-rates.log"
    if code := run_logged(command, log, dict(os.environ), seconds_left()):
        log_tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        book.add({"kind": "rates", "row": comparison.name, "side": OURS, "error": f"exit code {code}: {log_tail}"})
        return
    run = load_resolved(folder / "config.yaml")
    work = step_work(run.model, run.train, load_plan(folder / "plan.yaml"))
    profile = load_profile(file)
    book.add(
        {"kind": "rates", "row": comparison.name, "side": OURS, "profile": to_plain(profile), "work": to_plain(work)}
    )
    for side, line in breakdowns.items():
        step_seconds = [run["step_seconds"] for run in book.of("run", comparison.name, side) if "error" not in run]
        comparison_with_roofline = roofline(
            work, profile, from_plain(Breakdown, without_common_keys(line)), statistics.median(step_seconds)
        )
        book.add({"kind": "roofline", "row": comparison.name, "side": side, **to_plain(comparison_with_roofline)})


def without_common_keys(line: Line) -> Line:
    """The line without the keys that all lines have."""
    return {key: value for key, value in line.items() if key not in ("kind", "row", "side", "session")}


if __name__ == "__main__":
    main()
