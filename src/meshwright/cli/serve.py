"""`meshwright serve`: a model behind an HTTP server with OpenAI's interface."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.evaluate import Model
from meshwright.cli.options import model_folder, print_now
from meshwright.cli.setting_options import add_options
from meshwright.cli.spread import check_experts, check_split, cluster_here, model_in
from meshwright.spec.deployment import EngineSwitches
from meshwright.spec.engine import ExpertRanks
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import MTP, ServeSpec


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

        meshwright serve exported-model --host 0.0.0.0 --api-key KEY

        meshwright serve exported-model --plan deployment.yaml
    """
    from meshwright.config.deployment_file import load_deployment, server_settings
    from meshwright.config.serve_file import load_settings
    from meshwright.server.run import run_server

    deployment = None if plan is None else load_deployment(plan)
    planned = {} if deployment is None else server_settings(deployment, options.get("role"), str(plan))
    given = planned | {key: value for key, value in options.items() if value is not None}
    switches = EngineSwitches() if deployment is None else deployment.engine
    experts = ExpertRanks(
        count=given.pop("expert", 1), dispatch=switches.expert_dispatch, micro_batches=switches.expert_micro_batches
    )
    spec, folder = load_settings(ServeSpec, config, given), model_folder(model)
    if experts.count > 1 and (spec.invariant or spec.speculate or spec.draft_model or spec.exchanges):
        raise BadInput(
            f"{plan}: expert: expected 1 with invariant, speculate, draft_model or roles, got {experts.count}"
        )
    if spec.draft_model not in (None, MTP):
        spec = replace(spec, draft_model=str(model_folder(Path(spec.draft_model))))
    cluster = None
    if spec.tensor > 1:
        served, _ = model_in(folder)
        check_split(served, spec.tensor)
        cluster = cluster_here(spec.tensor, f"--tensor {spec.tensor}", "expected at most that many")
    elif experts.count > 1:
        check_experts(model_in(folder)[0], experts.count, f"{plan}: expert")
        cluster = cluster_here(experts.count, f"{plan}: expert", "expected at most that many")
    run_server(folder, spec, print_now, cluster, experts, absorb=switches.absorb)


add_options(serve, ServeSpec)
