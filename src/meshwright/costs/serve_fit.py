"""Fits the constants of the engine's step time to measured steps."""

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
FITTED_WITH_PROGRAMS = (*FITTED, "text_bytes_per_s")
"""Constants that are fitted where the programs of decodes are known."""
LEAST_SECONDS = 1e-9
"""A fixed time of a fit is at least this, as its logarithm is fitted."""
PRIOR_WEIGHT = 0.02
"""Weight of a constant's logarithmic distance from its start beside relative errors: it decides what no step does."""
ROUNDS = 40
DAMPING = 1e-3


class ServeFit(NamedTuple):
    """Constants, and the median of the relative errors at each step by the constants fitted to the others."""

    constants: StepConstants
    median_error: float


def fit_constants(work: DeviceWork, start: StepConstants, steps: Sequence[StepTime]) -> ServeFit:
    """The constants with which `InstanceStepTimes` gives the measured steps of one device best, by relative error.

    Where launches were measured, their constants are fitted to them alone: the host's speed varies from second to second, so each step is
    compared with the model for the launch that it had. Raises BadInput without steps of both types, with and without a prompt.
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
    """The constants of `fit_constants`."""
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
    # A step that ended with its launch says nothing of the device.
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
    """Least squares of the launches: a constant, the time for decodes, and that for each chunk that begins a long prompt."""
    shapes = [[1.0, float(step.decodes > 0), whole_chunks(step.chunks, whole_tokens)] for step in steps]
    seconds = [step.launch_seconds for step in steps]
    return np.maximum(0.0, np.linalg.lstsq(np.array(shapes), np.array(seconds), rcond=None)[0]).tolist()


def _fitted_names(constants: StepConstants) -> tuple[str, ...]:
    return FITTED_WITH_PROGRAMS if constants.decode_programs else FITTED


def _with(constants: StepConstants, logs: np.ndarray) -> StepConstants:
    return replace(constants, **dict(zip(_fitted_names(constants), np.exp(logs).tolist(), strict=True)))


def _log_errors(work: DeviceWork, constants: StepConstants, steps: Sequence[StepTime]) -> np.ndarray:
    """Logarithms of measured over modelled seconds."""
    times = InstanceStepTimes(work, constants)
    return np.log([step.seconds / _modelled_seconds(times, step) for step in steps])


def _modelled_seconds(times: InstanceStepTimes, step: StepTime) -> float:
    """The model's seconds of a measured step, for the launch that it had if that was measured."""
    if step.launch_seconds:
        return soft_maximum(_device_seconds(times, step), step.exposed_seconds)
    return times.seconds(step.decodes, step.positions, step.chunks, step.longest)


def _device_seconds(times: InstanceStepTimes, step: StepTime) -> float:
    return times.device_seconds(step.decodes, step.positions, step.chunks, step.longest)


def _factors(errors: Sequence[tuple[int, float]]) -> tuple[StepFactor, ...]:
    """The mean error of the steps of each size."""
    by_size = defaultdict(list)
    for tokens, error in errors:
        by_size[tokens].append(error)
    return tuple(
        StepFactor(tokens=tokens, factor=float(np.exp(np.mean(by_size[tokens])))) for tokens in sorted(by_size)
    )


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """A local minimum of the sum of squares, by the method of Levenberg and Marquardt with differences for derivatives."""
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
