"""litellm: tools over two turns, streams, structured output, many prompts."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import ARGUMENTS, KEY, NAME, NO_SPACES, REPLY, RESULT, Report, expect, run_checks

PROVIDERS = ("openai", "hosted_vllm")
"""Its providers for OpenAI's API, and for servers of other makers that have it."""
QUESTION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def ask(url: str, provider: str, messages: list[Any], **options: Any) -> Any:
    """The answer to a chat."""
    return litellm.completion(
        model=f"{provider}/{NAME}", api_base=url, api_key=KEY, messages=messages, max_retries=0, **options
    )


def tools_over_two_turns(url: str) -> None:
    """The call and its answer go back as messages, as the client holds them; then the text, which goes back too."""
    for provider in PROVIDERS:
        called = ask(url, provider, QUESTION, tools=TOOLS).choices[0].message
        continue_from(url, provider, called)


def streamed_tools(url: str) -> None:
    """The same with a stream that litellm puts together."""
    for provider in PROVIDERS:
        pieces = list(ask(url, provider, QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
        whole: Any = litellm.stream_chunk_builder(pieces, messages=QUESTION)
        continue_from(url, provider, whole.choices[0].message)


def continue_from(url: str, provider: str, called: Any) -> None:
    """Answer the call of a message."""
    (call,) = called.tool_calls
    expect((call.function.name, json.loads(call.function.arguments)), ("weather", ARGUMENTS))
    answer = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": RESULT}
    for sent_back in (called, called.model_dump()):
        messages = [*QUESTION, sent_back, answer]
        replied = ask(url, provider, messages, tools=TOOLS).choices[0].message
        expect(replied.content, REPLY)
        thanks = {"role": "user", "content": "Thank you."}
        again = ask(url, provider, [*messages, replied.model_dump(), thanks], tools=TOOLS)
        expect(again.choices[0].message.content, REPLY)


def streams(url: str) -> None:
    """The pieces of a stream are the text of the whole answer."""
    for provider in PROVIDERS:
        whole = ask(url, provider, QUESTION, temperature=0, max_tokens=12).choices[0].message.content
        pieces = ask(url, provider, QUESTION, temperature=0, max_tokens=12, stream=True)
        expect("".join(piece.choices[0].delta.content or "" for piece in pieces), whole)


def structured_output(url: str) -> None:
    """A class as the form of the answer."""
    for provider in PROVIDERS:
        answer = ask(url, provider, QUESTION, response_format=Report, max_tokens=400, logit_bias=NO_SPACES)
        Report.model_validate_json(answer.choices[0].message.content)


def many_prompts(url: str) -> None:
    """Twenty prompts in one request for completions."""
    prompts = [f"Number {number}:" for number in range(20)]
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{NAME}", api_base=url, api_key=KEY, prompt=prompts, max_tokens=4, max_retries=0
    )
    expect(len(answer.choices), 20)


if __name__ == "__main__":
    run_checks(
        {"tools over two turns": tools_over_two_turns, "streamed tools": streamed_tools},
        {"streams": streams, "structured output": structured_output, "20 prompts": many_prompts},
    )
