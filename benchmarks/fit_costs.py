"""Fits costs/constants.yaml to published runs: `python benchmarks/fit_costs.py` (a few minutes on one core).

Minimises the absolute log error plus a prior that penalises the distance of each constant from a physical guess, so a stack with few runs
stays near the guess. Solved by re-weighted, damped Gauss-Newton steps with numerical derivatives; NumPy only.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import yaml

from meshwright.calibration.published_records import PublishedCase, failed, measured_seconds, read_record
from meshwright.calibration.record_predictions import class_of, memory
from meshwright.costs.bands import RunClass, fitted_bands
from meshwright.costs.collective_costs import MAX_LINE_SHARE
from meshwright.costs.constants import (
    FILE,
    GENERATION,
    NAMES,
    Constants,
    at_release,
    constant_arrays,
    is_measured,
    table,
)
from meshwright.costs.device_rates import Machine
from meshwright.costs.software import SOFTWARE
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.costs.step import step_cost
from meshwright.spec.chips import CHIPS
from meshwright.workload.arrays import side_by_side
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import Shape

RUNS = tuple(sorted((Path(__file__).parent / "data").glob("published-runs*.csv.gz")))
"""Tables of runs with the columns of published-runs.csv.gz. Runs of this program are fitted by fit_own.py."""
# "Share" means the share of the figure in the datasheet. costs/constants.py explains each constant in full.
PRIORS: dict[str, tuple[float, float]] = {
    # Of the GPU generation.
    "gemm": (0.75, 0.1),  # share of the bf16 peak that a large matmul reaches
    "gemm_low": (0.8, 0.15),  # share of the fp8 peak that fp8 matmuls reach, relative to gemm
    "gemm_block": (0.75, 0.15),  # the same for block-scaled fp8, relative to gemm
    "gemm_fp4": (0.6, 0.2),  # the same for fp4, relative to gemm
    "attention": (0.5, 0.25),  # share of the bf16 peak that the two matmuls of attention reach
    "hbm": (0.8, 0.1),  # share of memory bandwidth that element-wise passes reach
    "link": (0.7, 0.2),  # share of link bandwidth that a collective inside a domain reaches
    "narrow": (150.0, 0.5),  # elements: smallest dimension of a matmul at which its time per FLOP doubles
    "tail_us": (2.0, 0.5),  # us of device time lost at the end of each kernel
    # Of the software stack: compute.
    "slow": (1.0, 0.25),  # device time relative to the best kernels of the generation
    "yearly": (1.05, 0.1),  # factor by which releases become faster in a year
    # bytes that element-wise operations of one layer's forward move, per token and hidden element
    "passes": (60.0, 0.35),
    "scores": (0.0, 0.5),  # bytes moved per attention score in forward; 0 is fused attention
    "quantise": (4.0, 0.5),  # bytes moved per element to cast an input of a matmul to fp8 or fp4
    "moe_us": (50.0, 0.7),  # us of host time that each expert of a rank adds to a layer
    "moe_passes": (40.0, 0.7),  # bytes moved to permute and combine, per routed token and hidden element
    "moe_yearly": (1.1, 0.2),  # as yearly, for moe_us and moe_passes
    # Host time.
    "host_us": (600.0, 0.7),  # us per layer and micro-batch, forward and backward
    "host_tensor_us": (200.0, 0.8),  # us that tensor parallelism adds to a layer
    "host_micro_us": (500.0, 0.8),  # us per micro-batch outside its layers
    # us per layer and tensor rank after the first, in pipelines across nodes or with sequence parallelism
    "ring_us": (0.0, 0.3),
    # Communication.
    "tensor_exposed": (0.8, 0.4),  # share of tensor-parallel communication that compute does not hide
    "expert_exposed": (0.8, 0.4),  # share of the exchange of tokens between experts that compute does not hide
    "hide": (0.7, 0.4),  # share of the backward pass under which data-parallel communication hides
    "overlap_tax": (0.15, 0.5),  # seconds by which a second of communication slows the compute beside it
    "net": (0.6, 0.5),  # share of network bandwidth that a collective across nodes reaches
    "net_us": (10.0, 0.7),  # us of latency of one step of a collective across nodes
    "link_us": (2.0, 0.7),  # us of latency of one step of a collective inside a domain
    "start_us": (15.0, 0.4),  # us to start a collective
    "messages": (0.3, 0.8),  # data-parallel collectives per layer
    "reduce_bytes": (4.0, 0.01),  # bytes sent between replicas per gradient element
    "scatter_bytes": (2.0, 0.01),  # bytes sent between shards per gradient element
    "stall_s": (0.0, 0.1),  # s by which a congested network delays a micro-batch at a stage boundary
    "stall_nodes": (16.0, 0.3),  # nodes at which half of the runs congest the network
    "crowd": (0.0, 0.3),  # relative increase of the time of collectives between replicas on a congested network
    # Pipeline and step.
    "pipe_us": (30.0, 0.8),  # us that a stage boundary adds to a micro-batch, without the transfer of its bytes
    "pipe_exposed": (0.5, 0.6),  # share of the transfers between stages that compute does not hide, in the steady state
    "bubble": (1.0, 0.2),  # idle time of the pipeline relative to the ideal (p - 1) / v micro-batches
    "step_ms": (10.0, 0.8),  # ms of fixed time of a step
    "step_layer_us": (100.0, 0.8),  # us of a step per layer of a rank: optimizer launches, gradient norm
    "update": (30.0, 0.3),  # bytes that the optimizer moves per parameter
    "jitter": (0.002, 0.6),  # relative slow-down per doubling of the number of nodes
    "sync_ms": (1.0, 0.8),  # ms that each doubling of the number of nodes adds to a step
}
"""Constant → (guess, standard deviation of its logarithm). A guess of 0 fixes the constant at 0 in that column of the table."""
LIMITS = {
    "gemm": 0.88,
    "attention": 0.88,
    "hbm": 0.95,
    "link": MAX_LINE_SHARE,
    "net": MAX_LINE_SHARE,
    "tensor_exposed": 1.0,
    "expert_exposed": 1.0,
    "hide": 1.0,
    "overlap_tax": 1.0,
    "pipe_exposed": 1.0,
    "moe_passes": 100.0,
}
"""Largest value of a constant that is physically possible.

