"""Sends requests over plain sockets and judges the answers: in time, in the documented form, and no fault of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.fuzz.bodies import COMPLETIONS, COUNT, DETOKENIZE, MESSAGES, RESPONSES, TOKENIZE, FuzzRequest

FIRST_SECONDS = 1.0
"""Longest time to a refusal, a first token or a whole answer."""
LONGEST_SECONDS = 30.0
"""After which a request counts as never answered."""
ALLOWED_SERVER_ERRORS = ("text_unavailable",)
"""Codes of errors 5xx that a request did not cause."""
REASONS = ("stop", "length", "tool_calls")
STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
"""Events that end a stream of the Responses or the Messages API."""


@dataclass(frozen=True)
class Answer:
    """Answer to a request, as far as one came."""

    status: int = 0
    """0: no answer."""
    body: bytes = b""
    first_seconds: float = 0.0
    """Time to the first bytes of a stream, or to the end of a whole answer."""
    lost: str = ""
    """Why the answer has no end."""


async def send(port: int, request: FuzzRequest) -> Answer:
    """The answer to a request over a connection of its own."""
    head = (
        f"POST {request.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(request.body)}\r\n\r\n"
    )
    loop, start = asyncio.get_running_loop(), time.perf_counter()
    received, first = bytearray(), 0.0
    with socket.socket() as end:
        end.setblocking(False)
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                await loop.sock_connect(end, ("127.0.0.1", port))
                # A server may answer and close before it has read a body that is too long.
                sending = asyncio.ensure_future(_send_all(end, head.encode() + request.body))
                try:
                    while data := await loop.sock_recv(end, 1 << 18):
                        received += data
                        if not first and b"\ndata: " in received[:2_000]:
                            first = time.perf_counter() - start
                            if request.leaves:
                                break
                finally:  # before the number of the socket belongs to another one
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        except TimeoutError:
            return Answer(first_seconds=time.perf_counter() - start, lost=f"no end within {LONGEST_SECONDS:g} s")
        except OSError as error:
            if not received:
                return Answer(first_seconds=time.perf_counter() - start, lost=f"connection lost: {error}")
    head_bytes, _, body = bytes(received).partition(b"\r\n\r\n")
    if not head_bytes.startswith(b"HTTP/1.1 "):
        return Answer(first_seconds=time.perf_counter() - start, lost="connection closed without an answer")
    if b"transfer-encoding: chunked" in head_bytes.lower():
        body = b"".join(_chunks(body))
    return Answer(int(head_bytes[9:12]), body, first or time.perf_counter() - start)


async def _send_all(end: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(end, content)


def fault(request: FuzzRequest, answer: Answer, *, seconds: float = FIRST_SECONDS) -> str | None:
    """The fault of an answer; None if it is a proper refusal, or a proper answer in time."""
    if answer.lost:
        return answer.lost
    try:
        if answer.body.startswith(b"event: "):
            found = _fault_of_events(answer, request)
        elif answer.body.startswith(b"data: "):
            found = _fault_of_stream(answer, request)
        else:
            found = _fault_of_whole(request, answer)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"status {answer.status}, the answer has another form: {type(error).__name__}: {error}"
    if found is None and answer.first_seconds > seconds:
        return f"status {answer.status}, slow: more than {seconds:g} s to the first token or the answer"
    return found


def _fault_of_whole(request: FuzzRequest, answer: Answer) -> str | None:
    value = _parsed(answer.body)
    if answer.status != 200:
        return _fault_of_error(answer.status, _openai_form(value))
    if request.path == COUNT:
        return None if value["input_tokens"] > 0 else "count of tokens is wrong"
    if request.path == MESSAGES:
        return None if value["stop_reason"] in STOP_REASONS else f"stop_reason is {value['stop_reason']}"
    if request.path == RESPONSES:
        return None if value["status"] in ("completed", "incomplete") else f"status is {value['status']}"
    if request.path == TOKENIZE:
        return None if value["count"] == len(value["tokens"]) else "count of tokens is wrong"
    if request.path == DETOKENIZE:
        return None if isinstance(value["prompt"], str) else "no text"
    for index, choice in enumerate(value["choices"]):
        text = choice["text"] if request.path == COMPLETIONS else choice["message"].get("content") or ""
        if choice["index"] != index or choice["finish_reason"] not in REASONS or not isinstance(text, str):
            return f"choice {index} has index {choice['index']} and finish_reason {choice['finish_reason']}"
        text.encode("utf-8")
    usage = value["usage"]
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return f"usage does not add up: {usage}"
    return None


def _openai_form(value: dict[str, Any]) -> dict[str, Any]:
    """The error of an answer in OpenAI's form. That of Anthropic's API names its key in the message only."""
    if "type" not in value:
        return value["error"]
    return {**value["error"], "param": value["error"]["message"].partition(":")[0], "code": None}


def _fault_of_events(answer: Answer, request: FuzzRequest) -> str | None:
    """The fault of a stream of the Responses or the Messages API."""
    blocks = [block for block in answer.body.split(b"\n\n") if block]
    events = [_parsed(block.partition(b"\ndata: ")[2]) for block in (blocks[:1] if request.leaves else blocks)]
    for block, event in zip(blocks, events, strict=False):
        if block.partition(b"\n")[0] != b"event: " + event["type"].encode():
            return f"the event {event['type']} has another name"
    if request.leaves:
        return None
    last = events[-1]
    if last["type"] not in LAST_EVENTS or sum(event["type"] in LAST_EVENTS for event in events) != 1:
        return f"a stream ends with {last['type']}"
    if last["type"] in ("error", "response.failed"):
        error = _openai_form(last) if last["type"] == "error" else last["response"]["error"]
        if error["code"] not in (None, "grammar"):
            return f"an error event: {error['message'][:200]}"
    return None


def _fault_of_stream(answer: Answer, request: FuzzRequest) -> str | None:
    ended: dict[int, str] = {}
    seen: set[int] = set()
    events = answer.body.split(b"\n\n")
    if request.leaves:
        events = events[:1]
    elif events[-2:] != [b"data: [DONE]", b""]:
        return "a stream ends without [DONE]"
    for event in events:
        if event in (b"", b"data: [DONE]"):
            continue
        value = _parsed(event.removeprefix(b"data: "))
        if "error" in value:
            return _fault_of_error(0, value["error"])
        for choice in value["choices"]:
            index = choice["index"]
            if index in ended:
                return f"an event of choice {index} after its end"
            seen.add(index)
            if choice["finish_reason"] is not None:
                ended[index] = choice["finish_reason"]
    if request.leaves:
        return None
    if seen != set(ended) or not set(ended.values()) <= set(REASONS) or not seen:
        return f"a stream of choices {sorted(seen)} ends with {ended}"
    return None


def _fault_of_error(status: int, error: dict[str, Any]) -> str | None:
    """The fault of an error, which must be a refusal in OpenAI's form; status 0: of an event."""
    code, message = error.get("code"), error.get("message")
    if set(error) != {"message", "type", "param", "code"} or not message or not error["type"]:
        return f"status {status}, an error in another form: {sorted(error)}"
    if status >= 500 and code not in ALLOWED_SERVER_ERRORS:
        return f"status {status}, code {code}: {message[:200]}"
    if status == 0 and code != "grammar":
        return f"an error event of code {code}: {message[:200]}"
    if status != 429 and error["param"] is None and code is None and "the body" not in message:
        return f"status {status}, an error that names no key: {message[:200]}"
    return None


def _parsed(content: bytes) -> Any:
    """The value of JSON that has no NaN. Raises ValueError."""
    return json.loads(content, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} in JSON")


def _chunks(body: bytes) -> Iterator[bytes]:
    """The contents of an answer that is sent in chunks, as far as it came."""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            return
        yield rest[:length]
        body = rest[length + 2 :]
