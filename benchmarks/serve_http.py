"""Host time of the HTTP process for each output token: real server and sockets, an engine that only counts.

    python benchmarks/serve_http.py                    # 256 streams of 400 tokens
    python benchmarks/serve_http.py --tiny             # 32 streams of 40 tokens

Prints one JSON line. Three processes: the server, measured by its CPU time; an engine that answers each step with one token for every
request, as soon as the server has taken the step before; clients that read the streams. `microseconds_per_token` is the CPU time of the
server between the first and the last token, divided by the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

VOCAB = 257


def serve_steps(end: socket.socket, streams: int, steps_per_second: float) -> None:
    """The engine: once it has all requests, one token for each of them in every step."""
    from meshwright.server.engine_process import Connection

    connection = Connection(end)
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


async def read_streams(port: int, streams: int, tokens: int, chat: bool) -> dict[str, float]:
    """Read all streams; the numbers of events, and the seconds from the first to the last."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    body = json.dumps({**prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    times: list[float] = []
    events = 0

    async def read() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        ending = b""
        while b"[DONE]" not in ending:
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError(f"a stream ended early: {ending!r}")
            if not ending:
                times.append(time.perf_counter())
            events += data.count(b"data: {")
            ending = (ending + data)[-64:]
        times.append(time.perf_counter())
        writer.close()

    await asyncio.gather(*(read() for _ in range(streams)))
    return {"events": events, "seconds": max(times) - min(times)}


async def serve(engine: socket.socket, folder: Path, streams: int, tokens: int, chat: bool) -> dict[str, Any]:
    """Serve the clients of one run; the figures."""
    from meshwright.server.app import api_app
    from meshwright.server.endpoints import Api
    from meshwright.server.engine_client import EngineClient, connect
    from meshwright.server.metrics import ServerMetrics
    from meshwright.server.model_files import read_model_files
    from meshwright.server.run import uvicorn_server
    from meshwright.spec.serve import ServeSpec

    spec = ServeSpec(sequences=4096, log_requests=False)
    api = Api(spec, "counter", read_model_files(folder), EngineClient(ServerMetrics("counter")))
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
    arguments = ["--clients", str(listening.getsockname()[1]), str(streams), str(tokens), *["--chat"] * chat]
    clients = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments, stdout=subprocess.PIPE)
    out, _ = await clients.communicate()
    watching.cancel()
    server.should_exit = True
    await task
    api.workers.close()
    api.client.close()
    (first_cpu, first), (last_cpu, last) = marks["first"], marks["last"]
    read = json.loads(out)
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


def write_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    """The tokenizer and a chat template for the server: the given tokenizer, or one of bytes."""
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    else:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        plain: Any = Tokenizer(models.BPE({"<|endoftext|>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}, []))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        plain.decoder = decoders.ByteLevel()
        plain.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps-per-second", type=float, default=100.0, help="steps of the engine at most")
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of one of bytes")
    parser.add_argument("--tiny", action="store_true", help="32 streams of 40 tokens")
    parser.add_argument("--clients", nargs=3, type=int, metavar=("PORT", "STREAMS", "TOKENS"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", nargs=2, type=int, metavar=("FD", "STREAMS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(asyncio.run(read_streams(*options.clients, options.chat))))
        return
    if options.engine:
        serve_steps(socket.socket(fileno=options.engine[0]), options.engine[1], options.steps_per_second)
        return
    streams, tokens = (32, 40) if options.tiny else (options.streams, options.tokens)
    import uvloop

    ours, theirs = socket.socketpair()
    with theirs:
        command = [
            sys.executable,
            __file__,
            "--engine",
            str(theirs.fileno()),
            str(streams),
            "--steps-per-second",
            str(options.steps_per_second),
        ]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        write_tokenizer(Path(folder), options.tokenizer)
        figures = runner.run(serve(ours, Path(folder), streams, tokens, options.chat))
    ours.close()
    engine.wait(10)
    print(
        json.dumps(
            {
                "streams": streams,
                "tokens_each": tokens,
                "chat": options.chat,
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
