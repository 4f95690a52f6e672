"""LlamaIndex's model for servers with OpenAI's API: tools over two turns, streams, structured answers, completions."""

from __future__ import annotations

from typing import Any

from checks import ARGUMENTS, KEY, NAME, NO_SPACES, REPLY, RESULT, Report, expect, run_checks, weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION = "What is the weather in Paris?"


def model_of(url: str, **options: Any) -> OpenAILike:
    """The model of a server."""
    return OpenAILike(
        model=NAME,
        api_base=url,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=3072,
        max_retries=0,
        **options,
    )


def tools_over_two_turns(url: str) -> None:
    """The call and its answer go back as messages; then the text."""
    model = model_of(url)
    tools = [FunctionTool.from_defaults(fn=weather)]
    history = [ChatMessage(role="user", content=QUESTION)]
    called = model.chat_with_tools(tools, chat_history=history)
    (call,) = model.get_tool_calls_from_response(called)
    expect((call.tool_name, call.tool_kwargs), ("weather", ARGUMENTS))
    result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    replied = model.chat_with_tools(tools, chat_history=[*history, called.message, result])
    expect(replied.message.content, REPLY)


def streams(url: str) -> None:
    """The pieces of a stream are the text of the whole answer."""
    model = model_of(url, temperature=0, max_tokens=12)
    messages = [ChatMessage(role="user", content=QUESTION)]
    whole = model.chat(messages).message.content
    expect("".join(piece.delta or "" for piece in model.stream_chat(messages)), whole)


def completions(url: str) -> None:
    """A text goes on, whole and as a stream."""
    model = model_of(url, temperature=0, max_tokens=12).model_copy(update={"is_chat_model": False})
    whole = model.complete("A text").text
    expect("".join(piece.delta or "" for piece in model.stream_complete("A text")), whole)


def structured(url: str) -> None:
    """An answer as an object of a class, by a forced call of a tool."""
    model = model_of(url, max_tokens=400, additional_kwargs={"logit_bias": NO_SPACES})
    program = model.as_structured_llm(Report)
    expect(type(program.chat([ChatMessage(role="user", content="A report.")]).raw), Report)


if __name__ == "__main__":
    run_checks(
        {"tools over two turns": tools_over_two_turns},
        {"streams": streams, "completions": completions, "structured": structured},
    )
