"""Predictions of measured loads: the simulator against the engine on an H200, with the profile of the same card.

Both runs were with graphs of prompts 256 tokens apart from 1,024 on, as their profiles say.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serve_prediction import summary

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.serve_constants import usual_constants
from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serve_fit import fitted_constants
from meshwright.costs.serve_work import device_work
from meshwright.simulator.serve_simulation import simulate
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import Deployment, InstanceSpec, ServeLimits, TimedRequest
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain
from meshwright.spec.serve_profile import EngineProfile, StepTime

FILE = Path(__file__).parents[2] / "benchmarks/results/2026-11-27-serve-prediction-H200.json"
RUNS: list[dict[str, Any]] = json.loads(FILE.read_text())["runs"]
"""The first has a profile of prompts one behind another, the second of prompts for a third of the time."""
HOT, COOL = 0, 1
PROFILES = [from_plain(EngineProfile, run["profile"]) for run in RUNS]
CLUSTER = ClusterSpec(gpu="H200", gpus_per_node=1)
SIZES = EngineOptions(sequences=256, step_tokens=2048, context=8192, prefix_cache=False, texts=False)
LIMITS = ServeLimits(ttft_seconds=0.2, tpot_seconds=0.02)
LEAST_TOKENS = 200
"""Steps with fewer tokens do not take a GPU to its power limit."""


class Errors(NamedTuple):
    """Predicted less measured at one rate."""

    points: float
    """Of attainment."""
    ttft: float
    """Of its 90th percentile, in percent of the measured one."""
    tpot: float
    """The same."""


def errors(number: int, profile: EngineProfile) -> dict[float, Errors]:
    """The errors of a run's predictions with this profile, by share of the capacity."""
    costs = ServeCosts(profile.model, CLUSTER, settings=SIZES, profile=profile)
    deployment = Deployment(instances=(InstanceSpec(token_budget=SIZES.step_tokens),))
    by_share = {}
    for rate in RUNS[number]["rates"]:
        draw, measured = random.Random(rate["seed"]), rate["measured"]
        times = accumulate(draw.expovariate(rate["rate"]) for _ in rate["sizes"])
        requests = [TimedRequest(time, *size) for time, size in zip(times, rate["sizes"], strict=True)]
        predicted = summary(simulate(deployment, requests, costs, LIMITS))
        ttft, tpot = (100 * (predicted[name] / measured[name] - 1) for name in ("ttft_p90", "tpot_p90"))
        by_share[rate["share"]] = Errors(100 * (predicted["attainment"] - measured["attainment"]), ttft, tpot)
    return by_share


def between(number: int, other: int) -> EngineProfile:
    """The profile of a run with the geometric mean of both runs' prompts.

    It stands for prompts that take six tenths of the time, as the engine's profile has them now: an assumption, as none was measured.
    """
    own_seconds, other_seconds = (
        {step.tokens: step.seconds for step in PROFILES[index].steps if step.decodes <= 1 and len(step.chunks) == 1}
        for index in (number, other)
    )
    sizes = sorted(own_seconds.keys() & other_seconds.keys())

    def warmed(step: StepTime) -> StepTime:
        if not step.chunks or step.tokens < LEAST_TOKENS:
            return step
        size = min(sizes, key=lambda tokens: abs(tokens - step.tokens))
        return replace(step, seconds=step.seconds * (other_seconds[size] / own_seconds[size]) ** 0.5)

    profile = PROFILES[number]
    known = {name: getattr(profile.constants, name) for name in ("whole_tokens", "prompt_sizes", "decode_programs")}
    start = replace(usual_constants(machine_of(CLUSTER, "bf16")), **known)
    steps = tuple(map(warmed, profile.steps))
    work = device_work(profile.model, weights=profile.weights, item=profile.item_bytes, cache_item=profile.item_bytes)
    return replace(profile, steps=steps, constants=fitted_constants(work, start, steps))


def test_a_profile_of_hot_prompts_predicts_times_that_are_a_little_too_long() -> None:
    of_hot = errors(HOT, PROFILES[HOT])
    assert all(-3 < error.points < 1 and -4 < error.ttft < 12 and 2 < error.tpot < 6 for error in of_hot.values())
    assert max(error.ttft for error in of_hot.values()) > 10


def test_a_profile_of_cool_prompts_predicts_rates_up_to_the_capacity() -> None:
    """Above it prompts take longer than in the profile: waiting times grow with that."""
    of_cool = errors(COOL, PROFILES[COOL])
    above = of_cool.pop(1.1)
    assert all(abs(error.points) < 2 and -9 < error.ttft < 1 and -6 < error.tpot < 1 for error in of_cool.values())
    assert above.points > 5 and above.ttft < -15 and above.tpot < -12


@pytest.mark.parametrize(("number", "other"), [(HOT, COOL), (COOL, HOT)], ids=["hot", "cool"])
def test_a_profile_between_them_predicts_all_rates(number: int, other: int) -> None:
    for share, error in errors(number, between(number, other)).items():
        assert abs(error.points) < 3 and abs(error.ttft) < 6 and abs(error.tpot) < 6, share
