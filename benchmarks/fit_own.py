"""Fits costs/own.yaml to this program's own kept runs: `python benchmarks/fit_own.py` (some minutes on one core).

Each constant starts at a guess from separate measurements (see GUESSES). The fit minimises the sum of squared log errors of the
simulator's step seconds, each run in units of its own deviation from step to step, plus the squared distance of every constant from its
guess. No constant is specific to a run, a model or a layout. Solved by damped Gauss-Newton steps with numerical derivatives. A second
fit, of the constants of MoE models, follows on runs of MoE models, with the other constants as fitted.

    python benchmarks/fit_own.py               # on the runs that own.yaml names
    python benchmarks/fit_own.py --all         # on all kept runs; runs since the last fit are then no independent test

Prints each run with its error under the fit and under a fit without its session (one Gauss-Newton step from the whole fit).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml
from accuracy import RecordedRun, kernels_of, moe_runs, recorded_runs

from meshwright.costs.constants import OWN_FILE
from meshwright.costs.plan_costs import missing_features
from meshwright.simulator.step_simulation import simulate_plan

CHIP = "hopper"
Guesses = Mapping[str, tuple[str, float, float]]
"""Constant → (section of own.yaml, guess, standard deviation of its logarithm)."""
GUESSES: Guesses = {
    "gemm": ("measured", 0.80, 0.04),
    "narrow": ("measured", 400.0, 0.4),
    "attention": ("measured", 0.632, 0.05),
    "tail_us": ("measured", 2.0, 0.5),
    "hbm": ("measured", 0.883, 0.02),
    "link": ("measured", 0.69, 0.05),
    "start_us": ("stack", 120.0, 0.3),
    "passes": ("stack", 54.0, 0.3),
    "overlap_tax": ("stack", 0.72, 0.2),
    "side_copies": ("stack", 0.5, 0.4),
    "step_ms": ("stack", 8.0, 0.3),
    "update": ("stack", 25.0, 0.15),
    "slow": ("before", 1.04, 0.02),
    "ragged_vocab": ("before", 5.0, 0.5),
    "net": ("stack", 0.75, 0.1),
    "net_sum": ("stack", 1.33, 0.15),
    "net_yield": ("stack", 0.47, 0.4),
}
"""Constants of all models.

Guesses come from benchmarks/data/h200x8-*.json: matmuls at 671–676 TFLOP/s sustained and slower when small, cuDNN
attention at 500 TFLOP/s forward and backward together, copies at 4.24 of 4.8 TB/s, gathers and scatters by size over 2,
4 and 8 ranks, and 2.1 of the 2.9 ms of a gather that runs under matmuls. `passes` and `tail_us` are torchtitan's;
`ragged_vocab` and `net*` come from phase times. `slow` of `before` is no constant of the cost model: it is the device
time of the first kernels (`sides.KERNELS`) over that of today's (a configuration that ran on both took 0.580 and 0.560
s). `ragged_vocab` has no effect on today's
heads either."""
MOE_GUESSES: Guesses = {"moe_passes": ("stack", 6.75, 0.3), "torch_moe_passes": ("before", 12.0, 0.3)}
"""Constants of MoE models.

`moe_passes` counts a forward's bytes per copy of a token and hidden element for Qwen3-30B-A3B: token copies write a row and read an eighth
of one, sums of copies the reverse, 2.25 each; the activation reads two and writes one row of 768 of 2,048 elements, 2.25. The
guess for the kernels before, when torch moved copies, is the value set by hand then.
"""
BAND = 0.8
"""Share of runs that should lie inside the band: fitted runs predicted without their session, and similar runs outside the fit."""
MACHINE_NOISE = 0.012
"""Relative deviation between sessions and machines, in addition to a run's deviation from step to step."""
HEADER = """# Made by benchmarks/fit_own.py: this program's own stack. `measured`: constants on the GPU generations that it ran on.
# Others use the generation's row of constants.yaml, except for costs.constants.unmeasured_chip_constants.
# Set by hand, from runs named in docs/design/cost-model.md, and not changed by fits: host_us, moe_us, moe_back, moe_spread,
# quantise, token_passes, net_ring, packing, matmul_sums, logit_bytes, attention_wide, flex, flex_wide, flex_capped,
# flex_backward, flash, flash_wide, flash_backward.
# `before`: constants of earlier kernels, which older runs used.
"""


