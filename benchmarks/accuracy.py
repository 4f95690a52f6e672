"""This program's own runs, predicted again with the present constants: how right the cost model is about the engine that it plans for.

    python benchmarks/accuracy.py                       # every kept run of benchmarks/results
    python benchmarks/accuracy.py --only '*fsdp*' --parts
    python benchmarks/accuracy.py --profile benchmarks/data/h200x2-profile.json benchmarks/data/h200x2-tcp-profile.json
    python benchmarks/accuracy.py --json

A row is a layout that benchmarks/layouts.py ran, or this program's side of a row of benchmarks/dense.py. Its run is rebuilt from the words
and the run file that it was started with, as `meshwright train` does; its plan is the one it ran. Rows of slower kernels than today's are
priced with those (own.yaml's `before`). Step seconds are predicted by the simulator, which the planner's last word is, and by the closed
form, which its search uses; memory is compared with the most that torch had allocated, so without the framework's share.
A star marks rows that the constants were not fitted on: they were predicted before they were measured, or left out. Torch is not needed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from sides import KERNELS

from meshwright.config.load import load_run
from meshwright.costs import constants as constants_module
from meshwright.costs.constants import FILE, OWN_FILE, with_own
from meshwright.costs.plan_costs import STACK, band, plan_time
from meshwright.simulator.step_simulation import memory_of, simulate_plan
from meshwright.simulator.timeline import Timeline
from meshwright.spec.fields import from_plain
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.plan_bytes import fullest

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MEASURED_PARTS = ("forward", "backward", "reduce", "optim", "host")


CLIPPED = 9.6
"""Bytes a parameter, at a copy's rate, of the pass over gradients that clipping was: 7.28 ms for 3.2e9 of them on an H200."""
CHUNKED = 0.44
"""`packing` of torch's kernel: 26.1 to 26.5 ms for 8.03e9 gradients on 4 H200s, in bf16 and fp8 steps (2026-11-22-four-gpus-H200.jsonl)."""
LIMITS = {"in the fit": 0.01, "not in the fit": 0.02}
"""Largest median error of the step."""
WARM_UP = 4
"""Steps that a run's range leaves out."""


@dataclass(frozen=True)
class Row:
    """One kept run: what was asked for, what ran, what was measured."""

    file: str
    name: str
    run: RunSpec
    plan: Plan
    seconds: float
    """Median of its steps."""
    steps: tuple[float, ...]
    """Each step's, without the first few."""
    deviation: float
    """Relative, of one step from the next."""
    allocated_bytes: float | None
    """The most that torch had allocated on a rank; none where the file says that its engine kept more than today's does."""
    phases: dict[str, float]
    """Of one step, on the device of rank 0."""
    kernels: int
    """Which it ran on (its file's `kernels`, see `sides.KERNELS`)."""

    @property
    def label(self) -> str:
        return f"{Path(self.file).stem[11:]} {self.name}"


@dataclass(frozen=True)
class Check:
    """A row with what the model says of it; errors are predicted over measured, less one."""

    row: Row
    timeline: Timeline
    closed: float
    memory_bytes: float

    @property
    def error(self) -> float:
        return self.timeline.step_seconds / self.row.seconds - 1

    @property
    def closed_error(self) -> float:
        return self.closed / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        allocated = self.row.allocated_bytes
        return None if allocated is None else self.memory_bytes / allocated - 1

    @property
    def inside(self) -> bool:
        """Whether what was measured lies in the printed band."""
        low, high = band(self.timeline.step_seconds, self.row.run.cluster, self.row.plan)
        return low <= self.row.seconds <= high

    @property
    def fitted(self) -> bool:
        """Whether the constants have seen the row."""
        return (self.row.file, self.row.name) in fitted_on()

    def as_plain(self) -> dict[str, Any]:
        return {
            "file": self.row.file,
            "name": self.row.name,
            "fitted": self.fitted,
            "measured_seconds": self.row.seconds,
            "predicted_seconds": self.timeline.step_seconds,
            "closed_form_seconds": self.closed,
            "error": self.error,
            "measured_phases": self.row.phases,
            "predicted_parts": self.timeline.breakdown,
            "allocated_bytes": self.row.allocated_bytes,
            "predicted_bytes": self.memory_bytes,
            "memory_error": self.memory_error,
        }