Rates stay below the peak or the line rate. Shares of time are at most 1. `moe_passes` is at most 100 bytes per routed token and hidden
element, which software without fused kernels moves for masks, sorts and casts.
"""
STACK_GUESSES: dict[str, dict[str, float]] = {
    "nanotron": {"ring_us": 2700.0, "stall_s": 0.6, "host_us": 4000.0, "net_us": 400.0, "crowd": 2.0},
    "torchtitan": {"scatter_bytes": 4.0},  # FSDP2 reduces in fp32 unless told otherwise
    "bridge": {"reduce_bytes": 2.0},
    "bridge_graphs": {"host_us": 50.0},  # one graph launches the whole step
    "nemo": {"reduce_bytes": 2.0},
    "megatron_tuned": {"reduce_bytes": 2.0},
    "megatron_deepspeed": {"scores": 12.0, "passes": 100.0},
    "megatron_lm": {"scores": 10.0, "passes": 90.0},
}
"""Guesses that differ by stack; stacks of 2021 keep attention scores in memory."""


MEMORY_PRIORS: dict[str, tuple[float, float]] = {
    "held": (6.0, 0.3),  # bytes per parameter that every replica stores: weights and gradients, with their copies
    "owned": (12.0, 0.2),  # bytes per parameter of master weights and moments
    "sharding": (0.0, 0.7),  # further bytes per parameter of a shard of the optimizer: its gradients and buffers
    # saved elements per token, layer and hidden element that only sequence parallelism divides over tensor ranks
    "wide": (0.5, 0.5),
    "hidden": (0.0, 0.3),  # the same for elements that tensor parallelism always divides
    # saved elements per token, layer and element of attention inputs and feed-forward (not the `narrow` of PRIORS)
    "narrow": (1.0, 0.3),
    "live": (0.0, 0.5),  # undivided elements per token and hidden element of the layer that computes
    "logits": (8.0, 0.5),  # bytes per logit of one micro-batch
    "gathered": (2.0, 0.5),  # fully sharded layers whose whole weights exist at once
    "slack": (0.05, 0.7),  # memory lost to fragmentation, as a share of activations
    "base": (1.0, 0.7),  # GiB of the framework, kernels and communicators
    "base_rank": (0.2, 0.7),  # GiB of communicators per axis in use
}
"""As `PRIORS`, for the constants of memory (costs/stack_footprint.py)."""
MEMORY_GUESSES: dict[str, dict[str, float]] = {"nanotron": {"held": 7.0, "wide": 1.5, "hidden": 8.0, "live": 2.5}}
"""nanotron runs without fused operations: it also saves inputs of norms, residuals, and rotated queries and keys."""
PARENTS = {software.constants: software.parent for software in SOFTWARE if software.parent}
"""Software with few runs → the set of constants that it shares, but for `OWN_CONSTANTS`."""
HELD_SPREAD = 1e-5
"""Standard deviation of the logarithm of a constant that is held."""
OWN_CONSTANTS = ("slow", "host_us", "net", "hide", "expert_exposed", "moe_passes")
"""Constants that software with a parent has of its own."""
STRENGTH = 30.0
"""Weight of the data against the priors in the loss.

