"""Predicts this program's stored runs ("kept runs") with the present constants and compares them with the measurements.

    python benchmarks/accuracy.py                       # every kept run of benchmarks/results
    python benchmarks/accuracy.py --only '*fsdp*' --parts
    python benchmarks/accuracy.py --mixtures            # every measured MoE model, also single lines of `meshwright
    train` python benchmarks/accuracy.py --profile benchmarks/data/h200x2-profile.json
    benchmarks/data/h200x2-tcp-profile.json python benchmarks/accuracy.py --json

A kept run is a layout that benchmarks/layouts.py ran, this program's side of a comparison by benchmarks/dense.py or offload_peers.py, or a
run of `meshwright train` whose file has its plan. Its RunSpec is rebuilt from its overrides and run file, as `meshwright train` does; its
plan is the one that ran. Runs on older, slower kernels are priced with
those (own.yaml's `before`). Step seconds are predicted twice: by the simulator, with which the planner decides, and by the closed form,
with which its search compares layouts. Memory is compared with the most that torch had allocated, without the framework's share. A star
marks runs that the constants were not fitted on. Torch is not needed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
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
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import memory_of, simulate_plan
from meshwright.simulator.timeline import Timeline
from meshwright.spec.fields import from_plain
from meshwright.spec.plan import Plan
from meshwright.spec.plan_keys import PlanKeys, plan_of
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import shard_size
from meshwright.workload.plan_bytes import fullest

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
EARLIER_NAMES = (
    (r'\b(gather|tensor)_engine("?[:=] ?"?)kernel\b', r"\1_transport\2nccl"),
    (r'\b(gather|tensor)_engine("?[:=] ?"?)copy\b', r"\1_transport\2copy_engine"),
    (
        r'"window"(: \d+,\s*)"owners": "even"(,\s*)"owners_every"',
        r'"load_window"\1"placement": "even"\2"placement_every"',
    ),
)
"""Patterns of names that a plan's keys had when runs were kept, and their names now."""
MEASURED_PARTS = ("forward", "backward", "reduce", "optim", "host")


CLIPPING_BYTES = 9.6
"""Bytes per parameter, at a copy's rate, of the separate pass over gradients for clipping: 7.28 ms for 3.2e9 gradients on an H200."""
CHUNKED_PACKING = 0.44
"""`packing` of torch's kernel: 26.1 to 26.5 ms for 8.03e9 gradients on 4 H200s, in bf16 and fp8 steps (2026-11-22-four-gpus-H200.jsonl)."""
EAGER_LOSS_BYTES = 12.0
"""`logit_bytes` of the compiled loss before its kernel: 1.57 ms for 4,096 tokens of 128,256 logits, of the kernel 0.78."""
LIMITS = {"in the fit": 0.01, "in the fit of MoE models": 0.02, "not in the fit": 0.02}
"""Largest median error of the step."""
MOE_LIMIT = 0.07
"""Largest error of the step of an MoE layer."""
NOT_MODELLED = {
    "experts-4xH200 planned": "98.5% of the device was reserved, and the allocator frees and reserves again",
    "mixtures deepseek-v2-lite-6, two H100, tensor 2": "the device waits for the host",
    "mixtures deepseek-v2-lite-6, two H200, tensor 2": "the device waits for the host, kernels take 119 ms",
}
"""Why MoE models are further from their predictions than `MOE_LIMIT`."""
WARM_UP = 4
"""First steps that are left out of a run's range."""


@dataclass(frozen=True)
class RecordedRun:
    """A kept run: its RunSpec, its plan and its measurements."""

    file: str
    name: str
    run: RunSpec
    plan: Plan
    seconds: float
    """Median of its steps."""
    steps: tuple[float, ...]
    """Seconds of each step, without the first few."""
    deviation: float
    """Relative standard deviation of step seconds."""
    allocated_bytes: float | None
    """Most bytes that torch had allocated on a rank; None where its engine needed more than today's."""
    phases: dict[str, float]
    """Seconds of a step's phases, on the device of rank 0."""
    kernels: int
    """Version of the kernels that it ran on (its file's `kernels`, see `sides.KERNELS`)."""

    @property
    def label(self) -> str:
        return f"{Path(self.file).stem[11:]} {self.name}"


