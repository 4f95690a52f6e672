"""Notations of reasoning and tool calls: how each family of models writes them in its answers, as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from meshwright.spec.serve import NotationName

Sequences = Sequence[Sequence[str]]
NotationKey = Literal["array", NotationName]
"""`array` is the JSON array of calls that the grammar of a request asks for."""


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one after the other. A value is raw text; the tool's schema gives its type."""

    opening: str
    """Text before a value, a pattern as in `Notation`, with the field `{key}` and optionally `{string}`."""
    closing: str
    """Text after a value. Where none of `next` comes after it, it is part of the value."""
    next: Sequences
    """What can come after `closing`, apart from white space. Each entry is a sequence of marks."""
    newlines: bool = False
    """Whether a newline on each side of a value belongs to the notation."""


class Forced(NamedTuple):
    """The text around the arguments of calls that a grammar enforces."""

    head: str
    """Text before the arguments, with the field `{name}` or, in quotation marks, `{json_name}`; `{number}` is any number."""
    tail: str
    """Text after the arguments."""
    between: str = "\n"
    """Text between two calls."""
    before: str = ""
    """Text before all calls."""
    after: str = ""
    """Text after all calls."""


@dataclass(frozen=True)
class Notation:
    """How a family writes reasoning and calls."""

    patterns: Mapping[str, str] = field(default_factory=dict)
    """Patterns of the text between `before` and `after`, by its first character; "" is for any other character.

    Fields: `{call}` is a JSON object with a name and arguments, `{name}` the function's name, `{json}` a JSON object with its
    arguments, `{params}` arguments one by one, `{python}` a list of Python calls, `{gemma}` arguments in Gemma's own syntax.
    `{?TEXT}` is text that may be left out. White space may stand before each part, so that `{?}` is only white space.
    """
    opening: Sequence[str] = ()
    """Texts that begin calls anywhere in an answer. A text that is not in `before` is the beginning of the pattern."""
    before: Sequence[str] = ()
    """Texts that may come before a call, also between two calls. A call that follows a call needs none of them."""
    after: Sequence[str] = ()
    """Texts that may come directly after a call."""
    first: str = ""
    """Characters that begin calls at the start of an answer."""
    parameters: Parameters | None = None
    reasoning: tuple[str, str] | None = None
    """Texts that begin and end the reasoning, which comes first in an answer."""
    special: bool = False
    """Whether the marks of reasoning are special tokens, which are otherwise left out of texts."""
    numbered: bool = False
    """Whether a call's name is an id `functions.NAME:NUMBER`. The template expects this id again in later messages."""
    forced: Forced | None = None
    """How calls are written if the request enforces them. None: as `array`."""
    channels: bool = False
    """Whether the answer is messages in channels (harmony), which have marks of their own."""


