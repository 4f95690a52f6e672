"""Cost of the router: real sockets, servers that only write streams of tokens, clients that only read them.

    python benchmarks/serve_router.py                    # 64 streams at a time, 4,000 requests of 128 tokens
    python benchmarks/serve_router.py --tiny             # 8 streams at a time, 40 requests

Prints one JSON line. Four processes: the router (`meshwright route`), two servers, clients. A server sends one token to each of its
streams in every step of `--step-seconds`, as one chunk. `requests_per_second_per_core` is the number of requests by the CPU time of the
router. `added_seconds_p50` is the difference between the medians of the time to the first byte through the router and without it, of
requests that alternate while nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"model",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEALTH = b'HTTP/1.1 200 OK\r\ncontent-length: 34\r\n\r\n{"status":"ready","role":"decode"}'


class Server(asyncio.Protocol):
    """A connection to a server: each request gets a stream."""

    streams: dict[Server, int] = {}
    tokens = 0

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self.data = body[length:]
        if head.startswith(b"GET"):
            self.transport.write(HEALTH)
        elif b'"max_tokens": 1}' in body:
            self.transport.write(HEAD + CHUNK + END)
        else:
            self.transport.write(HEAD)
            self.streams[self] = self.tokens


async def serve(tokens: int, step_seconds: float) -> None:
    """Serve at a free port, which is printed, for ever."""
    Server.tokens = tokens
    listening = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    due = time.perf_counter()
    while True:
        due = max(due + step_seconds, time.perf_counter())
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for server, left in list(Server.streams.items()):
            server.transport.write(CHUNK if left > 1 else CHUNK + END)
            if left > 1:
                Server.streams[server] = left - 1
            else:
                del Server.streams[server]


class Client(asyncio.Protocol):
    """A connection of a client: one request after the other."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.received:
            self.first.set_result(time.perf_counter())
        self.received += len(data)
        self.tail = (self.tail + data)[-64:]
        if self.tail.endswith(END):
            self.done.set_result(self.received)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("a stream ended early"))

    async def ask(self, data: bytes) -> float:
        """Send a request and read its answer; the seconds to its first byte."""
        loop = asyncio.get_running_loop()
        self.received, self.tail, self.first, self.done = 0, b"", loop.create_future(), loop.create_future()
        started = time.perf_counter()
        self.transport.write(data)
        await self.done
        return self.first.result() - started


def request(tokens: int, number: int) -> bytes:
    """A request of about 2,000 bytes."""
    body = json.dumps({"stream": True, "prompt": f"{number} " + "word " * 380, "max_tokens": tokens}).encode()
    lines = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return b"POST /v1/completions HTTP/1.1\r\n" + lines + body


async def connected(port: int) -> Client:
    """A client of a port."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def measure(router: int, server: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    pair, seconds = [await connected(port) for port in (router, server)], ([], [])
    for number in range(options.singles):
        for client, times in zip(pair, seconds, strict=True):
            times.append(await client.ask(request(1, number)))
    clients = [await connected(router) for _ in range(options.streams)]
    each = options.requests // options.streams

    async def ask_all(first: int) -> None:
        for number in range(first, first + each):
            await clients[first // each].ask(request(options.tokens, number))

    cpu, started = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(ask_all(index * each) for index in range(options.streams)))
    cpu, wall, count = cpu_seconds(pid) - cpu, time.perf_counter() - started, each * options.streams
    through, direct = map(statistics.median, seconds)
    return {
        "requests_per_second_per_core": count / cpu,
        "microseconds_per_token": 1e6 * cpu / count / options.tokens,
        "requests_per_second": count / wall,
        "added_seconds_p50": through - direct,
        "direct_seconds_p50": direct,
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the figures as one JSON line."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--singles", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.002)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.streams, options.requests, options.singles = 8, 40, 10
    if options.serve:
        uvloop.run(serve(options.tokens, options.step_seconds))
    command = [sys.executable, __file__, "--serve", "--tokens", str(options.tokens)]
    command += ["--step-seconds", str(options.step_seconds)]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    processes = list(servers)
    try:
        ports = [int(server.stdout.readline()) for server in servers if server.stdout is not None]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        route = [sys.executable, "-m", "meshwright", "route", *urls, "--port", "0"]
        processes.append(router := subprocess.Popen(route, stdout=subprocess.PIPE, text=True))
        assert router.stdout is not None
        port = int(router.stdout.readline().rpartition(":")[2])
        figures = uvloop.run(measure(port, ports[0], router.pid, options))
    finally:
        for process in processes:
            process.kill()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    sizes = {name: getattr(options, name) for name in ("streams", "requests", "tokens", "step_seconds")}
    print(json.dumps({**sizes, **figures, **machine}))


if __name__ == "__main__":
    main()
