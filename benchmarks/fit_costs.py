"""Fits costs/constants.yaml to published runs: `python benchmarks/fit_costs.py` (a few minutes on one core).

Minimises the absolute log error plus a prior that penalises the distance of each constant from a physical guess, so a stack with few runs
stays near the guess. Solved by re-weighted, damped Gauss-Newton steps with numerical derivatives; NumPy only.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import yaml

from meshwright.calibration.published_rows import Case, failed, measured_seconds, read_record
from meshwright.calibration.row_predictions import memory
from meshwright.costs.collective_costs import MAX_LINE_SHARE
from meshwright.costs.compute import MAX_PEAK_SHARE
from meshwright.costs.constants import FILE, GENERATION, NAMES, Constants, at_release, constant_arrays
from meshwright.costs.device_rates import Machine
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.costs.step import step_cost
from meshwright.workload.arrays import side_by_side
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape

RUNS = tuple(sorted((Path(__file__).parent / "data").glob("*-runs.csv")))
"""Tables of runs with the columns of published-runs.csv. Runs of this program are fitted by fit_own.py."""
PRIORS: dict[str, tuple[float, float]] = {
    "gemm": (0.75, 0.1), "gemm_low": (0.8, 0.15), "gemm_block": (0.75, 0.15), "gemm_fp4": (0.6, 0.2),
    "attention": (0.5, 0.25), "hbm": (0.8, 0.1), "link": (0.7, 0.2), "narrow": (150.0, 0.5), "tail_us": (2.0, 0.5),
    "slow": (1.0, 0.25), "yearly": (1.05, 0.1), "passes": (60.0, 0.35), "scores": (0.0, 0.5), "quantise": (4.0, 0.5),
    "host_us": (600.0, 0.7), "host_tensor_us": (200.0, 0.8), "host_micro_us": (500.0, 0.8),
    "ring_us": (0.0, 0.3), "stall_s": (0.0, 0.1), "stall_nodes": (16.0, 0.3), "crowd": (0.0, 0.3),
    "tensor_exposed": (0.8, 0.4), "expert_exposed": (0.8, 0.4), "hide": (0.7, 0.4), "overlap_tax": (0.15, 0.5), "net": (0.6, 0.5),
    "net_us": (10.0, 0.7), "link_us": (2.0, 0.7), "start_us": (15.0, 0.4), "messages": (0.3, 0.8),
    "reduce_bytes": (4.0, 0.01), "pipe_us": (30.0, 0.8), "pipe_exposed": (0.5, 0.6), "bubble": (1.0, 0.2),
    "step_ms": (10.0, 0.8), "step_layer_us": (100.0, 0.8), "update": (30.0, 0.3), "jitter": (0.002, 0.6),
    "sync_ms": (1.0, 0.8), "moe_us": (50.0, 0.7), "moe_passes": (40.0, 0.7), "moe_yearly": (1.1, 0.2),
}  # fmt: skip
"""Constant → (guess, standard deviation of its logarithm)."""
LIMITS = {
    "gemm": MAX_PEAK_SHARE, "attention": MAX_PEAK_SHARE, "hbm": 0.95, "link": MAX_LINE_SHARE, "net": MAX_LINE_SHARE, "tensor_exposed": 1.0,
    "expert_exposed": 1.0, "hide": 1.0, "overlap_tax": 1.0, "pipe_exposed": 1.0, "moe_passes": 100.0,
}  # fmt: skip
"""Upper limit of each constant by physics: rates below the line rate, communication exposed at most once, overlap that takes at most all of
compute, and for routing the bytes that unfused masks, sorts and casts move."""
STACK_GUESSES: dict[str, dict[str, float]] = {
    "nanotron": {"ring_us": 2700.0, "stall_s": 0.6, "host_us": 4000.0, "net_us": 400.0, "crowd": 2.0},
    "bridge": {"reduce_bytes": 2.0},
    "nemo": {"reduce_bytes": 2.0},
    "megatron_tuned": {"reduce_bytes": 2.0},
    "megatron_deepspeed": {"scores": 12.0, "passes": 100.0},
    "megatron_lm": {"scores": 10.0, "passes": 90.0},
}
"""Guesses that differ by stack; stacks of 2021 keep attention scores in memory."""


MEMORY_PRIORS: dict[str, tuple[float, float]] = {
    "held": (6.0, 0.3), "owned": (12.0, 0.2), "sharding": (0.0, 0.7), "wide": (0.5, 0.5), "hidden": (0.0, 0.3), "narrow": (1.0, 0.3),
    "live": (0.0, 0.5), "logits": (8.0, 0.5),
    "gathered": (2.0, 0.5), "slack": (0.05, 0.7), "base": (1.0, 0.7), "base_rank": (0.2, 0.7),
}  # fmt: skip
MEMORY_GUESSES: dict[str, dict[str, float]] = {"nanotron": {"held": 7.0, "wide": 1.5, "hidden": 8.0, "live": 2.5}}
"""nanotron is eager: it also keeps inputs of norms, residuals, and rotated queries and keys."""
STRENGTH = 30.0
"""Weight of one log unit of error of a source with one run, relative to one squared standard deviation of a prior."""
Evaluate = Callable[[dict[str, np.ndarray]], np.ndarray]


@dataclass
class RunArrays:
    """Runs to fit on, as arrays."""

    names: list[str]
    pairs: list[tuple[str, str]]
    shape: Shape
    machine: Machine
    layout: Layouts
    release: np.ndarray
    filled: np.ndarray
    measured: np.ndarray
    weight: np.ndarray


def read_runs(paths: Sequence[Path] = RUNS) -> list[dict[str, str]]:
    records: list[dict[str, str]] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            records += csv.DictReader(file)
    return records


def usable(runs: list[dict[str, str]]) -> list[tuple[int, dict[str, str], Case, float]]:
    """(index, columns, case, seconds) of every run that finished and can be priced."""
    usable_records = []
    for index, record in enumerate(runs):
        case, seconds = read_record(record).case, measured_seconds(record)
        if case is not None and seconds and not failed(record):
            usable_records.append((index, record, case, seconds))
    return usable_records


def with_memory(table: list[dict[str, str]]) -> list[tuple[dict[str, str], Case]]:
    """Runs with a measured memory that can be priced."""
    readings = [(record, read_record(record).case) for record in table if record["mem_gb"]]
    return [(record, case) for record, case in readings if case is not None]


def arrays_of(usable_records: list[tuple[int, dict[str, str], Case, float]]) -> RunArrays:
    sources = Counter(record["source"] for _, record, _, _ in usable_records)
    cases = [case for _, _, case, _ in usable_records]
    weight = np.array([_weight(record, sources) for _, record, _, _ in usable_records])
    return RunArrays(
        [record["source"] for _, record, _, _ in usable_records],
        [(case.generation, case.stack) for case in cases],
        side_by_side([case.shape for case in cases]),
        side_by_side([case.machine for case in cases]),
        side_by_side([case.layout for case in cases]),
        np.array([case.release for case in cases]),
        share_filled(cases),
        np.array([seconds for *_, seconds in usable_records]),
        weight,
    )


def share_filled(cases: list[Case]) -> np.ndarray:
    """Predicted share of a device's memory that each case needs, under the memory constants of all runs."""
    sizes = sum(memory(cases, {"memory": memory_constants()}, as_printed=False).values())
    return sizes / np.array([case.machine.memory for case in cases])


