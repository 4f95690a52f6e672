"""Chooses a serving deployment.

All deployments get a mean-field estimate of their goodput. The best of them are simulated exactly. The answer has the
reasons of the choice.
"""

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
"""Maximum number of deployments that are simulated."""
COLOCATED_FINALISTS = 4
"""Maximum number of colocated deployments among them."""
EXPERT_FINALISTS = 2
"""Maximum number of deployments among them that divide the experts of an MoE model over several groups of devices."""
Placement = Literal["colocated", "roles", "experts"]
"""Kind of a deployment; see `PLACEMENTS`."""
PLACEMENTS: tuple[Placement, ...] = ("colocated", "roles", "experts")
"""colocated: each instance computes prompts and decodes. roles: there are prefill and decode instances. experts:
colocated, and the groups of an instance divide the experts.
"""
FINALIST_SHARE = 0.75
"""A finalist has at least this share of the best estimated goodput of its kind."""
REFINED_SHARE = 0.9
"""A deployment gets a longer simulation if it has at least this share of the best goodput in the shorter simulations.
"""
COARSE_REQUESTS = 1000
"""Number of requests of a simulation that compares finalists."""
FINE_REQUESTS = 3000
"""Number of requests of a simulation that gives the printed figures.

Bursts are rare and batches fill slowly, so a short simulation is too good: with 4,000 requests, 8 GPUs served 24% more
within 1 s and 50 ms than with 16,000. Clusters of every size are planned with the same requests, so that their goodputs
can be compared.
"""
COARSE = 0.06
"""Relative distance of two rates at which the bisection ends, for finalists."""
FINE = 0.02
"""Relative distance of two rates at which the bisection ends, for the best deployment of each kind."""
RESAMPLES = 4
"""Number of further samples of the requests that give the band."""
BAND_REQUESTS = 1000
"""Number of requests of each of these samples. With n times as many, goodputs would vary less by the factor √n."""
BAND_RATES = 0.75, 1.0, 1.3
"""Rates, as factors of the goodput, at which the attainment of the first sample is simulated for the band."""
LOW_SHARES = (0.85, 0.6, 0.3, 0.1)
"""Rates, as shares of the goodput, at which the curve of attainment has points at low load."""
LOW_REQUESTS = 500
"""Number of requests of a simulation at low load, where no batch fills slowly."""
FINE_CUT = 0.9
"""Longer simulations end early if their attainment falls below this share of the required attainment.

The curve and the band only need points near the goodput.
"""
BAND = 0.8
"""Share of samples inside the band."""
TIE = 0.05
"""If disaggregation gains less than this share, the colocated deployment is chosen.

An error of 5% in step times changes goodputs by as much or more.
"""