@dataclass(frozen=True)
class Check:
    """A kept run with its predictions; errors are predicted / measured - 1."""

    recorded_run: RecordedRun
    timeline: Timeline
    closed: float
    memory_bytes: float

    @property
    def step_seconds(self) -> float:
        """Predicted by the simulator."""
        return self.timeline.step_seconds

    @property
    def error(self) -> float:
        return self.step_seconds / self.recorded_run.seconds - 1

    @property
    def closed_error(self) -> float:
        return self.closed / self.recorded_run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        allocated = self.recorded_run.allocated_bytes
        return None if allocated is None else self.memory_bytes / allocated - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time is inside the printed band."""
        low, high = band(self.step_seconds, self.recorded_run.run.cluster, self.recorded_run.plan)
        return low <= self.recorded_run.seconds <= high

    @property
    def fit(self) -> str:
        """Fit that the run was part of, a key of `LIMITS`."""
        key = self.recorded_run.file, self.recorded_run.name
        if key in fitted_on("fitted_on"):
            return "in the fit"
        return "in the fit of MoE models" if key in fitted_on("mixtures_fitted_on") else "not in the fit"

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted on the run."""
        return self.fit != "not in the fit"

    def as_plain(self) -> dict[str, Any]:
        return {
            "file": self.recorded_run.file,
            "name": self.recorded_run.name,
            "fitted": self.fitted,
            "measured_seconds": self.recorded_run.seconds,
            "predicted_seconds": self.step_seconds,
            "closed_form_seconds": self.closed,
            "error": self.error,
            "measured_phases": self.recorded_run.phases,
            "predicted_parts": self.timeline.breakdown,
            "allocated_bytes": self.recorded_run.allocated_bytes,
            "predicted_bytes": self.memory_bytes,
            "memory_error": self.memory_error,
        }


def main() -> None:
    options = arguments()
    known = moe_runs() if options.mixtures else recorded_runs()
    runs = [recorded_run for recorded_run in known if fnmatch.fnmatchcase(recorded_run.name, options.only)]
    checks = [
        check(with_profile(recorded_run, options.profile) if options.profile else recorded_run) for recorded_run in runs
    ]
    if options.json:
        print(
            json.dumps(
                {"constants": STACK, "rows": [result.as_plain() for result in checks], **summary(checks)}, indent=1
            )
        )
    else:
        show(checks, parts=options.parts)
    if options.mixtures and not options.json:
        far = sorted(result.recorded_run.label for result in checks if abs(result.error) > MOE_LIMIT)
        print(f"{len(checks) - len(far)} of {len(checks)} within {MOE_LIMIT:.0%}")
        for label in far:
            print(f"  not {label}: {NOT_MODELLED.get(label, 'the reason is unknown')}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of the names of the runs to predict, with * and ?")
    parser.add_argument(
        "--mixtures", action="store_true", help="predict the runs of MoE models, and name those far off"
    )
    parser.add_argument("--parts", action="store_true", help="print the parts of each step, measured and predicted")
    parser.add_argument(
        "--profile",
        type=Path,
        nargs=2,
        metavar=("NODE", "NODES"),
        help="price by two profiles, not by the fitted rates of the device: runs inside a node by the first, over several by the second",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def recorded_runs(folder: Path = RESULTS) -> list[RecordedRun]:
    """All kept runs by file, in the order they ran: of benchmarks/layouts.py and of single calls, and this program's side of comparisons.

    Runs with a device slowed on purpose are left out, and those that updated an offloaded optimizer after the backward.
    """
    files = sorted(folder.glob("*.json"))
    layouts = [recorded_run for file in files for recorded_run in (*_layout_runs(file), *_planned_runs(file))]
    return layouts + [recorded_run for file in sorted(folder.glob("*.jsonl")) for recorded_run in _dense_runs(file)]


def moe_runs(folder: Path = RESULTS) -> list[RecordedRun]:
    """The kept runs of MoE models, and `single_moe_runs`."""
    return [recorded_run for recorded_run in recorded_runs(folder) if recorded_run.run.model.experts] + single_moe_runs(
        folder
    )


def single_moe_runs(folder: Path = RESULTS) -> list[RecordedRun]:
    """Runs of MoE models by single calls of `meshwright train`, with the plans that the planner makes of their words."""
    lines = [recorded_run for file in sorted(folder.glob("*mixtures.json")) for recorded_run in _train_runs(file)]
    return lines + [
        recorded_run for file in sorted(folder.glob("*paired-*.json")) for recorded_run in _schedule_runs(file)
    ]


def with_profile(recorded_run: RecordedRun, profiles: Sequence[Path]) -> RecordedRun:
    """The run with rates from a profile: the first file's, or the second's on several nodes."""
    file = profiles[recorded_run.run.cluster.emulate_nodes * recorded_run.run.cluster.nodes > 1]
    return replace(
        recorded_run, run=replace(recorded_run.run, cluster=replace(recorded_run.run.cluster, profile=str(file)))
    )


@cache
def fitted_on(part: str) -> frozenset[tuple[str, str]]:
    """(file, name) of the runs that own.yaml names under `part`."""
    files = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))[part]
    return frozenset((file, name) for file, names in files.items() for name in names)


