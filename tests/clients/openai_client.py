"""OpenAI's client: responses, chats and completions with its helpers for streams, structured answers and tools over two turns."""

from __future__ import annotations

import json
from typing import Any

from checks import ARGUMENTS, KEY, NAME, NO_SPACES, REPLY, RESULT, Report, expect, run_checks
from openai import BadRequestError, OpenAI

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
FLAT: Any = [{"type": "function", **FUNCTION, "strict": False}]
NESTED: Any = [{"type": "function", "function": FUNCTION}]
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


def client_of(url: str) -> OpenAI:
    """The client of a server."""
    return OpenAI(base_url=url, api_key=KEY, max_retries=0)


def plain(item: Any) -> Any:
    """An answer's part as a client sends it back."""
    return json.loads(item.model_dump_json(exclude_unset=True))


def responses_over_two_turns(url: str, *, stream: bool) -> None:
    """The call and its output go back as items; then the text."""
    client = client_of(url)

    def answer(items: Any) -> Any:
        ask: Any = {"model": NAME, "input": items, "tools": FLAT, "max_output_tokens": 200}
        if not stream:
            return client.responses.create(**ask)
        with client.responses.stream(**ask) as events:
            return events.get_final_response()

    called = answer([QUESTION])
    (call,) = [item for item in called.output if item.type == "function_call"]
    expect((call.name, json.loads(call.arguments)), ("weather", ARGUMENTS))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    replied = answer([QUESTION, *map(plain, called.output), result])
    expect((replied.output_text, replied.status), (REPLY, "completed"))


def chats_over_two_turns(url: str, *, stream: bool) -> None:
    """The same with chats and the helper for their streams."""
    client = client_of(url)

    def answer(messages: Any) -> Any:
        ask: Any = {"model": NAME, "messages": messages, "tools": NESTED, "max_tokens": 200}
        if not stream:
            return client.chat.completions.create(**ask).choices[0].message
        with client.chat.completions.stream(**ask) as events:
            return events.get_final_completion().choices[0].message

    called = answer([QUESTION])
    (call,) = called.tool_calls
    expect((call.function.name, json.loads(call.function.arguments)), ("weather", ARGUMENTS))
    message: Any = {
        "role": "assistant",
        "content": called.content,
        "tool_calls": [{"id": call.id, "type": "function", "function": plain(call.function)}],
    }
    message["tool_calls"][0]["function"].pop("parsed_arguments", None)
    replied = answer([QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}])
    expect((replied.content, replied.tool_calls or []), (REPLY, []))


def structured(url: str) -> None:
    """Answers as objects of a class, by both APIs."""
    client = client_of(url)
    ask: Any = {"model": NAME, "extra_body": {"logit_bias": NO_SPACES}}
    chat = client.chat.completions.parse(**ask, messages=[QUESTION], response_format=Report, max_tokens=400)
    expect(type(chat.choices[0].message.parsed), Report)
    form = {"type": "json_schema", "name": "report", "schema": Report.model_json_schema(), "strict": True}
    answer = client.responses.create(model=NAME, input=[QUESTION], text={"format": form}, max_output_tokens=1000)  # type: ignore[call-overload]
    if answer.status == "completed":  # a model without training may write white space up to the end
        expect(type(Report.model_validate_json(answer.output_text)), Report)


def streams(url: str) -> None:
    """The pieces of a stream are the text of the whole answer."""
    client = client_of(url)
    ask: Any = {"model": NAME, "input": [QUESTION], "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    expect("".join(event.delta for event in events if event.type == "response.output_text.delta"), whole.output_text)
    expect(events[-1].response.usage.output_tokens, whole.usage.output_tokens)


def scores(url: str) -> None:
    """The log probabilities of a prompt."""
    ask: Any = {"model": NAME, "prompt": "A text.", "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = client_of(url).completions.create(**ask).choices
    expect(("".join(choice.logprobs.tokens), choice.logprobs.token_logprobs[0]), ("A text.", None))
    expect(all(value < 0 for value in choice.logprobs.token_logprobs[1:]), True)


def mistakes(url: str) -> None:
    """A wrong value is an error of the client's own class, with its key."""
    try:
        client_of(url).responses.create(model=NAME, input=[QUESTION], temperature=-1)
    except BadRequestError as error:
        expect(error.param, "temperature")
    else:
        raise AssertionError("expected an error")


if __name__ == "__main__":
    run_checks(
        {
            f"{name} over two turns{', streamed' * stream}": lambda url, check=check, stream=stream: check(
                url, stream=stream
            )
            for name, check in (("responses", responses_over_two_turns), ("chats", chats_over_two_turns))
            for stream in (False, True)
        },
        {"streams": streams, "structured": structured, "scores": scores, "mistakes": mistakes},
    )
