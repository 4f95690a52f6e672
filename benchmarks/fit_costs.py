"""Fits costs/constants.yaml to published runs: `python benchmarks/fit_costs.py` (a few minutes on one core).

Least absolute log error with a prior: each constant starts at a physical guess and pays for leaving it, so a stack with few rows stays
near the guess. Solved by re-weighted, damped Gauss-Newton steps with numerical derivatives; NumPy only.
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

from meshwright.calibration.published_rows import Case, failed, measured_seconds, read_row
from meshwright.calibration.row_predictions import memory
from meshwright.costs.collective_costs import MOST_OF_LINE
from meshwright.costs.compute import MOST_OF_PEAK
from meshwright.costs.constants import FILE, GENERATION, NAMES, Constants, aged, per_row
from meshwright.costs.machine import Machine
from meshwright.costs.stack_footprint import Keeping, footprint
from meshwright.costs.step import step_cost
from meshwright.workload.arrays import side_by_side
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape

RUNS = tuple(sorted((Path(__file__).parent / "data").glob("*-runs.csv")))
"""Tables of runs, all with the columns of published-runs.csv. This program's own runs are fitted apart (fit_own.py)."""
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
    "gemm": MOST_OF_PEAK, "attention": MOST_OF_PEAK, "hbm": 0.95, "link": MOST_OF_LINE, "net": MOST_OF_LINE, "tensor_exposed": 1.0,
    "expert_exposed": 1.0, "hide": 1.0, "overlap_tax": 1.0, "pipe_exposed": 1.0, "moe_passes": 100.0,
}  # fmt: skip
"""Constant → the most that physics allows: no rate above its line, no communication that shows twice, none that takes more from compute
than all of it, and of routing what unfused masks, sorts and casts move."""
STACK_GUESSES: dict[str, dict[str, float]] = {
    "nanotron": {"ring_us": 2700.0, "stall_s": 0.6, "host_us": 4000.0, "net_us": 400.0, "crowd": 2.0},
    "bridge": {"reduce_bytes": 2.0},
    "nemo": {"reduce_bytes": 2.0},
    "megatron_tuned": {"reduce_bytes": 2.0},
    "megatron_deepspeed": {"scores": 12.0, "passes": 100.0},
    "megatron_lm": {"scores": 10.0, "passes": 90.0},
}
"""Stacks of 2021 keep attention scores in memory."""


MEMORY_PRIORS: dict[str, tuple[float, float]] = {
    "held": (6.0, 0.3), "owned": (12.0, 0.2), "sharding": (0.0, 0.7), "wide": (0.5, 0.5), "hidden": (0.0, 0.3), "narrow": (1.0, 0.3),
    "live": (0.0, 0.5), "logits": (8.0, 0.5),
    "gathered": (2.0, 0.5), "slack": (0.05, 0.7), "base": (1.0, 0.7), "base_rank": (0.2, 0.7),
}  # fmt: skip
MEMORY_GUESSES: dict[str, dict[str, float]] = {"nanotron": {"held": 7.0, "wide": 1.5, "hidden": 8.0, "live": 2.5}}
"""nanotron is eager: inputs of norms, residuals and rotated queries and keys are kept beside what products need."""
STRENGTH = 30.0
"""How much one log unit of error of one lone row weighs against one squared standard deviation of a prior."""
Evaluate = Callable[[dict[str, np.ndarray]], np.ndarray]


@dataclass
class Rows:
    """Rows to fit on, side by side."""

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
    rows: list[dict[str, str]] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    return rows


def usable(table: list[dict[str, str]]) -> list[tuple[int, dict[str, str], Case, float]]:
    """(row, its columns, its case, seconds) of every row that ran and can be expressed."""
    kept = []
    for index, row in enumerate(table):
        case, seconds = read_row(row).case, measured_seconds(row)
        if case is not None and seconds and not failed(row):
            kept.append((index, row, case, seconds))
    return kept


