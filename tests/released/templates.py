"""The chat templates of released models in the package `trl`, which also has variants of them that mark answers by `{% generation %}`.

python -m tests.released.templates > docs/reference/chat-templates.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.chat_template import ChatTemplate, TemplateRefusal
from meshwright.data.message_ranges import ASSISTANT, InexactTemplate, MessageRanges

IMAGES = {"diffusion_gemma", "idefics3", "lfm2_2_5_vl", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm"}
"""Templates of models that read images."""
ENDS = {"deepseek": "<｜end▁of▁sentence｜>", "gemma": "<eos>", "llama": "<|eot_id|>", "phi": "<|endoftext|>"}
BEGINS = {
    "deepseek": "<｜begin▁of▁sentence｜>",
    "gemma": "<bos>",
    "llama": "<|begin_of_text|>",
    "cohere": "<BOS_TOKEN>",
}
TOKEN = re.compile(r"<[|｜][^\s<>'\"{}]+?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")
ORDINARY = re.compile(r"</?(?:think|tool_call|tool_response)>")
"""Added tokens that are not special."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
TRAINED_HEADERS = {
    "deepseek_r1_distill": r"<｜Assistant｜>|<｜tool▁outputs▁end｜>",
    "deepseekv3": r"<｜Assistant｜>|<｜tool▁outputs▁end｜>",
    "gptoss": r"<\|start\|>assistant",
    "muse_glimmer": r"<\|start\|>assistant",
    "qwen2_5": r"\n",
}
"""What the variant marks at the beginning of an answer although the prompt has it; here it is not trained on."""
ADDED_REASONING = {
    "deepseek_r1_distill": r"<think>.*?</think>",
    **dict.fromkeys(("qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), r"<think>\n.*?\n</think>\n\n"),
}
"""Reasoning that the variant writes and the template leaves out: of the first in all answers, else in those before the last question."""
SHAPES = ("one turn", "two turns", "system message", "tools", "reasoning")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "Days ahead."},
                },
                "required": ["city"],
            },
        },
    }
]


