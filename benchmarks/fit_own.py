"""Fits costs/own.yaml to this program's own kept runs: `python benchmarks/fit_own.py` (some minutes on one core).

Each constant starts at a figure measured apart from any training run (GUESSES says where) and pays for leaving it; what is minimised is the
sum of squared log errors of the SIMULATOR's step seconds, each row in units of its own spread from step to step, plus the squared distance
of every constant from its guess. No constant belongs to a row, a model or a layout. Damped Gauss-Newton steps with numerical derivatives.

    python benchmarks/fit_own.py               # again on the rows that own.yaml names
    python benchmarks/fit_own.py --all         # on every kept row; what was measured since the last fit is then no longer a test

Prints every row with its error under the fit and under a fit without its session (one Gauss-Newton step from the whole fit).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml
from accuracy import Row, kernels_of, own_rows

from meshwright.costs.constants import OWN_FILE
from meshwright.costs.plan_costs import never_measured
from meshwright.simulator.step_simulation import simulate_plan

CHIP = "hopper"
GUESSES: dict[str, tuple[str, float, float]] = {
    "gemm": ("measured", 0.80, 0.04), "narrow": ("measured", 400.0, 0.4), "attention": ("measured", 0.632, 0.05),
    "tail_us": ("measured", 2.0, 0.5), "hbm": ("measured", 0.883, 0.02), "link": ("measured", 0.69, 0.05),
    "start_us": ("stack", 120.0, 0.3), "passes": ("stack", 54.0, 0.3), "overlap_tax": ("stack", 0.72, 0.2),
    "side_copies": ("stack", 0.5, 0.4),
    "step_ms": ("stack", 8.0, 0.3), "update": ("stack", 25.0, 0.15),
    "slow": ("before", 1.04, 0.02), "ragged_vocab": ("before", 5.0, 0.5),
    "net": ("stack", 0.75, 0.1), "net_sum": ("stack", 1.33, 0.15), "net_yield": ("stack", 0.47, 0.4),
}  # fmt: skip
"""Constant → (section of own.yaml, guess, standard deviation of its logarithm).

Guesses come from benchmarks/data/h200x8-*.json: matrix products at 671–676 TFLOP/s sustained and slower when small, cuDNN attention at 500
TFLOP/s forward and backward together, copies at 4.24 of 4.8 TB/s, gathers and scatters by size over 2, 4 and 8 ranks, and 2.1 of the 2.9 ms
of a gather that runs under products. `passes` and `tail_us` are torchtitan's; `ragged_vocab` and the `net` ones are read off phases.
`slow` of `before` is no constant of the cost model: device time of the first kernels (`sides.KERNELS`) over that of today's (the one
configuration that ran on both took 0.580 and 0.560 s). Nor do heads of today's engine depend on `ragged_vocab`."""
BAND = 0.8
"""Share of runs that the band is to hold: those of the fit when their session is left out, and those like them that are in no fit."""
MACHINE_NOISE = 0.012
"""Relative deviation between sessions and machines, beside a row's own from step to step."""
HEADER = """# Made by benchmarks/fit_own.py: this program's own stack. `measured`: what it reaches on a generation that it ran on.
# On others the generation's row of constants.yaml holds, but for what costs.constants.unmeasured says.
# Set by hand, from runs named in docs/design/cost-model.md, and left alone by fits: host_us, moe_us, moe_passes, moe_back,
# moe_spread, quantise, token_passes, net_ring, packing, product_sums. `before`: of the first kernels, that older runs ran on.
"""


