"""The answer of `meshwright plan` for a file with `serve`: a deployment, as text, JSON, YAML and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from meshwright.cli.options import check_writable, say, split_words
from meshwright.config.deployment_file import deployment_yaml, read_deployment_spec
from meshwright.config.reading import Located
from meshwright.config.trace_file import workload_requests
from meshwright.durable.writes import write_durable
from meshwright.launch.machine import found_cluster
from meshwright.launch.prepare import with_model_vocabulary
from meshwright.models.families import folder_spec
from meshwright.observe.number_text import rate as rate_text
from meshwright.planner.deployment_search import DeploymentAnswer, Option, plan_deployment
from meshwright.spec.deployment import DeploymentSpec, TimedRequest
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import to_plain


@dataclass(frozen=True)
class ServePlan:
    """The planner's answer with its question."""

    spec: DeploymentSpec
    answer: DeploymentAnswer
    rate: float
    """Requests per second of the workload."""

    @property
    def devices_needed(self) -> int:
        """Devices that serve the workload's own rate."""
        return max(1, ceil(self.rate / self.answer.chosen.goodput_per_gpu))


def answer_deployment(
    words: list[str] | None, out: Path | None, html: Path | None, *, as_json: bool, refused: Sequence[str] = ()
) -> None:
    """Plan the deployment that the words ask for, print it, and write the files that are asked for.

    `refused` are options of a training plan that were given; they raise BadInput.
    """
    if refused:
        raise BadInput(f"{', '.join(refused)}: for plans of trainings; leave out for a file with `serve`")
    check_writable("--out", out)
    check_writable("--html", html)
    plan = serve_plan(words)
    if out is not None:
        write_durable(out, deployment_yaml(plan.answer.deployment))
    if html is not None:
        from meshwright.cli.plan_deployment_html import page

        write_durable(html, page(plan))
    if as_json:
        print(json.dumps(as_plain(plan.answer)))
    else:
        from meshwright.cli.plan_deployment_text import show

        show(plan)


def serve_plan(words: list[str] | None) -> ServePlan:
    """The plan of the deployment that the words of a command ask for."""
    question = deployment_question(words)
    spec, serve = question.value, question.value.serve
    requests = workload_requests(serve.workload)
    with question.at_keys():
        answer = plan_deployment(spec.model, spec.cluster, requests, serve.limits, serve.quantisation, note=say)
    return ServePlan(spec, answer, workload_rate(requests))


def deployment_question(words: list[str] | None) -> Located[DeploymentSpec]:
    """The question in the file that the words name, with its vocabulary. Raises BadConfig with every mistake."""
    path, overrides = split_words(words)
    if path is None:
        raise BadInput("a plan of a deployment needs a file with `serve`: meshwright plan serve.yaml [KEY=VALUE]...")
    question = read_deployment_spec(path, overrides, detect=found_cluster, model_reader=folder_spec, note=say)
    return replace(question, value=replace(question.value, model=with_model_vocabulary(question.value.model)))


def workload_rate(requests: Sequence[TimedRequest]) -> float:
    """Requests per second of a workload; 0 for one request."""
    seconds = requests[-1].arrival_seconds
    return (len(requests) - 1) / seconds if seconds > 0 else 0.0


def as_plain(answer: DeploymentAnswer) -> dict[str, Any]:
    """The JSON output of `--json`."""
    return {
        "instances": to_plain(answer.deployment.instances),
        "goodput_per_gpu": answer.chosen.goodput_per_gpu,
        "low": answer.low,
        "high": answer.high,
        "binding": answer.chosen.goodput.binding,
        "alternatives": [_alternative(option) for option in answer.alternatives],
        "margin_over_colocated": answer.margin_over_colocated,
        "search_seconds": answer.search_seconds,
    }


def _alternative(option: Option) -> dict[str, Any]:
    return {
        "instances": to_plain(option.deployment.instances),
        "goodput_per_gpu": option.goodput_per_gpu,
        "binding": option.goodput.binding,
        "runnable": option.deployment.runnable,
        "why_not": option.why_not,
    }


def headline(plan: ServePlan) -> str:
    """Goodput with its band, in a sentence."""
    answer, ranks = plan.answer, plan.spec.cluster.ranks
    rate, idle = answer.chosen.goodput_per_gpu, ranks - answer.deployment.devices
    whole = f", {rate_text(rate * ranks)} on all {ranks}" if ranks > 1 else ""
    whole += f", {idle} of them idle" if idle else ""
    return f"{rate_text(rate)} requests/s a GPU (80%: {rate_text(answer.low)} to {rate_text(answer.high)}){whole}"


def limits_line(plan: ServePlan) -> str:
    """The limits, and the gain over colocated instances."""
    limits = plan.spec.serve.limits
    margin = plan.answer.margin_over_colocated
    gain = "" if not margin else f"; {margin:+.0%} over colocated"
    return (
        f"{limits.attainment:.0%} of requests within {limits.ttft_seconds:g} s to the first token and "
        f"{limits.tpot_seconds:g} s a further token; {plan.answer.chosen.goodput.binding.upper()} binds{gain}"
    )


def rate_line(plan: ServePlan) -> str:
    """The share of the goodput that the workload's own rate takes, and the devices that it needs if these are too few."""
    if not plan.rate:
        return "the workload's requests arrive at once: it has no rate of its own"
    needed, ranks = plan.devices_needed, plan.spec.cluster.ranks
    share = plan.rate / (plan.answer.chosen.goodput_per_gpu * ranks)
    more = f": it needs {needed:,} GPUs" if needed > ranks else ""
    return f"the workload's own {rate_text(plan.rate)} requests/s are {share:,.0%} of that{more}"


def search_line(answer: DeploymentAnswer) -> str:
    """How the plan was found."""
    simulated = 1 + len(answer.alternatives)
    unit = f", one of {answer.units} equal parts of the cluster" if answer.units > 1 else ""
    return f"best of {answer.considered:,} deployments, {simulated} simulated{unit}, found in {answer.search_seconds:.1f} s"


def instance_lines(answer: DeploymentAnswer) -> list[tuple[str, ...]]:
    """(role, count, tensor, expert, token budget) of each entry of the chosen deployment."""
    return [
        (i.role, f"{i.count:,}", f"{i.tensor}", f"{i.expert}", f"{i.token_budget:,}")
        for i in answer.deployment.instances
    ]


def scaled_limits(answer: DeploymentAnswer) -> list[tuple[float, float]]:
    """(factor of both limits, attainment) of the chosen deployment at its goodput."""
    served = answer.chosen.goodput.served
    return [] if served is None else [(factor, served.attainment_within(factor)) for factor in LIMIT_FACTORS]


def divisions(answer: DeploymentAnswer) -> list[tuple[float, float]]:
    """(share of devices that compute prompts only, goodput) of each simulated deployment that can be served, ascending."""
    options = [option for option in (answer.chosen, *answer.alternatives) if option.deployment.runnable]
    return sorted((_prefill_share(option), option.goodput_per_gpu) for option in options)


def _prefill_share(option: Option) -> float:
    prefill = sum(entry.devices for entry in option.deployment.instances if entry.role == "prefill")
    return prefill / option.deployment.devices


LIMIT_FACTORS = tuple(factor / 10 for factor in range(4, 21))
"""Factors of both limits for which the plan shows the attainment."""
INSTANCE_HEADS = ("role", "instances", "tensor", "expert", "prompt tokens a step")