def with_memory(table: list[dict[str, str]]) -> list[tuple[dict[str, str], Case]]:
    """Rows with a measured memory that can be expressed."""
    readings = [(row, read_row(row).case) for row in table if row["mem_gb"]]
    return [(row, case) for row, case in readings if case is not None]


def gather_rows(kept: list[tuple[int, dict[str, str], Case, float]]) -> Rows:
    sources = Counter(row["source"] for _, row, _, _ in kept)
    cases = [case for _, _, case, _ in kept]
    weight = np.array([_weight(row, sources) for _, row, _, _ in kept])
    return Rows(
        [row["source"] for _, row, _, _ in kept],
        [(case.generation, case.stack) for case in cases],
        side_by_side([case.shape for case in cases]),
        side_by_side([case.machine for case in cases]),
        side_by_side([case.layout for case in cases]),
        np.array([case.release for case in cases]),
        share_filled(cases),
        np.array([seconds for *_, seconds in kept]),
        weight,
    )


def share_filled(cases: list[Case]) -> np.ndarray:
    """Share of a device's memory that each case is predicted to need, under the memory constants of all rows."""
    sizes = sum(memory(cases, {"memory": memory_constants()}, as_printed=False).values())
    return sizes / np.array([case.machine.memory for case in cases])


@cache
def memory_constants() -> dict[str, Any]:
    return fit_memory(with_memory(read_runs()))


def _weight(row: dict[str, str], sources: Counter[str]) -> float:
    """Large sources count by less than their size, so that small ones are heard; very noisy rows count little."""
    noisy = 0.25 if "playbook" in row["source"] and float(row["gpus"]) >= 128 else 1.0
    return noisy * sources[row["source"]] ** -0.35


@dataclass
class Knob:
    """One constant: its guess in every column of the table, and the column that each row reads."""

    section: str
    name: str
    columns: list[str]
    guess: np.ndarray
    index: np.ndarray
    spread: float


def predict(rows: Rows, table: dict[str, Any]) -> np.ndarray:
    """Seconds of every row under a table."""
    return step_cost(
        rows.shape, rows.machine, rows.layout, aged(per_row(rows.pairs, table), rows.release), rows.filled
    ).seconds


def fit_time(rows: Rows, *, rounds: int = 40, least: int = 20) -> dict[str, Any]:
    """Generations and stacks that predict `rows` best; those with fewer than `least` rows read the pooled default."""
    columns = [_columns([pair[side] for pair in rows.pairs], least) for side in (0, 1)]
    knobs = []
    for name in (name for name in NAMES if name in PRIORS):
        section = "generations" if name in GENERATION else "stacks"
        names, index = columns[section == "stacks"]
        guesses = [STACK_GUESSES.get(column, {}).get(name, PRIORS[name][0]) for column in names]
        knobs.append(Knob(section, name, names, np.array(guesses), index, PRIORS[name][1]))

    def evaluate(values: dict[str, np.ndarray]) -> np.ndarray:
        return np.log(
            step_cost(
                rows.shape, rows.machine, rows.layout, aged(Constants(**values), rows.release), rows.filled
            ).seconds
        )

    return solve(knobs, evaluate, np.log(rows.measured), rows.weight, rounds)


def fit_memory(kept: list[tuple[dict[str, str], Case]], *, rounds: int = 40, least: int = 15) -> dict[str, Any]:
    """Memory constants per stack that predict the measured memory of `kept` best."""
    names, index = _columns([case.stack for _, case in kept], least)
    shape, layout = (side_by_side([getattr(case, part) for _, case in kept]) for part in ("shape", "layout"))
    first = np.array([float(case.first_stage) for _, case in kept])
    counts = Counter(row["source"] for row, _ in kept)
    weight = np.array([counts[row["source"]] ** -0.35 for row, _ in kept])
    measured = np.log([float(row["mem_gb"]) for row, _ in kept])
    knobs = [
        Knob(
            "memory", name, names, np.array([MEMORY_GUESSES.get(n, {}).get(name, guess) for n in names]), index, spread
        )
        for name, (guess, spread) in MEMORY_PRIORS.items()
    ]

    def evaluate(values: dict[str, np.ndarray]) -> np.ndarray:
        return np.log(sum(footprint(shape, layout, Keeping(**values), first).values()) / 2**30)

    return solve(knobs, evaluate, measured, weight, rounds)["memory"]


