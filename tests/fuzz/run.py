"""Random requests against `meshwright serve` with a tiny model: `make test-fuzz`.

    python -m tests.fuzz.run                          # 20,000 bodies and 2,000 schemas, twice
    python -m tests.fuzz.run --bodies 500 --schemas 50
    python -m tests.fuzz.run --only body:1234         # one request of the run, and its answer

Every request gets a refusal in OpenAI's form, its first token or its answer within a second. What it costs is its own: beside the requests
at random one client asks for the same text again and again, and gets the same. Ten further requests have the same texts before, between
and after the two passes, and the second pass, which is equal to the first, adds 5% to the memory of the server's processes at most. A
request whose answer is wrong is sent again by itself, so that the faults of others are not counted as its own. Ends with code 1 if
something failed, and prints what has failed with the shortest body that the script found.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from tests.fuzz.bodies import CHATS, COMPLETIONS, FuzzRequest, body_request
from tests.fuzz.schemas import schema_request
from tests.fuzz.verdicts import FIRST_SECONDS, Answer, fault, send
from tests.server.helpers import NAME, write_folder
from tests.server.test_process import metric, served

CONNECTIONS = 4
ROUND = 220
"""Requests between two looks at the server."""
MOST_GROWTH = 0.05
SHOWN_CHARACTERS = 700
SHOWN_EACH = 2
"""Reproducers printed for faults of one kind."""
SHORTER_SECONDS = 5.0
"""Time to look for a shorter body with the same fault."""
BUSY_WITNESSES = 10
"""Times of the witness that stand for a second on a busy machine."""
SETTINGS = ("--no-log-requests", "--context", "384", "--cache-blocks", "1200", "--notation", "hermes")
WITNESS = FuzzRequest(0, COMPLETIONS, json.dumps({"prompt": "A witness", "max_tokens": 8, "temperature": 0}).encode())
REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0}),
    "seeded": (COMPLETIONS, {"prompt": "Once upon a time", "seed": 5}),
    "samples": (COMPLETIONS, {"prompt": "A list:", "n": 3, "seed": 11, "temperature": 1.5, "top_k": 50}),
    "ids": (COMPLETIONS, {"prompt": [72, 101, 108, 108, 111], "temperature": 0, "echo": True}),
    "logprobs": (COMPLETIONS, {"prompt": "Numbers", "temperature": 0, "logprobs": 3}),
    "scored": (COMPLETIONS, {"prompt": "Numbers", "temperature": 0, "logprobs": 2, "echo": True}),
    "listed": (CHATS, {"messages": [{"role": "user", "content": "Hello?"}], "temperature": 0, "prompt_logprobs": 2}),
    "stream": (COMPLETIONS, {"prompt": "A stream", "temperature": 0, "stream": True}),
    "penalties": (COMPLETIONS, {"prompt": "aaaa", "temperature": 0, "frequency_penalty": 1.5, "logit_bias": {"70": 3}}),
    "chat": (CHATS, {"messages": [{"role": "user", "content": "Hello?"}], "temperature": 0}),
    "chat stream": (CHATS, {"messages": [{"role": "user", "content": "Hello?"}], "seed": 3, "stream": True}),
    "schema": (
        COMPLETIONS,
        {
            "prompt": "JSON:",
            "temperature": 0,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": ["one", "two", 3]}},
            },
        },
    ),
}


class Server:
    """The command's process, which is started again when it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start a new process instead of the one that runs."""
        self._stack.close()
        self.process, self.url = self._stack.enter_context(served(self._folder, *SETTINGS))
        self.port = int(self.url.rpartition(":")[2])
        self.starts += 1
        self.last_lines: collections.deque[str] = collections.deque(maxlen=8)
        threading.Thread(target=self.last_lines.extend, args=(self.process.stderr,), daemon=True).start()

    def healthy(self) -> bool:
        """Whether the server takes requests."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False

    def resident_bytes(self) -> dict[str, int]:
        """Memory of each of the server's processes."""
        return {f"{name} {pid}": size for pid, name, size in _processes(self.process.pid)}

    def cpu_seconds(self) -> float:
        """Processor time of the server's processes, and of those among them that have ended."""
        ticks = 0
        for pid, *_ in _processes(self.process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        self._stack.close()


def _processes(pid: int) -> Iterator[tuple[int, str, int]]:
    """Process ids, names and resident bytes of a process and all below it."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    yield pid, status["Name"].strip(), 1024 * int(status.get("VmRSS", "0 kB").split()[0])
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _processes(int(child))


@dataclasses.dataclass
class Failure:
    """A request whose answer is wrong."""

    request: FuzzRequest
    fault: str
    alone: bool
    """Whether it also fails by itself."""

    @property
    def name(self) -> str:
        """The request's name for `--only`."""
        kind = "schema" if b'"JSON' in self.request.body[:60] else "body"
        return "witness" if self.request is WITNESS else f"{kind}:{self.request.number}"


class Fuzz:
    """Passes of requests against one server."""

    def __init__(self, server: Server, say: Callable[[str], None] = print) -> None:
        self._server, self._say = server, say
        self.failures: list[Failure] = []
        self.statuses: collections.Counter[int] = collections.Counter()
        self.slow_beside_others = 0
        self._witness: Any = None

    def run_pass(self, requests: Iterable[FuzzRequest], total: int, name: str) -> None:
        """Send all requests, a few at a time."""
        left, done, start = iter(requests), 0, time.monotonic()
        while chunk := list(islice(left, ROUND)):
            suspects = asyncio.run(self._round(chunk))
            done += len(chunk)
            self._confirm(suspects)
            rate = done / (time.monotonic() - start)
            self._say(f"{name}: {done}/{total} requests, {rate:.0f}/s, failures: {len(self.failures)}")

    def references(self) -> dict[str, Any]:
        """The texts of the reference requests, one after the other."""
        return {name: texts_of(self._ask(_reference(*request))) for name, request in REFERENCES.items()}

    def _ask(self, request: FuzzRequest) -> Answer:
        if not self._server.healthy():
            self._server.start()
        return asyncio.run(send(self._server.port, request))

    async def _round(self, chunk: list[FuzzRequest]) -> list[tuple[FuzzRequest, str]]:
        """The requests of a chunk whose answers are wrong; stops early when the server has failed."""
        waiting, suspects, port = chunk[::-1], list[tuple[FuzzRequest, str]](), self._server.port

        async def client() -> None:
            while waiting:
                request = waiting.pop()
                answer = await send(port, request)
                self.statuses[answer.status] += 1
                if (found := fault(request, answer)) is not None:
                    suspects.append((request, found))

        async def witness() -> None:
            while True:
                text = texts_of(await send(port, WITNESS))
                if self._witness is None and isinstance(text, list):
                    self._witness = text
                if text != self._witness:
                    suspects.append((WITNESS, f"a witness got {str(text)[:200]}, expected {self._witness}"))
                await asyncio.sleep(0.02)

        watching = asyncio.ensure_future(witness())
        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
        watching.cancel()
        return suspects

    def _confirm(self, suspects: list[tuple[FuzzRequest, str]]) -> None:
        """Send each request whose answer was wrong again by itself."""
        confirmed, others = [], []
        for request, found in suspects:
            again = None if request is WITNESS else self._fault_alone(request)
            if again is not None:
                confirmed.append(Failure(request, again, alone=True))
            elif ", slow: " in found:
                self.slow_beside_others += 1
            else:
                others.append(Failure(request, found, alone=False))
        # What goes wrong beside a request that is at fault itself is that request's fault.
        for failure in confirmed or others:
            self.failures.append(failure)
            self._say(f"{failure.name}: {failure.fault[:160]}\n")

    def _fault_alone(self, request: FuzzRequest) -> str | None:
        """The fault of a request that is sent by itself.

        A slow or lost one has a second chance: if the machine is so busy that the witness is slow too, processor time counts.
        """
        answer = self._ask(request)
        found = fault(request, answer)
        if found is not None and (answer.lost or ", slow: " in found):
            busy, start = BUSY_WITNESSES * self._ask(WITNESS).first_seconds, self._server.cpu_seconds()
            answer = self._ask(request)
            worked = self._server.cpu_seconds() - start > FIRST_SECONDS / 2
            found = fault(request, answer, seconds=FIRST_SECONDS if worked else max(FIRST_SECONDS, busy))
        if found is not None:
            self._ask(WITNESS)  # failed steps that follow each other would end the server
        return found

    def shorter(self, failure: Failure) -> FuzzRequest:
        """A request with fewer keys that has the same fault."""
        try:
            body = json.loads(failure.request.body)
        except (ValueError, RecursionError):
            return failure.request
        best, end = failure.request, time.monotonic() + SHORTER_SECONDS
        if not isinstance(body, dict) or not failure.alone:
            return best
        smaller = _smaller(body)
        while time.monotonic() < end and (tried := next(smaller, None)) is not None:
            request = dataclasses.replace(best, body=json.dumps(tried).encode())
            found = self._fault_alone(request)
            if found is not None and kind_of(found) == kind_of(failure.fault):
                best, smaller = request, _smaller(tried)
        return best


def _smaller(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies of a body without one of its keys, or without half of a list, an object or a text within it."""
    for key in body:
        if key not in ("max_tokens", "prompt", "messages"):
            yield {name: value for name, value in body.items() if name != key}
    halves = [halved for _, halved in zip(range(200), _halved(body), strict=False)]
    yield from sorted(halves, key=lambda value: len(json.dumps(value)))


def _halved(value: Any) -> Iterator[Any]:
    items = list(value.items()) if isinstance(value, dict) else value
    if isinstance(items, list | str) and len(items) > 1:
        for half in (items[: len(items) // 2], items[len(items) // 2 :]):
            yield dict(half) if isinstance(value, dict) else half
    for key, inner in items if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for halved in _halved(inner):
            copied = value.copy()
            copied[key] = halved
            yield copied


def shown(body: bytes) -> str:
    """A body in a line: repetitions once, with their number, and the beginning of the rest."""
    text = body[:20_000].decode("utf-8", "replace")
    text = re.sub(
        r"(.{1,12}?)\1{15,}", lambda found: f"⟨{found[1]} × {len(found[0]) // len(found[1])}⟩", text, flags=re.DOTALL
    )
    more = f" … ({len(body)} bytes)" if len(text) > SHOWN_CHARACTERS or len(body) > 20_000 else ""
    return text[:SHOWN_CHARACTERS] + more


def _reference(path: str, body: dict[str, Any]) -> FuzzRequest:
    return FuzzRequest(0, path, json.dumps({"max_tokens": 24, **body}).encode())


def texts_of(answer: Answer) -> Any:
    """The texts of an answer and why they end, without what changes at each call; the answer itself if it is none."""
    if answer.status != 200 or answer.lost:
        return f"status {answer.status} {answer.lost} {answer.body[:200]!r}"
    texts: dict[int, str] = collections.defaultdict(str)
    reasons: dict[int, str | None] = {}
    tokens: list[Any] = []
    events = [answer.body]
    if answer.body.startswith(b"data: "):
        events = [event[6:] for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
    for event in events:
        value = json.loads(event)
        if "error" in value:
            return str(value)
        for choice in value["choices"]:
            message = choice.get("message") or choice.get("delta") or choice
            texts[choice["index"]] += message.get("content") or message.get("text") or ""
            reasons[choice["index"]] = choice["finish_reason"]
            tokens.append((choice.get("logprobs") or {}).get("tokens"))
    return [dict(texts), reasons, [found for found in tokens if found]]


def kind_of(text: str) -> str:
    """A fault without its numbers and values."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9.]+", "…", text)[:110]


def requests_of(seed: int, bodies: int, schemas: int) -> Iterator[FuzzRequest]:
    """The requests of a pass, schemas spread among the bodies."""
    made, step = 0, max(1, bodies // max(1, schemas))
    for number in range(bodies):
        yield body_request(seed, number)
        if number % step == step - 1 and made < schemas:
            yield schema_request(seed, made)
            made += 1
    for number in range(made, schemas):
        yield schema_request(seed, number)


@contextmanager
def tiny_server() -> Iterator[Server]:
    """A server of a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(write_folder(Path(folder) / NAME))
        try:
            yield server
        finally:
            server.close()


def print_failures(fuzz: Fuzz) -> None:
    """Print faults by kind, each with its shortest bodies."""
    kinds: dict[str, list[Failure]] = collections.defaultdict(list)
    for failure in fuzz.failures:
        kinds[kind_of(failure.fault)].append(failure)
    for failures in sorted(kinds.values(), key=len, reverse=True):
        print(f"\n{len(failures)} × {failures[0].fault}{'' if failures[0].alone else ' (beside others only)'}")
        for failure in sorted(failures, key=lambda failure: len(failure.request.body))[:SHOWN_EACH]:
            request = fuzz.shorter(failure)
            print(f"  {failure.name} {request.path} {shown(request.body)}")


def print_one(name: str, seed: int) -> int:
    """Print a request of the run and its answer; the exit code."""
    kind, _, number = name.partition(":")
    request = (schema_request if kind == "schema" else body_request)(seed, int(number))
    with tiny_server() as server:
        answer = asyncio.run(send(server.port, request))
        found = fault(request, answer)
        print(request.path, request.body[:4_000].decode("utf-8", "replace"))
        print(f"status {answer.status} after {answer.first_seconds:.3f} s: {answer.body[:2_000]!r} {answer.lost}")
        print(found or "as it should be")
        print(*server.last_lines, sep="")
    return int(found is not None)


def main() -> int:
    """Run the passes; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--schemas", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", metavar="KIND:NUMBER", help="body:N or schema:N: send one request and print its answer"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other would take the server's cores
    if options.only:
        return print_one(options.only, options.seed)
    start, wrong, total = time.monotonic(), list[str](), options.bodies + options.schemas
    with tiny_server() as server:
        fuzz = Fuzz(server, lambda line: print(f"\r{line}", end="", flush=True, file=sys.stderr))
        before, memory = fuzz.references(), list[dict[str, int]]()
        for name in ("first pass", "second pass"):
            fuzz.run_pass(requests_of(options.seed, options.bodies, options.schemas), total, name)
            print(file=sys.stderr)
            after = fuzz.references()
            wrong += [
                f"{key}: {after[key]} after the {name}, before {before[key]}"
                for key in before
                if after[key] != before[key]
            ]
            memory.append(server.resident_bytes())
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            if (value := metric(server.url, gauge)) != 0:
                wrong.append(f"{gauge} is {value} at the end, expected 0")
        first, second = (sum(sizes.values()) for sizes in memory)
        if server.starts > 1:
            wrong.append(f"the server had to be started {server.starts} times; memory cannot be compared")
        elif second > first * (1 + MOST_GROWTH):
            wrong.append(
                f"memory grew by {second / first - 1:.1%} in the second pass, expected at most {MOST_GROWTH:.0%}: {memory}"
            )
        print_failures(fuzz)
    print(*wrong, sep="\n")
    figures = {
        "seed": options.seed,
        "bodies": options.bodies,
        "schemas": options.schemas,
        "statuses": dict(sorted(fuzz.statuses.items())),
        "failures": len(fuzz.failures),
        "slow_beside_others": fuzz.slow_beside_others,
        "memory_ratio": round(second / first, 4),
        "memory_bytes": second,
        "starts": server.starts,
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(figures))
    return int(bool(fuzz.failures or wrong))


if __name__ == "__main__":
    raise SystemExit(main())