@cache
def memory_constants() -> dict[str, Any]:
    return fit_memory(with_memory(read_runs()))


def _weight(record: dict[str, str], sources: Counter[str]) -> float:
    """Weight of a run: large sources count less than in proportion to their size, and very noisy runs count little."""
    noisy = 0.25 if "playbook" in record["source"] and float(record["gpus"]) >= 128 else 1.0
    return noisy * sources[record["source"]] ** -0.35


@dataclass
class Knob:
    """A constant to fit: its guess in every column of the table, and the column that each run reads."""

    section: str
    name: str
    columns: list[str]
    guess: np.ndarray
    index: np.ndarray
    spread: float


def predict(arrays: RunArrays, table: dict[str, Any]) -> np.ndarray:
    """Seconds of every run under a table of constants."""
    return step_cost(
        arrays.shape,
        arrays.machine,
        arrays.layout,
        at_release(constant_arrays(arrays.pairs, table), arrays.release),
        arrays.filled,
    ).seconds


def fit_time(arrays: RunArrays, *, rounds: int = 40, least: int = 20) -> dict[str, Any]:
    """Constants by generation and stack that predict the runs best; those with fewer than `least` runs use the pooled default."""
    columns = [_columns([pair[side] for pair in arrays.pairs], least) for side in (0, 1)]
    knobs = []
    for name in (name for name in NAMES if name in PRIORS):
        section = "generations" if name in GENERATION else "stacks"
        names, index = columns[section == "stacks"]
        guesses = [STACK_GUESSES.get(column, {}).get(name, PRIORS[name][0]) for column in names]
        knobs.append(Knob(section, name, names, np.array(guesses), index, PRIORS[name][1]))

    def evaluate(values: dict[str, np.ndarray]) -> np.ndarray:
        return np.log(
            step_cost(
                arrays.shape,
                arrays.machine,
                arrays.layout,
                at_release(Constants(**values), arrays.release),
                arrays.filled,
            ).seconds
        )

    return solve(knobs, evaluate, np.log(arrays.measured), arrays.weight, rounds)