def main() -> None:
    options = arguments()
    rows = [row for row in own_rows() if fnmatch.fnmatchcase(row.name, options.only)]
    checks = [check(run_profile_job(row, options.profile) if options.profile else row) for row in rows]
    if options.json:
        print(json.dumps({"constants": STACK, "rows": [one.as_plain() for one in checks], **summary(checks)}, indent=1))
    else:
        show(checks, parts=options.parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of the rows to predict; * and ? stand for others")
    parser.add_argument("--parts", action="store_true", help="where each step goes, measured and predicted")
    parser.add_argument(
        "--profile", type=Path, nargs=2, metavar=("NODE", "NODES"),
        help="price by two profiles, not by the fitted rates of the device: runs inside a node by the first, over several by the second",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def own_rows(folder: Path = RESULTS) -> list[Row]:
    """Every kept run of this program at its machine's own speed, by file and in the order it ran: benchmarks/layouts.py's, and of
    benchmarks/dense.py's this program's side."""
    layouts = [row for file in sorted(folder.glob("*.json")) for row in _rows_of(file)]
    return layouts + [row for file in sorted(folder.glob("*.jsonl")) for row in _dense_rows(file)]


def run_profile_job(row: Row, profiles: Sequence[Path]) -> Row:
    """`row` on a machine with the rates that `meshwright profile` measured: the first file's, or the second's on several nodes."""
    file = profiles[row.run.cluster.emulate_nodes * row.run.cluster.nodes > 1]
    return replace(row, run=replace(row.run, cluster=replace(row.run.cluster, profile=str(file))))


@cache
def fitted_on() -> frozenset[tuple[str, str]]:
    """(file, name) of the rows that own.yaml was fitted on."""
    files = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))["fitted_on"]
    return frozenset((file, name) for file, names in files.items() for name in names)


def kernels_of(row: Row, own: dict[str, Any] | None = None) -> AbstractContextManager[object]:
    """A context in which the cost model has the kernels that `row` ran on: those of `own`, or of own.yaml, or the slower ones before."""
    own = own or yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    before, stack = own["before"], dict(own["stack"])
    slow = before["slow"] if row.kernels < 2 else 1.0
    measured = {chip: {**found, "slow": slow * found["slow"]} for chip, found in own["measured"].items()}
    if row.kernels < 2:
        stack |= {"lone_copies": 1.0, "ragged_vocab": before["ragged_vocab"]}
    if row.kernels < 3:
        stack["update"] += CLIPPED
    if row.kernels < 4:
        stack["packing"] = CHUNKED
    if row.kernels < 5:
        stack["product_sums"] = 1.0
    table = with_own(_published(), {**own, "stack": stack, "measured": measured})
    return mock.patch.object(constants_module, "table", lambda: table)


@cache
def _published() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def check(row: Row) -> Check:
    """`row` predicted with the present constants."""
    run = row.run
    with kernels_of(row):
        timeline = simulate_plan(run.model, run.train, row.plan, run.cluster)
        closed = plan_time(run.model, run.train, row.plan, run.cluster)
    assert closed is not None  # the simulator would have refused
    kinds = fullest(memory_of(run.model, run.train, row.plan, cpu=False))
    return Check(row, timeline, closed.seconds, float(sum(kinds.values()) - kinds["framework"]))


def summary(checks: Sequence[Check]) -> dict[str, float]:
    """Medians and worst of the absolute errors."""
    found = {}
    for name in ("error", "closed_error", "memory_error"):
        sizes = [abs(error) for error in (getattr(one, name) for one in checks) if error is not None] or [0.0]
        found |= {f"median_{name}": statistics.median(sizes), f"worst_{name}": max(sizes)}
    return found


def show(checks: Sequence[Check], *, parts: bool) -> None:
    """The table, on stdout."""
    print(f"{'':38s} measured predicted  error  closed form   GiB measured predicted  error   ({STACK}'s constants)")
    for one in checks:
        row, star = one.row, " " if one.fitted else "*"
        step = f"{row.seconds:8.3f} {one.timeline.step_seconds:9.3f} {one.error:+6.1%}"
        closed = f"{one.closed:8.3f} {one.closed_error:+5.0%}"
        memory = f"{'':12s} {one.memory_bytes / 2**30:9.1f}"
        if row.allocated_bytes is not None and one.memory_error is not None:
            memory = f"{row.allocated_bytes / 2**30:12.1f} {one.memory_bytes / 2**30:9.1f} {one.memory_error:+6.1%}"
        print(f"{row.label:36s} {star} {step} {closed} {memory}")
        if parts:
            print(f"    measured   {_listed(row.phases)}\n    predicted  {_listed(one.timeline.breakdown)}")
    for said, some in (
        ("in the fit", [c for c in checks if c.fitted]),
        ("not in the fit", [c for c in checks if not c.fitted]),
    ):
        if some:
            print(f"{len(some)} runs {said}: {_summed_up(some)}")
            reached, limit = summary(some)["median_error"], LIMITS[said]
            print(
                f"  {'pass' if reached <= limit else 'FAIL'}  {reached:.4f} ≤ {limit:<5g} median error of the step, {said}"
            )
    like = [one for one in checks if not one.fitted]
    held = statistics.mean(one.inside for one in like) if like else 1.0
    print(f"{held:.0%} of the runs that are not in the fit lie in the band that is printed for them (80% is asked)")


