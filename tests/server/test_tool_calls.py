"""Tool calls: their notations, OpenAI's client on scripted texts, and calls that a request forces by a grammar."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.chat_messages import read_messages
from meshwright.server.chat_template import ServedChatTemplate
from meshwright.server.engine_process import EngineConnection
from meshwright.server.model_files import read_model_files
from meshwright.server.notations import NotationKey as Notation
from meshwright.server.notations import template_notation
from meshwright.server.output_reader import OutputFormat
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import NAME, SIZES, TEMPLATE, byte_tokenizer, running_api, running_server, write_folder

openai = pytest.importorskip("openai")
PARIS, ROME = {"city": "Paris", "days": [1, 2]}, {"city": "Rom {}</tool_call", "note": 'a "b" \\ é'}
FIRST, SECOND = ("weather", PARIS), ("look_up", ROME)
Expected = tuple[str, list[tuple[str, Any]]]


def body(call: tuple[str, Any], arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]})


TEXTS: list[tuple[Notation, str, Expected]] = [
    ("hermes", f"<tool_call>\n{body(FIRST)}\n</tool_call>", ("", [FIRST])),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{body(FIRST)}\n</tool_call>\n<tool_call>{body(SECOND)}</tool_call>\n",
        ("Let me see.", [FIRST, SECOND]),
    ),
    ("hermes", f"<tool_call>{body(FIRST)}</tool_call>\nDone.", ("Done.", [FIRST])),
    ("hermes", "2 < 3 <tool> <tool_cal", ("2 < 3 <tool> <tool_cal", [])),
    ("hermes", '<tool_call>{"name": "weather"', ('<tool_call>{"name": "weather"', [])),
    ("hermes", "<tool_call>oops</tool_call> no", ("<tool_call>oops</tool_call> no", [])),
    ("hermes", "<tool_call>", ("<tool_call>", [])),
    ("llama3", body(FIRST, "parameters"), ("", [FIRST])),
    ("llama3", f"<|python_tag|>{body(FIRST, 'parameters')}; {body(SECOND, 'parameters')}", ("", [FIRST, SECOND])),
    ("llama3", '{"answer": 42}', ('{"answer": 42}', [])),
    ("llama3", f"As JSON: {body(FIRST)}", (f"As JSON: {body(FIRST)}", [])),
    ("mistral", f"[TOOL_CALLS][{body(FIRST)}, {body(SECOND)}]", ("", [FIRST, SECOND])),
    ("mistral", f"Wait.[TOOL_CALLS] [{body(FIRST)}]", ("Wait.", [FIRST])),
    (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS)}[TOOL_CALLS]look_up{json.dumps(ROME)}",
        ("", [FIRST, SECOND]),
    ),
    ("mistral", "A list: [1, 2]", ("A list: [1, 2]", [])),
    ("array", f"[{body(FIRST)},\n {body(SECOND)}]", ("", [FIRST, SECOND])),
]


def read(notation: Notation, pieces: list[str], **options: Any) -> Expected:
    reader = OutputFormat(notation, **options).reader()
    parts = [part for index, piece in enumerate(pieces) for part in reader.add(piece, final=index == len(pieces) - 1)]
    plain = "".join(part.text for part in parts if part.kind == "text")
    calls = [part.call for part in parts if part.call is not None]
    assert [call.index for call in calls] == list(range(len(calls))) and len({call.id for call in calls}) == len(calls)
    return plain, [(call.name, json.loads(call.arguments)) for call in calls]


MARKED = ("write", {"text": 'as <tool_call>{}</tool_call> or [TOOL_CALLS][1], {a}; \\"}'})
OTHER_TEXTS: list[tuple[Notation, str, Expected]] = [
    ("hermes", f"a <tool_call>{body(MARKED)}</tool_call> b", ("a b", [MARKED])),
    ("hermes", f"a \n <tool_call> no <tool_call>{body(FIRST)}</tool_call>", ("a \n <tool_call> no", [FIRST])),
    (
        "hermes",
        f"<tool_call>{body(FIRST)[:-1]}</tool_call>\n<tool_call>{body(SECOND)}",
        (f"<tool_call>{body(FIRST)[:-1]}</tool_call>", [SECOND]),
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "x</tool_call><tool_call>{body(SECOND)}',
        ('<tool_call>{"name": "x</tool_call>', [SECOND]),
    ),
    ("hermes", f"<tool_call>{body(FIRST)}</tool_call> \n<tool_call>{{}}", (" \n<tool_call>{}", [FIRST])),
    ("hermes", f"<tool_call><tool_call>{body(FIRST)}\n\n</tool_call>", ("", [FIRST])),
    ("hermes", "<tool_call><tool_call>{}<tool_call>", ("<tool_call><tool_call>{}<tool_call>", [])),
    ("hermes", '  <tool_call>\n{"name": 3}</tool_call> ', ('  <tool_call>\n{"name": 3}</tool_call> ', [])),
    ("hermes", ' <tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [("f", {"a": 1})])),
    ("hermes", '<tool_call>{"name": "f", "arguments": NaN}', ('<tool_call>{"name": "f", "arguments": NaN}', [])),
    ("hermes", '<tool_call>{"name": "f\n", "arguments": {}}', ('<tool_call>{"name": "f\n", "arguments": {}}', [])),
    ("hermes", " \n ", (" \n ", [])),
    ("hermes", f"<tool_call>{body(FIRST)}</tool_call>\nDone. \n", ("Done. \n", [FIRST])),
    ("llama3", f" {body(FIRST)} ; and", (" ; and", [FIRST])),
    ("llama3", f"{body(FIRST)};", ("", [FIRST])),
    ("llama3", '{"a": [[[{', ('{"a": [[[{', [])),
    ("llama3", f"{{}}<|python_tag|>{body(MARKED)}<|python_tag|>", ("{}<|python_tag|>", [MARKED])),
    ("mistral", f"[TOOL_CALLS][{body(MARKED)}], and", (", and", [MARKED])),
    ("mistral", "[TOOL_CALLS] name [ARGS] {}", ("[TOOL_CALLS] name [ARGS] {}", [])),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc123[ARGS] {json.dumps(MARKED[1])} then", ("then", [("f", MARKED[1])])),
    ("mistral", f"[TOOL_CALLS]{'x' * 300}{{}}", (f"[TOOL_CALLS]{'x' * 300}{{}}", [])),
    ("mistral", "[TOOL_CALLS]some words [TOOL_CALLS]f{}", ("[TOOL_CALLS]some words", [("f", {})])),
    ("mistral", "[TOOL_CAL", ("[TOOL_CAL", [])),
    ("array", f"[{body(FIRST)}, {body(SECOND)[:-3]}", (f", {body(SECOND)[:-3]}", [FIRST])),
    ("array", "[1, 2]", ("[1, 2]", [])),
    ("array", f" [{body(MARKED)}]\n", ("", [MARKED])),
]


def pieces_of(text: str, draws: random.Random) -> list[str]:
    """The text in a few random pieces."""
    ends = sorted(draws.randrange(len(text) + 1) for _ in range(4))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("notation", "text", "expected"), TEXTS + OTHER_TEXTS)
def test_calls_are_found_however_the_text_arrives(notation: Notation, text: str, expected: Expected) -> None:
    assert read(notation, [text]) == expected
    assert read(notation, [*text, ""]) == expected
    for cut in range(len(text) + 1):
        assert read(notation, [text[:cut], text[cut:]]) == expected
    draws = random.Random(text)
    for _ in range(20):
        assert read(notation, pieces_of(text, draws)) == expected


@pytest.mark.parametrize("notation", ["hermes", "llama3", "mistral", "array"])
def test_mixed_texts_are_read_alike_in_all_pieces(notation: Notation) -> None:
    draws = random.Random(notation)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "{",
        "}",
        '"',
        "\\",
        "f",
        "text é",
        body(FIRST),
        body(MARKED),
        body(SECOND)[:-2],
        '{"a": 1}',
        "{}",
        "<tool",
        "[TOOL",
    ]
    for _ in range(1000):
        text = "".join(draws.choices(parts, k=draws.randrange(1, 12)))
        expected = read(notation, [text])
        assert read(notation, [*text, ""]) == expected
        assert read(notation, pieces_of(text, draws)) == expected
        if not expected[1]:
            assert expected[0] == text


@pytest.mark.parametrize("notation", ["hermes", "llama3", "mistral", "array"])
def test_long_arguments_and_white_space_are_read_once(notation: Notation) -> None:
    opening = {"hermes": "<tool_call>", "llama3": "", "mistral": "[TOOL_CALLS][", "array": "["}[notation]
    call = ("write", {"text": '}</tool_call>\\"{' * 10_000})
    for text, expected in [
        (opening + body(call), [call]),
        (opening + body(call)[:-2], []),
        (opening + " " * 160_000, []),
    ]:
        pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
        plain, calls = read(notation, pieces)
        assert calls == expected and (calls or plain == text)


def test_plain_text_is_not_held_back() -> None:
    reader = OutputFormat("hermes").reader()
    assert [
        "".join(part.text for part in reader.add(piece, final=False)) for piece in ("Hello", " wor", "ld <", "b>")
    ] == [
        "Hello",
        " wor",
        "ld",
        " <b>",
    ]
    assert read("hermes", [TEXTS[1][1]], parallel=False)[1] == [FIRST]


@pytest.mark.parametrize(
    ("template", "notation"),
    [
        ("{{- '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\\n<function=", "qwen3_coder"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', "llama3"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral"),
        (TEMPLATE, None),
    ],
)
def test_templates_say_the_notation(template: str, notation: str | None) -> None:
    assert template_notation(template) == notation


def test_templates_get_arguments_of_earlier_calls_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(PARIS)}}
    messages = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    assert ServedChatTemplate(source, {}).render(messages) == "Paris"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"digit": {"$ref": "#/$defs/digit"}},
                "required": ["digit"],
                "additionalProperties": False,
                "$defs": {"digit": {"enum": [1, 2, 3]}},
            },
        },
    }
    for name in ("weather", "look_up")
]
ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello?"}], "tools": TOOLS}
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>")
SCRIPTED = [
    next(index for index, (name, *_) in enumerate(TEXTS) if name == "hermes") + 1,
    next(index for index, (name, *_) in enumerate(TEXTS) if name == "llama3") + 1,
    next(index for index, (name, *_) in enumerate(TEXTS) if name == "mistral") + 1,
]


def say(text: str, connection: EngineConnection) -> None:
    """An engine that answers each request with this text, three tokens a step."""
    connection.send({"ready": {"context": 4096, "vocab": 300, "sequences": 8}})
    tokens = byte_tokenizer(*SPECIAL).encode(text).ids
    try:
        while True:
            for message in connection.receive(wait=True):
                for id in message.get("submit", {"ids": ()})["ids"]:
                    steps = [[id, tokens[start : start + 3]] for start in range(0, len(tokens), 3)]
                    for entry in [*steps, [id, [], {"reason": "stop"}]]:
                        connection.send({"step": [entry], "figures": [0, 0, 0.0, 0, 0]})
    except EOFError:
        return


@pytest.fixture(scope="module", params=SCRIPTED, ids=lambda index: TEXTS[index][0])
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server with a scripted text, and what it says."""
    notation, text, expected = TEXTS[request.param]
    folder: Path = tmp_path_factory.mktemp("scripted")
    byte_tokenizer(*SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    spec = ServeSpec(**SIZES, log_requests=False, notation=notation)
    with (
        running_api(folder, spec, lambda connection: say(text, connection)) as (url, _, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client, text, expected


def test_the_client_reads_the_calls_of_a_text(scripted: Any) -> None:
    client, text, (plain, calls) = scripted
    for _ in range(2):
        (choice,) = client.chat.completions.create(**ASK).choices
        assert choice.finish_reason == "tool_calls" and (choice.message.content or "") == plain
        found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert found == calls and all(call.type == "function" for call in choice.message.tool_calls)
    (choice,) = client.chat.completions.create(**ASK, tool_choice="none").choices
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == byte_tokenizer(*SPECIAL).decode(byte_tokenizer(*SPECIAL).encode(text).ids)


def test_the_client_puts_streamed_calls_together(scripted: Any) -> None:
    client, _, (plain, calls) = scripted
    with client.chat.completions.stream(**ASK) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and (choice.message.content or "") == plain
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == calls


@pytest.fixture(scope="module", params=["none", "hermes", "glm", "qwen3_coder"])
def client(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of a model whose template leaves out the tools, which are longer than its context."""
    short = shutil.copytree(folder, tmp_path_factory.mktemp("forced") / NAME)
    (short / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with (
        running_server(short, notation=request.param) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_request_can_force_calls(client: openai.OpenAI, choice: Any) -> None:
    """In the notation of the model, or else as an array."""
    (answer,) = client.chat.completions.create(
        **ASK, tool_choice=choice, parallel_tool_calls=False, seed=2, max_tokens=150, temperature=0.5
    ).choices
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name in (("weather", "look_up") if choice == "required" else ("look_up",))
    assert json.loads(call.function.arguments)["digit"] in (1, 2, 3)


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
def test_a_grammar_begins_behind_reasoning_that_the_prompt_has_begun(tmp_path: Path) -> None:
    from meshwright.serve.compiled_grammar import Grammar, compiled, llguidance

    files = read_model_files(write_folder(tmp_path / NAME))
    files = replace(files, chat_template="{{ messages[0].content }}<think>\n{# <tool_call> #}")
    reader = RequestReader(ServeSpec(), NAME, files, chat_template(ServeSpec(), files), 4096, 257)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    forms: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, f"<tool_call>\n{body(('look_up', {'digit': 2}))}\n</tool_call>"),
        ({"tools": None, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, '{"a": true}'),
    ]
    for keys, text in forms:
        request = reader.chat(json.dumps({**ASK, **keys}).encode())
        assert request.grammar is not None and request.output is not None and request.output.inside
        library, tokenizer = llguidance(), byte_tokenizer()
        tokens = library.LLTokenizer(tokenizer.to_str(), eos_token=[0])
        whole = f"So: <b>\n</think>\n\n{text}"
        matcher = compiled(library, tokens, Grammar(*request.grammar))  # type: ignore[arg-type]
        ids = tokenizer.encode(whole).ids
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        parts = request.output.reader().add(whole, final=True)
        assert parts[0].text == "So: <b>" and parts[-1].kind == ("call" if "tools" not in keys else "text")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no_such"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
    ],
)
def test_mistakes_are_named(client: openai.OpenAI, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**ASK, **given})
    assert raised.value.param == param