@dataclass(frozen=True)
class Fit:
    """The result of a fit: log constants, residuals ln(predicted / measured), and their derivatives by constant."""

    log_constants: np.ndarray
    residuals: np.ndarray
    slopes: np.ndarray
    guesses: Guesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="fit on all kept runs, not only on those that own.yaml names"
    )
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    own_values = yaml.safe_load(OWN_FILE.read_text(encoding="utf-8"))
    runs = [
        recorded_run
        for recorded_run in recorded_runs()
        if options.all or recorded_run.name in own_values["fitted_on"].get(recorded_run.file, ())
    ]
    fit = fit_constants(runs, own_values, options.rounds, GUESSES)
    left_out_residuals = without_session(runs, fit)
    print_fit(runs, fit, left_out_residuals)
    constants = with_constants(own_values, fit.log_constants, GUESSES)
    moe_layers = [run for run in moe_runs() if run.name in own_values["mixtures_fitted_on"].get(run.file, ())]
    moe_fit = fit_constants(moe_layers, constants, options.rounds, MOE_GUESSES)
    print_fit(moe_layers, moe_fit, without_session(moe_layers, moe_fit))
    constants = with_constants(constants, moe_fit.log_constants, MOE_GUESSES)
    not_fitted = [
        recorded_run
        for recorded_run in recorded_runs()
        if recorded_run not in runs and not missing_features(recorded_run.run.cluster, recorded_run.plan)
    ]
    constants["band"] = float(f"{np.quantile(np.abs([*left_out_residuals, *errors(not_fitted, constants)]), BAND):.4f}")
    constants["fitted_on"] = {
        file: [recorded_run.name for recorded_run in runs if recorded_run.file == file]
        for file in dict.fromkeys(recorded_run.file for recorded_run in runs)
    }
    constants["mixtures_fitted_on"] = own_values["mixtures_fitted_on"]
    OWN_FILE.write_text(
        HEADER + yaml.safe_dump(constants, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
    )


def fit_constants(runs: Sequence[RecordedRun], own_values: dict[str, Any], rounds: int, guesses: Guesses) -> Fit:
    """The constants of `guesses` with the least cost, starting there; the others are those of `own_values`."""
    log_constants, damping = np.log([value for _, value, _ in guesses.values()]), 1e-3
    residuals = errors(runs, with_constants(own_values, log_constants, guesses))
    fit = Fit(log_constants, residuals, derivatives(runs, own_values, log_constants, residuals, guesses), guesses)
    for _ in range(rounds):
        previous_cost = cost(runs, fit)
        for _ in range(5):
            trial = fit.log_constants - step(runs, fit, damping)
            trial_fit = replace(
                fit, log_constants=trial, residuals=errors(runs, with_constants(own_values, trial, guesses))
            )
            if cost(runs, trial_fit) < previous_cost:
                fit, damping = trial_fit, damping / 3
                break
            damping *= 10
        fit = replace(fit, slopes=derivatives(runs, own_values, fit.log_constants, fit.residuals, guesses))
        if previous_cost - cost(runs, fit) < 1e-3 * previous_cost:
            break
    return fit


def errors(runs: Sequence[RecordedRun], own_values: dict[str, Any]) -> np.ndarray:
    """ln(predicted / measured) of each run under `own_values`, the content of own.yaml."""
    predicted = []
    for recorded_run in runs:
        with kernels_of(recorded_run, own_values):
            predicted.append(
                simulate_plan(
                    recorded_run.run.model, recorded_run.run.train, recorded_run.plan, recorded_run.run.cluster
                ).step_seconds
            )
    return np.log(predicted) - np.log([recorded_run.seconds for recorded_run in runs])


def derivatives(
    runs: Sequence[RecordedRun],
    own_values: dict[str, Any],
    log_constants: np.ndarray,
    residuals: np.ndarray,
    guesses: Guesses,
) -> np.ndarray:
    columns = []
    for index in range(len(log_constants)):
        shifted = log_constants.copy()
        shifted[index] += 0.01
        columns.append((errors(runs, with_constants(own_values, shifted, guesses)) - residuals) / 0.01)
    return np.array(columns).T


def step(runs: Sequence[RecordedRun], fit: Fit, damping: float, left_out: np.ndarray | None = None) -> np.ndarray:
    """The Gauss-Newton step of the fit; the runs that `left_out` marks do not count."""
    guess, log_deviation = guesses_of(fit)
    weight = 1 / noise(runs) ** 2
    if left_out is not None:
        weight[left_out] = 0.0
    curvature = fit.slopes.T @ (weight[:, None] * fit.slopes) + np.diag(log_deviation**-2.0)
    gradient = fit.slopes.T @ (weight * fit.residuals) + (fit.log_constants - guess) / log_deviation**2
    return np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)


