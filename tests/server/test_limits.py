"""Keys, limits and states of the server; requests that make no sense; clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.addresses import check_addresses, listening_socket, where_listening
from meshwright.server.app import admin_app
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import JSON, NAME, Answer, RunningServer, call, running_server

REQUEST = {"model": NAME, "prompt": "def", "max_tokens": 3}


def post(server: RunningServer, value: Any, path: str = "/v1/completions", headers: Any = JSON) -> Answer:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return server.run(call(server.app, "POST", path, body, headers))


def error_of(answer: Answer) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's form."""
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, api_key="a key", queue=1, max_body_bytes=1000, admin_key="another") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", None, 200),
        ("/metrics", None, 401),
        ("/", None, 401),
        ("/v1/models", None, 401),
        ("/v1/models", b"Bearer another", 401),
        ("/v1/models", b"Basic Onpvb206YSBrZXk=", 401),
        ("/no/such/path", None, 401),
        ("/version", b"Bearer a key", 200),
        ("/v1/models", b"Bearer a key", 200),
        ("/", b"Basic bmFtZTphIGtleQ==", 200),
        ("/no/such/path", b"Bearer a key", 404),
        ("/v1/completions", b"Bearer a key", 405),
    ],
)
def test_all_paths_but_health_need_the_key(locked: RunningServer, path: str, header: bytes | None, status: int) -> None:
    headers = [] if header is None else [(b"authorization", header)]
    answer = locked.run(call(locked.app, "GET", path, headers=headers))
    assert answer.status == status
    if status == 401:
        error_of(answer)
        assert answer.headers[b"www-authenticate"] == (b"Basic" if path == "/" else b"Bearer")


def test_long_bodies_and_full_queues_are_refused(locked: RunningServer) -> None:
    headers = [*JSON, (b"authorization", b"Bearer a key")]
    assert post(locked, {**REQUEST, "user": "x" * 1000}, headers=headers).status == 413
    assert post(locked, b"{}", headers=[*headers, (b"content-length", b"5000")]).status == 413
    full = {**REQUEST, "n": 9}
    assert post(locked, full, headers=headers).status == 200
    answer = post(locked, {**REQUEST, "n": 10}, headers=headers)
    assert answer.status == 429 and int(answer.headers[b"retry-after"]) >= 1
    assert error_of(answer)["type"] == "rate_limit_error"


def test_other_hosts_and_content_types_are_refused(server: RunningServer) -> None:
    assert post(server, REQUEST, headers=[(b"content-type", b"text/plain")]).status == 400
    scope_headers = [(b"host", b"evil.example:80")]

    async def foreign() -> Answer:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await server.app({**scope, "headers": scope_headers}, receive, send)

        return await call(app, "GET", "/v1/models")

    assert error_of(server.run(foreign()))["message"].startswith("host")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", b"POST"),
        ("OPTIONS", "/v1/chat/completions", b"POST"),
        ("POST", "/health", b"GET, HEAD"),
        ("DELETE", f"/v1/models/{NAME}", b"GET, HEAD"),
        ("GET", "/role", b"POST"),
        ("POST", "/state", b"GET, HEAD"),
    ],
)
def test_another_method_is_answered_with_those_allowed(
    server: RunningServer, method: str, path: str, allowed: bytes
) -> None:
    app = admin_app(server.api) if path in ("/role", "/state") else server.app
    answer = server.run(call(app, method, path))
    assert answer.status == 405 and answer.headers[b"allow"] == allowed and error_of(answer)
    assert not any(name.startswith(b"access-control") for name in answer.headers)  # pages of other sites get no answer


def test_bodies_in_chunks_are_read_within_their_limit(server: RunningServer) -> None:
    port = int(server.url.rpartition(":")[2])

    def ask(body: bytes, *lines: bytes, size: int = 7) -> bytes:
        head = b"".join(b"%b\r\n" % line for line in (b"host: localhost", b"content-type: application/json", *lines))
        chunks = (body[at : at + size] for at in range(0, len(body), size))
        data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        with socket.create_connection(("127.0.0.1", port), 60) as end:
            sent = (
                b"POST /v1/completions HTTP/1.1\r\n%btransfer-encoding: chunked\r\nx-request-id: a-1\r\n\r\n%b0\r\n\r\n"
            )
            with suppress(ConnectionError):  # it may be refused before all has come
                end.sendall(sent % (head, data))
            return end.recv(1 << 16)

    body = json.dumps(REQUEST).encode()
    answer = ask(body)
    assert answer.startswith(b"HTTP/1.1 200") and b"x-request-id: a-1\r\n" in answer
    assert ask(b" " * server.api.spec.max_body_bytes + body, size=1 << 20).startswith(b"HTTP/1.1 413")
    assert ask(body, b"content-length: %d" % len(body)).startswith(b"HTTP/1.1 400")
    server.settle()


def test_states(server: RunningServer) -> None:
    server.api.draining = True
    try:
        answer = post(server, REQUEST)
        assert (answer.status, error_of(answer)["code"]) == (503, "draining") and b"retry-after" in answer.headers
        assert server.run(call(server.app, "GET", "/health")).status == 503
    finally:
        server.api.draining = False
    assert server.run(call(server.app, "GET", "/health")).status == 200


