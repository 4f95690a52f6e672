"""Host time of the HTTP process for each output token: real server and sockets, an engine that only counts.

    python benchmarks/serve_http.py                    # 256 streams of 400 tokens
    python benchmarks/serve_http.py --tiny             # 32 streams of 40 tokens
    python benchmarks/serve_http.py --api messages --form think

Prints one JSON line. Three processes: the server, measured by its CPU time; an engine that answers each step with one token for every
request, as soon as the server has taken the step before; clients that read the streams. `microseconds_per_token` is the CPU time of the
server between the first and the last token, divided by the tokens. `--form` is how the model writes: a chat template that names no
notation (`plain`), one of a model that reasons, whose answer is all text (`think`) or all reasoning (`inside`), or one with tools
(`tools`), which each request has.

`--alone N` measures N requests one after the other instead: the median time to the first piece of text, by the clients' clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

VOCAB = 257
HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}


class Api(NamedTuple):
    """How a client asks for a stream and reads it."""

    path: str
    prompt: dict[str, Any]
    tool: dict[str, Any]
    most: str
    """Key of the number of new tokens."""
    text: bytes
    """Beginning of the first event with text or reasoning."""
    end: bytes
    """Text of the last event."""


FUNCTION = {"name": "echo", "description": "Repeat", "parameters": PARAMETERS}
APIS = {
    "completions": Api("/v1/completions", {"prompt": "hello"}, {}, "max_tokens", b'"text":"', b"[DONE]"),
    "chat": Api(
        "/v1/chat/completions",
        {"messages": HELLO},
        {"type": "function", "function": FUNCTION},
        "max_tokens",
        b'"delta":{"',
        b"[DONE]",
    ),
    "responses": Api(
        "/v1/responses",
        {"input": HELLO},
        {"type": "function", **FUNCTION},
        "max_output_tokens",
        b"text.delta",
        b"event: response.",
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": HELLO},
        {"name": "echo", "description": "Repeat", "input_schema": PARAMETERS},
        "max_tokens",
        b"content_block_delta",
        b"event: message_stop",
    ),
}
FORMS = {
    "plain": "",
    "think": "{% if false %}<think></think>{% endif %}",
    "inside": "{% if false %}</think>{% endif %}<think>",
    "tools": "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}",
}
"""Ends of a chat template."""


def serve_steps(end: socket.socket, streams: int, steps_per_second: float) -> None:
    """The engine: once it has all requests, one token for each of them in every step."""
    from meshwright.server.engine_process import EngineConnection

    connection = EngineConnection(end)
    connection.send({"ready": {"context": 1 << 20, "vocab": VOCAB, "sequences": 4096}})
    left: dict[int, int] = {}
    step, due = 0, time.perf_counter()
    try:
        while True:
            for message in connection.receive(wait=(not step and len(left) < streams) or not left):
                request = message.get("submit")
                if request is not None:
                    left |= dict.fromkeys(request["ids"], request["new_tokens"])
                for id in message.get("abort", ()):
                    left.pop(id, None)
            if not left or (not step and len(left) < streams):
                continue
            due = max(due + 1 / steps_per_second, time.perf_counter() - 1 / steps_per_second)
            time.sleep(max(0.0, due - time.perf_counter()))
            step += 1
            entries: list[Any] = []
            for id in list(left):
                left[id] -= 1
                token = 65 + (step + id) % 26
                entries.append([id, [token]] if left[id] else [id, [token], {"reason": "length"}])
                if not left[id]:
                    del left[id]
            connection.send({"step": entries, "figures": [len(left), 0, 0.5, 0, 0]})
    except EOFError:
        return


def request_bytes(api: Api, tokens: int, form: str) -> bytes:
    """The request for a stream, as the client sends it."""
    tools = {"tools": [api.tool]} if form == "tools" and api.tool else {}
    ends = {"ignore_eos": True} if api.end == b"[DONE]" else {}
    body = json.dumps({"model": "counter", **api.prompt, **tools, api.most: tokens, **ends, "stream": True}).encode()
    head = f"POST {api.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_stream(port: int, api: Api, request: bytes) -> tuple[float, float, float, int]:
    """Read one stream: the times when it was asked for, of its first text and of its end, and its events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin, first, events, ending = time.perf_counter(), 0.0, 0, b""
    writer.write(request)
    while not (api.end in ending and ending.endswith(b"0\r\n\r\n")):
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"a stream ended early: {ending!r}")
        events += data.count(b"data: {")
        if not first and api.text in (data if api.path != "/v1/chat/completions" else data.replace(b'{"role"', b"")):
            first = time.perf_counter()
        ending = (ending + data)[-4096:]
    writer.close()
    return begin, first, time.perf_counter(), events


async def read_streams(port: int, streams: int, tokens: int, api: Api, form: str) -> dict[str, float]:
    """Read all streams at once; the numbers of events, and the seconds from the first text to the last end."""
    request = request_bytes(api, tokens, form)
    found = await asyncio.gather(*(read_stream(port, api, request) for _ in range(streams)))
    seconds = max(end for _, _, end, _ in found) - min(first for _, first, _, _ in found)
    return {"events": sum(events for *_, events in found), "seconds": seconds}


