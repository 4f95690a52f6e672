"""Chats in the forms of data sets become the same tokens, and what is no chat is named with the key to give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import data as data_command
from meshwright.data.chat_forms import FORMS
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.spec.errors import BadInput
from tests.data.chats import CHATML, TOOL_CALL, TOOLS, marked, plain, turns, write_tokenizer
from tests.data.test_chat import documents

QUESTION, ANSWER = "What is 1 + 2?", "It is 3."
SENT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]
RECORDS: dict[str, dict[str, Any]] = {
    "messages": {"messages": turns(QUESTION, ANSWER)},
    "ShareGPT": {"conversations": SENT},
    "ShareGPT with roles": {"conversations": turns(QUESTION, ANSWER)},
    "Alpaca": {"instruction": "What is", "input": "1 + 2?", "output": ANSWER},
    "Alpaca without input": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "prompt and completion": {"prompt": QUESTION, "completion": ANSWER},
    "lists": {"prompt": turns(QUESTION), "completion": [{"role": "assistant", "content": ANSWER}]},
}


def prepared(folder: Path, name: str, content: str, **options: Any) -> Path:
    model = write_tokenizer(folder / "model", marked(CHATML))
    (folder / name).write_text(content)
    out = folder / f"out-{name}"
    prepare([str(folder / name)], str(model), out, on_bad="refuse", chat=ChatRequest(), **options)
    return out


@pytest.mark.parametrize("name", list(RECORDS))
def test_every_form_is_the_same_chat(tmp_path: Path, name: str) -> None:
    record = RECORDS[name] | {"system": "Be brief.", "other": 1}
    chat = [{"role": "system", "content": "Be brief."}, *turns(QUESTION, ANSWER)]
    if name == "Alpaca":
        chat[1]["content"] = "What is\n\n1 + 2?"
    expected = documents(prepared(tmp_path, "chats.jsonl", json.dumps({"messages": chat})))
    assert documents(prepared(tmp_path, "lines.jsonl", json.dumps(record))) == expected
    assert documents(prepared(tmp_path, "array.json", json.dumps([record], indent=1))) == expected


def test_parquet_of_every_form(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    model = write_tokenizer(tmp_path / "model", marked(CHATML))
    for number, record in enumerate(RECORDS.values()):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * 3), tmp_path / f"{number}.parquet")
    inputs = [str(tmp_path / f"{number}.parquet") for number in range(len(RECORDS))]
    result = prepare(inputs, str(model), tmp_path / "out", on_bad="refuse", chat=ChatRequest())
    assert result.chats is not None
    assert str(result.chats) == (
        "chats: 6 ShareGPT, 6 Alpaca, 6 prompt and completion, 3 messages; messages: 21 user, 21 assistant"
    )


def test_calls_of_tools_in_every_form(tmp_path: Path) -> None:
    """As objects, as JSON in a text, which OpenAI's API has, and as values of ShareGPT."""
    called = {**TOOL_CALL, "function": {**TOOL_CALL["function"], "arguments": json.dumps({"a": 1, "b": [2, "é"]})}}
    answers = {
        "object": {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        "text": {"role": "assistant", "content": None, "tool_calls": [called]},
    }
    chats: list[dict[str, Any]] = [
        {
            "messages": [
                *turns(QUESTION),
                answer,
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": ANSWER},
            ]
        }
        for answer in answers.values()
    ]
    call = {"from": "function_call", "value": json.dumps(TOOL_CALL["function"])}
    chats.append({"conversations": [SENT[0], call, {"from": "observation", "value": "3"}, SENT[1]]})
    expected, *others = (
        documents(prepared(tmp_path, f"{number}.jsonl", json.dumps(chat | {"tools": json.dumps(TOOLS)})))
        for number, chat in enumerate(chats)
    )
    assert others == [expected, expected]


def test_a_template_that_needs_arguments_as_text(tmp_path: Path) -> None:
    template = marked(CHATML).replace("(call.function | tojson)", "call.function.arguments + '!'")
    (tmp_path / "model").mkdir()
    model = write_tokenizer(tmp_path / "model", template)
    chat = [*turns(QUESTION), {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    result = prepare([str(tmp_path / "chats.jsonl")], str(model), tmp_path / "out", on_bad="refuse", chat=ChatRequest())
    assert result.manifests["train"].documents == 1


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"dialog": turns("a", "b")}, "no known form of chats: messages (messages), ShareGPT (conversations), Alpaca"),
        ({"dialog": turns("a", "b"), "id": 1}, "its records have 'dialog', 'id'"),
        ({"dialog": turns("a", "b")}, "or --text-key dialog, if that is a list of messages"),
        ({"mesages": turns("a", "b")}, "('mesages' is near 'messages')"),
        ({"question": "a", "answer": "b"}, "or --text-key KEY for a list of messages"),
        (
            {"conversations": [{"from": "narrator", "value": "a"}]},
            "conversations[0].from: expected one of human, user, gpt",
        ),
        ({"conversations": [{"from": "human"}]}, "conversations[0].content: expected text"),
        (
            {"conversations": [{"from": "function_call", "value": "add(1)"}]},
            "conversations[0].value: expected JSON of a call",
        ),
        ({"conversations": {}}, "conversations: expected a list of messages"),
        ({"instruction": "a", "output": 3}, "output: expected text, got int"),
        ({"prompt": [], "completion": "b"}, "prompt: expected a list of messages"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history: unknown key"),
        ({"prompt": "a", "completion": "b", "system": 1}, "system: expected text, got int"),
    ],
)
def test_what_is_no_chat_is_named(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as error:
        prepared(tmp_path, "chats.jsonl", json.dumps(record))
    assert words in str(error.value)


def test_the_key_of_other_lists_of_messages(tmp_path: Path) -> None:
    record = {"dialog": SENT, "prompt": "unused", "completion": "unused"}
    out = prepared(tmp_path, "chats.jsonl", json.dumps(record), text_key="dialog")
    assert documents(out) == documents(prepared(tmp_path, "b.jsonl", json.dumps(RECORDS["messages"])))
    with pytest.raises(BadInput, match=r"no key 'dialogs'; its records have 'dialog', .*nearest: 'dialog'"):
        prepared(tmp_path, "c.jsonl", json.dumps(record), text_key="dialogs")


def test_the_first_line_names_form_and_roles(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", marked(CHATML))
    (tmp_path / "chats.json").write_text(json.dumps([RECORDS["ShareGPT"]] * 2))
    command = [
        "prepare",
        str(tmp_path / "chats.json"),
        "--chat",
        "--tokenizer",
        str(model),
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(data_command.app, command)
    first = result.stdout.splitlines()[0]
    assert first == "prepared chats: 2 ShareGPT; messages: 2 user, 2 assistant"
    again = CliRunner().invoke(data_command.app, command)
    assert again.stdout.startswith("already prepared")


def test_reasoning_that_a_template_leaves_out_is_counted(tmp_path: Path) -> None:
    template = marked(CHATML).replace("message.content or ''", "(message.content or '').split('</think>')[-1]")
    model = write_tokenizer(tmp_path / "model", template)
    contents = ("B", "<think>\nhm\n</think>B", "<think></think>B")
    chats = [{"messages": turns("A", content)} for content in contents]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = [
        "prepare",
        str(tmp_path / "chats.jsonl"),
        "--chat",
        "--tokenizer",
        str(model),
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(data_command.app, command)
    assert "the chat template leaves out the reasoning of the last answer in 1 chats" in result.stdout
    again = CliRunner().invoke(data_command.app, [*command[:-1], str(tmp_path / "other"), "--json"])
    counts = json.loads(again.stdout)["chats"]
    assert counts == {"forms": {"messages": 3}, "roles": {"user": 3, "assistant": 3}, "without_reasoning": 1}


def test_marks_in_a_message_are_a_bad_document(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", plain(CHATML))
    chats = [{"messages": turns("A", content)} for content in ("B", "\U00100003")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    result = prepare([str(tmp_path / "chats.jsonl")], str(model), tmp_path / "out", chat=ChatRequest())
    assert result.left_out.bad.count == 1 and "contains U+100003" in result.left_out.bad.first[0]


def test_the_page_lists_every_form() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/chat.md").read_text(encoding="utf-8")
    for form in FORMS:
        keys = ", ".join(f"`{key}`" for key in form.keys)
        also = "".join(f", `{key}`" for key in form.also)
        assert f"| {form.name} | {keys}{also} | {form.meaning} |" in page
