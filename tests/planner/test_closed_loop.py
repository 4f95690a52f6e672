"""Latencies under a fixed number of users: against the laws of queues and the simulator of single requests."""

from __future__ import annotations

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.serve_costs import ServeCosts
from meshwright.planner.closed_loop import Load, loaded_latencies
from meshwright.simulator.serve_simulation import simulate
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import Deployment, InstanceSpec, Quantisation, ServeLimits, TimedRequest
from meshwright.spec.engine import EngineSettings
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

LLAMA_8B = from_plain(ModelSpec, {**MODEL_PRESETS["llama3-8b"], "vocab_size": 128256})
H200 = ClusterSpec(gpu="H200", gpus_per_node=8)
COSTS = ServeCosts(LLAMA_8B, H200, Quantisation(), EngineSettings(context=8192), software="vllm")
LIMITS = ServeLimits(ttft_seconds=1e3, tpot_seconds=1e3)
ONE = Deployment(instances=(InstanceSpec(),))
ROLES = Deployment(instances=(InstanceSpec(role="prefill"), InstanceSpec(role="decode", count=2)))


@pytest.mark.parametrize("deployment", [ONE, ROLES])
@pytest.mark.parametrize("users", [1, 8, 64])
def test_little(deployment: Deployment, users: int) -> None:
    load = Load(users=users, input_tokens=1024, output_tokens=256)
    found = loaded_latencies(deployment, load, COSTS.of)
    stay = found.ttft_seconds + load.output_tokens * found.tpot_seconds
    assert found.requests_per_s * stay == pytest.approx(users)


def test_one_user_waits_for_nobody() -> None:
    found = loaded_latencies(ONE, Load(users=1, input_tokens=1024, output_tokens=256), COSTS.of)
    costs = COSTS.of(InstanceSpec())
    assert found.tpot_seconds == pytest.approx(costs.times.seconds(1, 1152), rel=0.1)


def test_a_deployment_with_roles_computes_no_more_requests_than_its_prompts() -> None:
    load = Load(users=512, input_tokens=4096, output_tokens=32)
    found = loaded_latencies(ROLES, load, COSTS.of)
    # Two chunks of the budget, of a prefill instance that does nothing else.
    chunks = [type("Chunk", (), {"start": start, "count": 2048})() for start in (0, 2048)]
    prompt = sum(COSTS.of(InstanceSpec()).times.seconds(0, 0, [chunk]) for chunk in chunks)
    assert found.requests_per_s == pytest.approx(1 / prompt, rel=0.01)
    assert found.ttft_seconds > 400 * prompt


def test_requests_wait_if_the_cache_holds_fewer() -> None:
    small = ServeCosts(
        LLAMA_8B, H200, Quantisation(), EngineSettings(context=8192, cache_blocks=1 + 4 * 72), software="vllm"
    )
    load = Load(users=64, input_tokens=1024, output_tokens=256)
    free, full = (loaded_latencies(ONE, load, costs.of) for costs in (COSTS, small))
    assert full.tpot_seconds < free.tpot_seconds
    assert full.ttft_seconds > 10 * free.ttft_seconds


@pytest.mark.parametrize("users", [4, 32])
def test_the_simulator_serves_as_many_requests(users: int) -> None:
    """Users whose requests end at different times, as the simulator has no closed loop: as many arrive as the closed form serves."""
    load = Load(users=users, input_tokens=512, output_tokens=256)
    found = loaded_latencies(ONE, load, COSTS.of)
    gap = 1 / found.requests_per_s
    requests = [TimedRequest(index * gap, load.input_tokens, load.output_tokens) for index in range(40 * users)]
    served = simulate(ONE, requests, COSTS, LIMITS)
    middle = slice(10 * users, 30 * users)
    assert served.tpot[middle].mean() == pytest.approx(found.tpot_seconds, rel=0.1)


def test_entries_of_one_role_are_equal() -> None:
    twice = Deployment(instances=(InstanceSpec(), InstanceSpec(tensor=2)))
    with pytest.raises(BadInput, match="one entry of each role"):
        loaded_latencies(twice, Load(users=1, input_tokens=1, output_tokens=1), COSTS.of)
