"""The template that converts the messages of a chat to text. It is rendered in a sandbox."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput
from meshwright.spec.folder_files import (
    JSON_BYTES,
    TEMPLATE_BYTES,
    read_folder_file,
    read_folder_json,
    read_folder_text,
)

TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""File of a folder that has a separate template for chats with tools."""
PROCESSOR_TEMPLATE = "chat_template.json"
"""File with the template in older folders of models that also read images."""
TEXT_FILES = (TEMPLATE, TOOL_TEMPLATE, PROCESSOR_TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG)
"""Files about texts that a folder may have in addition to its tokenizer.json."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning in a message, the usual one first. Templates of gpt-oss and LFM2 read the second one."""
START = "\ufdd0"
END = "\ufdd1"
"""Marks before and after the text of a generation block. Unicode reserves these code points for internal use."""


class _NoContent(str):
    """The content of a message that is null: a template that writes it writes nothing, and a template that tests it finds no text."""

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


NO_CONTENT = _NoContent()


class TemplateRefusal(Exception):
    """The template raised an error for these messages."""


class ChatTemplate:
    """A Jinja template, with the functions and the `{% generation %}` block that templates in Hugging Face folders use."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        tool_source: str | None = None,
    ) -> None:
        """`now` is the time that the template may write. `tool_source` is the template for chats with tools, if it differs.

        Raises BadInput if a source is not a valid template.
        """
        self._plain = _compile(source, now, marks=False)
        self._marked = _compile(source, now, marks=True)
        self._plain_tools = self._plain if tool_source is None else _compile(tool_source, now, marks=False)
        self._marked_tools = self._marked if tool_source is None else _compile(tool_source, now, marks=True)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat. Raises TemplateRefusal if the template refuses the messages."""
        return self._render(
            self._plain_tools if tools else self._plain, messages, tools, variables, add_generation_prompt
        )

    def generated_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the ranges [start, stop) of its characters that generation blocks of the template have written.

        Raises TemplateRefusal if the template refuses the messages, or if it does more with the text of a block than write it.
        """
        text = self.render(messages, tools, add_generation_prompt=False)
        pieces = []
        spans = []
        at = 0
        depth = 0
        begin = 0
        marked = self._marked_tools if tools else self._marked
        for piece in _split(self._render(marked, messages, tools, None, False)):
            if piece == START:
                begin = begin if depth else at
                depth += 1
            elif piece == END:
                depth -= 1
                spans += [(begin, at)] if depth == 0 and at > begin else []
            else:
                pieces.append(piece)
                at += len(piece)
        if "".join(pieces) != text:
            raise TemplateRefusal("it changes the text of a generation block, or a message contains U+FDD0 or U+FDD1")
        return text, spans

    def _render(
        self,
        template: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": [_shown(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(values)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything if messages are not as it expects
            raise TemplateRefusal(str(error)) from None


def _shown(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as templates expect it: a null content is `_NoContent`, and its reasoning is under every key that a template may read."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return {**message, "content": NO_CONTENT} if message.get("content", "") is None else message


def folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The source of a folder's template. It is in chat_template.jinja, or the default template in `config` (tokenizer_config.json), or in
    chat_template.json."""
    source = _template_source(folder / TEMPLATE, config, "default")
    older = read_object(folder / PROCESSOR_TEMPLATE).get("chat_template") if source is None else source
    return older if isinstance(older, str) else None


def folder_tool_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The source of a folder's separate template for chats with tools; None if it has none."""
    return _template_source(folder / TOOL_TEMPLATE, config, "tool_use")


def _template_source(file: Path, config: Mapping[str, Any], name: str) -> str | None:
    """The template in `file`; else the template called `name` in `config`. If `config` has only one text, that is the default one."""
    folder = file.parent.parent if file.parent.name == Path(TOOL_TEMPLATE).parent.name else file.parent
    if file.is_file():
        return read_folder_text(file, TEMPLATE_BYTES, folder)
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get(name)
    elif name != "default":
        template = None
    return template if isinstance(template, str) else None


def copy_chat_files(source: Path, folder: Path, *, leave_out: Collection[str] = ()) -> None:
    """Copy the files about texts (`TEXT_FILES`) that `source` has and `folder` does not have, except for those named in `leave_out`."""
    for name in TEXT_FILES:
        if name not in leave_out and (source / name).is_file() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            limit = JSON_BYTES if name.endswith(".json") else TEMPLATE_BYTES
            write_durable(folder / name, read_folder_file(source / name, limit, source))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a tokenizer_config.json names, such as `bos_token`. They are variables in the template."""
    return {
        name: text for name in config if name.endswith("_token") and (text := _token_text(config[name])) is not None
    }


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist. Raises BadInput if it is not JSON."""
    if not file.is_file():
        return {}
    value = read_folder_json(file, error_class=BadInput)
    return value if isinstance(value, dict) else {}


def read_text(file: Path) -> str:
    """The text of a template file that the user named. Raises BadInput if it cannot be read."""
    return read_folder_text(file, TEMPLATE_BYTES, Path(os.path.realpath(file)).parent)


def _compile(source: str, now: Callable[[], datetime], *, marks: bool) -> Any:
    from jinja2 import TemplateAssertionError, nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}` around text that the model writes. It does not change the text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

        def _block(self, caller: Callable[[], str]) -> str:
            return f"{START}{caller()}{END}" if marks else caller()

    class NothingComputed(CodeGenerator):
        """Does not compute constants such as `'a' * 10**9` at compile time.

        They are computed at rendering, which has limits in the server.
        """

        def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
            if not isinstance(node, (nodes.TemplateData, nodes.Const)):
                raise nodes.Impossible
            return super()._output_child_to_const(node, frame, finalize)

        def visit_EvalContextModifier(self, node: Any, frame: Any) -> None:
            if not all(isinstance(option.value, nodes.Const) for option in node.options):
                raise TemplateAssertionError("autoescape: expected true or false", node.lineno)
            super().visit_EvalContextModifier(node, frame)

    class Environment(ImmutableSandboxedEnvironment):
        code_generator_class = NothingComputed

    environment: Any = Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = lambda value: value is None or value is NO_CONTENT
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: now().strftime(str(format))
    try:
        return environment.from_string(source)
    except (
        Exception
    ) as error:  # a source that Jinja accepts may still be too deep, or have too long a number, for Python
        raise BadInput(f"the chat template cannot be used: {str(error) or type(error).__name__}") from None


def _split(text: str) -> list[str]:
    """The text, cut before and after each mark."""
    return re.split(f"([{START}{END}])", text)


class _Refused(Exception):
    """Raised when a template calls `raise_exception`."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter.

    It has the options of transformers. The options `default` and `cls` of `json.dumps` are left out, because they would call objects from
    the template outside of the sandbox.
    """
    pair: Any = None if separators is None else tuple(map(str, separators))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _token_text(value: Any) -> str | None:
    """The text of a token in tokenizer_config.json, which is either a text or an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
