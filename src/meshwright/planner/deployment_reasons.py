"""Writes sentences that explain the choice of a deployment, and why other deployments were not chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.costs.serve_costs import InstanceCosts
from meshwright.planner.deployment_estimate import SizeSample, alone_seconds
from meshwright.planner.deployment_goodput import DeploymentGoodput
from meshwright.spec.deployment import Deployment, InstanceSpec, ServeLimits, deployment_name
from meshwright.spec.errors import OutOfResources

LEAST_GAIN = 0.02
"""Smallest relative difference of goodputs at which the choice of the token budget is explained."""


@dataclass(frozen=True)
class DeploymentOption:
    """A simulated deployment of the whole cluster, with its goodput."""

    deployment: Deployment
    goodput_per_gpu: float
    """Goodput in requests per second and per device of the cluster."""
    goodput: DeploymentGoodput
    """Goodput of one unit of the cluster in requests per second (`deployment_space`)."""
    why_not: str = ""
    """Why it was not chosen; empty for the chosen deployment."""


def choice_reasons(
    chosen: DeploymentOption, alternatives: Sequence[DeploymentOption], limits: ServeLimits, *, scores: bool = False
) -> Iterator[str]:
    """Yield the reasons of a choice: the roles, the token budget, how busy the instances are, and which limit binds.

    `scores` is true for a reward model, which has one role and no cache.
    """
    if (limit := chosen.deployment.release_limit) is not None:
        yield f"this release does not serve it: {limit}"
    alternatives = [option for option in alternatives if _comparable(chosen, option)]
    yield "one device an instance, as a reward model is served" if scores else _role_reason(chosen, alternatives)
    if (reason := _budget_reason(chosen, alternatives)) is not None:
        yield reason
    yield from _load_reasons(chosen, cached=not scores)
    yield _binding_reason(chosen, limits)


def why_not(chosen: DeploymentOption, other: DeploymentOption) -> str:
    """Return why another deployment was not chosen."""
    if not other.goodput_per_gpu:
        return "does not meet the limits at any rate"
    loss = 1 - other.goodput_per_gpu / chosen.goodput_per_gpu
    missed = other.goodput.binding.upper()
    if not _comparable(chosen, other):
        change = f"{abs(loss):.1%} {'less' if loss > 0 else 'more'}"
        return f"not runnable: this release serves groups of experts of one device each; it would serve {change}"
    if loss < 0:
        return f"serves {-loss:.1%} more, less than predictions can tell apart, and moves keys and values"
    return f"serves {loss:.1%} less; {missed} binds"


def unreachable(
    deployments: Iterable[Deployment],
    sizes: SizeSample,
    cost_of: Callable[[InstanceSpec], InstanceCosts],
    limits: ServeLimits,
) -> OutOfResources:
    """Return the error if no deployment meets the limits.

    It names limits that a request alone meets on the fastest instance.
    """
    instances = {instance for deployment in deployments for instance in deployment.instances}
    alone = [alone_seconds(sizes, cost_of(instance), instance, limits.attainment) for instance in instances]
    least = {"ttft": min(ttft for ttft, _ in alone), "tpot": min(tpot for _, tpot in alone)}
    given = {"ttft": limits.ttft_seconds, "tpot": limits.tpot_seconds}
    short = [name for name in given if least[name] > given[name]] or ["ttft", "tpot"]
    texts = [f"serve.limits.{name}_seconds: expected at least {least[name]:.3g}, got {given[name]:g}" for name in short]
    message = "no deployment meets the limits, which a request alone needs on the fastest instance: " + "; ".join(texts)
    return OutOfResources(message, key=f"serve.limits.{short[0]}_seconds")


def _comparable(chosen: DeploymentOption, other: DeploymentOption) -> bool:
    """Return whether another deployment could have been chosen: this release serves it, or serves neither deployment."""
    return other.deployment.runnable or not chosen.deployment.runnable


def _role_reason(chosen: DeploymentOption, alternatives: Sequence[DeploymentOption]) -> str:
    colocated = chosen.deployment.colocated
    others = [option for option in alternatives if option.deployment.colocated != colocated]
    other = max(others, key=lambda option: option.goodput_per_gpu, default=None)
    if colocated:
        kind = "colocated"
        if other is None or not other.goodput_per_gpu:
            return "colocated: no prefill and decode instances meet the limits on this cluster"
        change = other.goodput_per_gpu / chosen.goodput_per_gpu - 1
        gain = (
            f"gain {change:.1%}, which is within the error of predictions"
            if change > 0
            else f"serve {-change:.1%} less"
        )
        return f"{kind}: prefill and decode instances ({deployment_name(other.deployment)}) {gain}"
    if other is None or not other.goodput_per_gpu:
        return "prefill and decode instances: no colocated deployment meets the limits"
    gain = chosen.goodput_per_gpu / other.goodput_per_gpu - 1
    return f"prefill and decode instances serve {gain:.0%} more than the best colocated deployment ({deployment_name(other.deployment)})"


def _budget_reason(chosen: DeploymentOption, alternatives: Sequence[DeploymentOption]) -> str | None:
    if not chosen.deployment.colocated:
        return None
    (own,) = chosen.deployment.instances
    alike = [
        option
        for option in alternatives
        if option.deployment.colocated
        and option.deployment.instances[0].tensor == own.tensor
        and option.deployment.instances[0].expert == own.expert
    ]
    best = max(alike, key=lambda option: option.goodput_per_gpu, default=None)
    if best is None or best.goodput_per_gpu > (1 - LEAST_GAIN) * chosen.goodput_per_gpu:
        return None
    loss = 1 - best.goodput_per_gpu / chosen.goodput_per_gpu
    return f"{own.token_budget:,} prompt tokens a step: with {best.deployment.instances[0].token_budget:,} it serves {loss:.0%} less"


def _load_reasons(chosen: DeploymentOption, *, cached: bool) -> Iterator[str]:
    served = chosen.goodput.served
    if served is None:
        return
    for role in dict.fromkeys(instance.role for instance in chosen.deployment.instances):
        figures = [entry for entry in served.instances if entry.role == role]
        busy = sum(entry.busy for entry in figures) / len(figures)
        peak = max(entry.cache_peak for entry in figures)
        name = "instances" if role == "both" else f"{role} instances"
        filled = f" and fill at most {peak:.0%} of their caches" if cached else ""
        yield f"at that rate {name} are busy {busy:.0%} of the time{filled}"


def _binding_reason(chosen: DeploymentOption, limits: ServeLimits) -> str:
    goodput = chosen.goodput
    missed = next((point for point in goodput.points if point.rate > goodput.rate), None)
    limit = limits.ttft_seconds if goodput.binding == "ttft" else limits.tpot_seconds
    text = f"{goodput.binding.upper()} binds"
    if missed is None:
        return text
    if not missed.attainment:
        return f"{text}: {missed.rate / goodput.rate - 1:.0%} above that rate the queue grows without end"
    share = missed.ttft_share if goodput.binding == "ttft" else missed.tpot_share
    least = "at least " if missed.cut else ""
    return f"{text}: {missed.rate / goodput.rate - 1:.0%} above that rate {least}{1 - share:.0%} of requests take longer than {limit:g} s"