def fit_memory(
    usable_records: list[tuple[dict[str, str], Case]], *, rounds: int = 40, least: int = 15
) -> dict[str, Any]:
    """Memory constants per stack that predict the measured memory of the runs best."""
    names, index = _columns([case.stack for _, case in usable_records], least)
    shape, layout = (side_by_side([getattr(case, part) for _, case in usable_records]) for part in ("shape", "layout"))
    first = np.array([float(case.first_stage) for _, case in usable_records])
    counts = Counter(record["source"] for record, _ in usable_records)
    weight = np.array([counts[record["source"]] ** -0.35 for record, _ in usable_records])
    measured = np.log([float(record["mem_gb"]) for record, _ in usable_records])
    knobs = [
        Knob(
            "memory", name, names, np.array([MEMORY_GUESSES.get(n, {}).get(name, guess) for n in names]), index, spread
        )
        for name, (guess, spread) in MEMORY_PRIORS.items()
    ]

    def evaluate(values: dict[str, np.ndarray]) -> np.ndarray:
        return np.log(sum(footprint(shape, layout, MemoryConstants(**values), first).values()) / 2**30)

    return solve(knobs, evaluate, measured, weight, rounds)["memory"]


LAYOUT = ("model", "gpus", "tp", "pp", "dp", "micro_batch", "zero/fsdp")


def cross_validated_memory_gib(usable_records: list[tuple[dict[str, str], Case]]) -> np.ndarray:
    """GiB of every run as its software prints it, under constants fitted without its fifth.

    Repeats of a layout are in the same fifth, by the hash of the layout.
    """
    fold_of = np.array([crc32("/".join(record[key] for key in LAYOUT).encode()) % 5 for record, _ in usable_records])
    predicted_gib = np.zeros(len(usable_records))
    for fold in range(5):
        table = fit_memory([entry for entry, at in zip(usable_records, fold_of, strict=True) if at != fold])
        cases = [case for (_, case), at in zip(usable_records, fold_of, strict=True) if at == fold]
        predicted_gib[fold_of == fold] = sum(memory(cases, {"memory": table}, as_printed=True).values()) / 2**30
    return predicted_gib


def _columns(labels: list[str], least: int) -> tuple[list[str], np.ndarray]:
    """The columns of a table, default first, and the index of the column that each run reads."""
    counts = Counter(labels)
    names = ["default", *sorted(label for label, count in counts.items() if count >= least and label != "default")]
    column_index = {name: index for index, name in enumerate(names)}
    return names, np.array([column_index.get(label, 0) for label in labels])