def kernels_of(
    recorded_run: RecordedRun, own_constants: dict[str, Any] | None = None
) -> AbstractContextManager[object]:
    """A context in which the cost model prices the kernels that the run used: today's, from own.yaml, or slower ones."""
    own_constants = own_constants or yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    first_kernels, stack = own_constants["before"], dict(own_constants["stack"])
    slow = first_kernels["slow"] if recorded_run.kernels < 2 else 1.0
    measured = {chip: {**rates, "slow": slow * rates["slow"]} for chip, rates in own_constants["measured"].items()}
    if recorded_run.kernels < 2:
        stack |= {"lone_copies": 1.0, "ragged_vocab": first_kernels["ragged_vocab"], "logit_bytes": EAGER_LOSS_BYTES}
    if recorded_run.kernels < 3:
        stack["update"] += CLIPPING_BYTES
    if recorded_run.kernels < 4:
        stack["packing"] = CHUNKED_PACKING
    if recorded_run.kernels < 5:
        stack["matmul_sums"] = 1.0
    if recorded_run.kernels < 6:
        stack["moe_passes"] = first_kernels["torch_moe_passes"]
    table = with_own(_published(), {**own_constants, "stack": stack, "measured": measured})
    return mock.patch.object(constants_module, "table", lambda: table)


@cache
def _published() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def check(recorded_run: RecordedRun) -> Check:
    """The predictions for the run with the present constants."""
    run = recorded_run.run
    with kernels_of(recorded_run):
        timeline = simulate_plan(run.model, run.train, recorded_run.plan, run.cluster)
        closed = plan_time(run.model, run.train, recorded_run.plan, run.cluster)
    assert closed is not None  # the simulator would have refused
    by_category = fullest(memory_of(run.model, run.train, recorded_run.plan, cpu=False))
    memory_bytes = float(sum(by_category.values()) - by_category["framework"])
    return Check(recorded_run, timeline, closed.seconds, memory_bytes)


def summary(checks: Sequence[Check]) -> dict[str, float]:
    """Median and largest absolute errors."""
    figures = {}
    for name in ("error", "closed_error", "memory_error"):
        sizes = [abs(error) for error in (getattr(result, name) for result in checks) if error is not None] or [0.0]
        figures |= {f"median_{name}": statistics.median(sizes), f"worst_{name}": max(sizes)}
    return figures


def show(checks: Sequence[Check], *, parts: bool) -> None:
    """Print the table."""
    print(f"{'':38s} measured predicted  error  closed form   GiB measured predicted  error   ({STACK}'s constants)")
    for result in checks:
        recorded_run, star = result.recorded_run, " " if result.fitted else "*"
        step = f"{recorded_run.seconds:8.3f} {result.step_seconds:9.3f} {result.error:+6.1%}"
        closed = f"{result.closed:8.3f} {result.closed_error:+5.0%}"
        memory = f"{'':12s} {result.memory_bytes / 2**30:9.1f}"
        if recorded_run.allocated_bytes is not None and result.memory_error is not None:
            memory = f"{recorded_run.allocated_bytes / 2**30:12.1f} {result.memory_bytes / 2**30:9.1f} {result.memory_error:+6.1%}"
        print(f"{recorded_run.label:36s} {star} {step} {closed} {memory}")
        if parts:
            print(
                f"    measured   {_parts_text(recorded_run.phases)}\n    predicted  {_parts_text(result.timeline.breakdown)}"
            )
    for group_name in LIMITS:
        if group := [check_result for check_result in checks if check_result.fit == group_name]:
            print(f"{len(group)} runs {group_name}: {_summary_text(group)}")
            median_error, limit = summary(group)["median_error"], LIMITS[group_name]
            print(
                f"  {'pass' if median_error <= limit else 'FAIL'}  {median_error:.4f} ≤ {limit:<5g} median error of the step, {group_name}"
            )
    not_fitted = [result for result in checks if not result.fitted]
    coverage = statistics.mean(result.inside for result in not_fitted) if not_fitted else 1.0
    print(
        f"{coverage:.0%} of the runs that are not in the fit lie in the band that is printed for them (expected: 80%)"
    )


