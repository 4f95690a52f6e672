"""Answers in the texts of templates that write earlier messages otherwise than the last, each way of the released ones."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from meshwright.data.chat_template import ChatTemplate
from meshwright.data.message_ranges import InexactTemplate, MessageRanges
from tests.data.chats import TOOL_CALL, TOOLS, turns

EACH = "{{ bos_token }}{% for m in messages %}"
HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
LAST = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CONTENT = "{{ m.content + '<|im_end|>\n' }}"
REASON = "{{ '<think>\n' + (m.reasoning or '') + '\n</think>\n\n' }}"
ENDED = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|user|>", "<|tool|>", "<|answer|>")
TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "reasoning of the last answer only": (
        EACH
        + HEADER
        + "{% if loop.last and m.role == 'assistant' %}"
        + REASON
        + "{% endif %}"
        + CONTENT
        + "{% endfor %}"
        + LAST,
        ["B<|im_end|>", "<think>\n\n</think>\n\nD<|im_end|>"],
    ),
    "a prompt that begins the reasoning, which answers lack": (
        EACH + HEADER + CONTENT + "{% endfor %}" + LAST + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}",
        ["B<|im_end|>", "D<|im_end|>"],
    ),
    "empty reasoning in every answer, and a prompt that begins it": (
        EACH
        + HEADER
        + "{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}"
        + CONTENT
        + "{% endfor %}"
        + LAST
        + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}",
        ["<think></think>B<|im_end|>", "<think></think>D<|im_end|>"],
    ),
    "the header of an answer behind every text": (
        EACH + HEADER + CONTENT + "{% endfor %}{{ '<|im_start|>assistant\n' }}",
        ["B<|im_end|>", "D<|im_end|>"],
    ),
    "an end of the text": (
        EACH
        + HEADER
        + CONTENT
        + "{% endfor %}"
        + LAST
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ["B<|im_end|>", "D<|im_end|>\n</s>"],
    ),
    "another end of the last answer": (
        EACH
        + HEADER
        + "{{ m.content + ('</s>' if loop.last and m.role == 'assistant' else '<|im_end|>') }}{% endfor %}"
        + LAST,
        ["B<|im_end|>", "D</s>"],
    ),
    "answers that the next message ends": (
        EACH + "{{ '<|user|>' if m.role == 'user' else '<|answer|>' }}{{ '\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}",
        ["\nB<|user|>", "\nD<|user|>"],
    ),
    "a system message that is moved": (
        "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}" + HEADER + CONTENT + "{% endfor %}" + LAST,
        ["B<|im_end|>", "D<|im_end|>"],
    ),
    "trimmed contents": (
        EACH + HEADER + "{{ m.content | trim + '<|im_end|>\n' }}{% endfor %}" + LAST,
        ["B<|im_end|>", "D<|im_end|>"],
    ),
}


def answers(template: str, messages: list[dict[str, Any]], tools: Any = None, ranges: Any = None) -> list[str]:
    compiled = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, lambda: datetime(2026, 1, 1))
    ranges = ranges or MessageRanges(compiled.render, ENDED, ENDED)
    text = compiled.render(messages, tools, add_generation_prompt=False)
    wanted = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = ranges.find(text, messages, tools, wanted)
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_both_answers_are_found(name: str) -> None:
    template, expected = TEMPLATES[name]
    system = {"role": "system", "content": "S"}
    for messages in (
        turns("A", "B", "C", "D"),
        turns("B", "B", "D", "D"),
        turns("<|im_start|>assistant\nX<|im_end|>", "B", "<|user|>", "D"),
        [*turns("A", "B", "C"), system, *turns("", "D")[1:]],
    ):
        assert answers(template, messages) == expected
    assert answers(template, turns("A", "B", "C", "D", "E")[:5])[0] == expected[0]


def test_blanks_tags_and_reasoning_around_a_content() -> None:
    template = EACH + HEADER + "{{ m.content.split('</think>')[-1] | trim + '<|im_end|>\n' }}{% endfor %}" + LAST
    messages = turns("  <tool_response>\nA\n</tool_response>\n", "\n<think>\nhm\n</think>\n\nB\n", " C ", "<b>D</b>")
    assert answers(template, messages) == ["B<|im_end|>", "<b>D</b><|im_end|>"]


def test_calls_of_tools_and_results_in_the_same_turn() -> None:
    template = (
        EACH + "{% if m.role != 'tool' %}" + HEADER + "{% endif %}{% if m.tool_calls %}"
        "{{ '<call>' + m.tool_calls[0].function.name + '</call>' }}"
        "{% elif m.role == 'tool' %}{{ '<|tool|>' + messages[1].tool_calls[0].function.name + m.content }}"
        "{% else %}{{ '=' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + LAST
    )
    call = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    chat = [
        *turns("A"),
        call,
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "B"},
        *turns("C", "D"),
    ]
    found = answers(template, chat, TOOLS)
    assert found == ["<call>add</call><|tool|>", "=B<|im_end|>", "=D<|im_end|>"]


def test_an_outline_serves_chats_with_other_values() -> None:
    """A value that changes what is written around contents is found again in an outline of its own."""
    template = EACH + HEADER + "{{ m.get('prefix', '') }}" + CONTENT + "{% endfor %}" + LAST
    compiled = ChatTemplate(template, {"bos_token": "<s>"}, lambda: datetime(2026, 1, 1))
    ranges = MessageRanges(compiled.render, ENDED, ENDED)
    for prefix in ("p", "longer", "p"):
        messages = [{"role": "user", "content": "A", "prefix": prefix}, {"role": "assistant", "content": prefix + "B"}]
        assert answers(template, messages, None, ranges) == [f"{prefix}B<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("{{ m.content[:3] }}", r"messages\[0\] is written otherwise"),
        ("{{ m.content | upper if loop.first else '' }}", r"messages\[1\]: the template does not write its content"),
        ("{{ m.content + m.content }}", r"messages\[1\]: the template does not write its content"),
        ("{{ m.content | length }}", r"messages\[0\] is written otherwise"),
        (
            "{{ m.content + '#' * (m.content | length) }}",
            r"messages\[\d\] is written otherwise|depends on the contents",
        ),
    ],
)
def test_what_is_not_certain_is_refused(change: str, words: str) -> None:
    with pytest.raises(InexactTemplate, match=words):
        answers(EACH + HEADER + change + "{{ '<|im_end|>\n' }}{% endfor %}" + LAST, turns("question", "answer"))