A run that is the only one of its source adds `STRENGTH` × |ln(predicted / measured)|; a constant that is n standard deviations from its
guess adds n² / 2.
"""
Evaluate = Callable[[dict[str, np.ndarray]], np.ndarray]


@dataclass
class RunArrays:
    """Runs to fit on, as arrays with one element per run."""

    names: list[str]
    """Sources."""
    cases: list[PublishedCase]
    pairs: list[tuple[str, str]]
    """(GPU generation, software stack)."""
    shape: Shape
    machine: Machine
    layout: Layouts
    release: np.ndarray
    """Release date of the software, years after the start of 2025."""
    memory_share: np.ndarray
    """Predicted share of device memory in use."""
    measured: np.ndarray
    """Seconds of a step."""
    weight: np.ndarray
    """Weight in the loss."""


def read_runs(paths: Sequence[Path] = RUNS) -> list[dict[str, str]]:
    records: list[dict[str, str]] = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            records += csv.DictReader(file)
    return records


def usable_runs(runs: list[dict[str, str]]) -> list[tuple[int, dict[str, str], PublishedCase, float]]:
    """(index, columns, case, seconds) of every run that finished and states all inputs of the cost model."""
    usable_records = []
    for index, record in enumerate(runs):
        case, seconds = read_record(record).case, measured_seconds(record)
        if case is not None and seconds and not failed(record):
            usable_records.append((index, record, case, seconds))
    return usable_records


def with_memory(table: list[dict[str, str]]) -> list[tuple[dict[str, str], PublishedCase]]:
    """Runs that report their memory and state all inputs of the cost model."""
    readings = [(record, read_record(record).case) for record in table if record["mem_gb"]]
    return [(record, case) for record, case in readings if case is not None]


def arrays_of(usable_records: list[tuple[int, dict[str, str], PublishedCase, float]]) -> RunArrays:
    sources = Counter(record["source"] for _, record, _, _ in usable_records)
    cases = [case for _, _, case, _ in usable_records]
    weight = np.array([_weight(record, sources) for _, record, _, _ in usable_records])
    return RunArrays(
        [record["source"] for _, record, _, _ in usable_records],
        cases,
        [(case.generation, case.stack) for case in cases],
        side_by_side([case.shape for case in cases]),
        side_by_side([case.machine for case in cases]),
        side_by_side([case.layout for case in cases]),
        np.array([case.release for case in cases]),
        memory_shares(cases),
        np.array([seconds for *_, seconds in usable_records]),
        weight,
    )


def memory_shares(cases: list[PublishedCase]) -> np.ndarray:
    """Predicted share of a device's memory that each case needs on its fullest rank, under the memory constants of all runs."""
    # Some software prints only the memory of the first pipeline stage (as_printed=True); here the fullest stage counts.
    sizes = sum(memory(cases, {"memory": memory_constants()}, as_printed=False).values())
    return sizes / np.array([case.machine.memory for case in cases])


@cache
def memory_constants() -> dict[str, Any]:
    return fit_memory(with_memory(read_runs()))


def _weight(record: dict[str, str], sources: Counter[str]) -> float:
    """Weight of a run: large sources count less than in proportion to their size, and very noisy runs count little.

    Very noisy are runs of Hugging Face's "ultrascale playbook" on 128 GPUs or more: records with the same layout differ by up to a factor
    of five in time.
    """
    noisy = 0.25 if "playbook" in record["source"] and float(record["gpus"]) >= 128 else 1.0
    return noisy * sources[record["source"]] ** -0.6