def _summary_text(checks: Sequence[Check]) -> str:
    figures = summary(checks)
    return (
        f"step: median {figures['median_error']:.1%}, worst {figures['worst_error']:.1%}; closed form: median "
        f"{figures['median_closed_error']:.1%}, worst {figures['worst_closed_error']:.1%}; memory: "
        f"median {figures['median_memory_error']:.1%}, worst {figures['worst_memory_error']:.1%}"
    )


def _parts_text(seconds_by_part: dict[str, float]) -> str:
    return "  ".join(f"{name} {seconds:.3f}" for name, seconds in seconds_by_part.items() if seconds >= 0.0005)


def _text_of(file: Path) -> str:
    """The text of a file of results, with the names that keys of a plan have now."""
    text = file.read_text(encoding="utf-8")
    for earlier, now in EARLIER_NAMES:
        text = re.sub(earlier, now, text)
    return text


def _layout_runs(file: Path) -> Iterator[RecordedRun]:
    results = json.loads(_text_of(file))
    layouts = results.get("layouts", {})
    for name, entry in layouts.items():
        if "plan" not in entry or "slowed" in entry or "former_update" in entry or _exchanged_gradients(entry):
            continue
        plan = _plan_of(entry)
        yield RecordedRun(
            file=file.name,
            name=name,
            run=_run_of(_run_file(results), entry["words"], results["environment"]),
            plan=plan,
            seconds=entry["step_seconds"],
            steps=tuple(entry.get("step_seconds_all", [])[WARM_UP:]) or (entry["step_seconds"],),
            deviation=_step_deviation(entry),
            allocated_bytes=None if _needed_more(results, plan) else entry["memory_allocated_peak_gib"] * 2**30,
            phases={part: entry["phases"].get(part, 0.0) for part in MEASURED_PARTS},
            kernels=results.get("kernels", KERNELS),
        )


def _needed_more(results: dict[str, Any], plan: Plan) -> bool:
    """Whether the run's engine needed more memory than today's: by its file, or as one rank's gradients went through FSDP2's buffers."""
    before_own_sums = results.get("kernels", KERNELS) == 1 and shard_size(plan) == 1 and plan.batch.accumulate > 1
    return bool(results.get("older_memory")) or before_own_sums


def _planned_runs(file: Path) -> Iterator[RecordedRun]:
    """Runs of `meshwright train`, and this program's runs of benchmarks/offload_peers.py, whose files have their plans."""
    results = json.loads(_text_of(file))
    if results.get("benchmark") not in ("train", "offload_peers"):
        return
    common = results.get("words") or [word for word in results["command"].split() if "=" in word]
    for entry in (*results.get("rows", ()), *results.get("results", ())):
        if "plan" not in entry:
            continue
        words = [*common, *entry.get("words", ()), f"plan.moments={entry['plan']['precision']['moments']}"]
        peak = entry.get("memory_allocated_peak_gb")
        yield RecordedRun(
            file=file.name,
            name=entry.get("row") or f"peers, {entry['method']}",
            run=_run_of(HERE / "llama3-8b.yaml", words, results["environment"] | {"device_count": 1}),
            plan=_plan_of(entry),
            seconds=entry["step_seconds"],
            steps=tuple(entry.get("step_seconds_all", [])[2:]) or (entry["step_seconds"],),
            deviation=_step_deviation(entry),
            allocated_bytes=None if peak is None else peak * 1e9,
            phases=entry.get("phases", {}),
            kernels=results.get("kernels", KERNELS),
        )