def test_addresses_of_other_machines_need_a_key() -> None:
    with pytest.raises(BadInput, match="api_key"):
        check_addresses(ServeSpec(host="0.0.0.0"))
    with pytest.raises(BadInput, match="admin_key"):
        check_addresses(ServeSpec(admin_port=1))
    check_addresses(ServeSpec(host="0.0.0.0", api_key="key"))
    check_addresses(ServeSpec(host="::1"))


def test_metrics_count_tokens(server: RunningServer) -> None:
    def values() -> dict[str, float]:
        lines = server.run(call(server.app, "GET", "/metrics")).body.decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    before = values()
    assert post(server, {**REQUEST, "max_tokens": 5, "ignore_eos": True}).status == 200
    server.settle()
    after = values()
    label = f'{{model_name="{NAME}"}}'
    changes = {
        "prompt_tokens_total": 3,
        "generation_tokens_total": 5,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 1,
        "request_decode_time_seconds_count": 1,
    }
    for name, change in changes.items():
        key = f"meshwright:{name}{label}"
        assert after[key] - before[key] == change, name
    assert after[f"meshwright:num_requests_running{label}"] == 0


ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    2**64,
    -(2**70),
    1e308,
    -0.5,
    0.5,
    1e-320,
    "",
    "x",
    "\ud800",
    "é\0",
    "text",
    [],
    [[]],
    [None],
    [1],
    [-1],
    [256],
    [257],
    [1.5],
    ["a"],
    ["a", 1],
    [[1], ["a"]],
    {},
    {"a": 1},
    {"type": "json_schema"},
    {"include_usage": 3},
    {"5": "x"},
    {"-1": 1},
    {"5": 1e9},
    [{"type": "function"}],
    [{"role": "user"}],
    [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "tool", "content": None}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}],
    [{"role": "assistant", "content": "x"}],
    {"choice": ["a", "b"]},
    {"regex": "a*"},
    {"grammar": 'start: "a"'},
    {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
]
KEYS = (
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "skip_special_tokens",
    "echo",
    "suffix",
    "user",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
    "add_special_tokens",
    "tokens",
    "nonsense",
    "",
    "priority",
    "cache_salt",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "continue_final_message",
    "add_generation_prompt",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "reasoning_effort",
    "modalities",
    "functions",
)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def malformed(random: random.Random, path: str) -> bytes:
    """A body: a request with some odd values, or bytes that are no JSON."""
    request = dict(BODIES[path])
    for _ in range(random.randint(1, 4)):
        request[random.choice(KEYS)] = random.choice(ODD)
    body = json.dumps(request).encode()
    form = random.randrange(8)
    if form == 0:
        position = random.randrange(len(body))
        body = body[:position] + random.choice([b"", b"\xff", b"\0", b"NaN", b"1e999", b'"']) + body[position + 1 :]
    elif form == 1:
        body = random.choice([b"", b"null", b"[]", b"3", b'"x"', b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6_000])
    elif form == 2:
        body = body.decode().encode(random.choice(["utf-16", "utf-32", "utf-8-sig"]))
    return body


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_are_answered(server: RunningServer, count: int) -> None:
    source = random.Random(count)

    async def answers() -> list[Answer]:
        app = server.app
        paths = source.choices(list(BODIES), k=count)
        return [await call(app, "POST", path, malformed(source, path), JSON) for path in paths]

    found = server.run(answers())
    statuses = {answer.status for answer in found}
    assert statuses <= {200, 400, 404, 422} and {200, 400} <= statuses
    for answer in found:
        if answer.status != 200:
            error_of(answer)
    server.settle()
    assert post(server, REQUEST).status == 200


@pytest.mark.parametrize("count", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_abort_storm(server: RunningServer, count: int) -> None:
    """Half of the requests leave at random times; the others get what they get alone."""
    source = random.Random(count)
    prompts = [f"{number} and" for number in range(7)]
    alone = [post(server, {**REQUEST, "prompt": prompt, "max_tokens": 20, "temperature": 0}) for prompt in prompts]
    texts = [json.loads(answer.body)["choices"][0]["text"] for answer in alone]

    async def ask(number: int, delay: float | None) -> None:
        request = {
            **REQUEST,
            "prompt": prompts[number % 7],
            "max_tokens": 20,
            "temperature": 0,
            "stream": number % 3 == 0,
        }
        task = asyncio.ensure_future(call(server.app, "POST", "/v1/completions", json.dumps(request).encode(), JSON))
        if delay is not None:
            await asyncio.sleep(delay)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        answer = await task
        assert answer.status == 200
        events = (
            [answer.body]
            if not request["stream"]
            else answer.body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
        )
        pieces = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
        assert "".join(pieces) == texts[number % 7]

    async def storm() -> None:
        delays = [source.random() * 0.05 if source.random() < 0.5 else None for _ in range(count)]
        await asyncio.gather(*(ask(number, delay) for number, delay in enumerate(delays)))

    server.run(storm())
    server.settle()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", "at http://127.0.0.1:{port}"),
        ("0.0.0.0", "on all interfaces, port {port}, without TLS: put a proxy with TLS in front"),
    ],
)
def test_the_first_line_says_where_the_server_is_reached(host: str, words: str) -> None:
    with listening_socket(host, 0, "port") as end:
        assert where_listening(end) == words.format(port=end.getsockname()[1])
