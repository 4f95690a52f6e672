"""The template that turns the messages of a chat into a prompt, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from meshwright.server.errors import RequestError
from meshwright.spec.errors import BadInput


class ChatTemplate:
    """A Jinja template with the functions that templates of Hugging Face folders use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BadInput if the source is no template."""
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadInput(f"the chat template cannot be used: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a chat. Raises RequestError if the template refuses the messages."""
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except Exception as error:  # a template may raise anything on messages that it does not expect
            raise RequestError(422, f"messages: the chat template refuses them: {error}", param="messages") from None


class _Refused(Exception):
    """Raised by a template."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