def solve(
    knobs: list[Knob],
    evaluate: Evaluate,
    target: np.ndarray,
    weight: np.ndarray,
    rounds: int,
) -> dict[str, Any]:
    """The table with the least sum of weighted absolute error and distance from the guesses.

    A run reads one column of each constant, so one perturbed evaluation per constant gives the derivatives of all its columns.
    """
    sizes = [len(knob.columns) for knob in knobs]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    guess = np.concatenate([np.log(np.maximum(knob.guess, 1e-9)) for knob in knobs])
    free = np.concatenate([knob.guess > 0 for knob in knobs])
    stiffness = np.concatenate([np.full(size, knob.spread**-2.0) for knob, size in zip(knobs, sizes, strict=True)])
    highest = np.log(
        np.concatenate([np.full(size, LIMITS.get(knob.name, np.inf)) for knob, size in zip(knobs, sizes, strict=True)])
    )
    x = np.minimum(guess, highest)

    def values(x: np.ndarray) -> dict[str, np.ndarray]:
        each = np.where(free, np.exp(x), 0.0)
        return {
            knob.name: each[at : at + size][knob.index] for knob, at, size in zip(knobs, offsets, sizes, strict=False)
        }

    def loss(r: np.ndarray, x: np.ndarray) -> float:
        return float(STRENGTH * np.sum(weight * np.abs(r)) + 0.5 * np.sum(stiffness * (x - guess) ** 2))

    damping, r = 1.0, evaluate(values(x)) - target
    best = loss(r, x)
    for _ in range(rounds):
        slopes = np.zeros((len(r), len(x)))
        now = values(x)
        for knob, at in zip(knobs, offsets, strict=False):
            moved = {**now, knob.name: now[knob.name] * np.exp(1e-3)}
            slopes[np.arange(len(r)), at + knob.index] = (evaluate(moved) - target - r) / 1e-3
        slopes[:, ~free] = 0.0
        w = STRENGTH * weight / np.maximum(np.abs(r), 0.01)
        gradient = slopes.T @ (w * r) + stiffness * (x - guess)
        curvature = slopes.T @ (w[:, None] * slopes) + np.diag(stiffness)
        inside = ~((x >= highest) & (gradient < 0))  # the others are at their limit and would exceed it
        before = best
        for _ in range(8):
            step = np.zeros(len(x))
            damped = curvature + damping * np.diag(np.diag(curvature))
            step[inside] = np.linalg.solve(damped[np.ix_(inside, inside)], gradient[inside])
            trial = np.minimum(x - np.clip(step, -0.7, 0.7), highest)
            moved_r = evaluate(values(trial)) - target
            value = loss(moved_r, trial)
            if np.isfinite(value) and value < best:
                x, r, best, damping = trial, moved_r, value, max(damping / 3, 1e-4)
                break
            damping *= 4
        if before - best < 2e-5 * best:
            break
    return _as_table(knobs, np.where(free, np.exp(x), 0.0), offsets)


def _as_table(knobs: list[Knob], x: np.ndarray, offsets: np.ndarray) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for knob, offset in zip(knobs, offsets, strict=False):
        for column_number, column in enumerate(knob.columns):
            table.setdefault(knob.section, {}).setdefault(column, {})[knob.name] = float(
                f"{x[offset + column_number]:.4g}"
            )
    return table


def cross_validated_seconds(arrays: RunArrays, folds: list[np.ndarray]) -> np.ndarray:
    """Seconds of every run under constants fitted without its fold (True marks the runs of a fold); NaN for runs in no fold."""
    predicted_seconds = np.full(len(arrays.measured), np.nan)
    for fold in folds:
        table = fit_time(take(arrays, ~fold))
        predicted_seconds[fold] = predict(take(arrays, fold), table)
    return predicted_seconds


def take(arrays: RunArrays, chosen: np.ndarray) -> RunArrays:
    """The rows that `which` marks."""

    def part(columns: Any) -> Any:
        return type(columns)(**{f.name: getattr(columns, f.name)[chosen] for f in fields(columns)})

    names = [name for name, selected in zip(arrays.names, chosen, strict=True) if selected]
    pairs = [pair for pair, selected in zip(arrays.pairs, chosen, strict=True) if selected]
    return RunArrays(
        names,
        pairs,
        part(arrays.shape),
        part(arrays.machine),
        part(arrays.layout),
        arrays.release[chosen],
        arrays.filled[chosen],
        arrays.measured[chosen],
        arrays.weight[chosen],
    )


def every_fifth(count: int) -> list[np.ndarray]:
    """Five folds of runs, drawn with a fixed seed."""
    fold_of = np.random.default_rng(0).permutation(count) % 5
    return [fold_of == fold for fold in range(5)]


BAND = 0.8
"""Share of runs that should lie inside a band."""
MIN_RECORDS, MIN_SOURCES = 3, 4
"""Fewest runs of a source that is left out, and fewest sources for a band of a stack or a generation."""