THINK = ("<think>", "</think>")
_FUNCTION = "<function={name}>{params}</function>"
_PARAMETER = Parameters(
    "<parameter={key}>", "</parameter>", [["<parameter="], ["</function>", "</tool_call>"]], newlines=True
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DSML = ("function_calls", "tool_calls", " calls")

NOTATIONS: Mapping[NotationKey, Notation] = {
    "array": Notation({"": "{call}"}, before=("[", ","), after=("]",), first="["),
    "think": Notation(reasoning=THINK),
    "hermes": Notation(
        {"": "{call}"},
        ("<tool_call>",),
        before=("<tool_call>",),
        after=("</tool_call>",),
        reasoning=THINK,
        forced=Forced('<tool_call>\n{"name": {json_name}, "arguments": ', "}\n</tool_call>"),
    ),
    "qwen3_coder": Notation(
        {"": _FUNCTION},
        ("<tool_call>", "<function="),
        before=("<tool_call>",),
        after=("</tool_call>",),
        parameters=_PARAMETER,
        reasoning=THINK,
        forced=Forced("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
    ),
    "glm": Notation(
        {"": "{name}{params}"},
        ("<tool_call>",),
        before=("<tool_call>",),
        after=("</tool_call>",),
        parameters=Parameters(
            "<arg_key>{key}</arg_key>{?}<arg_value>", "</arg_value>", [["<arg_key>"], ["</tool_call>"]]
        ),
        reasoning=THINK,
        forced=Forced("<tool_call>{name}\n", "</tool_call>"),
    ),
    "deepseek_v3": Notation(
        {"": "function<｜tool▁sep｜>{name}\n```json{json}```"},
        _DEEPSEEK[:1],
        before=_DEEPSEEK[:2],
        after=_DEEPSEEK[2:],
        reasoning=THINK,
        forced=Forced(
            _DEEPSEEK[1] + "function<｜tool▁sep｜>{name}\n```json\n",
            "\n```" + _DEEPSEEK[2],
            "\n",
            _DEEPSEEK[0],
            _DEEPSEEK[3],
        ),
    ),
    "deepseek_v31": Notation(
        {"": "{name}<｜tool▁sep｜>{json}"},
        _DEEPSEEK[:1],
        before=_DEEPSEEK[:2],
        after=_DEEPSEEK[2:],
        reasoning=THINK,
        forced=Forced(_DEEPSEEK[1] + "{name}<｜tool▁sep｜>", _DEEPSEEK[2], "", _DEEPSEEK[0], _DEEPSEEK[3]),
    ),
    "deepseek_v32": Notation(
        {"": '<｜DSML｜invoke name="{name}">{params}</｜DSML｜invoke>'},
        tuple(f"<｜DSML｜{name}>" for name in _DSML),
        before=[f"<｜DSML｜{name}>" for name in _DSML],
        after=[f"</｜DSML｜{name}>" for name in _DSML],
        parameters=Parameters(
            '<｜DSML｜parameter name="{key}" string="{string}">',
            "</｜DSML｜parameter>",
            [
                ["<｜DSML｜parameter"],
                ["</｜DSML｜invoke>", "<｜DSML｜invoke"],
                *(["</｜DSML｜invoke>", f"</｜DSML｜{name}>"] for name in _DSML),
            ],
        ),
        reasoning=THINK,
    ),
    "kimi_k2": Notation(
        {"": "{name}<|tool_call_argument_begin|>{json}"},
        ("<|tool_calls_section_begin|>",),
        before=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        after=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        reasoning=THINK,
        numbered=True,
        forced=Forced(
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "harmony": Notation(channels=True, special=True),
    "llama3": Notation(
        {"": "{call}"},
        ("<|python_tag|>",),
        before=("<|python_tag|>", ";"),
        first="{",
        forced=Forced('{"name": {json_name}, "parameters": ', "}", "; "),
    ),
    "llama4": Notation(
        {"": "{call}", "[": "{python}"},
        ("<|python_start|>",),
        before=("<|python_start|>", ";"),
        after=("<|python_end|>",),
        first="[{",
    ),
    "lfm2": Notation(
        {"": "{python}"},
        ("<|tool_call_start|>",),
        before=("<|tool_call_start|>",),
        after=("<|tool_call_end|>",),
        reasoning=THINK,
    ),
    "mistral": Notation(
        {"": "{name}{?[CALL_ID]}{?[ARGS]}{json}", "{": "{call}"},
        ("[TOOL_CALLS]",),
        before=("[TOOL_CALLS]", "[", ","),
        after=("]",),
        reasoning=("[THINK]", "[/THINK]"),
        special=True,
    ),
    "gemma": Notation(
        {"": "call:{name}{gemma}"},
        ("<|tool_call>",),
        before=("<|tool_call>",),
        after=("<tool_call|>", "<|tool_response>"),
        reasoning=("<|channel>thought", "<channel|>"),
        special=True,
    ),
    "minimax": Notation(
        {"": '<invoke name="{name}">{params}</invoke>'},
        ("<minimax:tool_call>",),
        before=("<minimax:tool_call>",),
        after=("</minimax:tool_call>",),
        parameters=Parameters(
            '<parameter name="{key}">',
            "</parameter>",
            [["<parameter "], ["</invoke>", "</minimax:tool_call>"], ["</invoke>", "<invoke "]],
        ),
        reasoning=THINK,
        forced=Forced('<invoke name="{name}">\n', "</invoke>\n", "", "<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    "seed": Notation(
        {"": _FUNCTION},
        ("<seed:tool_call>",),
        before=("<seed:tool_call>",),
        after=("</seed:tool_call>",),
        parameters=Parameters(
            "<parameter={key}>", "</parameter>", [["<parameter="], ["</function>", "</seed:tool_call>"]]
        ),
        reasoning=("<seed:think>", "</seed:think>"),
        forced=Forced("<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>"),
    ),
}
"""Every notation; `think` has reasoning only."""

_SIGNS: Sequence[tuple[NotationName, Sequence[str]]] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed", ("<seed:tool_call>",)),
    ("gemma", ("<|tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama4", ("<|python_start|>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": function name, "parameters":',)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
"""Texts by which a chat template describes a notation, the most special first."""


def template_notation(template: str) -> NotationName | None:
    """The notation that a chat template describes; None if it is none of these."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


assert {*NOTATIONS} == {*get_args(NotationKey)}, "the setting offers the table's names"
