"""The class of all commands of the command line: its help, overrides with dashes, and hints about options of other programs."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.foreign_words import option_hint

_DOTTED = re.compile(r"--[a-z_]+\.[^\s=]+=", re.IGNORECASE)
"""An override that is written like an option, such as `--train.steps=200`."""
_MAX_METAVAR = 22
"""Longest placeholder of a value, in characters, that stands beside the name of its option in the help."""
_MAX_NAME = 26
"""Longest option with its placeholder, in characters, whose help text begins on the same line."""


class Command(TyperCommand):
    """A command. If it takes KEY=VALUE arguments, it accepts `--train.steps=200` and reads it as `train.steps=200`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Overrides that begin with dashes lose them, and an unknown option of another program gets a hint."""
        takes_keys = any("KEY=VALUE" in (getattr(each, "metavar", None) or "") for each in self._arguments())
        if takes_keys:
            end = args.index("--") if "--" in args else len(args)
            args = [word[2:] if number < end and _DOTTED.match(word) else word for number, word in enumerate(args)]
        try:
            return super().parse_args(ctx, args)
        # NoSuchOption is a class of click, or of a copy of click inside typer, so its attribute is tested instead.
        except Exception as error:
            name = getattr(error, "option_name", None)
            if not isinstance(name, str) or name in self._options():
                raise
            hint = option_hint(name, frozenset(option.lstrip("-") for option in self._options()), _is_key, takes_keys)
            if hint is not None:
                ctx.fail(f"No such option '{name}': {hint}.")
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: usage, description, and for each panel a list of names and texts.

        The tables of typer have a column each for short names, negative names and placeholders. In a terminal of 80
        columns they cut the names of options and leave a fifth of the width to the texts.
        """
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if each.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(each, "rich_help_panel", None) or kind, []).append(
                    _short_record(each, ctx, *record)
                )
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records, col_max=_MAX_NAME)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn a BrokenPipeError into an error of this program.

        Typer would assume that the reader of standard output is gone and would end without a message. But here it is a
        pipe to another process.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise as_meshwright_error(error) from error

    def _arguments(self) -> list[Any]:
        return [each for each in self.params if each.param_type_name == "argument"]

    def _options(self) -> list[str]:
        return [option for each in self.params for option in (*each.opts, *each.secondary_opts)]


def _short_record(parameter: Any, context: Any, name: str, text: str) -> tuple[str, str]:
    """Return the name and the text of a parameter in the help. Values that do not fit beside the name stand in the text."""
    metavar = parameter.make_metavar(context)
    choices = getattr(parameter.type, "choices", None)
    if choices is None or len(metavar) <= _MAX_METAVAR:
        return name, text
    return name.replace(metavar, "VALUE"), f"{text} One of: {', '.join(map(str, choices))}."


def _is_key(name: str) -> bool:
    """Return whether a run file has a key with the dotted name `name`."""
    from meshwright.config.schema import all_keys
    from meshwright.spec.run import RunSpec

    return any(".".join(map(str, path)) == name for path in all_keys(RunSpec))