def bands(arrays: RunArrays) -> dict[str, float]:
    """Half-widths of the 80% bands, in logarithms, from sources that were left out of the fit whole.

    By stack where at least four sources have it, and by generation over those stacks; `default` for all other stacks.
    """
    return widths(arrays, np.log(arrays.measured / cross_validated_seconds(arrays, by_source(arrays))))


def widths(arrays: RunArrays, residual: np.ndarray, ignored_source: str | None = None) -> dict[str, float]:
    """Half-widths by class from residuals ln(measured / predicted) of left-out sources; `ignored_source` names a source to ignore."""
    source = np.array([source_of(name) for name in arrays.names])
    known = np.isfinite(residual) & (source != ignored_source)
    stacks, generations = (np.array([pair[side] for pair in arrays.pairs]) for side in (1, 0))
    common = {name for name in set(stacks) if len(set(source[known & (stacks == name)])) >= MIN_SOURCES}
    inside = known & np.isin(stacks, list(common))
    half_widths = {"default": _half_width(residual, source, known & ~inside)}
    for labels, chosen in ((stacks, inside), (generations, inside)):
        for label in sorted({str(name) for name in labels[chosen]}):
            if len(set(source[chosen & (labels == label)])) >= MIN_SOURCES:
                half_widths[label] = _half_width(residual, source, chosen & (labels == label))
    return half_widths


def _half_width(residual: np.ndarray, source: np.ndarray, chosen: np.ndarray) -> float:
    """The `BAND` quantile of the absolute residuals of the chosen runs, with equal weight for each source."""
    size, counts = np.abs(residual[chosen]), Counter(source[chosen])
    weight = np.array([1 / counts[name] for name in source[chosen]])
    order = np.argsort(size)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(f"{size[order][np.searchsorted(reached, BAND)]:.4f}")


def source_of(name: str) -> str:
    """The source of a run; submissions to one round of MLPerf training are one source."""
    return re.sub(r"(training_results_v[0-9.]+).*", r"\1", name)


def by_source(arrays: RunArrays) -> list[np.ndarray]:
    """A fold for each source with at least `MIN_RECORDS` runs."""
    names = np.array([source_of(name) for name in arrays.names])
    return [names == name for name, count in Counter(names.tolist()).items() if count >= MIN_RECORDS]


COMPARABLE = 1e9
"""Parameters of a dense model from which matrix products take most of a step."""


def best_quartile(arrays: RunArrays, table: dict[str, Any]) -> dict[str, float]:
    """Share of the 16-bit peak that large products reach, by generation, in the fastest quarter of comparable runs.

    Comparable: dense, 16-bit products, fused attention. The speed of a run's products relative to its stack is taken as the speed of the
    run relative to its prediction.
    """
    k = at_release(constant_arrays(arrays.pairs, table), arrays.release)
    shape = arrays.shape
    comparable = (shape.moe_layers + shape.mixer_layers == 0) & (arrays.machine.low == 0)
    comparable &= (k.scores == 0) & (shape.params >= COMPARABLE)
    reached = k.gemm / k.slow * predict(arrays, table) / arrays.measured
    generations = np.array([generation for generation, _ in arrays.pairs])
    shares = {}
    for name in sorted(set(generations)):
        chosen = comparable & (generations == name)
        if chosen.sum() >= 15:
            shares[str(name)] = min(MAX_PEAK_SHARE, float(f"{np.quantile(reached[chosen], 0.75):.4g}"))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    runs = read_runs()
    usable_records = usable(runs)
    arrays = arrays_of(usable_records)
    table = fit_time(arrays, rounds=arguments.rounds)
    table["best_quartile"] = best_quartile(arrays, table)
    table["memory"] = memory_constants()
    table["bands"] = bands(arrays)
    table["fitted_on"] = dict(sorted(Counter(arrays.names).items()))
    FILE.write_text(
        HEADER + yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
    )
    error = np.abs(predict(arrays, table) / arrays.measured - 1)
    print(f"{len(error)} rows, median error {np.median(error):.1%}", file=sys.stderr)


HEADER = """# Made by benchmarks/fit_costs.py from the runs named under fitted_on (rows of each). What each means: costs/constants.py.
"""

if __name__ == "__main__":
    main()
