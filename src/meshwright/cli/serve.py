"""`meshwright serve`: a model behind an HTTP server with OpenAI's interface."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import click
import typer

from meshwright.cli.evaluate import Model
from meshwright.cli.options import model_folder, print_now
from meshwright.cli.spread import check_split, cluster_here, model_in
from meshwright.spec.fields import docs_of, hints_of
from meshwright.spec.serve import ServeSpec

_ANNOTATED: Any = Annotated  # applied to types made at run time, which a type checker cannot follow


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
            help="Deployment of which this server is an instance: role, tensor, step_tokens and formats are those of the file that "
            "`meshwright plan serve.yaml --out` wrote; --role selects among several.",
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
    from meshwright.config.serve_file import load_serve
    from meshwright.server.run import run_server

    planned = {} if plan is None else server_settings(load_deployment(plan), options.get("role"), str(plan))
    given = planned | {key: value for key, value in options.items() if value is not None}
    spec, folder = load_serve(config, given), model_folder(model)
    if spec.draft_model is not None:
        spec = replace(spec, draft_model=str(model_folder(Path(spec.draft_model))))
    cluster = None
    if spec.tensor > 1:
        served, _ = model_in(folder)
        check_split(served, spec.tensor)
        cluster = cluster_here(spec.tensor, f"--tensor {spec.tensor}", "expected at most that many")
    run_server(folder, spec, print_now, cluster)


def _option(name: str, annotation: Any, help: str, default: Any) -> inspect.Parameter:
    """The option of a key; without a value the key keeps the file's value or its default."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        annotation = next((part for part in typing.get_args(annotation) if part is not type(None)), annotation)
    choices, plain = None, typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    if typing.get_origin(plain) is Literal:
        choices, plain = click.Choice(typing.get_args(plain)), str
    flag = f"--{name.replace('_', '-')}"
    shown = default if default is not None else False
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if plain is bool else flag,
        help=help,
        click_type=choices,
        show_default=str(shown) if shown is not False else False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_ANNOTATED[plain | None, option]
    )


def _with_options(command: Any) -> None:
    """Replace `**options` of a command by an option for each key of ServeSpec."""
    signature = inspect.signature(command, eval_str=True)
    fixed = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    docs, hints = docs_of(ServeSpec), hints_of(ServeSpec)
    options = [
        _option(field.name, hints[field.name], docs[field.name], field.default)
        for field in dataclasses.fields(ServeSpec)
    ]
    command.__signature__ = signature.replace(parameters=[*fixed, *options])
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*fixed, *options]}


_with_options(serve)
