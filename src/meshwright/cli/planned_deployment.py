"""Figures of a planned deployment, and sentences about them, for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from meshwright.observe.number_text import rate as rate_text
from meshwright.planner.deployment_search import DeploymentAnswer, DeploymentOption
from meshwright.spec.deployment import Deployment, DeploymentSpec, deployment_name

LIMIT_FACTORS = tuple(factor / 10 for factor in range(4, 21))
"""Factors by which both limits are multiplied to show how the attainment depends on them."""
INSTANCE_HEADS = ("role", "instances", "tensor", "expert", "prompt tokens a step")
"""Heads of the table of instances."""


@dataclass(frozen=True)
class ServePlan:
    """The planner's answer, together with the question."""

    spec: DeploymentSpec
    """The question."""
    answer: DeploymentAnswer
    """The planner's answer."""
    rate: float
    """Requests per second of the workload itself. 0 if all requests arrive at once."""

    @property
    def fewest(self) -> Deployment:
        """The deployment on the fewest devices that serves the workload's own rate within the limits.

        It is a part of one of the simulated deployments, with instances of the same kinds in the same proportion,
        rounded up. It was not simulated itself; fewer instances share the load a little less evenly.
        """
        answer = self.answer
        ranks = self.spec.cluster.ranks
        runnable = answer.chosen.deployment.runnable
        options = [answer.chosen, *(option for option in answer.alternatives if option.deployment.runnable == runnable)]
        parts = [_part(option.deployment, self.rate / (ranks * option.goodput_per_gpu)) for option in options]
        return min(parts, key=lambda part: part.devices)


def headline(plan: ServePlan) -> str:
    """Return one sentence with the goodput and its 80% interval."""
    answer = plan.answer
    ranks = plan.spec.cluster.ranks
    rate = answer.chosen.goodput_per_gpu
    idle = ranks - answer.deployment.devices
    whole = f", {rate_text(rate * ranks)} on all {ranks}" if ranks > 1 else ""
    whole += f", {idle} of them idle" if idle else ""
    return f"{rate_text(rate)} requests/s a device (80%: {rate_text(answer.low)} to {rate_text(answer.high)}){whole}"


def limits_line(plan: ServePlan) -> str:
    """Return one sentence with the limits, which of them decides the goodput, and the gain over the best colocated deployment."""
    limits = plan.spec.serve.limits
    if plan.spec.model.head == "score":
        return f"{limits.attainment:.0%} of requests within {limits.ttft_seconds:g} s to their score"
    margin = plan.answer.margin_over_colocated
    gain = "" if not margin else f"; {margin:+.0%} over colocated"
    return (
        f"{limits.attainment:.0%} of requests within {limits.ttft_seconds:g} s to the first token and "
        f"{limits.tpot_seconds:g} s a further token; {plan.answer.chosen.goodput.binding.upper()} binds{gain}"
    )


def _part(deployment: Deployment, share: float) -> Deployment:
    """Return the fraction `share` of a deployment, rounded up to whole instances."""
    counts = (replace(instance, count=max(1, ceil(share * instance.count))) for instance in deployment.instances)
    return replace(deployment, instances=tuple(counts))


def rate_line(plan: ServePlan) -> str:
    """Return one sentence: which fraction of the goodput the workload's own rate is, and how many devices suffice for it."""
    if not plan.rate:
        return "the workload's requests arrive at once: it has no rate of its own"
    share = plan.rate / (plan.answer.chosen.goodput_per_gpu * plan.spec.cluster.ranks)
    fewest = plan.fewest
    devices = f"{fewest.devices:,} device{'s' * (fewest.devices > 1)}: {deployment_name(fewest)}"
    return f"the workload's own {rate_text(plan.rate)} requests/s are {share:,.0%} of that, and need at least {devices}"


def search_line(answer: DeploymentAnswer) -> str:
    """Return one sentence about the search: how many deployments were considered and simulated."""
    simulated = 1 + len(answer.alternatives)
    unit = f", one of {answer.units} equal parts of the cluster" if answer.units > 1 else ""
    return f"best of {answer.considered:,} deployments, {simulated} simulated{unit}, found in {answer.search_seconds:.1f} s"


def instance_lines(answer: DeploymentAnswer) -> list[tuple[str, ...]]:
    """Return a table row for each kind of instance, with the columns `INSTANCE_HEADS`."""
    return [
        (i.role, f"{i.count:,}", f"{i.tensor}", f"{i.expert}", f"{i.token_budget:,}")
        for i in answer.deployment.instances
    ]


def scaled_limits(answer: DeploymentAnswer) -> list[tuple[float, float]]:
    """Return (factor of both limits, attainment) of the chosen deployment at its goodput. Empty if it was not simulated."""
    served = answer.chosen.goodput.served
    return [] if served is None else [(factor, served.attainment_within(factor)) for factor in LIMIT_FACTORS]


def divisions(answer: DeploymentAnswer) -> list[tuple[float, float]]:
    """Return (fraction of devices in prefill instances, goodput per device) of each simulated deployment, ascending.

    Deployments that cannot be served are left out.
    """
    options = [option for option in (answer.chosen, *answer.alternatives) if option.deployment.runnable]
    return sorted((_prefill_share(option), option.goodput_per_gpu) for option in options)


def _prefill_share(option: DeploymentOption) -> float:
    prefill = sum(entry.devices for entry in option.deployment.instances if entry.role == "prefill")
    return prefill / option.deployment.devices