def _dense_runs(file: Path) -> Iterator[RecordedRun]:
    """This program's runs in a file of benchmarks/dense.py; of several passes, each."""
    lines = [json.loads(line) for line in _text_of(file).splitlines()]
    sessions = {line["date"]: line for line in lines if line["kind"] == "session"}
    for line in lines:
        if line["kind"] != "run" or line["side"] != "meshwright" or "plan" not in line or _exchanged_gradients(line):
            continue
        session = sessions[line["session"]]
        table = yaml.safe_load((HERE / "dense" / f"{session['table']}.yaml").read_text(encoding="utf-8"))
        run = _run_of(HERE / table["run"], line["words"], session["environment"])
        plan = _plan_of(line)
        tokens = run.train.global_batch * run.train.seq_len / plan.ranks
        steps = [tokens / rate for rate in line["rates"]]
        yield RecordedRun(
            file=file.name,
            name=line["row"] + (f"-{line['pass']}" if line["pass"] > 1 else ""),
            run=run,
            plan=plan,
            seconds=line["step_seconds"],
            steps=tuple(steps),
            deviation=_step_deviation({"step_seconds_all": steps}),
            allocated_bytes=line["memory_allocated_peak_gib"] * 2**30,
            phases={part: line["phases"].get(part, 0.0) for part in MEASURED_PARTS},
            kernels=session.get("kernels", KERNELS),
        )


def _train_runs(file: Path) -> Iterator[RecordedRun]:
    """The lines of a file of single runs that have a step time, with the plans that the planner makes of their words."""
    for line in json.loads(_text_of(file))["lines"]:
        if "step_ms" not in line:
            continue
        values = dict(word.split("=") for word in line["words"])
        environment = {"device": values["cluster.gpu"], "device_count": int(values["cluster.gpus_per_node"])}
        run = _run_of(HERE / "llama3-8b.yaml", line["words"], environment)
        seconds = line["step_ms"] / 1e3
        yield RecordedRun(
            file=file.name,
            name=f"{line['model']}-{line['layers']}, {line['device']}{', ' * ('plan' in line)}{line.get('plan', '')}",
            run=run,
            plan=search(run).best.plan,
            seconds=seconds,
            steps=(seconds,),
            deviation=_step_deviation({}),
            allocated_bytes=line["memory_gb"] * 1e9,
            phases={},
            kernels=line.get("kernels", KERNELS),
        )


def _schedule_runs(file: Path) -> Iterator[RecordedRun]:
    """The runs of a file of one layout under several schedules; its engine held other tensors than today's."""
    results = json.loads(_text_of(file))
    for name, entry in results["schedules"].items():
        words = [*results["words"], f"plan.schedule={name}"]
        run, seconds = _run_of(HERE / "llama3-8b.yaml", words, results["environment"]), entry["step_seconds"]
        yield RecordedRun(
            file=file.name,
            name=name,
            run=run,
            plan=search(run).best.plan,
            seconds=seconds,
            steps=(seconds,),
            deviation=_step_deviation({}),
            allocated_bytes=None,
            phases={},
            kernels=results.get("kernels", KERNELS),
        )


def _exchanged_gradients(entry: dict[str, Any]) -> bool:
    """Whether a run summed its gradients by the exchange, which was removed: no prediction exists for it."""
    return entry["plan"].get("reduce_engine") == "exchange"


def _plan_of(entry: dict[str, Any]) -> Plan:
    """The plan of a kept run: the keys of its plan file, or of earlier runs the fields of a Plan, one of which is no longer."""
    if "mesh" not in entry["plan"]:
        return plan_of(from_plain(PlanKeys, entry["plan"]))
    return from_plain(Plan, {key: value for key, value in entry["plan"].items() if key != "reduce_engine"})


def _step_deviation(entry: dict[str, Any]) -> float:
    """Relative standard deviation of the second half of the steps, after warm-up; 1% where they were not kept."""
    steps = entry.get("step_seconds_all", [])
    second_half = steps[len(steps) // 2 :]
    return statistics.stdev(second_half) / statistics.mean(second_half) if len(second_half) > 2 else 0.01


def _run_file(results: dict[str, Any]) -> Path:
    """The run file of a results file: named in it, or in the file of layouts with its name."""
    run_file = results.get("run")
    if run_file is None:
        layouts = HERE / "layouts" / f"{results['benchmark']}.yaml"
        run_file = yaml.safe_load(layouts.read_text(encoding="utf-8"))["run"]
    return HERE / run_file


def _run_of(file: Path, overrides: Iterable[str], environment: dict[str, Any]) -> RunSpec:
    """The RunSpec from its run file and overrides; `cluster: auto` is resolved to the devices that it ran on."""
    chip = environment["device"].split()[-1]
    cluster = {"gpu": chip, "nodes": 1, "gpus_per_node": environment["device_count"]}
    # A key of earlier releases: how much a validation read changes no step.
    words = [word for word in overrides if not word.startswith("train.validate_batches=")]
    return load_run(file, words, detect=lambda: cluster)


if __name__ == "__main__":
    main()