@dataclass
class FittedConstant:
    """A constant to fit: its guess in every column of the table, and the column that each run reads."""

    section: str
    name: str
    columns: list[str]
    guess: np.ndarray
    index: np.ndarray
    spread: float
    parents: dict[str, str] = field(default_factory=dict)
    """Column with few runs → the column that it is near."""
    held: tuple[str, ...] = ()
    """Columns that stay at their guess."""


def predict(arrays: RunArrays, table: dict[str, Any]) -> np.ndarray:
    """Seconds of every run under a table of constants."""
    return step_cost(
        arrays.shape,
        arrays.machine,
        arrays.layout,
        at_release(constant_arrays(arrays.pairs, table), arrays.release),
        arrays.memory_share,
    ).seconds


def fit_time(
    arrays: RunArrays, *, rounds: int = 40, min_runs: int = 20, held: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, Any]:
    """Constants by generation and stack that predict the runs best; those with fewer than `min_runs` runs use the pooled default.

    Generations of `held` keep the constants that it gives.
    """
    held = held or {}
    generations = _columns([pair[0] for pair in arrays.pairs], 1)
    stacks = [pair[1] for pair in arrays.pairs]
    parents = _columns([PARENTS.get(stack, stack) for stack in stacks], min_runs)
    children = _columns([stack if stack in PARENTS or stack in parents[0] else "default" for stack in stacks], 1)
    fitted_constants = []
    for name in (name for name in NAMES if name in PRIORS):
        section = "generations" if name in GENERATION else "stacks"
        names, index = generations if name in GENERATION else children if name in OWN_CONSTANTS else parents
        guesses = [STACK_GUESSES.get(column, {}).get(name, PRIORS[name][0]) for column in names]
        guesses = [held.get(column, {}).get(name, guess) for column, guess in zip(names, guesses, strict=True)]
        parents_of = PARENTS if section == "stacks" else {}
        fitted_constants.append(
            FittedConstant(section, name, names, np.array(guesses), index, PRIORS[name][1], parents_of, tuple(held))
        )

    def evaluate(values: dict[str, np.ndarray]) -> np.ndarray:
        return np.log(
            step_cost(
                arrays.shape,
                arrays.machine,
                arrays.layout,
                at_release(Constants(**values), arrays.release),
                arrays.memory_share,
            ).seconds
        )

    table = solve(fitted_constants, evaluate, np.log(arrays.measured), arrays.weight, rounds)
    runs = Counter(name for pair in arrays.pairs for name in pair)
    table["measured_with"] = sorted(name for name, count in runs.items() if count >= min_runs and name != "default")
    table["runs"] = dict(sorted(runs.items()))
    return table


def fit_memory(
    usable_records: list[tuple[dict[str, str], PublishedCase]], *, rounds: int = 40, min_runs: int = 15
) -> dict[str, Any]:
    """Memory constants per stack that predict the measured memory of the runs best.

    Runs of software with a parent are left out: their tables do not say which weights and gradients stay whole between micro-batches.
    """
    usable_records = [(record, case) for record, case in usable_records if case.stack not in PARENTS]
    names, index = _columns([case.stack for _, case in usable_records], min_runs)
    shape, layout = (side_by_side([getattr(case, name) for _, case in usable_records]) for name in ("shape", "layout"))
    prints_first_stage = np.array([float(case.first_stage) for _, case in usable_records])
    runs_by_source = Counter(record["source"] for record, _ in usable_records)
    weight = np.array([runs_by_source[record["source"]] ** -0.35 for record, _ in usable_records])
    measured = np.log([float(record["mem_gb"]) for record, _ in usable_records])
    fitted_constants = [
        FittedConstant(
            "memory",
            name,
            names,
            np.array([MEMORY_GUESSES.get(column, {}).get(name, guess) for column in names]),
            index,
            spread,
        )
        for name, (guess, spread) in MEMORY_PRIORS.items()
    ]

    def evaluate(values: dict[str, np.ndarray]) -> np.ndarray:
        return np.log(sum(footprint(shape, layout, MemoryConstants(**values), prints_first_stage).values()) / 2**30)

    return solve(fitted_constants, evaluate, measured, weight, rounds)["memory"]


LAYOUT_COLUMNS = ("model", "gpus", "tp", "pp", "dp", "micro_batch", "zero/fsdp")


