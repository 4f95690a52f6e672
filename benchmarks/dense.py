"""Dense models side by side with torchtitan: every row of a table on both sides, in one go on one machine.

    python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --budget 500 --out one-gpu.jsonl
    python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --only '1b-*' --passes 3 --out one-gpu.jsonl
    python benchmarks/dense.py benchmarks/dense/one-gpu.yaml --out one-gpu.jsonl --show     # the tables of what is there, nothing is run

A table is played in passes: in the first, each row's peer and then ours; in the second ours and then the peer; so both sides see the
machine warm and cold alike. A row's figure is the median over the counted steps of all its passes. In the first pass both sides record
two steps behind the counted ones, from which the time by kind of kernel is read; then the device is measured at the row's own
shapes, and what it needs for the step is held against what the step took.

Every run adds one JSON line to --out, so a table that ran out of --budget, or was stopped, goes on where it was when the same command is
given again. A row that failed is tried again with --again.

A file of tables has these keys:

    run        the run file, beside this script
    gpus       of this host; `=gpus` in the words stands for it
    sequences  of a step
    steps      of a run; skip: those at the start that do not count; limit: seconds for one run; log_every: steps a line of torchtitan's log
    ours       key=value words of all our runs
    peer       torchtitan's arguments for all its runs
    rows       name → any of these anew, its `ours` and `peer` behind those for all; `peer_batch`, how many sequences a GPU of torchtitan
               may take at a time, of which the first that fits in memory is taken (left out: no peer); `against`, a row whose own
               side it is compared with in place of a peer. `ours` may be several lists of words, of which the first that fits is taken
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

from dense_rows import Row, Visit, read_rows, visits
from dense_runs import LEAST_SECONDS, made, tell
from dense_table import OURS, PEER, Line, show
from kernel_times import Breakdown
from roofline import roofline
from sides import KERNELS, MESHWRIGHT, SAID, TORCHTITAN, run_logged

from meshwright.config.load import load_plan, load_resolved
from meshwright.config.profile_file import load_profile
from meshwright.observe.environment import environment
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.fields import from_plain, to_plain
from meshwright.workload.device_work import step_work


def main() -> None:
    options = arguments()
    try:
        rows = [row for row in read_rows(options) if wanted(row.name, options.only)]
    except MeshwrightError as error:
        sys.exit(f"{options.table}: {error}")
    if not rows:
        sys.exit(f"{options.table}: no row is called {options.only}")
    book = Book(options.out)
    if not options.show:
        options.logs.mkdir(parents=True, exist_ok=True)
        play(rows, options, book)
    show(options.table.stem, [row.name for row in rows], book.lines, {row.name: row.against for row in rows})


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


def wanted(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(",") if pattern)


class Book:
    """The JSON lines of --out: those that were there and those that are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        there = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.lines: list[Line] = [json.loads(line) for line in there]

    def add(self, line: Line) -> None:
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, kind: str, row: str, side: str | None = None) -> list[Line]:
        return [
            line for line in self.lines
            if line["kind"] == kind and line["row"] == row and (side is None or line["side"] == side)
        ]  # fmt: skip


def play(rows: list[Row], options: argparse.Namespace, book: Book) -> None:
    """Run what --out lacks, pass by pass, as long as the budget lasts."""
    started = time.monotonic()
    has_peer = importlib.util.find_spec("torchtitan") is not None
    if not has_peer and PEER in options.sides:
        print(
            f"torchtitan {TORCHTITAN} cannot be imported here, so rows have our side only (benchmarks/peers/README.md)"
        )
    session = time.strftime("%Y-%m-%dT%H:%M:%S")
    book.add(
        {"kind": "session", "row": None, "date": session, "command": " ".join(sys.argv), "kernels": KERNELS,
         "table": options.table.stem, "torchtitan": TORCHTITAN if has_peer else None, "environment": environment()}
    )  # fmt: skip

    def left() -> float:
        return options.budget - (time.monotonic() - started)

    for number in range(1, options.passes + 1):
        for visit in visits(rows, number):
            if (
                visit.side not in options.sides
                or (visit.side == PEER and not has_peer)
                or is_done(visit, book, options)
            ):
                continue
            if left() < expected(visit, book):
                print(f"{left():.0f} s are left: {visit.row.name} is not run; the same command goes on from here")
                return
            for line in made(visit, options, left()):
                book.add({**line, "session": session})
                tell(line)
        if number == 1 and not options.no_trace and not options.no_rates:
            for row in rows:
                hold_against_device(row, options, book, left)


def is_done(visit: Visit, book: Book, options: argparse.Namespace) -> bool:
    """Whether this run is there already, or its like has only ever failed."""
    there = book.of("run", visit.row.name, visit.side)
    good = [line for line in there if "error" not in line]
    return any(line["pass"] == visit.number for line in good) or (bool(there) and not good and not options.again)


def expected(visit: Visit, book: Book) -> float:
    """Seconds that this run will take, from earlier ones of its kind."""
    before = [line["wall_seconds"] for line in book.of("run", visit.row.name, visit.side) if "error" not in line]
    return max(LEAST_SECONDS, 1.1 * min(before, default=0.0))


def hold_against_device(row: Row, options: argparse.Namespace, book: Book, left: Callable[[], float]) -> None:
    """Measure the device at the shapes of the row's own run, and hold both sides' traced steps against what it needs; rows that are
    compared with another of ours are told by kind alone."""
    told = {line["side"]: line for line in book.of("breakdown", row.name) if "error" not in line}
    folder = next((Path(line["folder"]) for line in book.of("run", row.name, OURS) if "folder" in line), None)
    if row.against or not told or book.of("rates", row.name) or folder is None or not (folder / "plan.yaml").exists():
        return
    if left() < LEAST_SECONDS + options.rates_seconds:
        print(f"{left():.0f} s are left: the device is not measured at the shapes of {row.name}")
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
    log = options.logs / f"{row.name}-rates.log"
    if code := run_logged(command, log, dict(os.environ), left()):
        said = log.read_text(encoding="utf-8", errors="replace")[-SAID:]
        book.add({"kind": "rates", "row": row.name, "side": OURS, "error": f"exit code {code}: {said}"})
        return
    run = load_resolved(folder / "config.yaml")
    work = step_work(run.model, run.train, load_plan(folder / "plan.yaml"))
    profile = load_profile(file)
    book.add({"kind": "rates", "row": row.name, "side": OURS, "profile": to_plain(profile), "work": to_plain(work)})
    for side, line in told.items():
        runs = [run["step_seconds"] for run in book.of("run", row.name, side) if "error" not in run]
        held = roofline(work, profile, from_plain(Breakdown, without(line)), statistics.median(runs))
        book.add({"kind": "roofline", "row": row.name, "side": side, **to_plain(held)})


def without(line: Line) -> Line:
    """The line without what every line has."""
    return {key: value for key, value in line.items() if key not in ("kind", "row", "side", "session")}


if __name__ == "__main__":
    main()
