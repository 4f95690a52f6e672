"""Calls and reasoning that released chat templates write are read back: call, template, text, call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from meshwright.server.chat_template import ServedChatTemplate
from meshwright.server.errors import RequestError
from meshwright.server.notations import NOTATIONS, template_notation
from meshwright.server.output_reader import OutputFormat
from tests.released.templates import released_templates
from tests.server.chat_templates import SPECIAL_TOKENS
from tests.server.chat_templates import TEMPLATES as FORMS
from tests.server.test_notations import RUN, TOOLS, TYPES, WRITE, Call

RELEASED = {template.name: (template.source, template.named) for template in released_templates()}
SOURCES = {**{f"form of {name}": (source, SPECIAL_TOKENS[name]) for name, source in FORMS.items()}, **RELEASED}
END = re.compile(
    r"(?:\s*(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<｜end▁of▁sentence｜>|</s>|<turn\|>|<\|call\|>|<\|return\|>))*\s*$"
)
"""Ends of turns, which no answer has: they are stop tokens."""
THOUGHTS = "I think so."
NAMES = {name for name in SOURCES if template_notation(SOURCES[name][0]) is not None}


def written(template: ServedChatTemplate, calls: list[Call], thoughts: str | None) -> tuple[str, str] | None:
    """The end of the prompt before an answer with calls, and the answer as the template writes it; None if it refuses them."""
    tool_calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    if thoughts is not None:
        answer |= {"reasoning_content": thoughts, "reasoning": thoughts}
    question = [{"role": "user", "content": "Go."}]
    try:
        whole = template.render([*question, answer], TOOLS, add_generation_prompt=False)
    except RequestError:
        return None
    for opens in (True, False):
        prompt = template.render(question, TOOLS, add_generation_prompt=opens)
        if whole.startswith(prompt):
            text = END.sub("", whole[len(prompt) :])
            header = re.match(r"<\|start\|>assistant|<｜Assistant｜>|<\|assistant\|>|<\|im_start\|>assistant\n", text)
            return prompt, text if header is None or opens else text[header.end() :]
    raise AssertionError("an answer does not begin where the prompt ends")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_a_template_writes_is_read_back(name: str) -> None:
    source, named = SOURCES[name]
    notation = template_notation(source)
    assert notation is not None
    template, marks = ServedChatTemplate(source, named), NOTATIONS[notation].reasoning
    read = 0
    for calls in ([WRITE], [RUN], [WRITE, RUN]):
        for thoughts in (None, THOUGHTS):
            if notation == "harmony" and len(calls) > 1:  # its template writes the first call only
                continue
            if (found := written(template, calls, thoughts)) is None:
                continue
            prompt, text = found
            inside = marks is not None and prompt.rstrip().endswith(marks[0])
            parts = OutputFormat(notation, types=TYPES, inside=inside).reader().add(text, final=True)
            assert [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call] == calls, text
            assert "".join(part.text for part in parts if part.kind == "text").strip() == "", text
            assert "".join(part.text for part in parts if part.kind == "reasoning") in ("", thoughts), text
            read += 1
    assert read >= 4
