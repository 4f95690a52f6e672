"""Adds an option to a command for each key of a settings class."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union

import click
import typer

from meshwright.spec.fields import docs_of, hints_of

_EXPERT_PANEL = "Expert options"
"""Title of the options in the help that most users do not need."""
_ANNOTATED: Any = Annotated  # This is applied to types that are made at run time. A type checker cannot follow that.


def add_options(command: Any, settings: type, basics: Collection[str], given: Collection[str] = ()) -> None:
    """Replace the parameter `**options` of a command by one option for each field of `settings`.

    The help shows the fields in `basics` first, apart from the others. Fields in `given` get no option.
    """
    signature = inspect.signature(command, eval_str=True)
    fixed = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    docs = docs_of(settings)
    hints = hints_of(settings)
    options = [
        _option(
            field.name,
            hints[field.name],
            docs[field.name],
            field.default,
            panel=None if field.name in basics else _EXPERT_PANEL,
        )
        for field in dataclasses.fields(settings)
        if field.name not in given
    ]
    command.__signature__ = signature.replace(parameters=[*fixed, *options])
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*fixed, *options]}


def split_default(help: str) -> tuple[str, str]:
    """Split the help text of an option into (text, default). The default is empty if the text names none."""
    text, _, default = help.removesuffix("]").partition(" [default: ")
    return (text, default) if default else (help, "")


def _shown(flag: str, default: Any) -> str:
    """Return a default as the user would write it. For a switch that is on, it is the name of the switch."""
    return flag[2:] if default is True else str(default)


def _option(name: str, annotation: Any, help: str, default: Any, *, panel: str | None) -> inspect.Parameter:
    """Return the option for one field, which the help shows in `panel`.

    If the user does not give it, it is None, and the file's value or the field's default applies.
    """
    if typing.get_origin(annotation) in (Union, types.UnionType):
        annotation = next((part for part in typing.get_args(annotation) if part is not type(None)), annotation)
    choices = None
    plain = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    if typing.get_origin(plain) is Literal:
        choices = click.Choice(typing.get_args(plain))
        plain = str
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if plain is bool else flag,
        help=help if default is None or default is False else f"{help} [default: {_shown(flag, default)}]",
        click_type=choices,
        # The default of the option itself is None, and typer would put another text in parentheses.
        show_default=False,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_ANNOTATED[plain | None, option]
    )
