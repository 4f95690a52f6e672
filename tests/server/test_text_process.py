"""Text processes: equal results, limits of time and memory, the order of jobs, and what the end of one does to others."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.token_bytes import TokenBytes
from meshwright.server import text_process, text_workers
from meshwright.server.errors import RequestError
from meshwright.server.model_files import ModelFiles, read_model_files
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.server.text_process import Setup
from meshwright.server.text_request import CheckedTextRequest
from meshwright.server.text_workers import SHORT_BODY, Sizes, TextWorkers
from meshwright.spec.fields import to_plain
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import JSON, NAME, TEMPLATE, Answer, call, running_server
from tests.server.test_limits import BODIES, malformed

SIZES = Sizes(context=192, vocab=257)
ENDLESS = "endless"
LOOPS = (
    f"{{% if '{ENDLESS}' in messages[0].content %}}"
    + "{% for a in range(99999) %}" * 3
    + "{% endfor %}" * 3
    + "{% endif %}"
)
FILLS = "{% if filling %}{{ ('x' * filling) | length }}{% endif %}"
WORK: dict[str, Any] = {
    "/v1/completions": RequestReader.completion,
    "/v1/chat/completions": RequestReader.chat,
    "/tokenize": RequestReader.tokenize,
    "/detokenize": RequestReader.detokenize,
}


def chat(content: str, **keys: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **keys}).encode()


def completion(source: random.Random) -> bytes:
    """A body with some valid keys."""
    keys = {
        "max_tokens": source.randint(1, 9),
        "n": source.randint(1, 4),
        "temperature": source.random(),
        "stop": ["x", "\u00e9"],
        "seed": source.getrandbits(60),
        "stop_token_ids": [1, source.randrange(257)],
        "logprobs": 3,
        "ignore_eos": True,
        "stream": True,
        "logit_bias": {str(source.randrange(257)): 2.5},
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "user": "someone",
    }
    chosen = {key: value for key, value in keys.items() if source.random() < 0.4}
    text = "".join(source.choices("ab \n\u00e9\U0001f600", k=source.randint(1, 99)))
    return json.dumps({"prompt": source.choice([text, [text, "b"], [5, 6], [[5], [6, 7]]]), **chosen}).encode()


@pytest.fixture(scope="module")
def files(folder: Path) -> ModelFiles:
    return replace(read_model_files(folder), chat_template=LOOPS + FILLS + TEMPLATE)


def with_workers(files: ModelFiles, act: Callable[[TextWorkers], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """The result of a coroutine function with text processes of its own."""

    async def run() -> Any:
        workers = TextWorkers(ServeSpec(name=NAME, **settings), NAME, files)
        try:
            return await asyncio.wait_for(act(workers), 60)
        finally:
            workers.close()

    return asyncio.run(run())


async def outcome(workers: TextWorkers, body: bytes, work: Any = RequestReader.chat) -> Any:
    """Return what a text process makes of a body: a request, the bytes of an answer, or an error."""
    try:
        return await workers.read(work, body, SIZES)
    except RequestError as error:
        return error


async def pid_of(workers: TextWorkers) -> int:
    """The number of the loaded process for short bodies."""
    assert isinstance(await outcome(workers, chat("x")), CheckedTextRequest)
    assert workers._short._process is not None
    return workers._short._process.pid


def plain(reading: Any) -> Any:
    """An outcome in a form that can be compared."""
    if isinstance(reading, RequestError):
        return reading.status, reading.content
    if isinstance(reading, CheckedTextRequest):
        values, ids = reading.pack()
        values["sampling"] = {key: value for key, value in reading.sampling.items() if key != "seed"}
        return json.loads(json.dumps(values)), ids
    return bytes(reading)


@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.slow)])
def test_a_text_process_reads_what_the_http_process_reads(files: ModelFiles, count: int) -> None:
    source = random.Random(count)
    spec = ServeSpec(name=NAME)
    reader = RequestReader(spec, NAME, files, chat_template(spec, files), SIZES.context, SIZES.vocab)
    long = "long text \u00e9 " * (SHORT_BODY // 8)
    bodies = [
        *((path, malformed(source, path)) for path in source.choices(list(BODIES), k=count // 2)),
        *(("/v1/completions", completion(source)) for _ in range(count // 2)),
        (
            "/v1/completions",
            b'{"prompt": ["a", "b\xc3\xa9"], "n": 2, "stop": ["x"], "logit_bias": {"7": 1.5}, "echo": true}',
        ),
        ("/v1/completions", json.dumps({"prompt": long}).encode()),
        ("/v1/completions", json.dumps({"prompt": [5] * SHORT_BODY}).encode()),
        (
            "/v1/chat/completions",
            chat("hello", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
        ),
        ("/v1/chat/completions", chat("hello", response_format={"type": "json_object"}, stream=True)),
        ("/v1/chat/completions", chat(long)),
        ("/tokenize", chat(long, return_token_strs=True)),
        ("/detokenize", json.dumps({"tokens": [7] * SHORT_BODY}).encode()),
    ]

    async def read(workers: TextWorkers) -> list[Any]:
        return [plain(await outcome(workers, body, WORK[path])) for path, body in bodies]

    def read_here(path: str, body: bytes) -> Any:
        try:
            return plain(WORK[path](reader, body))
        except RequestError as error:
            return plain(error)

    expected = [read_here(*body) for body in bodies]
    assert with_workers(files, read) == expected
    assert sum(isinstance(value, tuple) and isinstance(value[0], dict) for value in expected) > count // 3


def test_an_endless_template_ends_its_own_request_only(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "SHORT_SECONDS", 1.0)

    async def ask(workers: TextWorkers) -> Any:
        pid = await pid_of(workers)
        reading = await asyncio.gather(*(outcome(workers, chat(text)) for text in ("a", ENDLESS, "b", "c")))
        long = await outcome(workers, chat(f"{ENDLESS} " * SHORT_BODY))
        return reading, long, pid != await pid_of(workers)

    monkeypatch.setattr(text_workers, "LONG_SECONDS", 1.0)
    (first, endless, *others), long, replaced = with_workers(files, ask)
    assert (endless.status, endless.param, endless.code) == (422, "messages", "text_timeout")
    assert "chat template took longer than 1 s" in endless.message
    assert all(isinstance(request, CheckedTextRequest) for request in (first, *others)) and replaced
    assert (long.status, long.code) == (422, "text_timeout") and "the body took longer" in long.message


def test_a_killed_process_ends_the_request_that_it_worked_on(files: ModelFiles) -> None:
    async def ask(workers: TextWorkers) -> Any:
        idle = await pid_of(workers)
        os.kill(idle, signal.SIGKILL)
        while (process := workers._short._process) is not None and process.pid == idle:
            await asyncio.sleep(0.01)
        busy = await pid_of(workers)
        tasks = [asyncio.ensure_future(outcome(workers, chat(text))) for text in (ENDLESS, *"abcdefg")]
        await asyncio.sleep(0.05)
        os.kill(busy, signal.SIGKILL)
        return await asyncio.gather(*tasks), idle != busy != await pid_of(workers)

    (lost, *others), replaced = with_workers(files, ask)
    assert (lost.status, lost.code) == (500, "text_lost") and (b"x-should-retry", b"false") in lost.headers
    assert all(isinstance(request, CheckedTextRequest) for request in others) and replaced


def test_a_request_gets_limited_memory(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says that memory is exhausted; a tokenizer ends its process."""
    monkeypatch.setattr(text_process, "LEAST_LIMIT_BYTES", 200 << 20)
    monkeypatch.setattr(text_process, "LIMIT_PER_BODY_BYTE", 0)

    async def ask(workers: TextWorkers) -> Any:
        filling = await outcome(workers, chat("x", chat_template_kwargs={"filling": 10**9}))
        long = json.dumps({"prompt": "abc " * 500_000}).encode()
        tokenized = await outcome(workers, long, RequestReader.tokenize)
        return filling, tokenized, await outcome(workers, chat("x")), await outcome(workers, chat("x" * SHORT_BODY))

    *refused, short, long = with_workers(files, ask)
    assert [(error.status, error.code) for error in refused] == [(422, "text_memory")] * 2
    assert isinstance(short, CheckedTextRequest) and long.code == "context_length_exceeded"


