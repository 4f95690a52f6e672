"""The choice of a deployment: finalists, ties, the band, and the best of an exhaustive simulation."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from math import log, sqrt
from types import SimpleNamespace
from typing import cast

import pytest

from meshwright.config.deployment_file import server_settings
from meshwright.config.load import load_run
from meshwright.config.trace_file import workload_requests
from meshwright.costs.serve_costs import ServeCosts
from meshwright.planner import deployment_search
from meshwright.planner.deployment_goodput import DeploymentGoodput, GoodputSearch, RatePoint
from meshwright.planner.deployment_reasons import DeploymentOption, choice_reasons, why_not
from meshwright.planner.deployment_search import FINALISTS, plan_deployment
from meshwright.planner.deployment_space import deployment_space
from meshwright.simulator.serve_simulation import simulate
from meshwright.spec.deployment import Deployment, InstanceSpec, Quantisation, Role, ServeLimits, Workload
from meshwright.spec.errors import BadInput, OutOfResources

RUN = load_run(None, ["model=llama3-8b", "cluster.gpu=H200", "cluster.gpus_per_node=2"])


def instances(*entries: tuple[Role, int, int]) -> Deployment:
    return Deployment(instances=tuple(InstanceSpec(role=role, count=n, tensor=tensor) for role, n, tensor in entries))


LIMITS = ServeLimits(ttft_seconds=1.0, tpot_seconds=0.1)
COLOCATED, PAIR = instances(("both", 8, 1)), instances(("prefill", 5, 1), ("decode", 3, 1))


def goodput(rate: float) -> DeploymentGoodput:
    return DeploymentGoodput(rate, "tpot", ())


@pytest.mark.parametrize(
    ("colocated", "pair", "chosen"),
    [(10.0, 9.0, COLOCATED), (10.0, 10.4, COLOCATED), (10.0, 10.6, PAIR), (0.0, 1.0, PAIR)],
)
def test_of_a_tie_the_colocated_deployment_is_chosen(colocated: float, pair: float, chosen: Deployment) -> None:
    assert deployment_search._choose({COLOCATED: goodput(colocated), PAIR: goodput(pair)}) == chosen
    assert deployment_search._choose({PAIR: goodput(pair)}) == PAIR


def test_finalists_are_the_best_of_each_kind_and_of_each_tensor_degree() -> None:
    estimates = {instances(("both", n, 1)): 100.0 + n for n in range(1, 9)}
    wide, slow, pairs = instances(("both", 4, 2)), instances(("both", 2, 4)), []
    estimates |= {wide: 90.0, slow: 50.0, instances(("both", 1, 8)): 0.0}
    for n in range(1, 9):
        pairs.append(instances(("prefill", n, 1), ("decode", 1, 1)))
        estimates[pairs[-1]] = 20.0 + n
    finalists = deployment_search._finalists(estimates)
    assert wide in finalists and slow not in finalists and len(finalists) == FINALISTS
    assert [d for d in finalists if not d.colocated] == pairs[:1:-1]


def test_equal_estimates_leave_a_place_for_other_budgets() -> None:
    def budget(tokens: int) -> Deployment:
        return Deployment(instances=(InstanceSpec(token_budget=tokens),))

    estimates = {budget(1024): 16.0, budget(512): 14.2} | {budget(tokens): 14.7 for tokens in (2048, 4096, 8192)}
    assert set(deployment_search._finalists(estimates)) == {budget(tokens) for tokens in (512, 1024, 2048, 8192)}
    # A small budget of a kind may be far from its estimate, and a large one not.
    rates = {budget(256): 2.0, budget(8192): 9.0, PAIR: 10.0}
    search = SimpleNamespace(goodput=lambda deployment, *_, **__: goodput(rates[deployment]))
    equal = dict.fromkeys(rates, 10.0)
    compared = deployment_search._compare(cast(GoodputSearch, search), list(rates), equal, set(rates))
    assert {deployment: found.rate for deployment, found in compared.items()} == rates


def test_devices_that_no_instance_fits_are_refused_with_how_many_would() -> None:
    def fit(least: int, devices: int) -> set[int]:
        def check(instance: InstanceSpec) -> None:
            if instance.tensor < least:
                raise OutOfResources("too little memory")

        run = load_run(None, ["model=llama3-70b", "cluster.gpu=H200", f"cluster.gpus_per_node={devices}"])
        space = deployment_space(run.model, run.cluster, Quantisation(), check)
        return {instance.tensor for deployment in space.deployments for instance in deployment.instances}

    assert fit(2, 3) == {2}, "one device stays idle"
    for least, devices, expected in (
        (8, 3, "at least 8, or a smaller model, got 3"),
        (128, 1, "a smaller model, got 1"),
    ):
        with pytest.raises(OutOfResources, match=f"gpus_per_node: expected {expected}: too little memory"):
            fit(least, devices)


@pytest.mark.parametrize("devices", range(1, 8))
def test_one_more_device_leaves_all_deployments_possible(devices: int) -> None:
    def deployments(count: int) -> set[tuple[tuple[Role, int], ...]]:
        run = load_run(None, ["model=qwen3-30b-a3b", "cluster.gpu=H200", f"cluster.gpus_per_node={count}"])
        space = deployment_space(run.model, run.cluster, Quantisation(), lambda instance: None)
        return {
            tuple((instance.role, instance.tensor) for instance in deployment.instances for _ in range(instance.count))
            for deployment in space.deployments
            if deployment.runnable and deployment.instances[0].expert == 1
        }

    more = [Counter(deployment) for deployment in deployments(devices + 1)]
    for deployment in deployments(devices):
        assert any(Counter(deployment) <= larger for larger in more), deployment


def grouped(expert: int, budget: int = 2048) -> Deployment:
    return Deployment(instances=(InstanceSpec(count=4 // expert, tensor=2, expert=expert, token_budget=budget),))


def test_groups_that_cannot_be_served_are_shown_and_never_chosen() -> None:
    estimates = {COLOCATED: 100.0, PAIR: 90.0} | {
        grouped(2, budget): 300.0 + budget / 100 for budget in (512, 1024, 2048)
    }
    finalists = deployment_search._finalists(estimates)
    assert set(finalists) == {COLOCATED, PAIR, grouped(2), grouped(2, 1024)}
    compared = {deployment: goodput(estimates[deployment]) for deployment in finalists}
    search = SimpleNamespace(goodput=lambda deployment, *_, **__: compared[deployment])
    refined = deployment_search._refine(cast(GoodputSearch, search), compared, estimates, {COLOCATED, PAIR})
    assert set(refined) == {COLOCATED, PAIR} and deployment_search._choose(refined) == COLOCATED
    options = [DeploymentOption(deployment, rate.rate, rate) for deployment, rate in compared.items()]
    best = options[finalists.index(COLOCATED)]
    assert "not runnable" in why_not(best, options[finalists.index(grouped(2))])
    assert "colocated: prefill and decode instances" in next(choice_reasons(best, options[1:], LIMITS))


def test_a_moe_has_deployments_with_groups_of_experts() -> None:
    run = load_run(None, ["model=qwen3-30b-a3b", "cluster.gpu=H200", "cluster.gpus_per_node=4"])
    space = deployment_space(run.model, run.cluster, Quantisation(), lambda instance: None)
    entries = [deployment.instances[0] for deployment in space.deployments if not deployment.runnable]
    assert {(i.count, i.tensor, i.expert) for i in entries} == {(1, 2, 2)}
    for deployment in space.deployments:  # those that the planner may choose are those that a server takes
        for role in {instance.role for instance in deployment.instances}:
            with nullcontext() if deployment.runnable else pytest.raises(BadInput, match="expert: expected 1"):
                server_settings(deployment, role)


def test_the_curve_gives_the_rate_of_an_attainment() -> None:
    points = tuple(RatePoint(rate, share, 1.0, share) for rate, share in ((1.0, 1.0), (4.0, 0.8), (16.0, 0.0)))
    curve = DeploymentGoodput(4.0, "tpot", points)
    assert curve.rate_at(0.9) == pytest.approx(2.0) and curve.rate_at(0.4) == pytest.approx(8.0)
    assert (curve.rate_at(0.0), curve.rate_at(1.0)) == (16.0, 1.0)


def test_the_band_spans_samples_that_are_harder_and_easier() -> None:
    harder = {None: 1.0, 1: 1.1, 2: 0.9, 3: 1.2, 4: 1.0}
    """By how much the load of a sample counts more."""

    class Curve(GoodputSearch):
        def point(self, deployment: Deployment, rate: float, count: int, seed: int | None = None) -> RatePoint:
            return RatePoint(rate, 1.0 - 0.1 * log(harder[seed] * rate / 10.0), 1.0, 1.0)

    search = Curve(lambda deployment, requests, sought: pytest.fail("no simulation"), LIMITS, [])
    chosen = DeploymentGoodput(10.0, "tpot", (search.point(PAIR, 10.0, 1), search.point(PAIR, 10.1, 1)))
    narrower = sqrt(deployment_search.BAND_REQUESTS / deployment_search.FINE_REQUESTS)
    rates = sorted(10.0 / factor**narrower for factor in harder.values())
    low, high = rates[0] + 0.4 * (rates[1] - rates[0]), rates[3] + 0.6 * (rates[4] - rates[3])
    around = [search.point(PAIR, factor * 10.0, 1) for factor in deployment_search.BAND_RATES]
    assert deployment_search._band(search, PAIR, chosen, around) == pytest.approx((low, high))


def test_the_band_of_a_cliff_ends_at_the_rate_that_fails() -> None:
    class Cliff(GoodputSearch):
        def point(self, deployment: Deployment, rate: float, count: int, seed: int | None = None) -> RatePoint:
            share = float(rate <= 10.0)
            return RatePoint(rate, share, share, 1.0)

    search = Cliff(lambda deployment, requests, sought: pytest.fail("no simulation"), LIMITS, [])
    chosen = DeploymentGoodput(10.0, "ttft", tuple(search.point(PAIR, rate, 1) for rate in (9.0, 10.0, 10.15, 10.5)))
    around = [search.point(PAIR, factor * 10.0, 1) for factor in deployment_search.BAND_RATES]
    assert deployment_search._band(search, PAIR, chosen, around) == (10.0, 10.15)


def test_rates_below_one_that_all_requests_meet_are_not_simulated() -> None:
    asked: list[float] = []

    class Loaded(GoodputSearch):
        def point(self, deployment: Deployment, rate: float, count: int, seed: int | None = None) -> RatePoint:
            asked.append(rate)
            return RatePoint(rate, 1.0 if rate <= 6.0 else 0.95, 1.0, 1.0)

    search = Loaded(lambda deployment, requests, sought: pytest.fail("no simulation"), LIMITS, [])
    met, missed = RatePoint(10.0, 0.9, 0.9, 1.0), RatePoint(10.1, 0.89, 0.89, 1.0)
    cut = RatePoint(11.0, 0.8, 0.8, 1.0, cut=True)
    curve = deployment_search._curve(search, PAIR, DeploymentGoodput(10.0, "ttft", (met, missed, cut)))
    rates = [1.0, 3.0, 6.0, 8.5, 10.0, 10.1]
    assert [(point.rate, point.attainment) for point in curve] == list(
        zip(rates, [1, 1, 1, 0.95, 0.9, 0.89], strict=True)
    )
    assert asked == [8.5, 6.0]
    # Without a whole simulation above the goodput, the nearest that was cut is repeated.
    curve = deployment_search._curve(search, PAIR, DeploymentGoodput(10.0, "ttft", (met, cut)))
    assert (curve[-1].rate, curve[-1].attainment) == (11.0, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize(("ttft", "tpot"), [(0.5, 0.008), (0.4, 0.012), (2.0, 0.05)])
def test_the_choice_is_near_the_best_of_all_deployments(
    ttft: float, tpot: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"COARSE_REQUESTS": 400, "FINE_REQUESTS": 400}.items():
        monkeypatch.setattr(deployment_search, name, value)
    limits = ServeLimits(ttft_seconds=ttft, tpot_seconds=tpot)
    requests = workload_requests(Workload(rate=10.0, input_tokens=1500, output_tokens=20))
    answer = plan_deployment(RUN.model, RUN.cluster, requests, limits, Quantisation())
    again = plan_deployment(RUN.model, RUN.cluster, requests, limits, Quantisation())
    assert replace(answer, search_seconds=0.0) == replace(again, search_seconds=0.0)
    costs = ServeCosts(RUN.model, RUN.cluster)
    search = GoodputSearch(lambda d, r, _: simulate(d, r, costs, limits), limits, requests)
    space = deployment_space(RUN.model, RUN.cluster, Quantisation(), costs.of)
    best = max(search.goodput(deployment, 20.0, 400, tolerance=0.03).rate for deployment in space.deployments)
    assert answer.chosen.goodput_per_gpu * RUN.cluster.ranks > 0.93 * best
