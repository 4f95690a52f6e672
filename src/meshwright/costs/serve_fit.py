"""Fits the constants of the inference engine's step time to measured steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.costs.serve_work import DeviceWork
from meshwright.costs.step_times import InstanceStepTimes, soft_maximum, whole_chunks
from meshwright.spec.errors import BadInput
from meshwright.spec.serve_profile import StepConstants, StepFactor, StepTime

FITTED = (
    "weight_bytes_per_s",
    "flops_per_s",
    "cache_bytes_per_s",
    "attention_flops_per_s",
    "decode_seconds",
    "prompt_seconds",
    "sequence_seconds",
    "chunk_seconds",
)
"""Constants of `StepConstants` that are fitted if the number of GPU programs per decode is unknown."""
FITTED_WITH_PROGRAMS = (*FITTED, "text_bytes_per_s")
"""Constants that are fitted if that number is known (`StepConstants.decode_programs`)."""
LEAST_SECONDS = 1e-9
"""The least value of a fixed time, because the fit needs its logarithm."""
PRIOR_WEIGHT = 0.02
"""Weight of a constant's distance from its start value (difference of logarithms), relative to the weight of a step's
relative error.

It decides the value of constants that no measured step depends on.
"""
ROUNDS = 40
"""Largest number of iterations of the fit, and of attempts to find a shorter step in one iteration."""
DAMPING = 1e-3
"""First damping factor of the Levenberg-Marquardt method."""


class ServeFit(NamedTuple):
    """Fitted constants and their error."""

    constants: StepConstants
    """The fitted constants."""
    median_error: float
    """Median relative error of the constants at a step that was left out of the fit; 0 if no step could be left out.

    Each step is left out once: the constants are fitted to the others, and their relative error at this step counts.
    """


def fit_constants(work: DeviceWork, start: StepConstants, steps: Sequence[StepTime]) -> ServeFit:
    """Return the constants with which `InstanceStepTimes` predicts the measured steps of one device with the least
    relative error.

    `work` are the sizes of the model on the device; the fit starts at `start`. If launch times were measured, the
    constants of the launch are fitted to them alone. The host's speed varies from second to second, so the prediction
    of a step then uses the measured launch time of that step.

    Raises BadInput unless there is at least one step with a prompt and one without.
    """
    if not any(step.chunks for step in steps) or not any(not step.chunks for step in steps):
        raise BadInput("the fit needs measured steps with a prompt and without")
    errors = []
    for left_out in range(len(steps)):
        others = [step for index, step in enumerate(steps) if index != left_out]
        if any(step.chunks for step in others) and any(not step.chunks for step in others):
            errors.append(abs(_log_errors(work, fitted_constants(work, start, others), [steps[left_out]])[0]))
    return ServeFit(fitted_constants(work, start, steps), float(np.median(errors)) if errors else 0.0)


def fitted_constants(work: DeviceWork, start: StepConstants, steps: Sequence[StepTime]) -> StepConstants:
    """Return the constants of `fit_constants`, without their error."""
    smooth = replace(start, decode_factors=(), prompt_factors=())
    first = np.log([max(getattr(smooth, name), LEAST_SECONDS) for name in _fitted_names(smooth)])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([_log_errors(work, _with(smooth, logs), steps), PRIOR_WEIGHT * (logs - first)])

    constants = _with(smooth, _least_squares(residuals, first))
    if launched := [step for step in steps if step.chunks and step.launch_seconds]:
        prompt, beside, whole = _launch_seconds(launched, start.whole_tokens)
        constants = replace(constants, prompt_seconds=prompt, beside_seconds=beside, whole_seconds=whole)
    errors = _log_errors(work, constants, steps)
    without = [(step.decodes, error) for step, error in zip(steps, errors, strict=True) if not step.chunks]
    times = InstanceStepTimes(work, constants)
    # If the device waited for the launch, the step's time says nothing about the device's speed.
    prompts = [
        (
            times.computed_tokens(step.decodes, step.chunks),
            0.0 if _device_seconds(times, step) < step.exposed_seconds else error,
        )
        for step, error in zip(steps, errors, strict=True)
        if step.chunks
    ]
    return replace(constants, decode_factors=_factors(without), prompt_factors=_factors(prompts))


def _launch_seconds(steps: Sequence[StepTime], whole_tokens: int) -> list[float]:
    """Return (prompt, beside, whole) seconds, fitted to the measured launches by least squares.

    A launch takes `prompt` seconds, `beside` seconds more if the step also has decodes, and `whole` seconds more for
    each chunk of at least `whole_tokens` tokens that begins a prompt.
    """
    shapes = [[1.0, float(step.decodes > 0), whole_chunks(step.chunks, whole_tokens)] for step in steps]
    seconds = [step.launch_seconds for step in steps]
    return np.maximum(0.0, np.linalg.lstsq(np.array(shapes), np.array(seconds), rcond=None)[0]).tolist()


def _fitted_names(constants: StepConstants) -> tuple[str, ...]:
    return FITTED_WITH_PROGRAMS if constants.decode_programs else FITTED


def _with(constants: StepConstants, logs: np.ndarray) -> StepConstants:
    """Return the constants with new values.

    `logs` are the logarithms of the fitted constants, in the order of `_fitted_names`.
    """
    return replace(constants, **dict(zip(_fitted_names(constants), np.exp(logs).tolist(), strict=True)))


def _log_errors(work: DeviceWork, constants: StepConstants, steps: Sequence[StepTime]) -> np.ndarray:
    """Return ln(measured ÷ predicted seconds) of each step, shape (steps,)."""
    times = InstanceStepTimes(work, constants)
    return np.log([step.seconds / _modelled_seconds(times, step) for step in steps])


def _modelled_seconds(times: InstanceStepTimes, step: StepTime) -> float:
    """Return the predicted seconds of a step, with its measured launch time if there is one."""
    if step.launch_seconds:
        return soft_maximum(_device_seconds(times, step), step.exposed_seconds)
    return times.seconds(step.decodes, step.positions, step.chunks, step.longest)


def _device_seconds(times: InstanceStepTimes, step: StepTime) -> float:
    return times.device_seconds(step.decodes, step.positions, step.chunks, step.longest)


def _factors(errors: Sequence[tuple[int, float]]) -> tuple[StepFactor, ...]:
    """Return the mean factor of measured over predicted time by size.

    `errors` has (size of the step in tokens, ln of the factor).
    """
    by_size = defaultdict(list)
    for tokens, error in errors:
        by_size[tokens].append(error)
    return tuple(
        StepFactor(tokens=tokens, factor=float(np.exp(np.mean(by_size[tokens])))) for tokens in sorted(by_size)
    )


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Return a local minimum of the sum of squared `residuals`, by the Levenberg-Marquardt method with numeric
    derivatives.

    `start` has shape (parameters,), and `residuals` maps such an array to an array of shape (n,).
    """
    point = start
    damping = DAMPING
    values = residuals(point)
    for _ in range(ROUNDS):
        width = 1e-5
        slopes = np.stack([(residuals(point + width * unit) - values) / width for unit in np.eye(len(point))], axis=1)
        curvature = slopes.T @ slopes
        gradient = slopes.T @ values
        for _ in range(ROUNDS):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            tried = residuals(point - step)
            if tried @ tried < values @ values:
                break
            damping *= 4
        else:
            return point
        point = point - step
        values = tried
        damping = damping / 4
        if np.abs(step).max() < 1e-6:
            break
    return point