def test_jobs_are_done_in_order_and_long_ones_delay_no_short_one(files: ModelFiles) -> None:
    done: list[str] = []

    async def ask(workers: TextWorkers) -> None:
        async def read(name: str, body: bytes) -> None:
            await outcome(workers, body, RequestReader.tokenize)
            done.append(name)

        await read("first", chat("x"))
        long = json.dumps({"prompt": "abc " * SHORT_BODY}).encode()
        await asyncio.gather(
            *(read(f"long {number}", long) for number in range(2)),
            *(read(f"short {number}", chat("x" * (500 - number))) for number in range(9)),
        )

    with_workers(files, ask)
    assert done == ["first", *(f"short {number}" for number in range(9)), "long 0", "long 1"]


def test_a_full_queue_refuses_bodies(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "WAITING_BYTES", 5_000)

    async def ask(workers: TextWorkers) -> Any:
        many = await asyncio.gather(*(outcome(workers, chat("x")) for _ in range(9)))
        large = await asyncio.gather(*(outcome(workers, chat("x" * 3_000)) for _ in range(6)))
        return many, large

    many, large = with_workers(files, ask, queue=3)
    assert [getattr(reading, "status", 200) for reading in many] == [200] * 3 + [429] * 6
    assert all(reading.retry_after for reading in many[3:])
    statuses = [getattr(reading, "status", 200) for reading in large]
    assert statuses.count(429) == 1 and large[-1].retry_after


