"""A deployment under load on one CPU host, with random faults for half an hour. `make test-soak`.

    python benchmarks/serve_deployment_soak.py [--minutes 30] [--seed 0] [--out FILE]

Two prefill and two decode servers, a cache, and two routers at one port, each a process that is started again when it ends. Clients send
requests to the routers without a pause. Every few seconds a random fault: `kill -9` of a server, of its engine alone, of the cache or of
a router, half of them in the middle of a message with blocks; blocks that arrive damaged; a connection between engines that breaks. One
prefill server is reached by a Unix socket with shared memory, the other and the cache over TCP through a proxy that damages and cuts.

Checked: each request is answered with the text of one engine that serves alone, or fails with an error that permits to try again while
some process is away, within its deadline. After each fault a request that was sent later is answered within 5 s. At the end
no server, no cache and no router has a request or a block in use, and no engine's process is left of a killed server.
Prints progress, then one JSON object; exit code 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_contents import NEW_TOKENS, Content, make_contents, write_model
from soak_processes import DamagingProxy, Outage, SupervisedProcess, free_ports

BLOCK_TOKENS = 8
SIZES = {"sequences": 16, "step-tokens": 64, "tokens-per-block": BLOCK_TOKENS, "cache-blocks": 600, "context": 256}
CLIENTS = 6
ROUTERS = 2
DEADLINE_SECONDS = 30.0
"""Time in which each request must end."""
RESTORE_SECONDS = 5.0
"""Time after a fault within which a request that was sent after it must be answered, if the machine does nothing else."""
GRACE_SECONDS = 3.0
"""Time after a process is back in which its requests may still fail: the router has to learn of it."""
START_SECONDS = 300.0
"""Longest time until all processes take requests."""
HEALTHY_ANSWERS = 20
"""Answers in turn after which both routers, of which either may answer, are taken to know the servers."""
QUIET_SECONDS = 20.0
"""Longest time until nothing is in use after the last request."""
RETRIABLE = (b'"server_lost"', b'"engine_failed"')
"""Codes of errors in a stream after which a client may try again."""
KEY = "soak"
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "kv_prompts_waiting",
    "kv_blocks_unacknowledged",
)
"""Gauges of a server that must be 0 once it has nothing to do."""
COUNTERS = (
    "kv_blocks_sent_total",
    "kv_blocks_received_total",
    "kv_blocks_damaged_total",
    "kv_blocks_stored_total",
    "kv_blocks_fetched_total",
    "kv_prompts_lost_total",
)
FAULTS = ("kill", "kill", "kill", "kill in a transfer", "kill in a transfer", "kill in a transfer", "damage", "cut")


class SoakError(Exception):
    """Something does not hold that must hold."""


@dataclass
class Attempt:
    """One request, and how it ended."""

    content: Content
    new_tokens: int
    began: float
    ended: float = 0.0
    text: str | None = None
    """The whole answer; None if there is none."""
    failure: str = ""
    """Why there is no answer: `unconnected`, `lost`, or the status of a refusal."""


@dataclass
class Verdicts:
    """Results of all requests and faults so far."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, float]] = field(default_factory=list)
    """Name and time of each fault."""
    unanswered_faults: list[tuple[str, float]] = field(default_factory=list)
    restore_seconds: list[tuple[str, float]] = field(default_factory=list)
    most_restore_seconds: float = RESTORE_SECONDS

    def add_fault(self, name: str) -> None:
        """Note a fault that happens now."""
        self.faults.append((name, time.monotonic()))
        self.unanswered_faults.append(self.faults[-1])

    def add(self, attempt: Attempt, outages: Sequence[Outage]) -> None:
        """Take in a request that has ended. Raises SoakError if it may not end so."""
        seconds = attempt.ended - attempt.began
        _check(seconds <= DEADLINE_SECONDS, f"a request took {seconds:.1f} s")
        if attempt.text is not None:
            expected = attempt.content.text[: attempt.new_tokens]
            _check(attempt.text == expected, f"got {attempt.text!r}, one engine alone gives {expected!r}")
            self.ends["answered"] += 1
            for fault in [fault for fault in self.unanswered_faults if attempt.began >= fault[1]]:
                self.unanswered_faults.remove(fault)
                self.restore_seconds.append((fault[0], attempt.ended - fault[1]))
        else:
            roles = {"router"} if attempt.failure == "unconnected" else {"router", "decode"}
            explained = any(
                outage.role in roles and outage.began <= attempt.ended and attempt.began <= outage.ended + GRACE_SECONDS
                for outage in outages
            )
            _check(explained, f"a request failed ({attempt.failure}) while router and decode servers were there")
            self.ends[attempt.failure] += 1
        for name, at in self.unanswered_faults:
            most = self.most_restore_seconds
            _check(attempt.ended - at <= most, f"no answer within {most} s of the fault: {name}")


