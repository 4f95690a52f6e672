"""Servers of several roles, a router and a cache under load, while processes are killed in the middle of transfers.

Each request is answered with the text of a single engine, or ends with an error after which the client may try again; nothing waits for
ever. The servers that are left hold no block once they have nothing to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.server.helpers import NAME, SIZES, call, running_server, write_folder

pytestmark = pytest.mark.slow
DEADLINE_SECONDS = 60
RESTORED_SECONDS = 5.0
CLIENTS = 6
NEW_TOKENS = 24
PROMPTS = [f"{number} " + "lorem ipsum dolor " * 7 for number in range(40)]
OPTIONS = [word for key, value in SIZES.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as end:
        return end.getsockname()[1]


@dataclass
class Deployment:
    """Processes by name, and how to start each again."""

    folder: Path
    sockets: Path
    ports: dict[str, int] = field(default_factory=dict)
    admin_ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a process, at its ports of before."""
        port = self.ports.setdefault(name, free_port())
        prefill = ["prefill-0", "prefill-1"]
        addresses = {each: f"unix:{self.sockets}/{each}" for each in prefill}
        store = f"unix:{self.sockets}/store"
        if name == "cache":
            arguments = ["cache", store, "--gib", "0.001"]
        elif name == "router":
            urls = [f"http://127.0.0.1:{self.ports[each]}" for each in ("decode-0", "decode-1", *prefill)]
            arguments = ["route", *urls, "--health-seconds", "0.3", "--port", str(port)]
        else:
            admin = self.admin_ports.setdefault(name, free_port())
            arguments = ["serve", str(self.folder), *OPTIONS, "--role", name.partition("-")[0]]
            arguments += ["--admin-port", str(admin), "--admin-key", "admin", "--transfer-seconds", "5"]
            arguments += ["--block-cache", store, "--port", str(port), "--no-log-requests"]
            arguments += ["--prefill-engines", ",".join(addresses.values())]
            arguments += ["--transfer-address", addresses[name]] if name in addresses else []
        command = [sys.executable, "-m", "meshwright", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def wait(self, name: str) -> None:
        """Wait until a process says its address."""
        output = self.processes[name].stdout
        assert output is not None and (" at http://127.0.0.1:" in (line := output.readline()) or " at unix:" in line)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def state(self, name: str) -> dict[str, Any]:
        """Return the state of a server from its admin port."""
        url = f"http://127.0.0.1:{self.admin_ports[name]}/state"
        headers = {"authorization": "Bearer admin"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return json.load(answer)

    def assert_nothing_is_held(self) -> None:
        """No server has a request, a prompt elsewhere or a block in use."""
        for name in self.admin_ports:
            deadline = time.monotonic() + DEADLINE_SECONDS
            state = self.state(name)
            while state["unfinished"] or state["waiting_prompts"] or state["cache_usage"]:
                assert time.monotonic() < deadline, (name, state)
                time.sleep(0.1)
                state = self.state(name)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("roles")
    made = Deployment(write_folder(folder / NAME), folder)
    names = ["cache", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    try:
        for name in names:
            made.start(name)
        for name in names:
            made.wait(name)
        made.start("router")
        made.wait("router")
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def expected(deployment: Deployment) -> dict[str, str]:
    """The texts of one engine."""
    with running_server(deployment.folder) as server:
        texts = {}
        for prompt in PROMPTS:
            answer = server.run(
                call(server.app, "POST", "/v1/completions", body(prompt), [(b"content-type", b"application/json")])
            )
            texts[prompt] = json.loads(answer.body)["choices"][0]["text"]
        return texts


def body(prompt: str, **options: Any) -> bytes:
    return json.dumps(
        {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **options}
    ).encode()


async def ask(port: int, prompt: str) -> str | None:
    """The text of a stream; None after an error that allows another attempt. Raises TimeoutError at the deadline."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            content = body(prompt, stream=True)
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            answer = await reader.read()
            writer.close()
        except ConnectionError:
            return None
    if not answer.endswith(b"0\r\n\r\n") or b'"server_lost"' in answer or b'"engine_failed"' in answer:
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503", b"HTTP/1.1 429")) or not answer, answer[:200]
        return None
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    if any("error" in event for event in events):
        return None
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router", "cache"])
def test_a_killed_process_costs_no_wrong_text_and_no_block(
    deployment: Deployment, expected: dict[str, str], victim: str
) -> None:
    port, texts, stop, restored = (
        deployment.ports["router"],
        list[tuple[str, str | None]](),
        asyncio.Event(),
        list[float](),
    )

    async def client(number: int) -> None:
        while not stop.is_set():
            # All prompts together are larger than the caches, so blocks have to be transferred.
            prompt = PROMPTS[(len(texts) + number) % len(PROMPTS)]
            text = await ask(port, prompt)
            texts.append((prompt, text))
            if text is None:
                await asyncio.sleep(0.05)

    async def load() -> None:
        clients = [asyncio.ensure_future(client(number)) for number in range(CLIENTS)]
        while len(texts) < 2 * CLIENTS:
            await asyncio.sleep(0.01)
        killed = time.monotonic()
        await asyncio.to_thread(deployment.kill, victim)
        if victim == "router":
            deployment.start(victim)
            await asyncio.to_thread(deployment.wait, victim)
        while await ask(port, PROMPTS[0]) is None:
            await asyncio.sleep(0.02)
        restored.append(time.monotonic() - killed)
        count = len(texts)
        while len(texts) < count + 2 * CLIENTS:
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*clients)

    asyncio.run(load())
    assert all(text in (None, expected[prompt]) for prompt, text in texts)
    if victim != "router":  # while there is none, every attempt fails
        assert sum(text is None for _, text in texts) <= 2 * CLIENTS
    if victim != "router":
        deployment.start(victim)
        deployment.wait(victim)
    deployment.assert_nothing_is_held()
    assert any(deployment.state(name)["received_blocks"] for name in ("decode-0", "decode-1"))
    assert restored[0] <= RESTORED_SECONDS
    print(
        f"{victim}: restored after {restored[0]:.2f} s, {sum(text is None for _, text in texts)} of {len(texts)} failed"
    )
