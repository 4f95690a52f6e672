"""Cost of HTTP: throughput and time to first token of one engine, called in its process and through the server.

    python benchmarks/serve_overhead.py --model llama3-8b [--out FILE]     # 256 streams, 512 tokens in, 128 out
    python benchmarks/serve_overhead.py --tiny                             # a tiny model, seconds on a CPU

The engine has random weights and its own process. There it first continues `--requests` prompts, `--streams` at a time, then requests that
arrive at random times at `--load` of the capacity that this gave. Then a server in this process gets the same requests from clients in a
third process, as token ids over connections that are open, and answers them as streams. Last come the arrivals in the engine's process
again, as a GPU is slower when it is warm. Times to first token count from the time at which a request is due; `hops_milliseconds` are
medians of its parts, of which the engine's process prediction checks for "queue" and "steps".
Prints one JSON object. Needs starlette and uvicorn; without uvloop and httptools the server is slower, and the result says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from serve_arrivals import Arrivals, arrivals, serve

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
BACKLOG = 1024
TIMER_SECONDS = 0.002
"""Timers of an event loop may be late by about this."""
HOPS = ("client", "request", "queue", "steps", "message", "reply")
"""From one to the next of: due, sent, submitted to the engine, read by it, its first token, read by the server, read by the client."""


def run_engine(end: socket.socket, options: argparse.Namespace) -> None:
    """The engine's process: measure in it, report the figures, then serve the other end of the socket."""
    from serve_offline import random_model

    from meshwright.serve.engine import Engine
    from meshwright.server.engine_process import serve_engine
    from meshwright.spec.engine import EngineOptions

    context = options.prompt + options.new
    model = random_model(options.model, context)
    sizes = EngineOptions(sequences=options.streams, context=context, prefix_cache=False, texts=False)
    engine = Engine(model, options=sizes)
    vocab = model.spec.vocab_size
    continue_all(engine, requests_of(options, vocab, math.inf, options.streams), options.streams)
    tokens_per_second = continue_all(engine, requests_of(options, vocab, math.inf), options.streams)
    rate = options.load * tokens_per_second / options.new
    timed = requests_of(options, vocab, rate, max(8, int(rate * options.seconds)))
    figures = {"tokens_per_second": tokens_per_second, "first_milliseconds": first_milliseconds(engine, timed)}
    print(json.dumps({"vocab": vocab, "rate": rate, **figures}), flush=True)
    connection = timed_connection(end)
    serve_engine(engine, connection)
    print(json.dumps({"first_milliseconds": first_milliseconds(engine, timed), "marks": connection.marks}))


def first_milliseconds(engine: Any, timed: Arrivals) -> float:
    """Median time to first token."""
    return 1000 * statistics.median(times.first for times in serve(engine, timed))


def timed_connection(end: socket.socket) -> Any:
    """The engine's end of the socket; `marks` are by seed of a request when it was read and when its first token was sent."""
    from meshwright.server.engine_process import EngineConnection

    class TimedConnection(EngineConnection):
        def __init__(self, end: socket.socket) -> None:
            super().__init__(end)
            self.marks: dict[int, list[float]] = {}
            self._waiting: dict[int, int] = {}

        def receive(self, *, wait: bool) -> list[dict[str, Any]]:
            messages = super().receive(wait=wait)
            for message in messages:
                if (request := message.get("submit")) is not None:
                    seed = request["sampling"].get("seed", 0)
                    self.marks[seed] = [time.perf_counter()]
                    self._waiting[request["ids"][0]] = seed
            return messages

        def send(self, message: dict[str, Any]) -> None:
            if self._waiting:
                now = time.perf_counter()
                for entry in message.get("step", ()):
                    if (seed := self._waiting.pop(entry[0], None)) is not None:
                        self.marks[seed].append(now)
            super().send(message)

    return TimedConnection(end)


def requests_of(options: argparse.Namespace, vocab: int, rate: float, count: int | None = None) -> Arrivals:
    """The requests of a measurement; the same in both processes."""
    return arrivals(options.prompt, options.new, rate, count or options.requests, vocab)