def cross_validated_memory_gib(usable_records: list[tuple[dict[str, str], PublishedCase]]) -> np.ndarray:
    """GiB of every run as its software prints it, under constants fitted without its fifth.

    Repeats of a layout are in the same fifth, by the hash of the layout.
    """
    fold_of = np.array(
        [crc32("/".join(record[key] for key in LAYOUT_COLUMNS).encode()) % 5 for record, _ in usable_records]
    )
    predicted_gib = np.zeros(len(usable_records))
    for fold in range(5):
        table = fit_memory([entry for entry, run_fold in zip(usable_records, fold_of, strict=True) if run_fold != fold])
        cases = [case for (_, case), run_fold in zip(usable_records, fold_of, strict=True) if run_fold == fold]
        predicted_gib[fold_of == fold] = sum(memory(cases, {"memory": table}, as_printed=True).values()) / 2**30
    return predicted_gib


def _columns(labels: list[str], min_runs: int) -> tuple[list[str], np.ndarray]:
    """The columns of a table, default first, and the index of the column that each run reads."""
    runs_by_label = Counter(labels)
    names = [
        "default",
        *sorted(label for label, count in runs_by_label.items() if count >= min_runs and label != "default"),
    ]
    column_index = {name: index for index, name in enumerate(names)}
    return names, np.array([column_index.get(label, 0) for label in labels])


def solve(
    fitted_constants: list[FittedConstant],
    evaluate: Evaluate,
    target: np.ndarray,
    weight: np.ndarray,
    rounds: int,
) -> dict[str, Any]:
    """The table with the least sum of weighted absolute error and distance from the guesses.

    A run reads one column of each constant, so one perturbed evaluation per constant gives the derivatives of all its columns.
    """
    sizes = [len(constant.columns) for constant in fitted_constants]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    guess = np.concatenate([np.log(np.maximum(constant.guess, 1e-9)) for constant in fitted_constants])
    # A guess of 0 fixes the constant at 0 in this column.
    is_fitted = np.concatenate([constant.guess > 0 for constant in fitted_constants])
    precision = np.zeros((offsets[-1], offsets[-1]))
    for constant, size, offset in zip(fitted_constants, sizes, offsets[:-1], strict=True):
        precision[offset : offset + size, offset : offset + size] = _prior_precision(constant)
    limits = [_limit(constant.name, column) for constant in fitted_constants for column in constant.columns]
    highest = np.log(np.array(limits))
    log_constants = np.minimum(guess, highest)

    def values(log_constants: np.ndarray) -> dict[str, np.ndarray]:
        values_by_column = np.where(is_fitted, np.exp(log_constants), 0.0)
        return {
            constant.name: values_by_column[offset : offset + size][constant.index]
            for constant, offset, size in zip(fitted_constants, offsets, sizes, strict=False)
        }

    def loss(residuals: np.ndarray, log_constants: np.ndarray) -> float:
        return float(
            STRENGTH * np.sum(weight * np.abs(residuals))
            + 0.5 * (log_constants - guess) @ precision @ (log_constants - guess)
        )

    damping, residuals = 1.0, evaluate(values(log_constants)) - target
    best = loss(residuals, log_constants)
    for _ in range(rounds):
        slopes = np.zeros((len(residuals), len(log_constants)))
        current = values(log_constants)
        for constant, offset in zip(fitted_constants, offsets, strict=False):
            shifted = {**current, constant.name: current[constant.name] * np.exp(1e-3)}
            slopes[np.arange(len(residuals)), offset + constant.index] = (evaluate(shifted) - target - residuals) / 1e-3
        slopes[:, ~is_fitted] = 0.0
        run_weights = STRENGTH * weight / np.maximum(np.abs(residuals), 0.01)
        gradient = slopes.T @ (run_weights * residuals) + precision @ (log_constants - guess)
        curvature = slopes.T @ (run_weights[:, None] * slopes) + precision
        # The other constants are at their limit, and the step would exceed it.
        below_limit = ~((log_constants >= highest) & (gradient < 0))
        previous_loss = best
        for _ in range(8):
            step = np.zeros(len(log_constants))
            damped = curvature + damping * np.diag(np.diag(curvature))
            step[below_limit] = np.linalg.solve(damped[np.ix_(below_limit, below_limit)], gradient[below_limit])
            trial = np.minimum(log_constants - np.clip(step, -0.7, 0.7), highest)
            trial_residuals = evaluate(values(trial)) - target
            value = loss(trial_residuals, trial)
            if np.isfinite(value) and value < best:
                log_constants, residuals, best, damping = trial, trial_residuals, value, max(damping / 3, 1e-4)
                break
            damping *= 4
        if previous_loss - best < 2e-5 * best:
            break
    return _as_table(fitted_constants, np.where(is_fitted, np.exp(log_constants), 0.0), offsets)


