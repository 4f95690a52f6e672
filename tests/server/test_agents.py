"""The APIs of agents on scripted answers: bodies as Codex and Claude Code send them, and real clients of both APIs."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.agent_fields import IGNORED
from meshwright.server.chat_template import ServedChatTemplate
from meshwright.server.engine_process import EngineConnection
from meshwright.server.packed_ids import ids_of_text
from meshwright.spec.serve import ServeSpec
from tests.server.chat_templates import SPECIAL_TOKENS, TEMPLATES
from tests.server.helpers import NAME, SIZES, byte_tokenizer, running_api
from tests.server.scripted_engine import SPECIAL

openai = pytest.importorskip("openai")
http = pytest.importorskip("httpx2")
LIST = {"command": "ls -la", "timeout": 5}
CALL = f"<tool_call>\n{json.dumps({'name': 'shell__run', 'arguments': LIST})}\n</tool_call>"
TEXT = "Done: é 🙂 <b>."
THOUGHTS = "List them first."
ANSWERS = [f"<think>\n{THOUGHTS}\n</think>\n\nLooking.\n{CALL}", TEXT]
"""The first answer, and the one after a result of the tool."""
RESULT = "total 0"
CACHED = 7


class Script:
    """What an engine says, and what it got."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        """`answer` is the answer to the text of a prompt."""
        self.tokenizer = byte_tokenizer(*SPECIAL)
        self.prompts: list[str] = []
        self.tokens: list[list[int]] = []
        self._answer, self.ending = answer, {"reason": "stop"}
        self.may_end = threading.Event()
        """The end of an answer waits for it."""
        self.may_end.set()

    def say(self, connection: EngineConnection) -> None:
        """Run the engine; three tokens a step."""
        connection.send({"ready": {"context": 1 << 18, "vocab": 300, "sequences": 8}})
        try:
            while True:
                for message in connection.receive(wait=True):
                    if (request := message.get("submit")) is not None:
                        self._continue(connection, request)
        except EOFError:
            return

    def _continue(self, connection: EngineConnection, request: Mapping[str, Any]) -> None:
        self.tokens.append(list(ids_of_text(request["tokens"])))
        self.prompts.append(self.tokenizer.decode(self.tokens[-1], skip_special_tokens=False))
        new = self.tokenizer.encode(self._answer(self.prompts[-1])).ids
        length = {"reason": "length"} if len(new) > request["new_tokens"] else self.ending
        new = new[: request["new_tokens"]]
        for id in request["ids"]:
            steps: list[Any] = [[id, new[start : start + 3]] for start in range(0, len(new), 3)]
            steps[0].append({"cached_tokens": CACHED})
            for entry in [*steps, [id, [], length]]:
                if not entry[1]:
                    self.may_end.wait(60)
                connection.send({"step": [entry], "figures": [0, 0, 0.0, 0, 0]})


@contextmanager
def scripted(folder: Path, script: Script, form: str = "qwen3", **settings: Any) -> Iterator[str]:
    """The URL of a server whose engine follows a script."""
    byte_tokenizer(*SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS[form]))
    (folder / "chat_template.jinja").write_text(TEMPLATES[form])
    spec = ServeSpec(**SIZES, log_requests=False, **settings)
    with running_api(folder, spec, script.say) as (url, _, _):
        yield url


def answer_to(prompt: str) -> str:
    """The answer of the script, by the question in the prompt."""
    if "Patch." in prompt:
        return f"<tool_call>{json.dumps({'name': 'patch', 'arguments': {'input': '*** Begin'}})}</tool_call>"
    return "one END two" if "Count." in prompt else ANSWERS[RESULT in prompt]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    script = Script(answer_to)
    with scripted(tmp_path_factory.mktemp("agents"), script) as url:
        yield url, script


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}
CODEX: dict[str, Any] = {
    "model": NAME,
    "input": [
        {"type": "message", "role": role, "id": f"msg_{index}", "content": [{"type": "input_text", "text": text}]}
        for index, (role, text) in enumerate(
            [("developer", "Be exact."), ("developer", "Sandbox: none."), ("user", "List the files.")]
        )
    ],
    "tools": [
        {"type": "function", "name": "update_plan", "description": "", "parameters": SCHEMA, "strict": False},
        {"type": "namespace", "name": "shell", "tools": [{"type": "function", "name": "run", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"session": "1"},
}
CLAUDE: dict[str, Any] = {
    "model": NAME,
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.328.abc; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "system", "content": [{"type": "text", "text": "Tools: two."}]},
    ],
    "tools": [{"name": "shell__run", "description": "Runs.", "input_schema": SCHEMA, "defer_loading": False}],
    "metadata": {"user_id": "1"},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
    "stream": True,
}
HEADERS = {"authorization": "Bearer any", "anthropic-version": "2026-10-21", "anthropic-beta": "x,y"}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def post(url: str, path: str, body: Mapping[str, Any]) -> Any:
    return http.post(url + path, json=body, headers=HEADERS, timeout=60)


def test_codex_completes_a_task(server: tuple[str, Script]) -> None:
    url, script = server
    events = events_of(post(url, "/v1/responses", CODEX).text)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    order = [event["type"].removeprefix("response.") for event in events]
    assert [name for index, name in enumerate(order) if name != order[index - 1]] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1, 2]
    reasoning, message, call = items
    assert (reasoning["content"], message["content"][0]["text"]) == (
        [{"type": "reasoning_text", "text": THOUGHTS}],
        "Looking.",
    )
    assert (call["namespace"], call["name"], json.loads(call["arguments"])) == ("shell", "run", LIST)
    whole = events[-1]["response"]
    assert whole["output"] == items and whole["status"] == "completed"
    new = len(script.tokenizer.encode(ANSWERS[0]).ids)
    thinking = len(f">\n{THOUGHTS}\n</think>")  # tokens are bytes here; the last one of the opening counts
    assert whole["usage"] == {
        "input_tokens": len(script.tokens[-1]),
        "input_tokens_details": {"cached_tokens": CACHED},
        "output_tokens": new,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": len(script.tokens[-1]) + new,
    }
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    events = events_of(post(url, "/v1/responses", {**CODEX, "input": [*CODEX["input"], *items, output]}).text)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    assert script.prompts[-1].startswith(script.prompts[-2]), "the second prompt begins with the first"
    assert ANSWERS[0] in script.prompts[-1]
    assert re.search(r'own_answers_total\{.*result="same"\} [1-9]', http.get(f"{url}/metrics").text)


def test_claude_code_completes_a_task(server: tuple[str, Script]) -> None:
    url, script = server
    events = events_of(post(url, "/v1/messages?beta=true", CLAUDE).text)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    order = [event["type"] for event in events]
    assert order[0] == "message_start" and order[-2:] == ["message_delta", "message_stop"]
    deltas = {"thinking": "", "text": "", "partial_json": ""}
    for event in events:
        if event["type"] == "content_block_delta":
            for key, value in event["delta"].items():
                deltas[key] = deltas.get(key, "") + value
    assert (deltas["thinking"], deltas["text"]) == (THOUGHTS, "Looking.")
    assert (blocks[2]["name"], json.loads(deltas["partial_json"])) == ("shell__run", LIST)
    prompt = len(script.tokens[-1])
    usage = {"input_tokens": prompt - CACHED, "cache_creation_input_tokens": 0, "cache_read_input_tokens": CACHED}
    assert events[0]["message"]["usage"] == {**usage, "output_tokens": 0}
    new = len(script.tokenizer.encode(ANSWERS[0]).ids)
    assert events[-2]["usage"] == {**usage, "output_tokens": new}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert "billing" not in script.prompts[-1] and "Be exact." in script.prompts[-1]
    counted = post(
        url, "/v1/messages/count_tokens", {k: v for k, v in CLAUDE.items() if k not in ("max_tokens", "stream")}
    )
    assert counted.json() == {"input_tokens": prompt}

    answer = [
        {"type": "thinking", "thinking": THOUGHTS, "signature": ""},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": blocks[2]["id"], "name": "shell__run", "input": LIST},
    ]
    result = [{"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": [{"type": "text", "text": RESULT}]}]
    system = [
        {**CLAUDE["system"][0], "text": "x-anthropic-billing-header: cc_version=2.1.328.def;"},
        *CLAUDE["system"][1:],
    ]
    # What was a list of blocks is a text in the next turn.
    first = [CLAUDE["messages"][0], {"role": "system", "content": "Tools: two."}]
    messages = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": result}]
    body = {**CLAUDE, "system": system, "messages": messages, "stream": False}
    whole = post(url, "/v1/messages", body).json()
    assert whole["content"] == [{"type": "text", "text": TEXT}] and whole["stop_reason"] == "end_turn"
    assert script.prompts[-1].startswith(script.prompts[-2]) and ANSWERS[0] in script.prompts[-1]


@pytest.mark.parametrize("form", ["qwen3", "mistral"])
def test_late_system_messages_do_not_move_the_prefix(form: str) -> None:
    """Templates that refuse them get a message of the user in their place."""
    source = TEMPLATES[form]
    if form == "qwen3":  # as newer templates of the family: system comes first or is refused
        source = source.replace("(message.role == 'system' and not loop.first)", "false").replace(
            "{%- elif message.role == 'assistant' %}",
            "{%- elif message.role == 'system' and not loop.first %}{{- raise_exception('system comes first') }}"
            "{%- elif message.role == 'assistant' %}",
            1,
        )
    template = ServedChatTemplate(source, SPECIAL_TOKENS[form])
    first = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "List."},
        {"role": "system", "content": "Two tools."},
    ]
    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Thanks."}]
    prompts = [template.render(messages, None) for messages in (first, [*first, *more])]
    assert "<system-reminder>\nTwo tools.\n</system-reminder>" in prompts[0]
    if form == "qwen3":
        assert prompts[1].startswith(prompts[0])


@pytest.fixture(scope="module")
def client(server: tuple[str, Script]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openais_client_assembles_a_stream_and_sends_it_back(client: openai.OpenAI) -> None:
    ask = {key: value for key, value in CODEX.items() if key not in ("stream", "tools", "client_metadata")}
    tools = [{"type": "function", "name": "shell__run", "parameters": SCHEMA, "strict": False}]
    tools.append({"type": "custom", "name": "patch"})
    with client.responses.stream(**ask, tools=tools) as events:
        for _ in events:
            pass
        answer = events.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert (answer.output_text, answer.status) == ("Looking.", "completed")
    call = answer.output[2]
    assert (call.name, json.loads(call.arguments)) == ("shell__run", LIST)
    back = [item.model_dump(exclude_unset=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    whole = client.responses.create(**{**ask, "input": [*ask["input"], *back, output]}, tools=tools)
    assert whole.output_text == TEXT and whole.usage.output_tokens == len(TEXT.encode())
    cut = client.responses.create(model=NAME, input=RESULT, max_output_tokens=6)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "Done: ")


def test_chats_have_reasoning_apart(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "List."}]}
    message = client.chat.completions.create(**ask).choices[0].message
    assert message.reasoning_content == THOUGHTS and message.content.startswith("Looking.")
    pieces = [event.choices[0].delta for event in client.chat.completions.create(**ask, stream=True)]
    assert "".join(getattr(piece, "reasoning_content", "") for piece in pieces) == THOUGHTS
    assert "".join(piece.content or "" for piece in pieces) == message.content


def test_a_tool_with_free_text(server: tuple[str, Script]) -> None:
    body = {"model": NAME, "input": "Patch.", "tools": [{"type": "custom", "name": "patch"}], "stream": True}
    events = events_of(post(server[0], "/v1/responses", body).text)
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert "response.custom_tool_call_input.done" in [event["type"] for event in events]


def test_a_stream_that_fails_ends_with_the_events_of_its_api(
    server: tuple[str, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, script = server
    monkeypatch.setattr(script, "ending", {"reason": "failed", "error": "it broke", "code": "request_failed"})

    def last_event(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr(script, "may_end", threading.Event())
        with http.stream("POST", url + path, json=body, headers=HEADERS, timeout=60) as answer:
            pieces = answer.iter_text()
            begun = next(pieces)
            script.may_end.set()
            return events_of(begun + "".join(pieces))[-1]

    last = last_event("/v1/responses", CODEX)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "request_failed", "message": "the request failed: it broke"}
    last = last_event("/v1/messages", CLAUDE)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the request failed: it broke"}}
    whole = post(url, "/v1/messages", {**CLAUDE, "stream": False})
    assert (whole.status_code, whole.json()) == (500, last)


def test_ends_of_messages(server: tuple[str, Script]) -> None:
    ask = {"model": NAME, "max_tokens": 50, "messages": [{"role": "user", "content": "Count."}]}
    for keys, reason, sequence, text in [
        ({}, "end_turn", None, "one END two"),
        ({"stop_sequences": ["END"]}, "stop_sequence", "END", "one "),
        ({"max_tokens": 3}, "max_tokens", None, "one"),
    ]:
        found = post(server[0], "/v1/messages", {**ask, **keys}).json()
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
        assert found["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("path", "keys", "says"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id: answers are not kept here"),
        ("/v1/responses", {"input": [{"role": "king", "content": "x"}]}, "input[0].role: expected user"),
        ("/v1/responses", {"input": [3]}, "input[0]: expected an object"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens: expected a whole number"),
        ("/v1/responses", {"tools": [{"type": "function"}]}, "tools[0].name: expected text"),
        ("/v1/responses", {"tool_choice": {"type": "web_search"}}, "tool_choice: expected"),
        ("/v1/messages", {"messages": []}, "messages: expected a list"),
        ("/v1/messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: expected user"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences: expected texts"),
        ("/v1/messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema: expected a JSON schema"),
        ("/v1/messages", {"thinking": {"type": "deep"}}, "thinking.type: expected one of"),
        ("/v1/messages", {"model": "another"}, "model: there is no such model"),
        ("/v1/messages", {"system": "a" * (1 << 18)}, "prompt is too long: messages: the prompt has"),
        ("/v1/messages/count_tokens", {"messages": 3}, "messages: expected a list"),
    ],
)
def test_mistakes_are_named_in_the_form_of_the_api(
    server: tuple[str, Script], path: str, keys: dict[str, Any], says: str
) -> None:
    valid = {**(CODEX if path == "/v1/responses" else CLAUDE), "stream": False}
    answer = post(server[0], path, {**valid, **keys})
    value = answer.json()
    assert answer.status_code == (404 if "model" in keys else 400) and value["error"]["message"].startswith(says)
    if path != "/v1/responses":
        kind = "not_found_error" if "model" in keys else "invalid_request_error"
        assert (value["type"], value["error"]["type"], {*value["error"]}) == ("error", kind, {"type", "message"})


def test_what_agents_send_without_effect_is_counted(server: tuple[str, Script]) -> None:
    for path, body in (("/v1/responses", CODEX), ("/v1/messages", CLAUDE)):
        post(server[0], path, {**body, "stream": False, "never_heard_of": {"x": 1}})
    text = http.get(f"{server[0]}/metrics").text
    found = set(re.findall(r'meshwright:ignored_parts_total\{.*part="(\w+)"', text))
    assert {"another_key", "another_tool", "billing_header", "client_metadata", "context_management"} <= found
    assert found <= set(IGNORED)


def test_a_key_may_be_anthropics(tmp_path: Path) -> None:
    with scripted(tmp_path, Script(answer_to), api_key="secret") as url:
        body = json.dumps(CLAUDE)
        head = {"content-type": "application/json"}
        for key, status in (("secret", 200), ("wrong", 401), (None, 401)):
            given = {} if key is None else {"x-api-key": key}
            answer = http.post(f"{url}/v1/messages", content=body, headers={**head, **given}, timeout=60)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