async def read_alone(port: int, count: int, tokens: int, api: Api, form: str) -> dict[str, float]:
    """Read streams one after the other; the median milliseconds to the first text."""
    request = request_bytes(api, tokens, form)
    found = [await read_stream(port, api, request) for _ in range(count)]
    times = [1e3 * (first - begin) for begin, first, _, _ in found[count // 10 :]]
    return {"ttft_ms": round(statistics.median(times), 3), "events": 0, "seconds": found[-1][2] - found[0][0]}


async def serve(engine: socket.socket, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Serve the clients of one run; the figures."""
    from meshwright.server.app import api_app
    from meshwright.server.endpoints import Api as ServerApi
    from meshwright.server.engine_client import EngineClient, connect
    from meshwright.server.metrics import ServerMetrics
    from meshwright.server.model_files import read_model_files
    from meshwright.server.run import uvicorn_server
    from meshwright.spec.serve import ServeSpec

    spec = ServeSpec(sequences=4096, log_requests=False)
    api = ServerApi(spec, "counter", read_model_files(folder), EngineClient(ServerMetrics("counter")))
    await connect(api.client, engine)
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn_server(api_app(api, loopback=True))
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started or api.client.ready is None:
        await asyncio.sleep(0.01)
    marks: dict[str, tuple[float, int]] = {}

    async def watch() -> None:
        """Note CPU time and tokens once all streams have begun, and until the first ends."""
        while True:
            await asyncio.sleep(0.01)
            now = (cpu_seconds(), api.client.metrics.generation_tokens)
            if api.client.figures.running >= streams:
                marks.setdefault("first", now)
                marks["last"] = now

    watching = asyncio.ensure_future(watch())
    streams, tokens = options.streams, options.tokens
    arguments = ["--clients", str(listening.getsockname()[1]), "--streams", str(streams), "--tokens", str(tokens)]
    arguments += ["--api", options.api, "--form", options.form, "--alone", str(options.alone)]
    clients = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments, stdout=subprocess.PIPE)
    out, _ = await clients.communicate()
    watching.cancel()
    server.should_exit = True
    await task
    api.workers.close()
    api.client.close()
    read = json.loads(out)
    if options.alone:
        return {"ttft_ms": read["ttft_ms"]}
    (first_cpu, first), (last_cpu, last) = marks["first"], marks["last"]
    expected = streams * tokens
    return {
        "microseconds_per_token": round(1e6 * (last_cpu - first_cpu) / (last - first), 2),
        "tokens_measured": last - first,
        "tokens_per_second": round(expected / read["seconds"]),
        "events": read["events"],
        "tokens": expected,
    }


def cpu_seconds() -> float:
    """CPU time of this process, of all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write_tokenizer(folder: Path, tokenizer: Path | None, form: str) -> None:
    """The tokenizer and a chat template of a `form` for the server: the given tokenizer, or one of bytes."""
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    else:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        plain: Any = Tokenizer(models.BPE({"<|endoftext|>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}, []))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        plain.decoder = decoders.ByteLevel()
        plain.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}" + FORMS[form]
    )


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps-per-second", type=float, default=100.0, help="steps of the engine at most")
    parser.add_argument("--api", choices=APIS, default="completions")
    parser.add_argument("--chat", dest="api", action="store_const", const="chat", help="the same as --api chat")
    parser.add_argument("--form", choices=FORMS, default="plain", help="how the model writes")
    parser.add_argument("--alone", type=int, default=0, metavar="N", help="N requests one after the other")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of one of bytes")
    parser.add_argument("--tiny", action="store_true", help="32 streams of 40 tokens")
    parser.add_argument("--clients", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--engine", nargs=2, type=int, metavar=("FD", "STREAMS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        read, count = (read_alone, options.alone) if options.alone else (read_streams, options.streams)
        print(json.dumps(asyncio.run(read(options.clients, count, options.tokens, APIS[options.api], options.form))))
        return
    if options.engine:
        serve_steps(socket.socket(fileno=options.engine[0]), options.engine[1], options.steps_per_second)
        return
    if options.tiny:
        options.streams, options.tokens = 32, 40
    if options.alone:
        options.streams = 1
    import uvloop

    ours, theirs = socket.socketpair()
    with theirs:
        command = [
            sys.executable,
            __file__,
            "--engine",
            str(theirs.fileno()),
            str(options.streams),
            "--steps-per-second",
            str(options.steps_per_second),
        ]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        write_tokenizer(Path(folder), options.tokenizer, options.form)
        figures = runner.run(serve(ours, Path(folder), options))
    ours.close()
    engine.wait(10)
    print(
        json.dumps(
            {
                "streams": options.streams,
                "tokens_each": options.tokens,
                "api": options.api,
                "form": options.form,
                "steps_per_second": options.steps_per_second,
                **figures,
                "python": platform.python_version(),
                "uvicorn": version("uvicorn"),
                "uvloop": version("uvloop"),
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
