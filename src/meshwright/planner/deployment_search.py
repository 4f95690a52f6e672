"""Chooses a serving deployment: a mean-field estimate of all, exact simulation of the best, and the reasons of the choice."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import sqrt
from typing import Literal

from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serving_software import software_table
from meshwright.planner.deployment_estimate import SizeSample, estimate_goodput
from meshwright.planner.deployment_goodput import DeploymentGoodput, GoodputSearch, RatePoint, Simulate
from meshwright.planner.deployment_reasons import DeploymentOption, choice_reasons, unreachable, why_not
from meshwright.planner.deployment_space import DeploymentSpace, deployment_space
from meshwright.simulator.serve_simulation import simulate
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import (
    Deployment,
    DeploymentPrediction,
    Quantisation,
    ServeLimits,
    ServingSoftwareName,
    TimedRequest,
)
from meshwright.spec.model import ModelSpec

FINALISTS = 10
COLOCATED_FINALISTS = 4
EXPERT_FINALISTS = 2
"""Deployments that are simulated at most; of them colocated ones, and those of MoE models that divide experts over
groups."""
Placement = Literal["colocated", "roles", "experts"]
PLACEMENTS: tuple[Placement, ...] = ("colocated", "roles", "experts")
"""Colocated instances, instances with roles, and colocated ones with several groups of experts."""
FINALIST_SHARE = 0.75
"""Estimated goodput of a finalist at least, over the best of its kind."""
REFINED_SHARE = 0.9
"""The same by the shorter simulations, for longer ones."""
COARSE_REQUESTS = 1000
FINE_REQUESTS = 3000
"""Requests of a simulation that compares finalists, and of one that gives the printed figures.

Bursts are rare and batches fill slowly: with 4,000 requests 8 GPUs served 24% more within 1 s and 50 ms than with 16,000. Clusters of
every size are planned with the same requests, so that their goodputs compare.
"""
COARSE = 0.06
FINE = 0.02
"""Relative distance of rates at which the bisection ends: for finalists, and for the best of each kind."""
RESAMPLES = 4
BAND_REQUESTS = 1000
"""Further samples of the requests for the band, and requests of each; more of them would vary less, by the square root of their number."""
BAND_RATES = 0.75, 1.0, 1.3
"""Rates, as factors of the goodput, at which attainment is known beside the samples of the band, which lies between them."""
LOW_SHARES = (0.85, 0.6, 0.3, 0.1)
LOW_REQUESTS = 500
"""Shares of the goodput at low load, for the curve of attainment, and requests of a simulation there, where no batch fills slowly."""
FINE_CUT = 0.9
"""Share of the attainment asked for below which longer simulations are cut: the curve and the band need the points near the goodput."""
BAND = 0.8
"""Share of samples in the band."""
TIE = 0.05
"""A gain of disaggregation below this is a tie: an error of 5% in step times changes goodputs by as much or more."""


@dataclass(frozen=True)
class DeploymentAnswer:
    """The chosen deployment and its alternatives."""

    chosen: DeploymentOption
    low: float
    """Lower end of the band of the goodput per device over resampled arrivals."""
    high: float
    """Upper end."""
    alternatives: tuple[DeploymentOption, ...]
    margin_over_colocated: float | None
    """Gain of the chosen deployment over the best colocated one, 0 if it is that; None if no colocated one meets the limits."""
    limits: ServeLimits
    considered: int
    """Deployments that were estimated."""
    units: int
    """Equal units of the cluster, of which one was simulated."""
    search_seconds: float
    curve: tuple[tuple[float, float], ...] = ()
    """(requests per second and device, attainment) of the chosen deployment, ascending."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources of the numbers."""
    scores: bool = False
    """Whether the model is a reward model."""

    @property
    def deployment(self) -> Deployment:
        """The chosen deployment with its prediction and reasons."""
        chosen = self.chosen
        predicted = DeploymentPrediction(
            goodput_per_gpu=chosen.goodput_per_gpu, low=self.low, high=self.high, binding=chosen.goodput.binding
        )
        return replace(chosen.deployment, predicted=predicted, why=self.why)

    @property
    def why(self) -> tuple[str, ...]:
        """The reasons of the choice."""
        return tuple(choice_reasons(self.chosen, self.alternatives, self.limits, scores=self.scores))