@dataclass(frozen=True)
class DeploymentAnswer:
    """The chosen deployment and its alternatives. Goodputs are in requests per second and device."""

    chosen: DeploymentOption
    low: float
    """Lower end of the 80% band of the goodput, over resampled arrivals."""
    high: float
    """Upper end of the band."""
    alternatives: tuple[DeploymentOption, ...]
    """The other simulated deployments, the highest goodput first."""
    margin_over_colocated: float | None
    """Relative gain of the chosen deployment over the best colocated one.

    It is None if no colocated deployment meets the limits.

    It is 0 if the chosen deployment is the best colocated one.
    """
    limits: ServeLimits
    """The required limits of latency."""
    considered: int
    """Number of deployments that were estimated."""
    units: int
    """Number of equal units of the cluster, of which one was simulated."""
    search_seconds: float
    """Seconds that planning took."""
    curve: tuple[tuple[float, float], ...] = ()
    """Points (requests per second and device, attainment) of the chosen deployment, in ascending order."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the numbers come from."""
    scores: bool = False
    """Whether the model is a reward model."""

    @property
    def deployment(self) -> Deployment:
        """Return the chosen deployment with its prediction and its reasons."""
        chosen = self.chosen
        predicted = DeploymentPrediction(
            goodput_per_gpu=chosen.goodput_per_gpu, low=self.low, high=self.high, binding=chosen.goodput.binding
        )
        return replace(chosen.deployment, predicted=predicted, why=self.why)

    @property
    def why(self) -> tuple[str, ...]:
        """Return the sentences that explain the choice."""
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
    """Return the deployment of the cluster with the highest goodput.

    If this release serves some of the possible deployments, one of those is chosen. `requests` are the requests that
    are simulated. `software` names another inference server whose step times are predicted; the answer is then not for
    this release. `note` is called with messages about the progress.

    Raises OutOfResources if no instance fits into memory, or if no deployment meets the limits at any rate; the message
    then has limits that a request alone meets.
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
    """Return a request as a reward model gets it.

    Its one result, the score, comes with the step of the prompt, and it reads no prefix from a cache.
    """
    return request._replace(output_tokens=1, prefix_blocks=())


def _choices(deployments: Sequence[Deployment]) -> Set[Deployment]:
    """Return the deployments that this release serves; all of them if it serves none."""
    return {deployment for deployment in deployments if deployment.runnable} or set(deployments)


def _options(
    space: DeploymentSpace,
    compared: dict[Deployment, DeploymentGoodput],
    best_of_kind: dict[Deployment, DeploymentGoodput],
    devices: float,
) -> dict[Deployment, DeploymentOption]:
    """Return an option for each simulated deployment.

    Longer simulations give lower goodputs. The best deployment of each kind has a longer simulation; the goodputs of
    the others of its kind are multiplied by the same factor.
    """
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
    """Return the deployments that are simulated: the best estimates of each kind.

    Estimates of one kind have similar errors.

    In each kind, the best deployment of each tensor degree comes first. Of several deployments with equal estimates,
    the first and the last come next.
    """
    chosen: list[Deployment] = []
    for kind, most in (("colocated", COLOCATED_FINALISTS), ("experts", EXPERT_FINALISTS), ("roles", FINALISTS)):
        alike = sorted((d for d in estimates if _placement(d) == kind and estimates[d]), key=lambda d: -estimates[d])
        near = [deployment for deployment in alike if estimates[deployment] >= FINALIST_SHARE * estimates[alike[0]]]
        first = {deployment.instances[0].tensor: deployment for deployment in reversed(near)}
        leaders = [deployment for deployment in near if deployment in first.values()]
        # Token budgets above the longest prompt have equal estimates. If all of them were taken, none would be left
        # for smaller budgets.
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
    """Return goodputs from short simulations.

    After a deployment is simulated, the ratio of its goodput to its estimate corrects the estimates of later
    deployments of its kind. At least two of each kind are simulated before the rest is skipped, because the error may
    come from the token budget. A deployment that misses the limits at the best rate of its kind keeps its corrected
    estimate.
    """
    compared: dict[Deployment, DeploymentGoodput] = {}
    ratios = dict.fromkeys(PLACEMENTS, 1.0)
    fastest_of = dict.fromkeys(PLACEMENTS, 0.0)
    fastest = 0.0
    # The first deployment of each kind comes first. If one kind turns out much slower, its other deployments need no
    # simulation.
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
    """Return goodputs from longer simulations: of the best deployment of `choices` of each kind, the fastest kind
    first.

    A kind that is much slower has no entry. A kind that would not be chosen keeps the goodput of the short simulation.
    A short simulation may end before batches are full, and its goodput is then too high. So the search begins at the
    estimate, which assumes full batches, if that is lower.
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
    """Return the deployment with the highest goodput.

    In a tie the colocated deployment wins, because it transfers no keys and values.
    """
    best = max(best_of_kind, key=lambda deployment: best_of_kind[deployment].rate)
    plain = next((deployment for deployment in best_of_kind if _placement(deployment) == "colocated"), best)
    return plain if best_of_kind[best].rate < (1 + TIE) * best_of_kind[plain].rate else best


def _curve(search: GoodputSearch, chosen: Deployment, goodput: DeploymentGoodput) -> list[RatePoint]:
    """Return points of the curve of attainment over the rate.

    They ascend from low load to the first rate at which no request meets the limits, or that cannot be sustained. If
    all requests meet the limits at some rate, lower rates are not simulated. If all simulations above the goodput were
    cut, the one with the lowest rate is repeated to its end.
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
    """Return the band of goodputs over random samples of the requests.

    It contains the goodput, and ends at a rate that was seen to fail.

    `around` are points of the first sample at `BAND_RATES`. They give the attainment of the first sample as a function
    of the rate. Each further sample is simulated only at the goodput. Suppose that it has the attainment there that the
    first sample has at 1.1 times the goodput. Then this sample is harder by the factor 1.1, and its goodput is lower by
    this factor. Samples of `FINE_REQUESTS` would differ less, so the factor's logarithm is multiplied by
    √(BAND_REQUESTS / FINE_REQUESTS).

    If all requests meet the limits up to some rate and few do above it, all factors are 1. The goodput is then known as
    exactly as the bisection finds it.
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
    """Return the value below which the share `share` of the values lies, interpolated between neighbours.

    For 4 values and a share of 0.9, the position is 0.9 · 3 = 2.7. It lies between the third and the fourth value: 3 +
    0.7 · 2.

    >>> _quantile([1.0, 2.0, 3.0, 5.0], 0.9)
    4.4
    """
    position = share * (len(ascending) - 1)
    index = min(int(position), len(ascending) - 2)
    return ascending[index] + (position - index) * (ascending[index + 1] - ascending[index])