def test_a_job_whose_client_leaves_is_dropped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "SHORT_SECONDS", 1.0)
    monkeypatch.setattr(text_workers, "SHORT_SENT", 1)
    shutil.copytree(folder, tmp_path / NAME)
    (tmp_path / NAME / "chat_template.jinja").write_text(LOOPS + TEMPLATE)
    with running_server(tmp_path / NAME) as server:

        async def leave_and_stay() -> tuple[int, Answer, Answer]:
            ask = partial(call, server.app, "POST", "/v1/chat/completions", headers=JSON)
            endless = asyncio.ensure_future(ask(body=chat(ENDLESS)))
            await asyncio.sleep(0)

            async def leaving(scope: Any, receive: Any, send: Any) -> None:
                got: list[Any] = []

                async def receive_and_leave() -> Any:
                    got.append(None)
                    return await receive() if len(got) == 1 else {"type": "http.disconnect"}

                await server.app(scope, receive_and_leave, send)

            left = await call(leaving, "POST", "/v1/chat/completions", chat("x"), JSON)
            await asyncio.sleep(0.01)
            waiting = len(server.api.workers._short._waiting)
            stayed = await ask(body=chat("x", max_tokens=2))
            assert json.loads((await endless).body)["error"]["code"] == "text_timeout"
            return waiting, left, stayed

        waiting, left, stayed = server.run(leave_and_stay())
        server.settle()
    assert waiting <= 1 and left.status == 400 and stayed.status == 200


def test_a_process_that_cannot_load_is_started_again(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(text_workers, "FAILED_STARTS", 2)

    async def ask(workers: TextWorkers) -> Any:
        values, content = workers._short._files
        workers._short._files = values, b"no tokenizer"
        refused = await outcome(workers, chat("x"))
        workers._short._files = values, content
        while isinstance(reading := await outcome(workers, chat("x")), RequestError):
            assert reading.code == "text_unavailable"
            await asyncio.sleep(0.05)
        return refused, reading

    refused, reading = with_workers(files, ask)
    assert (refused.status, refused.code) == (503, "text_unavailable") and isinstance(reading, CheckedTextRequest)


def test_a_process_that_cannot_be_started_is_started_later(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as no file can be opened; requests wait for it."""
    popen, errors = subprocess.Popen, [OSError(24, "Too many open files")] * 2

    def start(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert (
        isinstance(with_workers(files, lambda workers: outcome(workers, chat("x"))), CheckedTextRequest) and not errors
    )


def test_a_text_process_has_no_secret_and_no_torch(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"api_key": "a key", "admin_key": "another", "transfer_key": "a third"}
    for name, value in secrets.items():
        monkeypatch.setenv(f"MESHWRIGHT_{name.upper()}", value)
    monkeypatch.setenv("HF_TOKEN", "a token")

    async def ask(workers: TextWorkers) -> tuple[list[str], str, str]:
        process = Path(f"/proc/{await pid_of(workers)}")
        environment = (process / "environ").read_text().split("\0")
        return environment, (process / "cmdline").read_text(), (process / "maps").read_text()

    environment, command, libraries = with_workers(files, ask, **secrets)
    names = {entry.partition("=")[0] for entry in environment if entry}
    assert names <= {*text_workers.ENVIRONMENT, "MESHWRIGHT_PARENT", "TOKENIZERS_PARALLELISM"}
    setup = json.dumps(to_plain(Setup.of(ServeSpec(**secrets), NAME, 0)))
    for value in (*secrets.values(), "a token"):
        assert value not in " ".join(environment) + command + setup
    assert "tokenizers" in libraries and "torch" not in libraries


def test_caches_by_values_of_clients_are_bounded(files: ModelFiles) -> None:
    """1,000 further values of each key leave nothing behind."""
    spec = ServeSpec(name=NAME)
    reader = RequestReader(spec, NAME, files, chat_template(spec, files), SIZES.context, SIZES.vocab)

    def requests(first: int) -> None:
        for number in range(first, first + 1_000):
            text = f"value {number}"
            shared = {
                "max_tokens": 1 + number % 100,
                "seed": number,
                "stop": [text],
                "stop_token_ids": [number % 257],
                "user": text,
                "temperature": 1 / (1 + number),
                "logit_bias": {str(number % 257): 1},
                "top_k": number,
                "metadata": {text: text},
            }
            schema = {"type": "object", "properties": {text: {"type": "string"}}}
            reader.completion(json.dumps({"prompt": text, **shared}).encode())
            tool = {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}
            reader.chat(chat(text, tools=[tool], chat_template_kwargs={f"name{number}": text}, **shared))
            format = {"type": "json_schema", "json_schema": {"name": text, "schema": schema}}
            reader.chat(chat(text, response_format=format, **shared))
            reader.tokenize(json.dumps({"prompt": text, "return_token_strs": True}).encode())
            reader.detokenize(json.dumps({"tokens": [number % 257]}).encode())
            for wrong in (f'{{"unknown{number}": 1}}', f'{{"prompt": "x", "logprobs": {number + 99}}}'):
                with pytest.raises(RequestError):
                    reader.completion(wrong.encode())

    requests(0)
    before = sys.getallocatedblocks()
    requests(1_000)
    assert sys.getallocatedblocks() - before < 500
    texts = TokenBytes(files.tokenizer)
    for token in [*range(SIZES.vocab)] * 4:  # the engine names no other
        texts.name(token)
        texts.plain[token]
    assert max(map(len, (texts._names, texts.all, texts.plain))) <= SIZES.vocab
