"""Anthropic's client: streams, tools over two turns, reasoning, counts of tokens, errors."""

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic, BadRequestError
from checks import ARGUMENTS, KEY, NAME, REPLY, RESULT, expect, run_checks

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
ASK: Any = {"model": NAME, "max_tokens": 200, "system": "Be short."}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


def client_of(url: str) -> Anthropic:
    """The client of a server."""
    return Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY, max_retries=0)


def tools_over_two_turns(url: str, *, stream: bool) -> None:
    """The call and its result go back as messages; then the text."""
    client = client_of(url)

    def answer(messages: Any) -> Any:
        if not stream:
            return client.messages.create(**ASK, tools=TOOLS, messages=messages)
        with client.messages.stream(**ASK, tools=TOOLS, messages=messages) as events:
            return events.get_final_message()

    called = answer([QUESTION])
    (call,) = [block for block in called.content if block.type == "tool_use"]
    expect((called.stop_reason, call.name, call.input), ("tool_use", "weather", ARGUMENTS))
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    content = [json.loads(block.model_dump_json(exclude_unset=True)) for block in called.content]
    replied = answer([QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}])
    expect(([block.text for block in replied.content], replied.stop_reason), ([REPLY], "end_turn"))


def streams(url: str) -> None:
    """The pieces of a stream are the text of the whole answer, with the same numbers of tokens."""
    client = client_of(url)
    ask: Any = {**ASK, "max_tokens": 12, "messages": [QUESTION], "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as events:
        text = "".join(events.text_stream)
        streamed = events.get_final_message()
    expect([text], [block.text for block in whole.content])

    def tokens(message: Any) -> tuple[int, int]:
        return message.usage.input_tokens + message.usage.cache_read_input_tokens, message.usage.output_tokens

    expect(tokens(streamed), tokens(whole))
    counted = client.messages.count_tokens(model=NAME, system=ASK["system"], messages=[QUESTION])
    expect(counted.input_tokens, tokens(whole)[0])


def mistakes(url: str) -> None:
    """A wrong value is an error of the client's own class."""
    try:
        client_of(url).messages.create(**{**ASK, "max_tokens": -1}, messages=[QUESTION])
    except BadRequestError as error:
        expect("max_tokens" in str(error), True)
    else:
        raise AssertionError("expected an error")


if __name__ == "__main__":
    run_checks(
        {
            "tools over two turns": lambda url: tools_over_two_turns(url, stream=False),
            "tools in streams": lambda url: tools_over_two_turns(url, stream=True),
        },
        {"streams": streams, "mistakes": mistakes},
    )