def _summed_up(checks: Sequence[Check]) -> str:
    found = summary(checks)
    return (
        f"step: median {found['median_error']:.1%}, worst {found['worst_error']:.1%}; closed form: median "
        f"{found['median_closed_error']:.1%}, worst {found['worst_closed_error']:.1%}; memory: median {found['median_memory_error']:.1%}, "
        f"worst {found['worst_memory_error']:.1%}"
    )


def _listed(parts: dict[str, float]) -> str:
    return "  ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items() if seconds >= 0.0005)


def _rows_of(file: Path) -> Iterator[Row]:
    kept = json.loads(file.read_text(encoding="utf-8"))
    layouts = kept.get("layouts", {})
    for name, found in layouts.items():
        if "plan" not in found or "slowed" in found or _exchanged_gradients(found):
            continue
        yield Row(
            file=file.name,
            name=name,
            run=_run_of(_run_file(kept), found["words"], kept["environment"]),
            plan=_plan_of(found),
            seconds=found["step_seconds"],
            steps=tuple(found.get("step_seconds_all", [])[WARM_UP:]) or (found["step_seconds"],),
            deviation=_deviation(found),
            allocated_bytes=None if kept.get("older_memory") else found["memory_allocated_peak_gib"] * 2**30,
            phases={part: found["phases"].get(part, 0.0) for part in MEASURED_PARTS},
            kernels=kept.get("kernels", KERNELS),
        )


def _dense_rows(file: Path) -> Iterator[Row]:
    """This program's runs of one file of benchmarks/dense.py; where a row ran in several passes, each."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    sessions = {line["date"]: line for line in lines if line["kind"] == "session"}
    for found in lines:
        if (
            found["kind"] != "run"
            or found["side"] != "meshwright"
            or "plan" not in found
            or _exchanged_gradients(found)
        ):
            continue
        session = sessions[found["session"]]
        asked = yaml.safe_load((HERE / "dense" / f"{session['table']}.yaml").read_text(encoding="utf-8"))
        run = _run_of(HERE / asked["run"], found["words"], session["environment"])
        plan = _plan_of(found)
        tokens = run.train.global_batch * run.train.seq_len / plan.ranks
        steps = [tokens / rate for rate in found["rates"]]
        yield Row(
            file=file.name, name=found["row"] + (f"-{found['pass']}" if found["pass"] > 1 else ""), run=run, plan=plan,
            seconds=found["step_seconds"], steps=tuple(steps), deviation=_deviation({"step_seconds_all": steps}),
            allocated_bytes=found["memory_allocated_peak_gib"] * 2**30,
            phases={part: found["phases"].get(part, 0.0) for part in MEASURED_PARTS}, kernels=session.get("kernels", KERNELS),
        )  # fmt: skip


def _exchanged_gradients(record: dict[str, Any]) -> bool:
    """Whether a run summed its gradients by the exchange, which was removed: no prediction exists for it."""
    return record["plan"].get("reduce_engine") == "exchange"


def _plan_of(record: dict[str, Any]) -> Plan:
    """The plan of a kept run, without the key that plans no longer have."""
    return from_plain(Plan, {key: value for key, value in record["plan"].items() if key != "reduce_engine"})


def _deviation(found: dict[str, Any]) -> float:
    """From the second half of the steps, which the first ones of compiling and warming up do not reach; 1% where they were not kept."""
    steps = found.get("step_seconds_all", [])
    late = steps[len(steps) // 2 :]
    return statistics.stdev(late) / statistics.mean(late) if len(late) > 2 else 0.01


def _run_file(kept: dict[str, Any]) -> Path:
    """The run file that a kept file's layouts were started from: named in it, or in the file of layouts of its name."""
    named = kept.get("run")
    if named is None:
        layouts = HERE / "layouts" / f"{kept['benchmark']}.yaml"
        named = yaml.safe_load(layouts.read_text(encoding="utf-8"))["run"]
    return HERE / named


def _run_of(file: Path, words: Iterable[str], environment: dict[str, Any]) -> RunSpec:
    """The run as the command line made it; `cluster: auto` finds the devices that it ran on."""
    chip = environment["device"].split()[-1]
    found = {"gpu": chip, "nodes": 1, "gpus_per_node": environment["device_count"]}
    return load_run(file, list(words), detect=lambda: found)


if __name__ == "__main__":
    main()