class Chat(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Verdict(NamedTuple):
    """What was found for a template and a shape of chats: the ranges as text, or why there are none."""

    spans: list[str]
    truth: list[str] | None
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return self.refusal
        return "yes" if self.truth is None else "equal" if self.spans == self.truth else "DIFFERENT"


class Template:
    """A released template and its variant."""

    def __init__(self, file: Path) -> None:
        self.name, self.source = file.stem, file.read_text(encoding="utf-8")
        variant = file.with_name(f"{file.stem}_training.jinja")
        self.variant = variant.read_text(encoding="utf-8") if variant.is_file() else None
        if self.variant is None and re.search(r"\{%-?\s*generation", self.source):
            self.variant = self.source
        self.named = {"bos_token": self._named(BEGINS, "<s>"), "eos_token": self._named(ENDS, "<|im_end|>")}

    def _named(self, tokens: dict[str, str], otherwise: str) -> str:
        return next((token for name, token in tokens.items() if self.name.startswith(name)), otherwise)

    @cached_property
    def added(self) -> list[str]:
        """The added tokens of a tokenizer for this template."""
        return sorted({*TOKEN.findall(self.source), *ORDINARY.findall(self.source), *self.named.values()})

    @cached_property
    def special(self) -> list[str]:
        return [token for token in self.added if not ORDINARY.fullmatch(token)]

    @cached_property
    def compiled(self) -> ChatTemplate:
        return ChatTemplate(self.source, self.named, lambda: datetime(2026, 1, 1))

    @cached_property
    def _compiled_variant(self) -> ChatTemplate | None:
        return self.variant and ChatTemplate(self.variant, self.named, lambda: datetime(2026, 1, 1))

    def chat(self, shape: str) -> Chat | str:
        """A chat of a shape, or why the template has none."""
        question, answer = {"role": "user", "content": "First question?"}, self._answer("First answer.", "The first.")
        more = [{"role": "user", "content": "Second question?"}, self._answer("Second answer.", "The second.")]
        if shape == "reasoning":
            return Chat([question, answer, *more])
        answer, more = (
            {"role": ASSISTANT, "content": "First answer."},
            [more[0], {"role": ASSISTANT, "content": "More."}],
        )
        if shape == "one turn":
            return Chat([question, answer])
        if shape == "two turns":
            return Chat([question, answer, *more])
        if shape == "system message":
            return Chat([{"role": "system", "content": "Be brief."}, question, answer, *more])
        if not re.search(r"\btool_calls\b", self.source):
            return "has no tools"
        arguments: Any = {"city": "Rome", "days": 2}
        if "arguments'] + " in self.source:
            arguments = json.dumps(arguments)
        call = {"type": "function", "id": "call12345", "function": {"name": "weather", "arguments": arguments}}
        asked = {"role": ASSISTANT, "content": None, "tool_calls": [call]}
        result = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": "sunny"}
        return Chat([question, asked, result, answer, *more], TOOLS)

    def _answer(self, text: str, reasoning: str) -> dict[str, Any]:
        """An answer with reasoning, under the key that the template reads or in the content."""
        for key in REASONING_KEYS:
            if re.search(rf"\b{key}\b", self.source):
                return {"role": ASSISTANT, "content": text, key: reasoning}
        return {"role": ASSISTANT, "content": f"<think>\n{reasoning}\n</think>\n\n{text}"}

    def verdict(self, shape: str) -> Verdict:
        if isinstance(chat := self.chat(shape), str):
            return Verdict([], None, chat)
        try:
            text, spans = self.ranges(chat)
        except TemplateRefusal:
            return Verdict([], None, "the template refuses it")
        except InexactTemplate as error:
            return Verdict([], None, f"refused: {error}")
        found = [text[start:stop] for start, stop in spans]
        variant = self._compiled_variant
        return Verdict(found, None if variant is None else self._truth(chat, variant))

    def ranges(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat and the ranges of its answers."""
        wanted = [number for number, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        text = self.compiled.render(*chat, add_generation_prompt=False)
        return self._ranges.find(text, chat.messages, chat.tools, wanted)

    @cached_property
    def _ranges(self) -> MessageRanges:
        return MessageRanges(self.compiled.render, self.added, self.special)

    def _truth(self, chat: Chat, variant: ChatTemplate) -> list[str]:
        """The ranges that the variant marks, as text, without the differences that are listed above and without blanks behind the end."""
        messages = json.loads(json.dumps(chat.messages))
        for message in messages:
            for call in message.get("tool_calls") or ():
                if self.name == "deepseekv3":  # its variant alone expects an object
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text, spans = variant.generated_spans(messages, chat.tools)
        joined: list[list[int]] = []
        for start, stop in spans:
            if joined and joined[-1][1] == start:
                joined[-1][1] = stop
            else:
                joined.append([start, stop])
        header, reasoning = TRAINED_HEADERS.get(self.name, ""), ADDED_REASONING.get(self.name)
        answers, last = [text[start:stop].rstrip() for start, stop in joined], text.rfind("Second question?")
        for number, (start, _) in enumerate(joined):
            answers[number] = re.sub(rf"\A(?:{header})", "", answers[number])
            if reasoning and (start < last or self.name == "deepseek_r1_distill"):
                answers[number] = re.sub(rf"\A{reasoning}", "", answers[number], flags=re.DOTALL)
        return answers


def released_templates() -> list[Template]:
    """The templates of models that read text only; empty without the package."""
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
    files = sorted(file for file in folder.glob("*.jinja") if not file.stem.endswith("_training"))
    return [Template(file) for file in files if file.stem not in IMAGES]


def page(templates: Sequence[Template]) -> str:
    """The page of the reference."""
    return "\n".join([*_lines(templates), ""])


def _lines(templates: Sequence[Template]) -> Iterator[str]:
    yield "# Chat templates"
    yield ""
    yield f"The answers that `data prepare --chat` trains on with the templates of {len(templates)} released models, as the"
    yield "package `trl` 1.16 has them. `make test-models` makes this page."
    yield ""
    yield "| word | meaning |"
    yield "|---|---|"
    yield "| equal | The ranges are those of the variant that `trl` has for training, up to blanks behind the end token |"
    yield "| yes | Ranges are found; `trl` has no variant to compare |"
    yield "| the template refuses it | It raises an error for such chats, for example for a system message |"
    yield ""
    yield f"| template | {' | '.join(SHAPES)} |"
    yield f"|---|{'---|' * len(SHAPES)}"
    for template in templates:
        yield f"| {template.name} | {' | '.join(str(template.verdict(shape)) for shape in SHAPES)} |"
    yield ""
    yield "Two differences are left out of the comparison. The variants of DeepSeek, gpt-oss, Muse and Qwen2.5 also train on"
    yield "what the prompt of an answer writes, such as `<｜Assistant｜>`. Those of Qwen3, Qwen3.5 and Qwen3.6 write reasoning into"
    yield "answers before the last question, that of R1-distill into all, where the released template leaves it out: `prepare`"
    yield "keeps the text of the released one."
    yield ""
    yield "DeepSeek-R1-distill and DeepSeek-V3 remove `<think>…</think>` from every answer, so chats with reasoning need another"
    yield "template."


if __name__ == "__main__":
    print(page(released_templates()), end="")
