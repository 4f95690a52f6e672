"""OpenAI's own client against a server: completions, chats, streams, log probabilities, grammars, errors."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from jinja2 import Template

from tests.models.tiny import LLAMA
from tests.serve.helpers import greedy, tiny
from tests.server.helpers import END, NAME, SIZES, TEMPLATE, RunningServer, byte_tokenizer

openai = pytest.importorskip("openai")
PROMPT = "def read"
LENGTH = 24
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def text() -> str:
    """The likeliest continuation of the prompt, by the trainer's forward."""
    tokenizer = byte_tokenizer()
    (tokens,) = greedy(tiny(replace(LLAMA, vocab_size=257)), [tokenizer.encode(PROMPT).ids], LENGTH)
    return tokenizer.decode(tokens)


def test_completion_is_the_likeliest_text(client: openai.OpenAI, text: str) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=LENGTH, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), LENGTH)


def test_several_prompts_as_text_and_tokens(client: openai.OpenAI, text: str) -> None:
    ids = byte_tokenizer().encode(PROMPT).ids
    answer = client.completions.create(
        model=NAME, prompt=[ids, ids[:3]], max_tokens=LENGTH, temperature=0, n=2, echo=True
    )
    assert [choice.text for choice in answer.choices[:2]] == [PROMPT + text] * 2
    assert all(choice.text.startswith("def") for choice in answer.choices[2:]) and len(answer.choices) == 4


def test_special_tokens_are_left_out_unless_asked_for(client: openai.OpenAI) -> None:
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "logit_bias": {"0": 100}}
    for body, expected in (({}, ""), ({"skip_special_tokens": False}, END * 3)):
        answer = client.completions.create(**request, extra_body={"ignore_eos": True, **body})
        assert answer.choices[0].text == expected


def test_streamed_pieces_are_the_text(client: openai.OpenAI, text: str) -> None:
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "stream": True}
    *events, last = client.completions.create(**request, stream_options={"include_usage": True})
    assert "".join(event.choices[0].text for event in events) == text
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all(event.usage is None for event in events)
    assert not last.choices and last.usage.completion_tokens == LENGTH


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("first", "length"), [(5, 1), (9, 4)])
def test_a_stop_string_cuts_the_text_exactly(
    client: openai.OpenAI, server: RunningServer, text: str, stream: bool, first: int, length: int
) -> None:
    stop = text[first : first + length]
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=60, temperature=0, stop=[stop, "never there"], stream=stream
    )
    choices = [event.choices[0] for event in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    server.settle()


def test_chat_continues_what_the_template_gives(client: openai.OpenAI) -> None:
    prompt = Template(TEMPLATE).render(messages=MESSAGES, tools=[TOOL], add_generation_prompt=True)
    assert "look_up" in prompt and "Be short." in prompt
    expected = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=[TOOL], max_completion_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content == expected.choices[0].text
    assert answer.usage.prompt_tokens == len(prompt)
    events = list(
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, tools=[TOOL], max_tokens=8, temperature=0, stream=True
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected.choices[0].text
    assert events[-1].choices[0].finish_reason == "length"


def test_an_answer_is_sent_back_as_the_client_dumps_it(client: openai.OpenAI) -> None:
    request = {"model": NAME, "max_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=MESSAGES, **request).choices[0].message
    plain = {"role": "assistant", "content": first.content}
    again = {"role": "user", "content": "And now?"}
    dumped = client.chat.completions.create(messages=[*MESSAGES, first.model_dump(), again], **request)
    as_plain = client.chat.completions.create(messages=[*MESSAGES, plain, again], **request)
    assert {"function_call", "annotations", "audio"} <= {*first.model_dump()}
    assert dumped.usage.prompt_tokens == as_plain.usage.prompt_tokens
    assert dumped.choices[0].message.content == as_plain.choices[0].message.content


def test_a_seed_repeats_samples_that_differ(client: openai.OpenAI) -> None:
    request = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "n": 3, "seed": -5}
    first, again = (client.chat.completions.create(**request) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, stream: bool) -> None:
    request = {"model": NAME, "max_tokens": 6, "temperature": 0, "stream": stream}
    chat = client.chat.completions.create(**request, messages=MESSAGES, logprobs=True, top_logprobs=3)
    entries = [
        entry
        for event in (chat if stream else [chat])
        for choice in event.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert len(entries) == 6
    for entry in entries:  # without a temperature the likeliest token is taken
        assert entry.logprob == entry.top_logprobs[0].logprob < 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    old = client.completions.create(**request, prompt=PROMPT, logprobs=2)
    parts = [event.choices[0].logprobs for event in (old if stream else [old]) if event.choices[0].logprobs is not None]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [len("".join(tokens[:index])) for index in range(6)]
    for value, top in ((v, t) for part in parts for v, t in zip(part.token_logprobs, part.top_logprobs, strict=True)):
        assert len(top) == 2 and max(top.values()) == value


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"count": digit}, "required": ["count"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        seed=1,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "count", "schema": schema}},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(r"\d", str(json.loads(answer.choices[0].message.content)["count"]))
    broken = {"type": "json_schema", "json_schema": {"name": "broken", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.UnprocessableEntityError) as error:
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=broken)
    assert error.value.param == "response_format"


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"temperature": "warm"}, openai.BadRequestError, "temperature"),
        ({"temperature": 1e9}, openai.BadRequestError, "temperature"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 10**30}, openai.BadRequestError, "max_tokens"),
        ({"logprobs": 99}, openai.BadRequestError, "logprobs"),
        ({"stop": ["x"] * 100}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"prompt": [[1, 300]]}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * SIZES["context"]}, openai.BadRequestError, "prompt"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    ],
)
def test_mistakes_are_named(client: openai.OpenAI, request_: dict, error: type, param: str | None) -> None:
    with pytest.raises(error) as raised:
        client.completions.create(**{"model": NAME, "prompt": PROMPT, **request_})
    assert raised.value.param == param


def test_tokens_and_models(client: openai.OpenAI, server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    import httpx2 as http

    ids = byte_tokenizer().encode(PROMPT).ids
    answer = http.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), SIZES["context"])
    info = http.get(f"{server.url}/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"], info["model_max_length"]) == (END, TEMPLATE, SIZES["context"])
    assert http.post(f"{server.url}/detokenize", json={"tokens": [*ids, 0]}).json() == {"prompt": PROMPT + END}


def test_concurrent_requests_get_their_own_texts(client: openai.OpenAI, server: RunningServer) -> None:
    prompts = [f"{number} is" for number in range(16)]
    single = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=9, temperature=0) for prompt in prompts[:4]
    ]

    async def all_texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as many:
            answers = [
                many.completions.create(model=NAME, prompt=prompt, max_tokens=9, temperature=0) for prompt in prompts
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    texts = asyncio.run(all_texts())
    assert texts[:4] == [answer.choices[0].text for answer in single]
    assert len(set(texts)) > 10


def test_a_client_that_leaves_frees_its_blocks(server: RunningServer) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as many:
            request = {"model": NAME, "prompt": PROMPT, "max_tokens": 100, "extra_body": {"ignore_eos": True}}
            streams = [await many.completions.create(**request, stream=True) for _ in range(3)]
            for stream in streams:
                await anext(aiter(stream))
            assert server.api.client.unfinished == 3
            for stream in streams:
                await stream.close()

    ended = dict(server.api.client.metrics._ended)
    asyncio.run(leave())
    server.settle()
    assert server.api.client.metrics._ended["abort"] == ended.get("abort", 0) + 3
