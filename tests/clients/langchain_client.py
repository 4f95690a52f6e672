"""LangChain's chat model and completion model: tools over two turns, streams, structured output, many prompts."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import ARGUMENTS, KEY, NAME, NO_SPACES, REPLY, RESULT, Report, expect, run_checks, weather
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = [SystemMessage("Be short."), HumanMessage("What is the weather in Paris?")]


def chat(url: str, **options: Any) -> ChatOpenAI:
    """The model of a server."""
    return ChatOpenAI(base_url=url, api_key=KEY, model=NAME, max_retries=0, seed=3, **options)


def expect_call(message: Any) -> None:
    """Raise AssertionError unless the message is the call of the script."""
    expect([(call["name"], call["args"]) for call in message.tool_calls], [("weather", ARGUMENTS)])


def tools_over_two_turns(url: str) -> None:
    """The call and its answer go back as messages; then the text, which goes back too."""
    model = chat(url).bind_tools([weather])
    called = model.invoke(QUESTION)
    expect_call(called)
    messages = [*QUESTION, called, ToolMessage(RESULT, tool_call_id=called.tool_calls[0]["id"])]
    replied = model.invoke(messages)
    expect((replied.content, replied.tool_calls), (REPLY, []))
    expect(model.invoke([*messages, replied, HumanMessage("Thank you.")]).content, REPLY)


def streamed_tools(url: str) -> None:
    """The same with streams, whose pieces LangChain adds."""
    model = chat(url, stream_usage=True).bind_tools([weather])
    called: Any = sum_of(model.stream(QUESTION))
    expect_call(called)
    messages = [*QUESTION, called, ToolMessage(RESULT, tool_call_id=called.tool_calls[0]["id"])]
    replied = sum_of(model.stream(messages))
    expect(replied.content, REPLY)
    expect(replied.usage_metadata is not None, True)


def sum_of(pieces: Any) -> Any:
    """The message of all pieces of a stream."""
    whole = None
    for piece in pieces:
        whole = piece if whole is None else whole + piece
    return whole


def streams(url: str) -> None:
    """The pieces of a stream are the text of the whole answer; the same without blocking."""
    model = chat(url, temperature=0, max_tokens=12)
    whole = model.invoke(QUESTION)
    expect("".join(str(piece.content) for piece in model.stream(QUESTION)), whole.content)

    async def pieces() -> str:
        return "".join([str(piece.content) async for piece in model.astream(QUESTION)])

    expect(asyncio.run(pieces()), whole.content)
    expect(whole.usage_metadata["output_tokens"] <= 12, True)


def structured(method: str) -> Any:
    """The check of a method of structured output."""

    def check(url: str) -> None:
        model = chat(url, max_tokens=400, logit_bias=NO_SPACES)
        expect(type(model.with_structured_output(Report, method=method).invoke("A report, as JSON.")), Report)

    return check


def many_prompts(url: str) -> None:
    """Twenty prompts: of completions in one request, of chats in a request each."""
    prompts = [f"Number {number}:" for number in range(20)]
    options: dict[str, Any] = {"base_url": url, "api_key": KEY, "model": NAME, "max_retries": 0, "max_tokens": 6}
    answer = OpenAI(**options, temperature=0).generate(prompts)
    alone = OpenAI(**options, temperature=0).invoke(prompts[7])
    expect((len(answer.generations), answer.generations[7][0].text), (20, alone))
    expect(len(chat(url, max_tokens=4).batch(prompts)), 20)


def log_probabilities(url: str) -> None:
    """Joined tokens are the text."""
    message = chat(url, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2).invoke(QUESTION)
    expect(len(message.response_metadata["logprobs"]["content"]), message.usage_metadata["output_tokens"])


if __name__ == "__main__":
    run_checks(
        {"tools over two turns": tools_over_two_turns, "streamed tools": streamed_tools},
        {
            "streams": streams,
            "20 prompts": many_prompts,
            "log probabilities": log_probabilities,
            **{f"structured output by {name}": structured(name) for name in ("json_schema", "function_calling")},
        },
    )