@dataclass(frozen=True)
class Fit:
    """Where a fit ended: log constants, residuals ln(predicted / measured), and their slopes by constant."""

    x: np.ndarray
    residuals: np.ndarray
    slopes: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="fit on every kept row, not only on those that own.yaml names"
    )
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    own = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    rows = [row for row in own_rows() if options.all or row.name in own["fitted_on"].get(row.file, ())]
    fit = fitted(rows, own, options.rounds)
    apart = left_out(rows, fit)
    show(rows, fit, apart)
    made = filled(own, fit.x)
    unseen = [row for row in own_rows() if row not in rows and not never_measured(row.run.cluster, row.plan)]
    made["band"] = float(f"{np.quantile(np.abs([*apart, *errors(unseen, made)]), BAND):.4f}")
    made["fitted_on"] = {
        file: [row.name for row in rows if row.file == file] for file in dict.fromkeys(row.file for row in rows)
    }
    OWN_FILE.write_text(
        HEADER + yaml.safe_dump(made, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
    )


def fitted(rows: Sequence[Row], own: dict[str, Any], rounds: int) -> Fit:
    """The constants of least cost, from the guesses."""
    guess = np.log([value for _, value, _ in GUESSES.values()])
    x, damping = guess.copy(), 1e-3
    r = errors(rows, filled(own, x))
    slopes = derivatives(rows, own, x, r)
    for _ in range(rounds):
        before = cost(rows, r, x)
        for _ in range(5):
            trial = x - step(rows, Fit(x, r, slopes), damping)
            moved = errors(rows, filled(own, trial))
            if cost(rows, moved, trial) < before:
                x, r, damping = trial, moved, damping / 3
                break
            damping *= 10
        slopes = derivatives(rows, own, x, r)
        if before - cost(rows, r, x) < 1e-3 * before:
            break
    return Fit(x, r, slopes)


def errors(rows: Sequence[Row], own: dict[str, Any]) -> np.ndarray:
    """ln(predicted / measured) of each row under own.yaml's content `own`."""
    found = []
    for row in rows:
        with kernels_of(row, own):
            found.append(simulate_plan(row.run.model, row.run.train, row.plan, row.run.cluster).step_seconds)
    return np.log(found) - np.log([row.seconds for row in rows])


def derivatives(rows: Sequence[Row], own: dict[str, Any], x: np.ndarray, r: np.ndarray) -> np.ndarray:
    columns = []
    for at in range(len(x)):
        moved = x.copy()
        moved[at] += 0.01
        columns.append((errors(rows, filled(own, moved)) - r) / 0.01)
    return np.array(columns).T


def step(rows: Sequence[Row], fit: Fit, damping: float, without: np.ndarray | None = None) -> np.ndarray:
    """The Gauss-Newton step, or that of the fit without the rows that `without` marks."""
    spread = np.array([spread for _, _, spread in GUESSES.values()])
    guess = np.log([value for _, value, _ in GUESSES.values()])
    weight = 1 / noise(rows) ** 2
    if without is not None:
        weight[without] = 0.0
    curvature = fit.slopes.T @ (weight[:, None] * fit.slopes) + np.diag(spread**-2.0)
    gradient = fit.slopes.T @ (weight * fit.residuals) + (fit.x - guess) / spread**2
    return np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)


def cost(rows: Sequence[Row], r: np.ndarray, x: np.ndarray) -> float:
    spread = np.array([spread for _, _, spread in GUESSES.values()])
    guess = np.log([value for _, value, _ in GUESSES.values()])
    return float(np.sum((r / noise(rows)) ** 2) + np.sum(((x - guess) / spread) ** 2))


def noise(rows: Sequence[Row]) -> np.ndarray:
    """Relative deviation of each row's step seconds."""
    return np.hypot(MACHINE_NOISE, [row.deviation for row in rows])


def left_out(rows: Sequence[Row], fit: Fit) -> np.ndarray:
    """ln(predicted / measured) of each row under a fit without any row of its session (file)."""
    files = np.array([row.file for row in rows])
    moves = [step(rows, fit, 0.0, without=files == row.file) for row in rows]
    return np.array([fit.residuals[at] - fit.slopes[at] @ move for at, move in enumerate(moves)])


def filled(own: dict[str, Any], x: np.ndarray) -> dict[str, Any]:
    """own.yaml's content with the constants at `x`."""
    stack, measured, before = dict(own["stack"]), dict(own["measured"][CHIP]), {}
    for (name, (section, _, _)), value in zip(GUESSES.items(), np.exp(x), strict=True):
        {"stack": stack, "measured": measured, "before": before}[section][name] = float(f"{value:.5g}")
    return {"stack": stack, "measured": {CHIP: {**measured, "slow": 1.0}}, "before": before, "band": own["band"]}


def show(rows: Sequence[Row], fit: Fit, apart: np.ndarray) -> None:
    print(f"{'':38s} measured    fit  left out")
    for row, here, there in zip(rows, np.expm1(fit.residuals), np.expm1(apart), strict=True):
        print(f"{row.label:38s} {row.seconds:8.3f} {here:+6.1%} {there:+8.1%}")
    for name, errors in (("fit", np.expm1(fit.residuals)), ("left out", np.expm1(apart))):
        print(f"{name}: median {np.median(np.abs(errors)):.1%}, worst {np.max(np.abs(errors)):.1%}")
    for (name, (_, value, spread)), now in zip(GUESSES.items(), np.exp(fit.x), strict=True):
        print(f"  {name:13s} {value:8.4g} → {now:8.4g}  ({np.log(now / value) / spread:+.1f} deviations)")


if __name__ == "__main__":
    main()