class DeploymentSoak:
    """The processes, the clients and the faults."""

    def __init__(self, folder: Path, contents: Sequence[Content], seed: int, pause: float, restore: float) -> None:
        self._draw, self._contents, self._pause = random.Random(seed), contents, pause
        self.verdicts = Verdicts(most_restore_seconds=restore)
        self.totals: Counter[str] = Counter()
        self._last: dict[tuple[str, int], dict[str, float]] = {}
        """Newest counters of each process that ever was, by name and process id."""
        ports = free_ports(9)
        self._router_port, self._server_ports = ports[0], ports[1:5]
        self.proxies = [DamagingProxy(ports[5], ports[6]), DamagingProxy(ports[7], ports[8])]
        self._processes = self._start(folder, ports)

    def _start(self, folder: Path, ports: Sequence[int]) -> list[SupervisedProcess]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_TRANSFER_KEY": KEY}
        log, store = folder / "log", self.proxies[1]
        sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
        serve = ["serve", str(folder / "model"), *sizes, "--no-log-requests", "--block-cache", f"127.0.0.1:{ports[7]}"]
        serve += ["--transfer-seconds", "5", "--drain-seconds", "5"]
        unix, tcp, proxied = f"unix:{folder}/prefill", f"127.0.0.1:{ports[6]}", f"127.0.0.1:{ports[5]}"
        words: list[tuple[str, str, list[str]]] = [
            ("cache", "cache", ["cache", f"127.0.0.1:{store.target}", "--gib", "0.02"]),
            ("prefill 0", "prefill", [*serve, "--role", "prefill", "--transfer-address", unix]),
            ("prefill 1", "prefill", [*serve, "--role", "prefill", "--transfer-address", tcp]),
        ]
        decode = [*serve, "--role", "decode", "--prefill-engines", f"{unix},{proxied}"]
        words += [(f"decode {number}", "decode", [*decode]) for number in range(2)]
        for entry, port in zip(words[1:], self._server_ports, strict=True):
            entry[2][2:2] = ["--port", str(port)]
        urls = [f"http://127.0.0.1:{port}" for port in self._server_ports]
        route = ["--port", str(self._router_port), "--share-port", "--health-seconds", "0.5", "--first-seconds", "20"]
        words += [(f"router {number}", "router", ["route", *urls, *route]) for number in range(ROUTERS)]
        return [SupervisedProcess(name, role, command, environment, log) for name, role, command in words]

    @property
    def outages(self) -> list[Outage]:
        """Times in which a process was not there."""
        return [outage for process in self._processes for outage in process.outages]

    async def run(self, seconds: float) -> None:
        """Raises SoakError if something does not hold."""
        for proxy in self.proxies:
            await proxy.start()
        await self._all_ready()
        end = time.monotonic() + seconds
        work = [self._client(random.Random(self._draw.random()), end) for _ in range(CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for task in (*work, self._inject(end), self._count(end)):
                group.create_task(task)
        await self._all_ready()
        await self._audit()

    async def end(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.end() for process in self._processes))
        for proxy in self.proxies:
            proxy.close()

    async def _all_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while missing := [process.name for process in self._processes if not process.ready.is_set()]:
            _check(time.monotonic() < deadline, f"not started within {START_SECONDS} s: {missing}")
            await asyncio.sleep(0.1)
        healthy = 0
        while healthy < HEALTHY_ANSWERS:
            _check(time.monotonic() < deadline, f"no healthy server within {START_SECONDS} s")
            status, _ = await self._exchange(self._router_port, "GET", "/health")
            healthy = healthy + 1 if status == 200 else 0
            await asyncio.sleep(0.1 if status != 200 else 0)

    async def _client(self, draw: random.Random, end: float) -> None:
        while (now := time.monotonic()) < end:
            attempt = Attempt(draw.choice(self._contents), draw.randint(1, NEW_TOKENS), now)
            try:
                async with asyncio.timeout(DEADLINE_SECONDS + 1):
                    await self._ask(attempt, stream=draw.random() < 0.7)
            except (OSError, EOFError):
                attempt.failure = attempt.failure or "lost"
            attempt.ended = time.monotonic()
            self.verdicts.add(attempt, self.outages)
            if attempt.failure:
                await asyncio.sleep(0.2)

    async def _ask(self, attempt: Attempt, *, stream: bool) -> None:
        """Send a request to the router and read its answer. Raises OSError or EOFError if the connection ends early."""
        fields = {"prompt": attempt.content.prompt, "max_tokens": attempt.new_tokens, "temperature": 0}
        content = json.dumps({**fields, "ignore_eos": True, "stream": stream}).encode()
        status, body = await self._exchange(self._router_port, "POST", "/v1/completions", content, attempt)
        if status in (429, 503):
            attempt.failure = str(status)
        elif status != 200:
            raise SoakError(f"status {status}: {body[:300]!r}")
        elif not stream:
            attempt.text = json.loads(body)["choices"][0]["text"]
        else:
            events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
            errors = [event for event in events if event.startswith(b'{"error"')]
            if errors or not events or events[-1] != b"[DONE]":
                retriable = all(any(code in error for code in RETRIABLE) for error in errors)
                _check(retriable, f"a stream ended with {errors}")
                attempt.failure = "lost"
                return
            attempt.text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    async def _exchange(
        self, port: int, method: str, path: str, content: bytes = b"", attempt: Attempt | None = None
    ) -> tuple[int, bytes]:
        """Status and content of an answer. Raises OSError or EOFError if there is none; `attempt` notes the connection."""
        if attempt is not None:
            attempt.failure = "unconnected"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if attempt is not None:
            attempt.failure = ""
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            answer = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read(-1)
            length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if length and len(body) < int(length):
                raise EOFError
            return int(answer.split(b" ", 2)[1]), body
        finally:
            writer.close()

    async def _inject(self, end: float) -> None:
        """One fault after the other, at random times."""
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._pause))
            if time.monotonic() > end - self.verdicts.most_restore_seconds:
                return
            fault = self._draw.choice(FAULTS)
            if fault == "damage":
                proxy = self._draw.choice(self.proxies)
                proxy.damage += self._draw.randint(1, 3)
                self.verdicts.add_fault("damage")
            elif fault == "cut":
                await self._in_a_transfer(self._draw.choice(self.proxies).cut)
                self.verdicts.add_fault("cut")
            else:
                await self._kill(fault)

    async def _kill(self, fault: str) -> None:
        victim, engine = self._draw.choice(self._processes), self._draw.random() < 0.5
        if fault != "kill":
            ready = asyncio.get_running_loop().create_future()
            await self._in_a_transfer(lambda: ready.done() or ready.set_result(None))
        others = [each for each in self._processes if each.role == victim.role and each is not victim]
        if victim.ready.is_set() and all(each.ready.is_set() for each in others):
            victim.kill(engine=engine)
            self.verdicts.add_fault(f"{fault}: {victim.role}")

    async def _in_a_transfer(self, action: Any) -> None:
        """Call `action` in the middle of the next message with blocks, or after a while if none comes."""
        called = asyncio.Event()

        def act() -> None:
            action()
            called.set()

        proxy = self._draw.choice(self.proxies)
        proxy.at_transfer = act
        try:
            await asyncio.wait_for(called.wait(), 2)
        except TimeoutError:
            proxy.at_transfer = None

    async def _count(self, end: float) -> None:
        """Note the counters of all servers again and again, and print progress."""
        shown = time.monotonic()
        while time.monotonic() < end:
            await self._note_counters()
            if time.monotonic() > shown + 30:
                shown = time.monotonic()
                print(f"{end - shown:.0f} s left: {self.summary()}", file=sys.stderr, flush=True)
            await asyncio.sleep(1)

    async def _note_counters(self) -> None:
        for process, port in self._servers():
            if process.ready.is_set():
                pid = process.pid
                try:
                    self._last[process.name, pid] = await self._figures(port, COUNTERS)
                except (OSError, EOFError):
                    continue
        self.totals = Counter()
        for figures in self._last.values():
            self.totals.update({name: int(value) for name, value in figures.items()})

    def _servers(self) -> list[tuple[SupervisedProcess, int]]:
        servers = [process for process in self._processes if process.role in ("prefill", "decode")]
        return list(zip(servers, self._server_ports, strict=True))

    async def _figures(self, port: int, names: Sequence[str]) -> dict[str, float]:
        _, body = await self._exchange(port, "GET", "/metrics")
        samples = (line.partition("{") for line in body.decode().splitlines() if not line.startswith("#"))
        found = {name.rpartition(":")[2]: float(value.rpartition(" ")[2]) for name, _, value in samples if value}
        return {name: found[name] for name in names}

    async def _audit(self) -> None:
        """Check that nothing is in use. Raises SoakError."""
        deadline = time.monotonic() + QUIET_SECONDS
        while in_use := await self._in_use():
            _check(time.monotonic() < deadline, f"in use after the last request: {in_use}")
            await asyncio.sleep(0.2)
        await self._note_counters()
        cache = next(process for process in self._processes if process.role == "cache")
        await cache.end()
        _check(cache.lines[-1].endswith("0 being read"), f"the cache ended with: {cache.lines[-1]}")
        await asyncio.gather(*(process.end() for process in self._processes if process is not cache))
        orphans = [pid for process in self._processes for pid in process.orphans()]
        _check(not orphans, f"engines without a server: {orphans}")

    async def _in_use(self) -> dict[str, Any]:
        """Gauges that are not 0, by process."""
        in_use: dict[str, Any] = {}
        for process, port in self._servers():
            for name, value in (await self._figures(port, GAUGES)).items():
                if value:
                    in_use[f"{process.name}: {name}"] = value
        for _ in range(8 * ROUTERS):  # the kernel divides connections among the routers
            _, body = await self._exchange(self._router_port, "GET", "/metrics")
            for line in body.decode().splitlines():
                if line.startswith("meshwright_router:requests{") and not line.endswith((" 0", " 0.0")):
                    in_use["router"] = line
        return in_use

    def summary(self) -> str:
        """Requests and faults so far, in words."""
        slowest = max((seconds for _, seconds in self.verdicts.restore_seconds), default=0.0)
        ends, faults = dict(self.verdicts.ends), len(self.verdicts.faults)
        return f"{ends}, {faults} faults, slowest answer after one {slowest:.2f} s, {dict(self.totals)}"


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise SoakError(problem)


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    contents = make_contents(options.seed)
    soak = DeploymentSoak(folder, contents, options.seed, options.pause, options.restore_seconds)
    start, problem = time.monotonic(), None
    try:
        await soak.run(60 * options.minutes)
    except* SoakError as group:
        problem = "; ".join(str(error) for error in group.exceptions)
    finally:
        await soak.end()
    restored: dict[str, list[float]] = {}
    for name, seconds in soak.verdicts.restore_seconds:
        restored.setdefault(name, []).append(seconds)
    return {
        "benchmark": "serve_deployment_soak",
        "seconds": round(time.monotonic() - start, 1),
        "minutes_asked": options.minutes,
        "restore_seconds_asked": options.restore_seconds,
        "seed": options.seed,
        "problem": problem,
        "requests": dict(soak.verdicts.ends),
        "faults": dict(Counter(name for name, _ in soak.verdicts.faults)),
        "damaged_messages": sum(proxy.damaged for proxy in soak.proxies),
        "slowest_answer_after_fault_seconds": {name: round(max(values), 2) for name, values in restored.items()},
        "process_back_seconds": _process_back(soak.outages),
        "counters": dict(soak.totals),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def _process_back(outages: Sequence[Outage]) -> dict[str, float]:
    """By role, the longest time from the end of a process to the first request that it takes again."""
    back: dict[str, float] = {}
    for outage in outages:
        back[outage.role] = round(max(back.get(outage.role, 0.0), outage.ended - outage.began), 1)
    return back


def main() -> int:
    """Print the result as one JSON object; 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--restore-seconds", type=float, default=RESTORE_SECONDS, help="longer on a machine at work")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model", options.seed)
        result = asyncio.run(_run(options, folder))
        if result["problem"]:
            print((folder / "log").read_text(errors="replace")[-4000:], file=sys.stderr)
    print(json.dumps(result))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return int(result["problem"] is not None)


if __name__ == "__main__":
    sys.exit(main())