def _limit(name: str, column: str) -> float:
    """Largest value of a constant in one column."""
    sustained = max((chip.sustained for chip in CHIPS.values() if chip.generation == column), default=0.0)
    return sustained if sustained and name in ("gemm", "attention") else LIMITS.get(name, np.inf)


def _prior_precision(constant: FittedConstant) -> np.ndarray:
    """Inverse covariance of the prior of one constant's columns.

    A column deviates from its guess by `spread`; one with a parent from the deviation of the parent instead, so those with few runs are
    near others.
    """
    precision = np.zeros((len(constant.columns), len(constant.columns)))
    for column, name in enumerate(constant.columns):
        parent = constant.parents.get(name)
        difference = np.zeros(len(constant.columns))
        difference[column] = 1.0
        if parent in constant.columns:
            difference[constant.columns.index(parent)] = -1.0
        spread = HELD_SPREAD if name in constant.held else constant.spread
        precision += np.outer(difference, difference) * spread**-2.0
    return precision


def _as_table(fitted_constants: list[FittedConstant], constants: np.ndarray, offsets: np.ndarray) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for constant, offset in zip(fitted_constants, offsets, strict=False):
        for column_number, column in enumerate(constant.columns):
            table.setdefault(constant.section, {}).setdefault(column, {})[constant.name] = float(
                f"{constants[offset + column_number]:.4g}"
            )
    return table


def cross_validated_seconds(arrays: RunArrays, folds: list[np.ndarray]) -> np.ndarray:
    """Seconds of every run under constants fitted without its fold (True marks the runs of a fold); NaN for runs in no fold."""
    predicted_seconds = np.full(len(arrays.measured), np.nan)
    for fold in folds:
        table = fit_time(select_runs(arrays, ~fold))
        predicted_seconds[fold] = predict(select_runs(arrays, fold), table)
    return predicted_seconds


def select_runs(arrays: RunArrays, selected_runs: np.ndarray) -> RunArrays:
    """The runs for which `selected_runs` is True."""

    def selected_rows(columns: Any) -> Any:
        return type(columns)(**{entry.name: selected(getattr(columns, entry.name)) for entry in fields(columns)})

    def selected(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(selected_rows, value))
        return value if isinstance(value, str) else value[selected_runs]

    names = [name for name, selected in zip(arrays.names, selected_runs, strict=True) if selected]
    pairs = [pair for pair, selected in zip(arrays.pairs, selected_runs, strict=True) if selected]
    cases = [case for case, selected in zip(arrays.cases, selected_runs, strict=True) if selected]
    return RunArrays(
        names,
        cases,
        pairs,
        selected_rows(arrays.shape),
        selected_rows(arrays.machine),
        selected_rows(arrays.layout),
        arrays.release[selected_runs],
        arrays.memory_share[selected_runs],
        arrays.measured[selected_runs],
        arrays.weight[selected_runs],
    )


def random_fifths(count: int) -> list[np.ndarray]:
    """Five random folds of `count` runs, drawn with a fixed seed; True marks the runs of a fold."""
    fold_of = np.random.default_rng(0).permutation(count) % 5
    return [fold_of == fold for fold in range(5)]


MIN_RECORDS = 3
"""Fewest runs of a source that is left out of a fit."""


def left_out(arrays: RunArrays) -> tuple[np.ndarray, list[RunClass]]:
    """Seconds of every run under constants fitted without its source, and its class under these constants.

    All sources are left out in turn, also those with one run. Of large sources `MOST_RUNS` stand for all.
    """
    names = np.array([source_of(name) for name in arrays.names])
    seconds, classes = np.full(len(names), np.nan), list[RunClass | None]([None] * len(names))
    fitted, kept = thinned(arrays)
    for name in dict.fromkeys(names.tolist()):
        table = fit_time(select_runs(fitted, names[kept] != name))
        of_source = names == name
        seconds[of_source] = predict(select_runs(arrays, of_source), table)
        for index in np.flatnonzero(of_source):
            classes[index] = class_of(arrays.cases[index], table)
    return seconds, [run for run in classes if run is not None]