def cost(runs: Sequence[RecordedRun], fit: Fit) -> float:
    guess, log_deviation = guesses_of(fit)
    distance = (fit.log_constants - guess) / log_deviation
    return float(np.sum((fit.residuals / noise(runs)) ** 2) + np.sum(distance**2))


def guesses_of(fit: Fit) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the guesses of a fit's constants, and their standard deviations."""
    values = fit.guesses.values()
    return np.log([value for _, value, _ in values]), np.array([deviation for _, _, deviation in values])


def noise(runs: Sequence[RecordedRun]) -> np.ndarray:
    """Relative deviation of each run's step seconds."""
    return np.hypot(MACHINE_NOISE, [recorded_run.deviation for recorded_run in runs])


def without_session(runs: Sequence[RecordedRun], fit: Fit) -> np.ndarray:
    """ln(predicted / measured) of each run under a fit without the runs of its session (file)."""
    files = np.array([recorded_run.file for recorded_run in runs])
    steps = [step(runs, fit, 0.0, left_out=files == recorded_run.file) for recorded_run in runs]
    return np.array([fit.residuals[index] - fit.slopes[index] @ change for index, change in enumerate(steps)])


def with_constants(own_values: dict[str, Any], log_constants: np.ndarray, guesses: Guesses) -> dict[str, Any]:
    """own.yaml's content with the constants of `guesses` at `log_constants`."""
    stack, measured = dict(own_values["stack"]), dict(own_values["measured"][CHIP])
    first_kernels = dict(own_values["before"])
    for (name, (section, _, _)), value in zip(guesses.items(), np.exp(log_constants), strict=True):
        {"stack": stack, "measured": measured, "before": first_kernels}[section][name] = float(f"{value:.5g}")
    return {
        "stack": stack,
        "measured": {CHIP: {**measured, "slow": 1.0}},
        "before": first_kernels,
        "band": own_values["band"],
    }


def print_fit(runs: Sequence[RecordedRun], fit: Fit, left_out_residuals: np.ndarray) -> None:
    print(f"{'':38s} measured    fit  left out")
    for recorded_run, fit_error, left_out_error in zip(
        runs, np.expm1(fit.residuals), np.expm1(left_out_residuals), strict=True
    ):
        print(f"{recorded_run.label:38s} {recorded_run.seconds:8.3f} {fit_error:+6.1%} {left_out_error:+8.1%}")
    for name, errors in (("fit", np.expm1(fit.residuals)), ("left out", np.expm1(left_out_residuals))):
        print(f"{name}: median {np.median(np.abs(errors)):.1%}, worst {np.max(np.abs(errors)):.1%}")
    for (name, (_, value, log_deviation)), fitted_value in zip(
        fit.guesses.items(), np.exp(fit.log_constants), strict=True
    ):
        print(
            f"  {name:13s} {value:8.4g} → {fitted_value:8.4g}  ({np.log(fitted_value / value) / log_deviation:+.1f} deviations)"
        )


if __name__ == "__main__":
    main()
