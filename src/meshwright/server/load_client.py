"""Load client: sends requests to servers at planned times over plain sockets, and notes when the answers come."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from meshwright.spec.deployment import PREFIX_BLOCK, TimedRequest

CHUNK_BYTES = 1 << 16
"""Maximum number of bytes of one read from a socket."""


@dataclass
class MeasuredRequest:
    """A request and the times of its events. Times are seconds since the start of the test, infinite until the event."""

    request: TimedRequest
    server: int
    # `server` is the index in `LoadTest.urls`; `error` is empty if the request succeeded.
    sent: float = float("inf")
    first_token: float = float("inf")
    end: float = float("inf")
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token: seconds from the request's planned arrival to its first token."""
        return self.first_token - self.request.arrival_seconds

    @property
    def tpot(self) -> float:
        """Time per output token: mean seconds between tokens after the first; 0 for an answer of one token."""
        tokens = self.request.output_tokens
        return (self.end - self.first_token) / (tokens - 1) if tokens > 1 else 0.0


@dataclass
class LoadTest:
    """Sends planned requests to the servers at `urls`, which all serve the same model with `vocab_size` tokens."""

    urls: Sequence[str]
    vocab_size: int
    key: str | None = None
    """API key of the servers."""
    name: str = ""
    """Name of the test; it changes the random prompts, so that no test hits the prefix cache entries of another."""
    measured: list[MeasuredRequest] = field(default_factory=list)
    occupancy: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    """Samples of the watched servers: (seconds since the start, index of the server, its gauges by name)."""

    async def run(self, requests: Sequence[TimedRequest], watched: Sequence[str] = (), every: float = 0.25) -> None:
        """Send the requests and wait for all answers.

        `watched` are the URLs of servers whose gauges are read every `every` seconds meanwhile.
        """
        begin = time.perf_counter()
        running = [0] * len(self.urls)
        watching = asyncio.ensure_future(self._watch(watched, begin, every))
        try:
            await asyncio.gather(
                *(self._send(number, request, running, begin) for number, request in enumerate(requests))
            )
        finally:
            watching.cancel()
            await asyncio.wait([watching])  # it fails if a server has ended; the requests report that failure
            if not watching.cancelled():
                watching.exception()

    async def _send(self, number: int, request: TimedRequest, running: list[int], begin: float) -> None:
        """Wait for a request's arrival time, and send it to the server with the fewest running requests.

        An error is recorded in the entry, whose times become infinite.
        """
        await asyncio.sleep(max(0.0, begin + request.arrival_seconds - time.perf_counter()))
        server = min(range(len(running)), key=running.__getitem__)
        entry = MeasuredRequest(request, server)
        self.measured.append(entry)
        running[server] += 1
        entry.sent = time.perf_counter() - begin
        try:
            await self._stream(entry, prompt_tokens(number, request, self.vocab_size, self.name), begin)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            entry.error = str(error)
            entry.first_token = float("inf")
            entry.end = float("inf")
        finally:
            running[server] -= 1

    async def _stream(self, entry: MeasuredRequest, prompt: list[int], begin: float) -> None:
        """Send a request and read its streamed answer. Raises OSError or ValueError if the answer is not complete."""
        fields = {"prompt": prompt, "max_tokens": entry.request.output_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True}).encode()
        reader, writer = await self._open(self.urls[entry.server], "POST", "/v1/completions", body)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 200:
                raise ValueError(f"status {status}: {(await reader.read(CHUNK_BYTES)).decode(errors='replace')[:200]}")
            entry.first_token = time.perf_counter() - begin  # the server sends the head with the first token
            ending = b""
            while b"[DONE]" not in ending:
                data = await reader.read(CHUNK_BYTES)
                if not data:
                    raise ValueError("the stream ended early")
                if b'"error"' in data:
                    raise ValueError(data.decode(errors="replace")[:200])
                ending = (ending + data)[-64:]
            entry.end = time.perf_counter() - begin
        finally:
            writer.close()

    async def _watch(self, watched: Sequence[str], begin: float, every: float) -> None:
        """Read the gauges of the watched servers repeatedly, until this task is cancelled."""
        while watched:
            for index, url in enumerate(watched):
                gauges = await self._gauges(url)
                self.occupancy.append((time.perf_counter() - begin, index, gauges))
            await asyncio.sleep(every)

    async def _gauges(self, url: str) -> dict[str, float]:
        """Return gauges of a server: `running` and `waiting` (numbers of requests) and `cache` (used share, 0 to 1)."""
        reader, writer = await self._open(url, "GET", "/metrics")
        try:
            text = (await reader.read(-1)).decode()
        finally:
            writer.close()
        names = {"num_requests_running": "running", "num_requests_waiting": "waiting", "kv_cache_usage_perc": "cache"}
        found = (line.removeprefix("meshwright:").partition("{") for line in text.splitlines())
        return {names[name]: float(values.rpartition(" ")[2]) for name, _, values in found if name in names}

    async def _open(
        self, url: str, method: str, path: str, body: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a server and send a request. Returns the streams from which the answer is read."""
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=CHUNK_BYTES)
        lines = [f"{method} {path} HTTP/1.1", f"host: {address.hostname}", "connection: close"]
        lines += [f"authorization: Bearer {self.key}"] if self.key else []
        lines += ["content-type: application/json", f"content-length: {len(body)}"] if body else []
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return reader, writer


def prompt_tokens(number: int, request: TimedRequest, vocab_size: int, test: str = "") -> list[int]:
    """Return the prompt of request `number` of a test: random token ids, the same in every run.

    The tokens of a prefix block depend only on the block's id and the test. Requests with the same prefix blocks
    therefore begin with the same tokens.
    """
    tokens: list[int] = []
    for block in request.prefix_blocks:
        tokens += random.Random(f"{test} block {block}").choices(range(vocab_size), k=PREFIX_BLOCK)
    own = random.Random(f"{test} request {number}")
    missing = max(0, request.input_tokens - len(tokens))
    return (tokens + own.choices(range(vocab_size), k=missing))[: request.input_tokens]


def failures(measured: Sequence[MeasuredRequest]) -> dict[str, Any]:
    """Return the number of failed requests, and the message of the first failure."""
    failed = [entry for entry in measured if entry.error]
    return {"failed": len(failed), "first_error": failed[0].error if failed else None}
