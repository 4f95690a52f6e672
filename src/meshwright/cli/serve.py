"""`meshwright serve`: a model behind an HTTP server with OpenAI's interface."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.evaluate import Model
from meshwright.cli.options import model_folder, print_now
from meshwright.spec.fields import field_docs, hints_of
from meshwright.spec.serve import ServeSpec

_ANNOTATED: Any = Annotated  # applied to types made at run time, which a type checker cannot follow


def serve(
    model: Model,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="SERVE.yaml", help="File with the same keys as the options below."),
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP with the interface of OpenAI's API, on 127.0.0.1:8000 unless told otherwise.

    Examples:

        meshwright serve runs/quickstart

        meshwright serve exported-model --host 0.0.0.0 --api-key KEY
    """
    from meshwright.config.serve_file import load_serve
    from meshwright.server.run import run_server

    given = {key: value for key, value in options.items() if value is not None}
    spec = load_serve(config, given)
    run_server(model_folder(model), spec, print_now)


def _option(name: str, annotation: Any, help: str, default: Any) -> inspect.Parameter:
    """The option of a key; without a value the key keeps the file's value or its default."""
    if typing.get_origin(annotation) is not Annotated:
        annotation = next((part for part in typing.get_args(annotation) if part is not type(None)), annotation)
    plain = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    flag = f"--{name.replace('_', '-')}"
    shown = default if default is not None else False
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if plain is bool else flag,
        help=help,
        show_default=str(shown) if shown is not False else False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_ANNOTATED[plain | None, option]
    )


def _with_options(command: Any) -> None:
    """Replace `**options` of a command by an option for each key of ServeSpec."""
    signature = inspect.signature(command, eval_str=True)
    fixed = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    docs, hints = field_docs(ServeSpec), hints_of(ServeSpec)
    options = [
        _option(field.name, hints[field.name], docs[field.name], field.default)
        for field in dataclasses.fields(ServeSpec)
    ]
    command.__signature__ = signature.replace(parameters=[*fixed, *options])
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*fixed, *options]}


_with_options(serve)
