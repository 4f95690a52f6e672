"""Answers `meshwright plan` for a file with `serve`: with a deployment, as text, JSON, YAML and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.options import check_writable, say, split_arguments
from meshwright.cli.plan_deployment_text import show
from meshwright.cli.planned_deployment import ServePlan
from meshwright.cli.quantised_folder import with_stored_formats
from meshwright.config.deployment_file import deployment_yaml, read_deployment_spec
from meshwright.config.reading import LocatedValues
from meshwright.config.trace_file import workload_requests
from meshwright.durable.writes import write_durable
from meshwright.families.folder import folder_spec
from meshwright.launch.machine import found_cluster
from meshwright.launch.prepare import with_model_vocabulary
from meshwright.planner.deployment_search import DeploymentAnswer, DeploymentOption, plan_deployment
from meshwright.spec.deployment import DeploymentSpec, Quantisation, TimedRequest
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import to_plain


def answer_deployment(
    arguments: list[str] | None, out: Path | None, html: Path | None, *, as_json: bool, refused: Sequence[str] = ()
) -> None:
    """Plan the deployment that the arguments describe, print it, and write the files that the options name.

    - `out`: file for the deployment as YAML.
    - `html`: file for the page.
    - `refused`: options given by the user that only training plans have. They raise BadInput.
    """
    if refused:
        raise BadInput(f"{', '.join(refused)}: for plans of trainings; leave out for a file with `serve`")
    check_writable("--out", out)
    check_writable("--html", html)
    plan = serve_plan(arguments)
    if out is not None:
        write_durable(out, deployment_yaml(plan.answer.deployment))
    if html is not None:
        from meshwright.cli.plan_deployment_html import page

        write_durable(html, page(plan))
    if as_json:
        fewest = {"fewest": to_plain(plan.fewest.instances)} if plan.rate else {}
        print(json.dumps({**as_plain(plan.answer), **fewest}))
    else:
        show(plan)


def serve_plan(arguments: list[str] | None) -> ServePlan:
    """Return the plan of the deployment that the arguments of a command describe."""
    question = deployment_question(arguments)
    spec = question.value
    serve = question.value.serve
    if spec.model.head == "score":
        if serve.quantisation != Quantisation():
            expected = "none with a reward model, whose weights are computed with as they are"
            raise BadInput(f"serve.quantisation: expected {expected}", key="serve.quantisation")
        say("a reward model writes no text: new tokens of requests and shared prefixes do not count")
    requests = workload_requests(serve.workload)
    with question.at_keys():
        answer = plan_deployment(
            spec.model,
            spec.cluster,
            requests,
            serve.limits,
            serve.quantisation,
            software=serve.software,
            note=say,
        )
    return ServePlan(spec, answer, workload_rate(requests))


def deployment_question(arguments: list[str] | None) -> LocatedValues[DeploymentSpec]:
    """Read the question in the file that the arguments name, and complete its vocabulary. Raises BadConfig with every mistake."""
    path, overrides = split_arguments(arguments)
    if path is None:
        raise BadInput("a plan of a deployment needs a file with `serve`: meshwright plan serve.yaml [KEY=VALUE]...")
    question = read_deployment_spec(path, overrides, detect=found_cluster, model_reader=folder_spec, note=say)
    whole = replace(question.value, model=with_model_vocabulary(question.value.model))
    value, sentence = with_stored_formats(whole)
    if sentence is not None:
        say(sentence)
    return replace(question, value=value)


def workload_rate(requests: Sequence[TimedRequest]) -> float:
    """Return the mean requests per second of a workload. 0 if all requests arrive at the same time."""
    seconds = requests[-1].arrival_seconds
    return (len(requests) - 1) / seconds if seconds > 0 else 0.0


def as_plain(answer: DeploymentAnswer) -> dict[str, Any]:
    """Return the answer as JSON values, for `--json`."""
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


def _alternative(option: DeploymentOption) -> dict[str, Any]:
    """Return an alternative that was not chosen, as JSON values."""
    return {
        "instances": to_plain(option.deployment.instances),
        "goodput_per_gpu": option.goodput_per_gpu,
        "binding": option.goodput.binding,
        "runnable": option.deployment.runnable,
        "why_not": option.why_not,
    }
