"""Answers over HTTP on scripted texts do not depend on how many tokens come at a time: stops, numbers, echoes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.engine_process import EngineConnection
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import END, SIZES, TEMPLATE, byte_tokenizer, running_api

http = pytest.importorskip("httpx2")
TEXT = " once, é🙂 stop here and behind"
TOKENS = byte_tokenizer().encode(TEXT).ids
STOP_TOKEN, CACHED = 7, 4


def say(connection: EngineConnection, at_once: int) -> None:
    """An engine that answers each request with `TEXT`, then with a stop token of the request if there is one."""
    connection.send({"ready": {"context": 60, "vocab": 300, "sequences": 8}})
    try:
        while True:
            for message in connection.receive(wait=True):
                if (request := message.get("submit")) is not None:
                    for id in request["ids"]:
                        answer(connection, id, request, at_once)
    except EOFError:
        return


def answer(connection: EngineConnection, id: int, request: dict[str, Any], at_once: int) -> None:
    new = TOKENS[: request["new_tokens"]]
    logprobs = [[-0.5, [[token, -0.5], [token + 1, -1.5]]] for token in new]
    for start in range(0, len(new), at_once):
        details: dict[str, Any] = {"cached_tokens": CACHED} if not start else {}
        if request["sampling"].get("logprobs"):
            details["logprobs"] = logprobs[start : start + at_once]
        connection.send(
            {
                "step": [[id, new[start : start + at_once], *([details] if details else [])]],
                "figures": [0, 0, 0.0, 0, 0],
            }
        )
    end = {"reason": "stop", "stop_token": request["stop_ids"][0]} if len(new) == len(TOKENS) else {"reason": "length"}
    connection.send({"step": [[id, [], end]], "figures": [0, 0, 0.0, 0, 0]})


@pytest.fixture(scope="module", params=[1, 4, 100])
def post(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Sends a body to a server whose engine gives so many tokens at a time; the events of a stream are put together."""
    folder: Path = tmp_path_factory.mktemp("scripted")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    spec = ServeSpec(**SIZES, log_requests=False)
    with running_api(folder, spec, lambda connection: say(connection, request.param)) as (url, _, _):

        def post(stream: bool, **body: Any) -> dict[str, Any]:
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            reply = http.post(
                f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 50, **options, **body}, timeout=60
            )
            assert reply.status_code == 200, reply.text
            return joined(reply.text) if stream else reply.json()

        yield post


def joined(events: str) -> dict[str, Any]:
    """The answer that a stream's events make."""
    *pieces, last = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
    choice: dict[str, Any] = {"text": "", "logprobs": None}
    for piece in pieces:
        (part,) = piece["choices"]
        logprobs = choice["logprobs"]
        if part["logprobs"] is not None:
            logprobs = {key: (logprobs or {}).get(key, []) + value for key, value in part["logprobs"].items()}
        choice |= {**part, "text": choice["text"] + part["text"], "logprobs": logprobs}
    return {"choices": [choice], "usage": last["usage"], "pieces": pieces}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_tokens_behind_a_stop_string_are_not_counted(post: Any, stream: bool, include: bool) -> None:
    answer = post(stream, stop=["stop", "behind"], include_stop_str_in_output=include, logprobs=2)
    (choice,) = answer["choices"]
    end = TEXT.index("stop") + (len("stop") if include else 0)
    assert choice["text"] == TEXT[:end] == "".join(choice["logprobs"]["tokens"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "stop")
    counted = len(byte_tokenizer().encode(TEXT[: TEXT.index("stop") + 4]).ids)
    assert answer["usage"]["completion_tokens"] == counted == len(choice["logprobs"]["token_logprobs"])
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [len("".join(choice["logprobs"]["tokens"][:index])) for index in range(counted)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "reported"), [(None, None), ([STOP_TOKEN], STOP_TOKEN), ([0], None)])
def test_only_a_stop_of_the_request_is_reported(
    post: Any, stream: bool, given: list[int] | None, reported: int | None
) -> None:
    answer = post(stream, stop_token_ids=given)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (TEXT, "stop", reported)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": len(TOKENS),
        "total_tokens": 3 + len(TOKENS),
        "prompt_tokens_details": {"cached_tokens": CACHED},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_texts_end_with_the_context(post: Any, stream: bool) -> None:
    answer = post(stream, prompt="x" * 50)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"]) == (
        "length",
        None,
        10,
    )
    assert choice["text"] == byte_tokenizer().decode(TOKENS[:10])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "shown"),
    [(f"{END}é x", f"{END}é x"), ([0, *byte_tokenizer().encode("é x").ids], f"{END}é x"), (["  a"], "  a")],
)
def test_an_echo_is_the_prompt_itself(post: Any, stream: bool, prompt: Any, shown: str) -> None:
    (choice,) = post(stream, prompt=prompt, echo=True)["choices"]
    assert choice["text"] == shown + TEXT


def test_every_event_has_the_numbers_of_tokens_if_asked_for(post: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [piece["usage"]["completion_tokens"] for piece in post(True, stream_options=options)["pieces"]]
    assert counts == sorted(counts) and counts[-1] == len(TOKENS)
    without = post(True, stream_options={"include_usage": True})["pieces"]
    assert all(piece["usage"] is None for piece in without)


def test_cached_tokens_count_once_for_each_prompt(post: Any) -> None:
    usage = post(False, prompt=["abc", "abd"], n=2)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (6, {"cached_tokens": 2 * CACHED})