def continue_all(engine: Any, requests: Arrivals, streams: int) -> float:
    """New tokens per second of all requests, `streams` of them at a time."""
    from meshwright.serve.sampling_options import SamplingOptions

    left = list(enumerate(requests.prompts))[::-1]
    start, tokens = time.perf_counter(), 0
    while left or engine.unfinished:
        while left and engine.unfinished < streams:
            seed, prompt = left.pop()
            sampling = SamplingOptions(temperature=0.6, seed=seed)
            engine.submit(prompt, new_tokens=requests.new_tokens, sampling=sampling)
        for update in engine.step():
            if update.error is not None:
                raise RuntimeError(update.error)
            tokens += len(update.tokens)
    return tokens / (time.perf_counter() - start)


class Client(asyncio.Protocol):
    """A connection that carries one stream after the other."""

    def __init__(self) -> None:
        self._first, self._ending = 0.0, b""
        self._ended: asyncio.Future[float] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def stream(self, request: bytes) -> tuple[float, float]:
        """Read one stream to its end; when the request was sent, and when the first event came."""
        self._first, self._ending = 0.0, b""
        self._ended = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self._transport.write(request)
        return sent, await self._ended

    def data_received(self, data: bytes) -> None:
        ending = self._ending + data
        if not self._first and b"data: " in ending:
            self._first = time.perf_counter()
        if b"HTTP/1.1 4" in data or b"HTTP/1.1 5" in data or b'{"error"' in data:
            self._fail(data)
        elif ending.endswith(END) and self._ended is not None:
            self._ended.set_result(self._first)
        self._ending = ending[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(self._ending)

    def _fail(self, data: bytes) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(f"a stream ended early: {data[:300]!r}"))


