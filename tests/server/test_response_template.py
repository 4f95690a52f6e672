"""A tokenizer's `response_template` says the notation, and answers are read as transformers reads them by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.model_files import ModelFiles, read_model_files
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import NAME

CALL = {"type": "function", "function": "{content}"}
THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
FORMS: dict[str, dict[str, Any]] = {
    "hermes": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True, "transform": CALL},
    "qwen3_coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}
ANSWERS = {
    "hermes": '<think>\nTwo.\n</think>\n\nWait.\n<tool_call>\n{"name": "go", "arguments": {"to": "Rome"}}\n</tool_call>',
    "qwen3_coder": (
        "<think>\nTwo.\n</think>\n\nWait.\n<tool_call>\n<function=go>\n<parameter=to>\nRome\n</parameter>\n</function>\n</tool_call>"
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "go", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}},
    }
]


def files_of(folder: Path, home: Path, template: object) -> ModelFiles:
    for file in folder.iterdir():
        (home / file.name).write_bytes(file.read_bytes())
    config = json.loads((home / "tokenizer_config.json").read_text())
    config |= {"chat_template": "{{ messages[0].content }}", "response_template": template}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return read_model_files(home)


def request_of(files: ModelFiles) -> Any:
    reader = RequestReader(ServeSpec(), NAME, files, chat_template(ServeSpec(), files), 4096, 257)
    return reader.chat(json.dumps({"messages": [{"role": "user", "content": "Go."}], "tools": TOOLS}).encode())


@pytest.mark.parametrize("name", FORMS)
def test_answers_are_read_as_transformers_does(folder: Path, tmp_path: Path, name: str) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template = {
        "version": 1,
        "start_anchor": "Go.",
        "defaults": {"role": "assistant"},
        "fields": {"thinking": THINKING, "content": {"content": "text"}, "tool_calls": FORMS[name]},
    }
    output = request_of(files_of(folder, tmp_path, template)).output
    assert output.notation == name
    theirs = chat_parsing.parse_response(ANSWERS[name], template, prefix="Go.", tools=TOOLS)
    reasoning, text, called = output.reader().add(ANSWERS[name], final=True)
    assert reasoning.text == theirs["thinking"].strip() and text.text == theirs["content"].strip()
    (call,) = theirs["tool_calls"]
    assert called.call is not None
    assert (called.call.name, json.loads(called.call.arguments)) == (
        call["function"]["name"],
        call["function"]["arguments"],
    )


@pytest.mark.parametrize(
    "template", [None, 3, {"fields": 3}, {"fields": {"a": 3, "b": {"open": 3, "close": [None]}}}], ids=str
)
def test_other_values_say_nothing(folder: Path, tmp_path: Path, template: object) -> None:
    assert request_of(files_of(folder, tmp_path, template)).output is None
