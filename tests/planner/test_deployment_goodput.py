"""Goodput by bisection and its estimate, against closed forms of queues; the space of deployments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp

import pytest
from tests.slow import quick_first

from meshwright.config.load import load_run
from meshwright.config.trace_file import workload_requests
from meshwright.costs.serve_costs import InstanceCosts, ServeCosts
from meshwright.costs.serve_work import PromptPart
from meshwright.costs.step_times import InstanceStepTimes
from meshwright.planner.deployment_estimate import SizeSample, estimate_goodput
from meshwright.planner.deployment_goodput import GoodputSearch, RequestSample
from meshwright.planner.deployment_space import TOKEN_BUDGETS, deployment_space
from meshwright.simulator.serve_types import RequestTimes, ServedDeployment
from meshwright.spec.deployment import Deployment, InstanceSpec, Quantisation, ServeLimits, TimedRequest, Workload
from meshwright.spec.errors import OutOfResources

SERVICE = 0.05
"""Seconds of a prompt in the queue of these tests."""
LIMITS = ServeLimits(ttft_seconds=1.8 * SERVICE, tpot_seconds=1.0)
SINGLE = Deployment(instances=(InstanceSpec(),))
RUN = load_run(None, ["model=llama3-8b", "cluster.gpu=H200", "cluster.gpus_per_node=8"])


def first_come_first_served(
    deployment: Deployment, requests: Sequence[TimedRequest], sought: float = 0.0
) -> ServedDeployment:
    """One server that takes `SERVICE` seconds for each request; it serves all of them whatever attainment is sought."""
    free, times = 0.0, []
    for request in requests:
        free = max(free, request.arrival_seconds) + SERVICE
        times.append(RequestTimes(request, free, free))
    return ServedDeployment(limits=LIMITS, devices=1, requests=times, instances=[], seconds=free)


def rate_of_md1(attainment: float) -> float:
    """The rate at which this share of an M/D/1 queue waits at most 0.8 services: P(W ≤ t) = (1 - λD) exp(λt) for t < D."""
    low, high = 0.0, 1 / SERVICE
    for _ in range(60):
        rate = (low + high) / 2
        met = (1 - rate * SERVICE) * exp(rate * (LIMITS.ttft_seconds - SERVICE))
        low, high = (rate, high) if met >= attainment else (low, rate)
    return low


@pytest.mark.parametrize("estimate", quick_first(1, [20.0, 1.0, 40.0]))
def test_goodput_of_one_server_is_that_of_its_queue(estimate: float) -> None:
    draw = random.Random(0)
    times = accumulate(draw.expovariate(1.0) for _ in range(40_000))
    requests = [TimedRequest(time, 100, 1) for time in times]
    search = GoodputSearch(first_come_first_served, LIMITS, requests)
    found = search.goodput(SINGLE, estimate, len(requests))
    # So many requests estimate the attainment to about 0.3%, which is 2% of the rate.
    assert found.rate == pytest.approx(rate_of_md1(0.9), rel=0.05)
    assert found.binding == "ttft"
    assert [point.rate for point in found.points] == sorted(point.rate for point in found.points)


def test_a_rate_that_cannot_be_sustained_has_no_attainment() -> None:
    requests = workload_requests(Workload(rate=1.0, input_tokens=100, output_tokens=1))[:500]
    loose = replace(LIMITS, ttft_seconds=1000.0)
    search = GoodputSearch(lambda d, r, _: replace(first_come_first_served(d, r), limits=loose), loose, requests)
    assert search.goodput(SINGLE, 1.0, 500).rate == pytest.approx(1 / SERVICE, rel=0.15)


def test_limits_that_no_rate_meets_give_no_goodput() -> None:
    tight = replace(LIMITS, ttft_seconds=SERVICE / 2)
    requests = workload_requests(Workload(rate=1.0, input_tokens=100, output_tokens=1))[:100]
    search = GoodputSearch(lambda d, r, _: replace(first_come_first_served(d, r), limits=tight), tight, requests)
    assert search.goodput(SINGLE, 10.0, 100).rate == 0


def test_a_sample_keeps_runs_of_requests_and_has_its_rate() -> None:
    requests = [TimedRequest(index**1.5, index + 1, 1) for index in range(400)]
    sample = RequestSample(requests, 80).at(7.0)
    lengths = [request.input_tokens for request in sample]
    assert lengths == [1 + block * 50 + index for block in range(8) for index in range(10)]
    times = [request.arrival_seconds for request in sample]
    assert times == sorted(times) and (len(times) - 1) / times[-1] == pytest.approx(7.0)
    assert RequestSample(requests, 80, seed=1).at(7.0) != sample
    assert len(RequestSample(requests[:3], 80).at(1.0)) == 80


class QueueTimes(InstanceStepTimes):
    """Step times: a whole prompt takes `SERVICE`, a decode step 1 ms and 0.1 ms for each request."""

    def __init__(self) -> None:
        """No work of a model stands behind them."""

    def seconds(self, decodes: int, positions: int, chunks: Sequence[PromptPart] = (), longest: int = 0) -> float:
        whole = sum(chunk.start == 0 for chunk in chunks)
        return SERVICE * whole + (0.001 + 1e-4 * decodes if decodes else 0.0)

    def decode_line(self, decodes: int) -> tuple[float, float, float]:
        return 0.001 + 1e-4 * decodes, 0.0, 0.0


def stub_costs(instance: InstanceSpec) -> InstanceCosts:
    real = ServeCosts(RUN.model, RUN.cluster).of(instance)
    return replace(real, times=QueueTimes(), port_bytes_per_s=1e18)


def test_the_estimate_of_a_prefill_instance_is_near_its_queue() -> None:
    requests = workload_requests(Workload(rate=1.0, input_tokens=100, output_tokens=2))
    pair = Deployment(instances=(InstanceSpec(role="prefill"), InstanceSpec(role="decode")))
    # A transfer takes 1 ms of the limit.
    limits = replace(LIMITS, ttft_seconds=LIMITS.ttft_seconds + 0.001)
    assert estimate_goodput(pair, SizeSample.of(requests), stub_costs, limits) == pytest.approx(
        rate_of_md1(0.9), rel=0.12
    )


def test_the_estimate_of_decodes_is_near_the_fluid_limit() -> None:
    requests = workload_requests(Workload(rate=1.0, input_tokens=100, output_tokens=200))
    pair = Deployment(instances=(InstanceSpec(role="prefill", count=1000), InstanceSpec(role="decode")))
    limits = ServeLimits(ttft_seconds=10.0, tpot_seconds=0.011)
    # 100 decodes take 11 ms a step: 100 / (200 tokens × 11 ms) requests a second.
    fluid = 100 / (200 * 0.011)
    estimate = estimate_goodput(pair, SizeSample.of(requests), stub_costs, limits)
    assert 0.9 * fluid < estimate < 1.02 * fluid  # the bisection ends within 2%


def test_prefixes_count_once_in_sizes() -> None:
    requests = [TimedRequest(i, 1024, 5, (1, 2 + i % 2)) for i in range(20)]
    assert {shared for _, shared, _ in SizeSample.of(requests).sizes} <= {0, 512, 1023}
    assert max(shared for _, shared, _ in SizeSample.of(requests).sizes) == 1023


def test_deployments_use_the_devices_of_a_unit() -> None:
    cluster = replace(RUN.cluster, nodes=8)
    space = deployment_space(RUN.model, cluster, Quantisation(), lambda instance: None)
    assert space.units == 8
    assert all(8 - 4 < deployment.devices <= 8 for deployment in space.deployments)
    assert all(space.whole(deployment).devices == 8 * deployment.devices for deployment in space.deployments)
    budgets = {d.instances[0].token_budget for d in space.deployments if d.colocated}
    assert budgets == set(TOKEN_BUDGETS)
    ratios = {(d.instances[0].count, d.instances[1].count) for d in space.deployments if not d.colocated}
    assert {(count, 8 - count) for count in range(1, 8)} <= ratios


def test_degrees_that_do_not_fit_are_left_out() -> None:
    def check(instance: InstanceSpec) -> None:
        if instance.tensor < 4 or instance.token_budget > 1024:
            raise OutOfResources(f"{instance.tensor} is too small")

    space = deployment_space(RUN.model, RUN.cluster, Quantisation(), check)
    assert {i.tensor for d in space.deployments for i in d.instances} == {4, 8}
    assert max(i.token_budget for d in space.deployments for i in d.instances) == 1024

    def refuse(instance: InstanceSpec) -> None:
        raise OutOfResources("no room")

    with pytest.raises(OutOfResources, match="no room"):
        deployment_space(RUN.model, RUN.cluster, Quantisation(), refuse)