LAYOUT = ("model", "gpus", "tp", "pp", "dp", "micro_batch", "zero/fsdp")


def memory_left_out(kept: list[tuple[dict[str, str], Case]]) -> np.ndarray:
    """GiB of every row as its software prints it, under constants fitted without its fifth; a layout's repeats share one, by its hash."""
    part = np.array([crc32("/".join(row[key] for key in LAYOUT).encode()) % 5 for row, _ in kept])
    found = np.zeros(len(kept))
    for fold in range(5):
        table = fit_memory([some for some, at in zip(kept, part, strict=True) if at != fold])
        cases = [case for (_, case), at in zip(kept, part, strict=True) if at == fold]
        found[part == fold] = sum(memory(cases, {"memory": table}, as_printed=True).values()) / 2**30
    return found


def _columns(labels: list[str], least: int) -> tuple[list[str], np.ndarray]:
    """The columns of a table (default first) and the one that each row reads."""
    counts = Counter(labels)
    names = ["default", *sorted(label for label, count in counts.items() if count >= least and label != "default")]
    place = {name: at for at, name in enumerate(names)}
    return names, np.array([place.get(label, 0) for label in labels])


def solve(
    knobs: list[Knob],
    evaluate: Evaluate,
    target: np.ndarray,
    weight: np.ndarray,
    rounds: int,
) -> dict[str, Any]:
    """The table of least weighted absolute error plus the cost of leaving the guesses.

    A row reads one column of each constant, so one perturbed evaluation per constant gives the derivatives of all its columns.
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
        inside = ~((x >= highest) & (gradient < 0))  # others lie at their limit and would leave it
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
    for knob, at in zip(knobs, offsets, strict=False):
        for place, column in enumerate(knob.columns):
            table.setdefault(knob.section, {}).setdefault(column, {})[knob.name] = float(f"{x[at + place]:.4g}")
    return table


def left_out(rows: Rows, folds: list[np.ndarray]) -> np.ndarray:
    """Seconds of every row under constants fitted without the rows of its fold (True marks a fold's rows); NaN in no fold."""
    found = np.full(len(rows.measured), np.nan)
    for fold in folds:
        table = fit_time(take(rows, ~fold))
        found[fold] = predict(take(rows, fold), table)
    return found


def take(rows: Rows, which: np.ndarray) -> Rows:
    """The rows that `which` marks."""

    def part(columns: Any) -> Any:
        return type(columns)(**{f.name: getattr(columns, f.name)[which] for f in fields(columns)})

    names = [name for name, kept in zip(rows.names, which, strict=True) if kept]
    pairs = [pair for pair, kept in zip(rows.pairs, which, strict=True) if kept]
    return Rows(
        names,
        pairs,
        part(rows.shape),
        part(rows.machine),
        part(rows.layout),
        rows.release[which],
        rows.filled[which],
        rows.measured[which],
        rows.weight[which],
    )


def every_fifth(count: int) -> list[np.ndarray]:
    """Five folds of rows, drawn once by a fixed seed."""
    place = np.random.default_rng(0).permutation(count) % 5
    return [place == fold for fold in range(5)]


BAND = 0.8
"""Share of rows that a band is to hold."""
LEAST_ROWS, LEAST_SOURCES = 3, 4
"""Of a source that is left out, and of sources that a stack's or a generation's own band rests on."""


def bands(rows: Rows) -> dict[str, float]:
    """Half-widths of the 80% bands, in logarithms, from sources that were left out of the fit whole.

    By stack where four sources or more know it, and by generation over those stacks; `default` for all other stacks.
    """
    return widths(rows, np.log(rows.measured / left_out(rows, by_source(rows))))


def widths(rows: Rows, residual: np.ndarray, but: str | None = None) -> dict[str, float]:
    """Half-widths by class from residuals ln(measured / predicted) of sources left out whole; `but` names a source to leave aside."""
    source = np.array([source_of(name) for name in rows.names])
    known = np.isfinite(residual) & (source != but)
    stacks, generations = (np.array([pair[side] for pair in rows.pairs]) for side in (1, 0))
    common = {name for name in set(stacks) if len(set(source[known & (stacks == name)])) >= LEAST_SOURCES}
    inside = known & np.isin(stacks, list(common))
    found = {"default": _half_width(residual, source, known & ~inside)}
    for labels, chosen in ((stacks, inside), (generations, inside)):
        for label in sorted({str(name) for name in labels[chosen]}):
            if len(set(source[chosen & (labels == label)])) >= LEAST_SOURCES:
                found[label] = _half_width(residual, source, chosen & (labels == label))
    return found


def _half_width(residual: np.ndarray, source: np.ndarray, chosen: np.ndarray) -> float:
    """The size of a residual that `BAND` of the chosen rows stay under, each source counting the same."""
    size, counts = np.abs(residual[chosen]), Counter(source[chosen])
    weight = np.array([1 / counts[name] for name in source[chosen]])
    order = np.argsort(size)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(f"{size[order][np.searchsorted(reached, BAND)]:.4f}")


def source_of(name: str) -> str:
    """The source that a row counts to: submissions to one round of MLPerf training are one source."""
    return re.sub(r"(training_results_v[0-9.]+).*", r"\1", name)


def by_source(rows: Rows) -> list[np.ndarray]:
    """One fold per source of at least `LEAST_ROWS` rows."""
    names = np.array([source_of(name) for name in rows.names])
    return [names == name for name, count in Counter(names.tolist()).items() if count >= LEAST_ROWS]


COMPARABLE = 1e9
"""Parameters of a dense model from which products take most of a step."""


def best_quartile(rows: Rows, table: dict[str, Any]) -> dict[str, float]:
    """Share of the 16-bit peak that large products reach, by generation, in the fastest quarter of comparable runs.

    Comparable: dense, 16-bit products, fused attention. A run's products are as much faster than its stack's as the run is than predicted.
    """
    k = aged(per_row(rows.pairs, table), rows.release)
    shape = rows.shape
    comparable = (shape.moe_layers + shape.mixer_layers == 0) & (rows.machine.low == 0)
    comparable &= (k.scores == 0) & (shape.params >= COMPARABLE)
    reached = k.gemm / k.slow * predict(rows, table) / rows.measured
    generations = np.array([generation for generation, _ in rows.pairs])
    found = {}
    for name in sorted(set(generations)):
        chosen = comparable & (generations == name)
        if chosen.sum() >= 15:
            found[str(name)] = min(MOST_OF_PEAK, float(f"{np.quantile(reached[chosen], 0.75):.4g}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    runs = read_runs()
    kept = usable(runs)
    rows = gather_rows(kept)
    table = fit_time(rows, rounds=arguments.rounds)
    table["best_quartile"] = best_quartile(rows, table)
    table["memory"] = memory_constants()
    table["bands"] = bands(rows)
    table["fitted_on"] = dict(sorted(Counter(rows.names).items()))
    FILE.write_text(
        HEADER + yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
    )
    error = np.abs(predict(rows, table) / rows.measured - 1)
    print(f"{len(error)} rows, median error {np.median(error):.1%}", file=sys.stderr)


HEADER = """# Made by benchmarks/fit_costs.py from the runs named under fitted_on (rows of each). What each means: costs/constants.py.
"""

if __name__ == "__main__":
    main()
