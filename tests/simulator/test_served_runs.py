"""Predictions of measured loads: the simulator against the engine on an H200, with the profile of the same card."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from serve_prediction import summary

from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serve_fit import _fitted
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
PROFILES = [from_plain(EngineProfile, run["profile"]) for run in RUNS]
BOTH = (1, 0), (0, 1)
SIZES = EngineOptions(sequences=256, step_tokens=2048, context=8192, prefix_cache=False, texts=False)
LIMITS = ServeLimits(ttft_seconds=0.2, tpot_seconds=0.02)
LEAST_TOKENS = 200
"""Steps with fewer tokens do not take a GPU to its power limit."""


def errors(number: int, profile: EngineProfile, shares: float = 1.1) -> tuple[float, float, float]:
    """The largest errors up to this share of the capacity: points of attainment, percents of p90 TTFT and TPOT."""
    costs = ServeCosts(profile.model, ClusterSpec(gpu="H200", gpus_per_node=1), settings=SIZES, profile=profile)
    deployment = Deployment(instances=(InstanceSpec(token_budget=SIZES.step_tokens),))
    pairs = []
    for rate in RUNS[number]["rates"]:
        if rate["share"] > shares:
            continue
        draw = random.Random(rate["seed"])
        times = accumulate(draw.expovariate(rate["rate"]) for _ in rate["sizes"])
        requests = [TimedRequest(time, *size) for time, size in zip(times, rate["sizes"], strict=True)]
        pairs.append((rate["measured"], summary(simulate(deployment, requests, costs, LIMITS))))
    points = max(100 * abs(predicted["attainment"] - measured["attainment"]) for measured, predicted in pairs)
    ttft, tpot = (
        max(100 * abs(predicted[name] / measured[name] - 1) for measured, predicted in pairs)
        for name in ("ttft_p90", "tpot_p90")
    )
    return points, ttft, tpot


def between(number: int, other: int) -> EngineProfile:
    """A profile of a run with the prompts' geometric mean of both: what prompts for six tenths of the time would have taken."""
    mine, others = (
        {step.tokens: step.seconds for step in PROFILES[index].steps if step.decodes <= 1 and len(step.chunks) == 1}
        for index in (number, other)
    )
    sizes = sorted(mine.keys() & others.keys())

    def warmed(step: StepTime) -> StepTime:
        if not step.chunks or step.tokens < LEAST_TOKENS:
            return step
        size = min(sizes, key=lambda tokens: abs(tokens - step.tokens))
        return replace(step, seconds=step.seconds * (others[size] / mine[size]) ** 0.5)

    profile = PROFILES[number]
    steps = tuple(map(warmed, profile.steps))
    work = device_work(profile.model, weights=None, item=2, cache_item=2)
    return replace(profile, steps=steps, constants=_fitted(work, profile.constants, steps))


def test_a_profile_of_hot_prompts_predicts_all_rates_a_little_too_slow() -> None:
    points, ttft, tpot = errors(0, PROFILES[0])
    assert points < 3 and 5 < ttft < 12 and tpot < 7


def test_a_profile_of_cool_prompts_predicts_rates_up_to_the_capacity() -> None:
    points, ttft, tpot = errors(1, PROFILES[1], 1.0)
    assert points < 2 and ttft < 9 and tpot < 6


@pytest.mark.parametrize("number, other", BOTH)
def test_a_profile_between_them_predicts_all_rates(number: int, other: int) -> None:
    points, ttft, tpot = errors(number, between(number, other))
    assert points < 2 and ttft < 6 and tpot < 5.5
