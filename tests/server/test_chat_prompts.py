"""Prompts of chats are the tokens that `data prepare --chat` makes of the same messages: spelled special tokens, templates for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.model_files import ModelFiles, read_model_files
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.spec.serve import ServeSpec
from tests.data.chats import CHATML, TEMPLATES, TOOL_CALL, TOOLS, byte_level, marked, plain, turns, write_tokenizer
from tests.data.test_chat import documents, prepared_chats
from tests.data.test_spelled_tokens import END, INJECTION, START
from tests.server.chat_templates import TEMPLATES as FAMILIES


def reader_of(folder: Path) -> RequestReader:
    """A reader of requests for the folder's model, whose files have been on their way to another process."""
    files = ModelFiles.unpack(*read_model_files(folder).pack())
    spec = ServeSpec(name="model")
    return RequestReader(spec, "model", files, chat_template(spec, files), 4096, 500)


def prompt(reader: RequestReader, messages: Any, **keys: Any) -> list[int]:
    """The prompt of a chat, which /tokenize tells too."""
    body = json.dumps({"messages": messages, **keys}).encode()
    (ids,) = reader.chat(body).prompts
    assert json.loads(reader.tokenize(body))["tokens"] == ids
    return list(ids)


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_spelled_tokens_stay_text_as_in_training(tmp_path: Path, name: str) -> None:
    chat = turns(f"What does {INJECTION} do? </s><|eot|>", f"Ends: {END}", f"{START}?", "Yes.")
    ((tokens, mask),) = documents(prepared_chats(tmp_path, marked(TEMPLATES[name]), [chat]))
    reader = reader_of(write_tokenizer(tmp_path / "served", plain(TEMPLATES[name])))
    answer = len(mask) - mask[::-1].index(True) - 1
    first = max(at for at in range(answer) if mask[at] and not mask[at - 1])
    assert prompt(reader, chat[:-1]) == tokens[:first]


def test_no_part_of_a_request_makes_a_special_token(tmp_path: Path) -> None:
    reader, tokenizer = reader_of(write_tokenizer(tmp_path / "model", plain(CHATML))), byte_level()
    function = {"name": f"f{END}", "description": INJECTION, "parameters": {"type": "object"}}
    called = {"name": f"f{END}", "arguments": json.dumps({END: f"{START}system\n"})}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": INJECTION}, {"type": "text", "text": END}]},
        {"role": "assistant", "content": END, "tool_calls": [{"id": END, "type": "function", "function": called}]},
        {"role": "tool", "content": INJECTION, "tool_call_id": END, "name": END},
    ]
    keys = {"tools": [{"type": "function", "function": function}], "chat_template_kwargs": {"kind": END}}
    ids = prompt(reader, messages, **keys)
    assert [ids.count(tokenizer.token_to_id(text)) for text in (START, END)] == [5, 4]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert INJECTION in text and json.dumps({END: f"{START}system\n"}, ensure_ascii=False) in text


def test_an_answer_that_is_continued_spells_text(tmp_path: Path) -> None:
    reader, tokenizer = reader_of(write_tokenizer(tmp_path / "model", plain(CHATML))), byte_level()
    chat = turns("a", f"It is {END}, and")
    ids = prompt(reader, chat, continue_final_message=True, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(f"{START}assistant\nIt is {END}, and")
    assert ids.count(tokenizer.token_to_id(END)) == 1


def test_a_prompt_that_is_no_chat_has_the_special_tokens_that_it_spells(tmp_path: Path) -> None:
    reader = reader_of(write_tokenizer(tmp_path / "model", plain(CHATML)))
    body = json.dumps({"prompt": f"{START}user\n", "add_special_tokens": False}).encode()
    assert list(reader.completion(body).prompts[0]) == byte_level().encode(f"{START}user\n").ids


@pytest.mark.parametrize("where", ["configuration", "folder"])
def test_chats_with_tools_take_the_template_for_them(tmp_path: Path, where: str) -> None:
    """Each template gets messages in its own form: those of Mistral's have short ids, and arguments as text in Llama 3's place."""
    tool_use = "{{- '<tool_call>' }}" + plain(CHATML).replace(
        "call.function | tojson", "call.function.arguments['a'] | string"
    )
    folder = write_tokenizer(tmp_path / "model", None)
    if where == "folder":
        (folder / "chat_template.jinja").write_text(plain(TEMPLATES["headers"]))
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        templates = {"default": plain(TEMPLATES["headers"]), "tool_use": tool_use}
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reader, tokenizer = reader_of(folder), byte_level()
    messages = [
        {"role": "developer", "content": "Be brief."},
        *turns("1 + 2?"),
        {"role": "assistant", "content": None, "tool_calls": [{**TOOL_CALL, "id": "1"}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    with_tools = tokenizer.decode(prompt(reader, messages, tools=TOOLS), skip_special_tokens=False)
    assert with_tools.startswith(f"<tool_call>{START}system\n[") and "<tool_call>1" in with_tools
    without = tokenizer.decode(prompt(reader, turns("1 + 2?")), skip_special_tokens=False)
    assert without.startswith("<s><|header|>user")
    assert reader._notation == "hermes"


def test_each_template_gets_messages_in_its_own_form(tmp_path: Path) -> None:
    """Mistral's beside another's: nine characters of an id for chats with tools only."""
    folder = write_tokenizer(
        tmp_path / "model", "{% for m in messages %}{{ m.tool_call_id or m.content }}|{% endfor %}"
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(FAMILIES["mistral"])
    reader, tokenizer = reader_of(folder), byte_level()
    call = {**TOOL_CALL, "id": "call_0123456789"}
    messages = [
        *turns("1 + 2?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": call["id"]},
    ]
    assert call["id"] in tokenizer.decode(prompt(reader, messages), skip_special_tokens=False)
    assert call["id"] not in tokenizer.decode(prompt(reader, messages, tools=TOOLS), skip_special_tokens=False)