MOST_RUNS = 100
"""Runs of one source that a fit without another source uses."""


def thinned(arrays: RunArrays) -> tuple[RunArrays, np.ndarray]:
    """The runs with at most `MOST_RUNS` of a source, drawn with a fixed seed, which have the weight of all; and which they are."""
    names, random = np.array([source_of(name) for name in arrays.names]), np.random.default_rng(0)
    kept, weight = np.ones(len(names), dtype=bool), arrays.weight.copy()
    for name, count in Counter(names.tolist()).items():
        if count > MOST_RUNS:
            indices = np.flatnonzero(names == name)
            kept[random.choice(indices, count - MOST_RUNS, replace=False)] = False
            weight[indices] *= count / MOST_RUNS
    return select_runs(replace(arrays, weight=weight), kept), kept


def source_of(name: str) -> str:
    """The source of a run; submissions to one round of MLPerf training are one source."""
    return re.sub(r"(training_results_v[0-9.]+).*", r"\1", name)


MIN_COMPARABLE_PARAMETERS = 1e9
"""Parameters of a dense model from which matmuls take most of a step."""


def best_quartile(arrays: RunArrays, table: dict[str, Any]) -> dict[str, float]:
    """Share of the 16-bit peak that large matmuls reach, by generation, in the fastest quarter of comparable runs.

    Comparable: dense, 16-bit matmuls, fused attention, software with many runs. Runs report no speed of their products.
    The fit gives the share that matmuls of the run's stack reach, `gemm / slow`; a run that is 5% faster than its
    prediction is assumed to have matmuls that are 5% faster.
    """
    k = at_release(constant_arrays(arrays.pairs, table), arrays.release)
    shape = arrays.shape
    # `low` is 0 for matmuls in bf16 or wider.
    comparable = (shape.moe_layers + shape.mixer_layers == 0) & (arrays.machine.matmul_format == 0)
    comparable &= (k.scores == 0) & (shape.params >= MIN_COMPARABLE_PARAMETERS)
    matmul_shares = k.gemm / k.slow * predict(arrays, table) / arrays.measured
    comparable &= np.array([stack not in PARENTS for _, stack in arrays.pairs])
    generations = np.array([generation for generation, _ in arrays.pairs])
    shares = {}
    for name in sorted(set(generations)):
        of_generation = comparable & (generations == name)
        if of_generation.sum() >= 15:
            shares[str(name)] = min(LIMITS["gemm"], float(f"{np.quantile(matmul_shares[of_generation], 0.75):.4g}"))
    return shares


def held_generations(runs: Counter[str]) -> dict[str, dict[str, float]]:
    """Present constants of generations with many published runs and without own runs, from which this program's plans there are priced."""
    present = table()["generations"]
    return {
        name: present[name] for name, count in runs.items() if count >= 20 and name in present and not is_measured(name)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--generations",
        action="store_true",
        help="fit again the generations on which this program has no own runs; prices of its plans there change with them",
    )
    arguments = parser.parse_args()
    runs = read_runs()
    usable_records = usable_runs(runs)
    arrays = arrays_of(usable_records)
    held = {} if arguments.generations else held_generations(Counter(pair[0] for pair in arrays.pairs))
    table = fit_time(arrays, rounds=arguments.rounds, held=held)
    table["best_quartile"] = best_quartile(arrays, table)
    table["memory"] = memory_constants()
    seconds, classes = left_out(arrays)
    table["bands"] = fitted_bands(
        classes, [source_of(name) for name in arrays.names], np.log(arrays.measured / seconds)
    )
    table["fitted_on"] = dict(sorted(Counter(arrays.names).items()))
    FILE.write_text(
        HEADER + yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
    )
    error = np.abs(predict(arrays, table) / arrays.measured - 1)
    print(f"{len(error)} rows, median error {np.median(error):.1%}", file=sys.stderr)


HEADER = """# Made by benchmarks/fit_costs.py from the runs named under fitted_on (runs of each source). Constants: costs/constants.py.
"""

if __name__ == "__main__":
    main()
