"""Notations: reasoning, text and calls are found in texts of every family, however the texts are cut."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest

from meshwright.server.notations import NOTATIONS, NotationKey, template_notation
from meshwright.server.output_reader import OutputFormat
from meshwright.server.tools import parameter_types

CODE = '  def f(x):\n\treturn {"a": [x]}  # </tool_call> </parameter> </arg_value>\n'
"""A value whose white space counts and which has closing marks."""
WRITE = ("write_file", {"path": "src/a.py", "text": CODE})
RUN = ("run", {"count": 3, "ratio": 0.5, "deep": {"a": [1, None]}, "on": True, "digits": "007", "none": None})
EMPTY = ("get_time", {})
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Writes a file.",
            "parameters": {"properties": {"path": {"type": "string"}, "text": {"type": ["string", "null"]}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs.",
            "parameters": {
                "properties": {
                    "count": {"type": "integer"},
                    "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "deep": {"$ref": "#/$defs/deep"},
                    "on": {"type": "boolean"},
                    "digits": {"type": "string"},
                    "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "$defs": {"deep": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "Now."}},
]
TYPES = parameter_types(TOOLS)
Call = tuple[str, dict[str, Any]]


class Read(NamedTuple):
    """What a text is."""

    reasoning: str
    text: str
    calls: list[Call]


def raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def object_of(call: Call) -> str:
    return json.dumps({"name": call[0], "arguments": call[1]}, ensure_ascii=False)


def xml(call: Call, opening: str, closing: str, newline: str = "\n") -> str:
    values = "".join(f"<parameter={key}>{newline}{raw(value)}{newline}</parameter>\n" for key, value in call[1].items())
    return f"{opening}\n<function={call[0]}>\n{values}</function>\n{closing}"


def glm(call: Call) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n" for key, value in call[1].items()
    )
    return f"<tool_call>{call[0]}\n{values}</tool_call>"


def deepseek(*calls: Call, old: bool = False) -> str:
    written = [
        f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        if old
        else f"{name}<｜tool▁sep｜>{json.dumps(arguments)}"
        for name, arguments in calls
    ]
    middle = "".join(f"<｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜>" for text in written)
    return f"<｜tool▁calls▁begin｜>{middle}<｜tool▁calls▁end｜>"


def dsml(*calls: Call, wrapper: str = "function_calls") -> str:
    def value(key: str, value: Any) -> str:
        string = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{string}">{raw(value)}</｜DSML｜parameter>\n'

    middle = "".join(
        f'<｜DSML｜invoke name="{name}">\n{"".join(value(*item) for item in arguments.items())}</｜DSML｜invoke>\n'
        for name, arguments in calls
    )
    return f"<｜DSML｜{wrapper}>\n{middle}</｜DSML｜{wrapper}>"


def kimi(*calls: Call) -> str:
    middle = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{middle}<|tool_calls_section_end|>"


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(gemma_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


def gemma(call: Call) -> str:
    return f"<|tool_call>call:{call[0]}{gemma_value(call[1])}<tool_call|>"


def minimax(*calls: Call) -> str:
    middle = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{raw(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{middle}</minimax:tool_call>"


def harmony(reasoning: str, text: str, *calls: Call) -> str:
    messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
    messages += [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{text}" + ("<|end|>" if calls else "")]
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


def python(*calls: Call) -> str:
    return (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        + "]"
    )


THINK = "<think>\nI see.\n\nSo: <b>\n</think>\n\n"
THOUGHTS = "I see.\n\nSo: <b>"
BOTH = [WRITE, RUN]
TEXTS: list[tuple[NotationKey, str, Read]] = [
    ("think", f"{THINK}Yes.", Read(THOUGHTS, "Yes.", [])),
    ("think", "Yes <think>no</think>", Read("", "Yes <think>no</think>", [])),
    ("hermes", f"{THINK}Look.\n\n<tool_call>\n{object_of(WRITE)}\n</tool_call>", Read(THOUGHTS, "Look.", [WRITE])),
    (
        "qwen3_coder",
        f"{THINK}Look.\n{xml(WRITE, '<tool_call>', '</tool_call>')}\n{xml(RUN, '<tool_call>', '</tool_call>')}",
        Read(THOUGHTS, "Look.", BOTH),
    ),
    ("qwen3_coder", xml(WRITE, "", "").strip(), Read("", "", [WRITE])),
    ("qwen3_coder", xml(EMPTY, "<tool_call>", "</tool_call>"), Read("", "", [EMPTY])),
    (
        "qwen3_coder",
        "a <function> b <tool_call>\n<function=f>\n<parameter=x>1</param",
        Read("", "a <function> b <tool_call>\n<function=f>\n<parameter=x>1</param", []),
    ),
    ("seed", xml(RUN, "<seed:tool_call>", "</seed:tool_call>", newline=""), Read("", "", [RUN])),
    ("glm", f"{THINK}\n{glm(WRITE)}{glm(RUN)}\nDone.", Read(THOUGHTS, "Done.", BOTH)),
    ("glm", f"<tool_call>{EMPTY[0]}</tool_call>", Read("", "", [EMPTY])),
    ("glm", "<tool_call>no call</tool_call>", Read("", "<tool_call>no call</tool_call>", [])),
    ("glm", "<tool_call>run\n", Read("", "<tool_call>run\n", [])),
    ("glm", "<tool_call>run\n<arg_key>count</arg_key>", Read("", "<tool_call>run\n<arg_key>count</arg_key>", [])),
    ("deepseek_v3", f"{THINK}Well.{deepseek(*BOTH, old=True)}", Read(THOUGHTS, "Well.", BOTH)),
    ("deepseek_v31", f"Well.{deepseek(*BOTH)}", Read("", "Well.", BOTH)),
    ("deepseek_v32", f"{THINK}Well.\n\n{dsml(*BOTH)}", Read(THOUGHTS, "Well.", BOTH)),
    ("deepseek_v32", dsml(EMPTY, RUN, wrapper=" calls"), Read("", "", [EMPTY, RUN])),
    ("kimi_k2", f"{THINK}Well.{kimi(*BOTH)}", Read(THOUGHTS, "Well.", BOTH)),
    ("minimax", f"{THINK}Well.\n{minimax(*BOTH)}", Read(THOUGHTS, "Well.", BOTH)),
    (
        "gemma",
        f"<|channel>thought\n{THOUGHTS}\n<channel|>Well.{gemma(WRITE)}{gemma(RUN)}",
        Read(THOUGHTS, "Well.", BOTH),
    ),
    (
        "mistral",
        f"[THINK]{THOUGHTS}[/THINK]Well.[TOOL_CALLS]run[ARGS]{json.dumps(RUN[1])}",
        Read(THOUGHTS, "Well.", [RUN]),
    ),
    ("llama3", json.dumps({"name": RUN[0], "parameters": RUN[1]}), Read("", "", [RUN])),
    ("llama4", python(*BOTH), Read("", "", BOTH)),
    ("llama4", f"Well.<|python_start|>{python(RUN)}<|python_end|>", Read("", "Well.", [RUN])),
    ("lfm2", f"{THINK}<|tool_call_start|>{python(*BOTH)}<|tool_call_end|>", Read(THOUGHTS, "", BOTH)),
    ("llama4", object_of(RUN), Read("", "", [RUN])),
    ("llama4", "[1, 2] and [f(x)]", Read("", "[1, 2] and [f(x)]", [])),
    ("harmony", harmony(THOUGHTS, "Well.", *BOTH), Read(THOUGHTS, "Well.", BOTH)),
    ("harmony", harmony(THOUGHTS, "Well.") + "<|return|>", Read(THOUGHTS, "Well.", [])),
    ("harmony", harmony("", "Well, <b>."), Read("", "Well, <b>.", [])),
    (
        "harmony",
        f" to=functions.run<|channel|>commentary json<|message|>{json.dumps(RUN[1])}<|call|>",
        Read("", "", [RUN]),
    ),
    ("harmony", "No channel.", Read("", "No channel.", [])),
]


def read(format: OutputFormat, pieces: list[str]) -> Read:
    reader = format.reader()
    parts = [part for index, piece in enumerate(pieces) for part in reader.add(piece, final=index == len(pieces) - 1)]
    texts = ["".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "text")]
    calls = [part.call for part in parts if part.call is not None]
    assert [call.index for call in calls] == [*range(len(calls))] and len({call.id for call in calls}) == len(calls)
    return Read(*texts, [(call.name, json.loads(call.arguments)) for call in calls])


@pytest.mark.parametrize(("notation", "text", "expected"), TEXTS)
def test_a_text_is_read_alike_in_all_pieces(notation: NotationKey, text: str, expected: Read) -> None:
    format = OutputFormat(notation, types=TYPES)
    assert read(format, [text]) == expected
    assert read(format, [*text, ""]) == expected
    for cut in range(len(text) + 1):
        assert read(format, [text[:cut], text[cut:]]) == expected, text[:cut]
    draws = random.Random(text)
    for _ in range(40):
        first, second = sorted(draws.choices(range(len(text) + 1), k=2))
        assert read(format, [text[:first], text[first:second], text[second:]]) == expected, (first, second)


@pytest.mark.parametrize("notation", NOTATIONS)
def test_mixed_texts_are_read_alike_in_all_pieces(notation: NotationKey) -> None:
    """Texts of marks at random: nothing depends on the pieces, and what is neither reasoning nor a call stays text."""
    found = NOTATIONS[notation]
    draws = random.Random(notation)
    marks = [*found.opening, *found.before, *found.after, *(found.reasoning or ())]
    if found.channels:
        marks += ["<|start|>assistant", "<|channel|>final", "<|message|>", "<|end|>", "<|channel|>analysis", "to=f"]
    own = [text for name, text, _ in TEXTS if name == notation]
    parts = [*marks, *own, *(text[: len(text) // 2] for text in own), *(mark[:-2] for mark in marks)]
    parts += ["f", " ", "\n", "{", "}", '"', "[", "x é", '{"a": 1}', "</parameter>", "</function>"]
    for inside in (False, True):
        if inside and found.reasoning is None:
            continue
        format = OutputFormat(notation, types=TYPES, inside=inside)
        for _ in range(40):
            text = "".join(draws.choices(parts, k=draws.randrange(1, 9)))
            expected = read(format, [text])
            assert read(format, [*text, ""]) == expected, text
            ends = sorted(draws.choices(range(len(text) + 1), k=4))
            pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
            assert read(format, pieces) == expected, pieces
            if not expected.calls and not expected.reasoning and not inside and not found.channels:
                assert expected.text == text or found.reasoning is not None


def test_reasoning_that_the_prompt_began() -> None:
    format = OutputFormat("qwen3_coder", types=TYPES, inside=True)
    call = xml(RUN, "<tool_call>", "</tool_call>")
    assert read(format, [f"Hm.\n</think>\n\nYes.\n\n{call}"]) == Read("Hm.", "Yes.", [RUN])
    assert read(format, [f"Hm.\n\n{call}"]) == Read("Hm.", "", [RUN])  # the call ends the reasoning
    assert read(format, [f"As {call}?\n</think>No."]) == Read(f"As {call}?", "No.", [])  # it is quoted
    assert read(format, ["Cut off"]) == Read("Cut off", "", [])


def test_a_value_stays_text_without_a_schema() -> None:
    text = xml(("other", {"a": "007", "b": "null"}), "<tool_call>", "</tool_call>")
    assert read(OutputFormat("qwen3_coder"), [text]) == Read("", "", [("other", {"a": "007", "b": "null"})])


def test_ids_of_numbered_calls_are_the_models() -> None:
    reader = OutputFormat("kimi_k2").reader()
    calls = [part.call for part in reader.add(kimi(*BOTH), final=True) if part.call is not None]
    assert [call.id for call in calls] == ["functions.write_file:0", "functions.run:1"]


def test_failed_calls_cost_no_more_than_their_text() -> None:
    """Openings within openings, each of which a reader could read to the end again."""
    for notation, unit, end in [
        ("qwen3_coder", "<tool_call><function=f><parameter=k>", ""),
        ("llama4", "<|python_start|>[f(", ")]" * 1_500),
        ("gemma", "<|tool_call>call:f{a:[", "}" * 1_500),
        ("hermes", '<tool_call>{"name": [', "]" * 1_500),
    ]:
        text = unit * 1_500 + end
        expected = read(OutputFormat(notation), [text])
        assert expected.calls == [] and expected.text == text


@pytest.mark.parametrize(
    ("template", "notation"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>\\n```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>", "deepseek_v31"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<|tool_call>call:", "gemma"),
        ("<minimax:tool_call>", "minimax"),
        ("<|tool_call_start|>", "lfm2"),
        ("<think>\\n\\n</think>", "think"),
    ],
)
def test_templates_say_the_notation(template: str, notation: str) -> None:
    assert template_notation(template) == notation
