"""Ten conversations, and their text by a chat template here and in transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from meshwright.data.chat_template import ChatTemplate, TemplateRefusal
from tests.released.templates import TOOLS

SYSTEM, EMPTY = {"role": "system", "content": "Be brief."}, {"role": "system", "content": ""}
QUESTION, ANSWER = {"role": "user", "content": "First question?"}, {"role": "assistant", "content": "First answer."}
MORE = [{"role": "user", "content": "Second\n\nquestion? "}, {"role": "assistant", "content": "  Second answer.\n"}]
LAST = {"role": "user", "content": "Third: é 漢字 🙂 <b>&amp;</b> {{ x }}"}
FUNCTION = {"name": "weather", "arguments": {"city": "São Paulo", "days": 2}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call12345", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"sky": "clear"}'}
THOUGHT = {"role": "assistant", "content": "First answer.", "reasoning_content": "I think."}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "a question": ([QUESTION], None),
    "a turn": ([QUESTION, ANSWER], None),
    "several turns": ([QUESTION, ANSWER, *MORE, LAST], None),
    "a system message": ([SYSTEM, QUESTION], None),
    "a system message and turns": ([SYSTEM, QUESTION, ANSWER, *MORE, LAST], None),
    "an empty system message": ([EMPTY, QUESTION, ANSWER, LAST], None),
    "tools": ([QUESTION], TOOLS),
    "tools and a system message": ([SYSTEM, QUESTION], TOOLS),
    "a call and its result": ([QUESTION, CALL, RESULT, ANSWER, LAST], TOOLS),
    "reasoning": ([QUESTION, THOUGHT, LAST, THOUGHT], None),
    "an empty answer": ([QUESTION, {"role": "assistant", "content": ""}, LAST], None),
}


def compared(
    source: str, special: Mapping[str, str], tokenizer: Any, tool_source: str | None = None
) -> list[str | None]:
    """For each conversation None if both texts are equal, with and without a prompt, "refused" if neither has any, else both texts."""
    ours = ChatTemplate(source, special, tool_source=tool_source)
    return [_compared(ours, tokenizer, *conversation) for conversation in CONVERSATIONS.values()]


def _compared(
    ours: ChatTemplate, tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str | None:
    refused = False
    for prompt in (False, True):
        renderers = (_ours(ours), _theirs(tokenizer))
        found = [render(copy.deepcopy(messages), tools, prompt) for render in renderers]
        if found[0] != found[1]:
            return f"DIFFERENT {json.dumps(found, ensure_ascii=False)}"
        refused |= found[0] is None
    return "refused" if refused else None


def _ours(template: ChatTemplate) -> Any:
    def render(messages: Any, tools: Any, prompt: bool) -> str | None:
        try:
            return template.render(messages, tools, add_generation_prompt=prompt)
        except TemplateRefusal:
            return None

    return render


def _theirs(tokenizer: Any) -> Any:
    def render(messages: Any, tools: Any, prompt: bool) -> str | None:
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception:  # of the template; transformers has no type for it
            return None

    return render
