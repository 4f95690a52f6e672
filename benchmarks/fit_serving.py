"""Fits the constants of other servers to published points: `make fit-serving` (CPU only, a minute).

Writes src/meshwright/costs/serving_software.yaml. Rows whose number of workers is an assumption are left out. A model counts by the
square root of its rows, so that one with many does not decide for the others.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime

import numpy as np
import yaml
from serving_points import Point, predict, read_points

from meshwright.costs.serving_software import FILE, ServingSoftware, software_table

TTFT_WEIGHT = 0.3
"""Weight of errors of first tokens beside those of further ones, which vary less between equal measurements."""
TYPICAL = 0.1
"""Relative error from which on errors count by their size, not its square: some rows were measured with speculation that none states."""
PRIOR = 0.5
"""Weight of the squared logarithm of a constant over `START`, which decides what no point does; that of a point's error is one at most."""
ROUNDS, STEP, PROGRESS = 40, 0.02, 1e-4
"""Rounds of a fit, the difference of logarithms for slopes, and the share of the error by which the last round lowers it less."""
START = ServingSoftware(
    memory_share=0.8,
    peak_share=0.5,
    kernel_seconds=2.5e-6,
    sum_seconds=8e-6,
    sequence_seconds=1.5e-5,
    request_seconds=0.1,
)


def main() -> None:
    points, _ = read_points()
    table = software_table()
    stated = [point for point in points if not point.assumed]
    fitted = {}
    for name in table.software:
        fitted[name] = fit([point for point in stated if point.software == name])
        print(name, {key: float(f"{value:.4g}") for key, value in asdict(fitted[name]).items()}, file=sys.stderr)
    write(fitted, len(stated))


def fit(points: Sequence[Point], start: ServingSoftware = START, progress: float = PROGRESS) -> ServingSoftware:
    """The constants with the smallest robust error of logarithms, by damped Gauss-Newton steps of their logarithms."""
    counts = Counter(point.name for point in points)
    weights = np.array([counts[point.name] ** -0.25 for point in points])
    weights = np.concatenate([weights, TTFT_WEIGHT * weights])

    def errors(logs: np.ndarray) -> np.ndarray:
        software = _software(logs)
        found = [predict(point, software) for point in points]
        tokens = [np.log(got.tpot_seconds / point.tpot_seconds) for got, point in zip(found, points, strict=True)]
        firsts = [np.log(got.ttft_seconds / point.ttft_seconds) for got, point in zip(found, points, strict=True)]
        return np.array([*tokens, *firsts])

    usual = np.log([getattr(START, field.name) for field in fields(START)])

    def cost(logs: np.ndarray, found: np.ndarray) -> float:
        robust = np.sum(weights**2 * (np.sqrt(1 + (found / TYPICAL) ** 2) - 1))
        return float(robust + PRIOR * np.sum((logs - usual) ** 2))

    logs = np.log([getattr(start, field.name) for field in fields(START)])
    found, damping = errors(logs), 1e-2
    for _ in range(ROUNDS):
        slopes = np.stack([(errors(logs + STEP * unit) - found) / STEP for unit in np.eye(len(logs))], axis=1)
        scale = weights**2 / np.sqrt(1 + (found / TYPICAL) ** 2)
        curvature = slopes.T @ (scale[:, None] * slopes) + 2 * PRIOR * TYPICAL**2 * np.eye(len(logs))
        gradient = slopes.T @ (scale * found) + 2 * PRIOR * TYPICAL**2 * (logs - usual)
        before = cost(logs, found)
        while damping < 1e6:
            shift = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-3), gradient)
            moved = logs + np.clip(shift, -1, 1)
            tried = errors(moved)
            if cost(moved, tried) < before:
                break
            damping *= 5
        else:
            break
        logs, found, damping = moved, tried, max(1e-6, damping / 5)
        if before - cost(logs, found) < progress * before:
            break
    return _software(logs)


def write(fitted: dict[str, ServingSoftware], count: int) -> None:
    """Write the table that the cost model reads."""
    table = software_table()
    lines = [
        "# Made by benchmarks/fit_serving.py. Constants: costs/serving_software.py.",
        f"fitted: '{datetime.now(UTC).date()}'",
        f"source: {table.source.partition(';')[0]}; {count:,} points",
        f"measured: {table.measured}",
        "software:",
    ]
    for name, software in fitted.items():
        values = {key: float(f"{value:.4g}") for key, value in asdict(software).items()}
        text = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=120).strip()
        lines.append(f"  {name}: {text}".replace("\n  ", "\n    "))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _software(logs: np.ndarray) -> ServingSoftware:
    return ServingSoftware(
        **{field.name: float(value) for field, value in zip(fields(START), np.exp(logs), strict=True)}
    )


if __name__ == "__main__":
    main()