def request_bytes(prompt: Sequence[int], new_tokens: int, seed: int) -> bytes:
    """A request for a stream."""
    request = {"prompt": prompt, "max_tokens": new_tokens, "seed": seed, "temperature": 0.6}
    body = json.dumps({**request, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def load(port: int, vocab: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """The clients: all requests, `streams` at a time, and then those that arrive at `rate` a second."""
    loop = asyncio.get_running_loop()

    async def client() -> Client:
        return (await loop.create_connection(Client, "127.0.0.1", port))[1]

    free = [await client() for _ in range(options.streams)]

    async def closed(requests: Arrivals) -> float:
        left = [request_bytes(prompt, options.new, seed) for seed, prompt in enumerate(requests.prompts)][::-1]

        async def worker(client: Client) -> None:
            while left:
                await client.stream(left.pop())

        start = time.perf_counter()
        await asyncio.gather(*map(worker, free))
        return len(requests.prompts) * options.new / (time.perf_counter() - start)

    await closed(requests_of(options, vocab, math.inf, options.streams))
    tokens_per_second = await closed(requests_of(options, vocab, math.inf))
    timed = requests_of(options, vocab, rate, max(8, int(rate * options.seconds)))
    prepared = [request_bytes(prompt, options.new, seed) for seed, prompt in enumerate(timed.prompts)]
    start = time.perf_counter()

    async def arriving(index: int) -> tuple[float, float, float]:
        due = start + timed.dues[index]
        await asyncio.sleep(due - time.perf_counter() - TIMER_SECONDS)
        while time.perf_counter() < due:
            await asyncio.sleep(0)
        used = free.pop() if free else await client()
        sent, first = await used.stream(prepared[index])
        free.append(used)
        return due, sent, first

    marks = await asyncio.gather(*(arriving(index) for index in range(len(timed.dues))))
    first = statistics.median(first - due for due, _, first in marks)
    return {"tokens_per_second": tokens_per_second, "first_milliseconds": 1000 * first, "marks": marks}


def timed_client(name: str) -> Any:
    """The server's end of the socket; `marks` are by seed of a request when it was submitted and when its first token was read."""
    from meshwright.server.engine_client import EngineClient, EngineRequest, Subscription
    from meshwright.server.metrics import ServerMetrics

    class TimedClient(EngineClient):
        def __init__(self) -> None:
            super().__init__(ServerMetrics(name))
            self.marks: dict[int, list[float]] = {}
            self._waiting: dict[int, int] = {}

        def submit(self, request: EngineRequest, subscription: Subscription, first_index: int) -> list[int]:
            ids = super().submit(request, subscription, first_index)
            seed = request.sampling.get("seed", 0)
            self.marks[seed], self._waiting[ids[0]] = [time.perf_counter()], seed
            return ids

        def _take_step(self, entries: Sequence[Sequence[Any]]) -> None:
            if self._waiting:
                now = time.perf_counter()
                for entry in entries:
                    if (seed := self._waiting.pop(entry[0], None)) is not None:
                        self.marks[seed].append(now)
            super()._take_step(entries)

    return TimedClient()


async def through_http(
    end: socket.socket, folder: Path, figures: dict[str, Any], words: list[str]
) -> tuple[dict[str, Any], dict[int, list[float]]]:
    """Serve the clients' requests; their figures, and the marks of the server."""
    from meshwright.server.app import api_app
    from meshwright.server.endpoints import Api
    from meshwright.server.engine_client import connect
    from meshwright.server.model_files import read_model_files
    from meshwright.server.run import uvicorn_server
    from meshwright.spec.serve import ServeSpec

    spec = ServeSpec(log_requests=False, queue=4096)
    api = Api(spec, "random", read_model_files(folder), timed_client("random"))
    await connect(api.client, end)
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = uvicorn_server(api_app(api, loopback=True))
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started or api.client.ready is None:
        await asyncio.sleep(0.01)
    given = ["--clients", str(listening.getsockname()[1]), str(figures["vocab"]), str(figures["rate"])]
    clients = await asyncio.create_subprocess_exec(sys.executable, __file__, *words, *given, stdout=subprocess.PIPE)
    out, _ = await clients.communicate()
    server.should_exit = True
    await task
    api.workers.close()
    api.client.close()
    return json.loads(out), api.client.marks


def hops(
    clients: Sequence[Sequence[float]], server: dict[int, list[float]], engine: dict[str, list[float]]
) -> dict[str, float]:
    """Median milliseconds of each part of the time to first token, by `HOPS`."""
    parts = []
    for seed, (due, sent, first) in enumerate(clients):
        (submitted, arrived), (read, computed) = server[seed], engine[str(seed)]
        times = (due, sent, submitted, read, computed, arrived, first)
        parts.append([1000 * (end - start) for start, end in pairwise(times)])
    return {name: statistics.median(values) for name, values in zip(HOPS, zip(*parts, strict=True), strict=True)}


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of bytes and made-up words with as many tokens as the model has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"Ġword{number}" for number in range(len(alphabet), vocab))][:vocab]
    tokenizer: Any = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def measure(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Run the three processes; the figures of both ways."""
    from meshwright.server.run import loop_factory

    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    with theirs:
        command = [sys.executable, __file__, *words, "--engine", str(theirs.fileno())]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    figures = json.loads(engine.stdout.readline())
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=loop_factory()) as runner:
        write_tokenizer(Path(folder), figures["vocab"])
        http, server_marks = runner.run(through_http(ours, Path(folder), figures, words))
    after = json.loads(engine.stdout.readline())
    engine.wait(30)
    client_marks = http.pop("marks")
    before_and_after = [figures["first_milliseconds"], after["first_milliseconds"]]
    return {
        "in_process": {**{name: figures[name] for name in http}, "first_milliseconds": before_and_after},
        "http": http,
        "requests_per_second_at_load": figures["rate"],
        "throughput_ratio": http["tokens_per_second"] / figures["tokens_per_second"],
        "added_first_milliseconds": http["first_milliseconds"] - statistics.mean(before_and_after),
        "hops_milliseconds": hops(client_marks, server_marks, after["marks"]),
    }


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help='a preset, or "tiny"')
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--load", type=float, default=0.6, help="share of the capacity at which requests arrive")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which requests arrive")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, 8 streams, 16 requests")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--clients", nargs=3, metavar=("PORT", "VOCAB", "RATE"), help=argparse.SUPPRESS)
    options, words = parser.parse_args(), sys.argv[1:]
    if options.tiny:
        options.model, options.streams, options.requests = "tiny", 8, 16
        options.prompt, options.new, options.seconds = 24, 8, 2.0
    if options.engine is not None:
        run_engine(socket.socket(fileno=options.engine), options)
        return
    if options.clients:
        port, vocab, rate = options.clients
        from meshwright.server.run import loop_factory

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            print(json.dumps(runner.run(load(int(port), int(vocab), float(rate), options))))
        return
    started = time.perf_counter()
    shown = {name: getattr(options, name) for name in ("model", "streams", "requests", "prompt", "new", "load")}
    packages = {name: version(name) if find_spec(name) else None for name in ("uvicorn", "uvloop", "httptools")}
    result = {**shown, **measure(options, words), "python": platform.python_version(), **packages}
    text = json.dumps({**result, "total_seconds": time.perf_counter() - started})
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