def plan_deployment(
    model: ModelSpec,
    cluster: ClusterSpec,
    requests: Sequence[TimedRequest],
    limits: ServeLimits,
    quantisation: Quantisation,
    *,
    software: ServingSoftwareName | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> DeploymentAnswer:
    """The deployment of the cluster with the highest goodput, among those that this release serves if it serves any.

    `software` is another server whose step times count; nothing is then for this release.
    Raises OutOfResources if no instance fits or none meets the limits at any rate, with the limits that a request alone meets.
    """
    begin = time.perf_counter()
    if model.head == "score":
        requests = [scored(request) for request in requests]
    costs = ServeCosts(model, cluster, quantisation, software=software)
    space = deployment_space(model, cluster, quantisation, costs.of, software=software)
    sizes = SizeSample.of(requests)
    estimates = {deployment: estimate_goodput(deployment, sizes, costs.of, limits) for deployment in space.deployments}
    finalists = _finalists(estimates)
    choices = _choices(space.deployments)
    if not choices & set(finalists):
        raise unreachable(choices, sizes, costs.of, limits)
    search = GoodputSearch(_simulator(costs, limits), limits, requests)
    note(f"{len(estimates)} deployments estimated; simulating the best {len(finalists)} at most")
    compared = _compare(search, finalists, estimates, choices)
    if not any(goodput.rate for deployment, goodput in compared.items() if deployment in choices):
        raise unreachable(choices, sizes, costs.of, limits)
    note(f"{len(compared)} simulated; simulating the best of each kind with more requests")
    best_of_kind = _refine(search, compared, estimates, choices)
    chosen = _choose(best_of_kind)
    around = [search.point(chosen, factor * best_of_kind[chosen].rate, BAND_REQUESTS) for factor in BAND_RATES]
    low, high = _band(search, chosen, best_of_kind[chosen], around)
    devices = cluster.ranks / space.units
    options = _options(space, compared, best_of_kind, devices)
    best = options.pop(chosen)
    alike = [option for option in (best, *options.values()) if _placement(option.deployment) == "colocated"]
    colocated = max((option.goodput_per_gpu for option in alike), default=0.0)
    others = sorted(options.values(), key=lambda option: -option.goodput_per_gpu)
    return DeploymentAnswer(
        chosen=best,
        low=low / devices,
        high=high / devices,
        alternatives=tuple(replace(option, why_not=why_not(best, option)) for option in others),
        margin_over_colocated=best.goodput_per_gpu / colocated - 1 if colocated else None,
        limits=limits,
        considered=len(estimates),
        units=space.units,
        search_seconds=time.perf_counter() - begin,
        curve=tuple((point.rate / devices, point.attainment) for point in _curve(search, chosen, best.goodput)),
        sources=_sources(costs),
        scores=model.head == "score",
    )


def scored(request: TimedRequest) -> TimedRequest:
    """A request to a reward model, whose score comes with the step of its prompt; it reads no prefix from a cache."""
    return request._replace(output_tokens=1, prefix_blocks=())


def _choices(deployments: Sequence[Deployment]) -> Set[Deployment]:
    """The deployments that this release serves; all of them if it serves none."""
    return {deployment for deployment in deployments if deployment.runnable} or set(deployments)


def _options(
    space: DeploymentSpace,
    compared: dict[Deployment, DeploymentGoodput],
    best_of_kind: dict[Deployment, DeploymentGoodput],
    devices: float,
) -> dict[Deployment, DeploymentOption]:
    """The compared deployments; the goodputs of a kind are corrected by the longer simulation of its best."""
    factors = {
        _placement(deployment): goodput.rate / compared[deployment].rate for deployment, goodput in best_of_kind.items()
    }
    options = {}
    for deployment, coarse in compared.items():
        goodput = best_of_kind.get(deployment, coarse)
        factor = factors.get(_placement(deployment), min(factors.values()))
        rate = goodput.rate if deployment in best_of_kind else factor * coarse.rate
        options[deployment] = DeploymentOption(space.whole(deployment), rate / devices, goodput)
    return options


def _sources(costs: ServeCosts) -> dict[str, str]:
    if costs.software is not None:
        table = software_table()
        return {
            "step times": f"constants fitted on {table.fitted} to {table.source}, measured {table.measured}",
            "latencies": "this engine's batching policy in simulated time",
        }
    profile = costs.profile
    measured = "usual shares of the datasheet's rates, not measured: `meshwright profile --serve` measures them"
    if profile is not None:
        measured = f"the engine measured on such a device ({profile.date}), median error {profile.median_error:.1%}"
    return {"step times": measured, "latencies": "the engine's own batching policy in simulated time"}


def _simulator(costs: ServeCosts, limits: ServeLimits) -> Simulate:
    return lambda deployment, requests, sought: simulate(deployment, requests, costs, limits, sought=sought)


def _placement(deployment: Deployment) -> Placement:
    if any(instance.expert > 1 for instance in deployment.instances):
        return "experts"
    return "colocated" if deployment.colocated else "roles"


def _finalists(estimates: Mapping[Deployment, float]) -> list[Deployment]:
    """The best estimates of each kind, as estimates of one kind err alike.

    The best of each tensor degree comes first, then of equal estimates the first and the last.
    """
    chosen: list[Deployment] = []
    for kind, most in (("colocated", COLOCATED_FINALISTS), ("experts", EXPERT_FINALISTS), ("roles", FINALISTS)):
        alike = sorted((d for d in estimates if _placement(d) == kind and estimates[d]), key=lambda d: -estimates[d])
        near = [deployment for deployment in alike if estimates[deployment] >= FINALIST_SHARE * estimates[alike[0]]]
        first = {deployment.instances[0].tensor: deployment for deployment in reversed(near)}
        leaders = [deployment for deployment in near if deployment in first.values()]
        # Budgets above the longest prompt have equal estimates: all of them would leave no place for smaller ones.
        equal = defaultdict[tuple[int, float], list[Deployment]](list)
        for deployment in near:
            equal[deployment.instances[0].tensor, estimates[deployment]].append(deployment)
        ends = [end for group in equal.values() for end in (group[0], group[-1])]
        others = [deployment for deployment in near if deployment in ends]
        chosen += list(dict.fromkeys([*leaders, *others, *near]))[: min(most, FINALISTS - len(chosen))]
    return chosen


def _compare(
    search: GoodputSearch,
    finalists: Sequence[Deployment],
    estimates: dict[Deployment, float],
    choices: Set[Deployment],
) -> dict[Deployment, DeploymentGoodput]:
    """Coarse goodputs. The error of the estimate of one deployment corrects those of the following of its kind.

    Two of each kind are simulated before it is given up, as the error may be one of the token budget. One that misses the limits at the
    rate of the best of its kind keeps its corrected estimate.
    """
    compared: dict[Deployment, DeploymentGoodput] = {}
    ratios = dict.fromkeys(PLACEMENTS, 1.0)
    fastest_of = dict.fromkeys(PLACEMENTS, 0.0)
    fastest = 0.0
    # The first of each kind come first, so that the others of a much slower kind need no simulation.
    kinds = [[d for d in finalists if _placement(d) == kind] for kind in PLACEMENTS]
    for deployment in [d for firsts in zip_longest(*kinds) for d in firsts if d is not None]:
        kind = _placement(deployment)
        start = ratios[kind] * estimates[deployment]
        if start < FINALIST_SHARE * fastest and sum(_placement(d) == kind for d in compared) > 1:
            continue
        least = fastest_of[kind]
        compared[deployment] = found = search.goodput(deployment, start, COARSE_REQUESTS, tolerance=COARSE, least=least)
        if deployment in choices:
            fastest = max(fastest, found.rate)
        if found.rate > least:
            fastest_of[kind] = found.rate
            ratios[kind] = found.rate / estimates[deployment]
    return compared


def _refine(
    search: GoodputSearch,
    compared: Mapping[Deployment, DeploymentGoodput],
    estimates: Mapping[Deployment, float],
    choices: Set[Deployment],
) -> dict[Deployment, DeploymentGoodput]:
    """Goodputs of the best deployment of `choices` of each kind, from longer simulations; a kind far behind has none.

    The fastest comes first. Another kind that would not be chosen beside it keeps the goodput of the shorter simulations. Where these end
    before batches are full, their goodput is too high: the search then begins at the estimate, which is one of full batches.
    """
    best: dict[Placement, Deployment] = {}
    for deployment in sorted(compared, key=lambda deployment: -compared[deployment].rate):
        if deployment in choices and compared[deployment].rate:
            best.setdefault(_placement(deployment), deployment)
    refined: dict[Deployment, DeploymentGoodput] = {}
    fastest = 0.0
    for kind, deployment in best.items():
        coarse = compared[deployment].rate
        if refined and coarse < REFINED_SHARE * max(compared[chosen].rate for chosen in refined):
            continue
        least = fastest / (1 + TIE) if kind == "colocated" else fastest * (1 + TIE)
        start = min(coarse, estimates[deployment])
        found = search.goodput(deployment, start, FINE_REQUESTS, tolerance=FINE, step=1.05, least=least, cut=FINE_CUT)
        refined[deployment] = found if found.rate else compared[deployment]
        fastest = max(fastest, refined[deployment].rate)
    return refined


def _choose(best_of_kind: Mapping[Deployment, DeploymentGoodput]) -> Deployment:
    """The best of all kinds; of a tie the colocated one, which needs no transfers."""
    best = max(best_of_kind, key=lambda deployment: best_of_kind[deployment].rate)
    plain = next((deployment for deployment in best_of_kind if _placement(deployment) == "colocated"), best)
    return plain if best_of_kind[best].rate < (1 + TIE) * best_of_kind[plain].rate else best


def _curve(search: GoodputSearch, chosen: Deployment, goodput: DeploymentGoodput) -> list[RatePoint]:
    """Attainment by rate, ascending from low load to the first rate that no request's latencies meet, or that cannot be sustained.

    Rates below one that all requests meet are not simulated. If the simulations above the goodput were cut, that of the lowest rate is
    repeated to its end.
    """
    known = [point for point in goodput.points if not point.cut]
    cut = next((point.rate for point in goodput.points if point.cut), None)
    if cut is not None and not any(point.rate > goodput.rate for point in known):
        known.append(search.point(chosen, cut, FINE_REQUESTS))
    low = min(known, key=lambda point: point.rate)
    for rate in (share * goodput.rate for share in LOW_SHARES if share * goodput.rate < low.rate):
        low = replace(low, rate=rate) if low.attainment == 1 else search.point(chosen, rate, LOW_REQUESTS)
        known.append(low)
    points = sorted(known, key=lambda point: point.rate)
    end = next((index + 1 for index, point in enumerate(points) if not point.attainment), len(points))
    return points[:end]


def _band(
    search: GoodputSearch, chosen: Deployment, goodput: DeploymentGoodput, around: Sequence[RatePoint]
) -> tuple[float, float]:
    """The band of goodputs over samples of the requests; it contains the goodput, and ends where a higher rate fails.

    `around` are points of the first sample at `BAND_RATES`. Another sample is simulated at the goodput alone. The rate at which the first
    sample has the same attainment says by which factor the new one is harder; with more requests the logarithm of the factor is smaller.
    Where all requests meet the limits up to a rate and few do above it, all factors are 1, and the goodput is known as exactly as the
    bisection is.
    """
    first = around[BAND_RATES.index(1.0)].attainment
    points = (*(point for point in goodput.points if point.rate != goodput.rate and not point.cut), *around)
    curve = replace(goodput, points=tuple(sorted(points, key=lambda point: point.rate)))
    attained = [search.point(chosen, goodput.rate, BAND_REQUESTS, seed).attainment for seed in range(1, RESAMPLES + 1)]
    harder = [(curve.rate_at(attainment) / curve.rate_at(first)) for attainment in attained]
    narrower = sqrt(BAND_REQUESTS / FINE_REQUESTS)
    rates = sorted([goodput.rate, *(goodput.rate / factor**narrower for factor in harder)])
    tail = (1 - BAND) / 2
    failing = min((point.rate for point in goodput.points if point.rate > goodput.rate), default=goodput.rate)
    return min(goodput.rate, _quantile(rates, tail)), max(failing, _quantile(rates, 1 - tail))


def _quantile(ascending: Sequence[float], share: float) -> float:
    """The value below which the share `share` of all lies, interpolated between neighbours.

    Position 0.9 · 3 = 2.7 is between the third and the fourth value: 3 + 0.7 · 2.

    >>> _quantile([1.0, 2.0, 3.0, 5.0], 0.9)
    4.4
    """
    position = share * (len(ascending) - 1)
    index = min(int(position), len(ascending) - 2)
    return ascending[index] + (position - index) * (ascending[index + 1] - ascending[index])
