"""`meshwright serve`: serves a model over HTTP with the interface of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.evaluate import Model
from meshwright.cli.options import model_folder, print_now
from meshwright.cli.setting_options import add_options
from meshwright.cli.spread import check_experts, check_split, cluster_here, model_in
from meshwright.spec.engine import ExpertRanks
from meshwright.spec.errors import BadInput, attach_key, call_all
from meshwright.spec.serve import MTP, ServeSpec

if TYPE_CHECKING:
    from meshwright.spec.cluster import ClusterSpec


def serve(
    model: Model,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="SERVE.yaml", help="File with the same keys as the options below."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="DEPLOYMENT.yaml",
            help="Deployment of which this server is an instance: role, tensor, expert, step_tokens, formats and engine switches are "
            "those of the file that `meshwright plan serve.yaml --out` wrote; --role selects among several.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP with the interface of OpenAI's API, on 127.0.0.1:8000 unless told otherwise.

    Examples:

        meshwright serve runs/quickstart

        MESHWRIGHT_API_KEY=KEY meshwright serve exported-model --host 0.0.0.0

        meshwright serve exported-model --plan deployment.yaml
    """
    from meshwright.config.deployment_file import planned_settings, read_deployment
    from meshwright.config.serve_file import load_settings
    from meshwright.server.run import run_server

    planned = {} if plan is None else planned_settings(read_deployment(plan), options.get("role"))
    given = {key: value for key, value in options.items() if value is not None}
    folder = model_folder(model)
    settings = load_settings(ServeSpec, config, given, planned, partial(_check, folder))
    values = {key: setting.value for key, setting in planned.items()}
    with settings.at_keys():
        spec = settings.value
        experts = _experts(values)
        if spec.draft_model not in (None, MTP):
            spec = replace(spec, draft_model=str(_draft_folder(spec.draft_model)))
        cluster = _devices(folder, spec.tensor, experts.count)
        run_server(folder, spec, print_now, cluster, experts, absorb=values.get("absorb", True))


def _check(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise the errors of settings that can be checked only with the model, this machine or keys in the environment."""
    from meshwright.server.addresses import ADDRESSES, check_addresses, with_keys
    from meshwright.server.follow import newest

    addresses = ServeSpec(**{key: values[key] for key in ADDRESSES if key in values})
    draft = values.get("draft_model")
    call_all(
        lambda: check_addresses(with_keys(addresses)),
        lambda: _check_experts(values, exchanges=addresses.exchanges or values.get("role", "both") != "both"),
        lambda: _devices(folder, values.get("tensor", 1), values.get("expert", 1)),
        lambda: None if draft in (None, MTP) else _draft_folder(draft),
        lambda: newest(folder) if values.get("follow") else None,
    )


def _check_experts(values: Mapping[str, Any], *, exchanges: bool) -> None:
    """Raise BadInput if several devices share the experts and a setting allows only one device.

    `exchanges` tells whether the server exchanges cache blocks with other servers, which also allows only one device.
    """
    count = _experts(values).count
    if count > 1 and (
        exchanges or any(values.get(key) for key in ("invariant", "speculate", "draft_model", "adapter"))
    ):
        expected = "expected 1 with invariant, speculate, draft_model, adapter or roles"
        raise BadInput(f"expert: {expected}, got {count}", key="expert")


def _draft_folder(name: str) -> Path:
    with attach_key("draft_model"):
        return model_folder(Path(name))


def _experts(planned: Mapping[str, Any]) -> ExpertRanks:
    """Return the expert-parallel ranks that the settings of a plan give."""
    with attach_key("expert_dispatch" if "expert_dispatch" in planned else "expert_micro_batches"):
        return ExpertRanks(
            count=planned.get("expert", 1),
            dispatch=planned.get("expert_dispatch"),
            micro_batches=planned.get("expert_micro_batches", 1),
        )


def _devices(folder: Path, tensor: int, experts: int) -> ClusterSpec | None:
    """Return this host as a cluster of the devices that divide the model (`tensor`) or share its experts.

    None for one device.
    """
    if tensor > 1:
        with attach_key("tensor"):
            check_split(model_in(folder)[0], tensor, "tensor")
            return cluster_here(tensor, f"tensor {tensor}", "expected at most that many")
    if experts > 1:
        with attach_key("expert"):
            check_experts(model_in(folder)[0], experts, "expert")
            return cluster_here(experts, f"expert {experts}", "expected at most that many")
    return None


_BASICS = (
    "host",
    "port",
    "api_key",
    "name",
    "chat_template",
    "follow",
    "log_requests",
    "sequences",
    "context",
    "weights",
    "adapter",
    "tensor",
)
"""The settings that the help shows first."""
add_options(serve, ServeSpec, _BASICS)
