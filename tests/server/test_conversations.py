"""Chats with tools over several turns: what the server has answered is sent back as OpenAI's client holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.chat_templates import TEMPLATES
from tests.server.helpers import NAME
from tests.server.scripted_engine import ARGUMENTS, REPLY, RESULT, scripted_server

openai = pytest.importorskip("openai")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        scripted_server(tmp_path_factory.mktemp("conversation"), request.param) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def message_of(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> Any:
    request = {"model": NAME, "messages": messages, "tools": TOOLS}
    if not stream:
        return client.chat.completions.create(**request).choices[0].message
    with client.chat.completions.stream(**request) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("unset", [False, True], ids=["nulls", "unset-left-out"])
def test_messages_of_the_client_can_be_sent_back(client: openai.OpenAI, stream: bool, unset: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather in Paris?"}]
    called = message_of(client, messages, stream=stream)
    (call,) = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    messages += [
        called.model_dump(exclude_unset=unset),
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    replied = message_of(client, messages, stream=stream)
    assert replied.content == REPLY and not replied.tool_calls
    messages += [replied.model_dump(exclude_unset=unset), {"role": "user", "content": "Thank you."}]
    assert message_of(client, messages, stream=stream).content == REPLY
