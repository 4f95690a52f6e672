"""Floods of each listener of running commands that may open 256 files: work goes on, and others are answered."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from meshwright.connections.proof import Challenge
from meshwright.observe.metrics import read_metrics
from tests.attack.commands import HARD_LIMIT, MARKS, Command, ask, flood, free_port, listening_ports, running
from tests.server.helpers import SIZES, write_folder
from tests.training.tiny import make_tiny

pytestmark = MARKS
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\n\r\n"
SENT = [b"", b"GET / HTTP/1.1\r\nx: ", b"\x16\x03\x01\x02"]
OPTIONS = [word for key, value in SIZES.items() for word in (f"--{key.replace('_', '-')}", value)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


def steps(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


def test_the_metrics_port_of_a_training_run(tiny: Path, tmp_path: Path) -> None:
    """The run trains on, its figures are served, and its losses are those of a run in peace."""
    words = ["train", tiny, "train.steps=150", "cluster.gpus_per_node=1", "checkpoint.every=50", "--runs"]
    with running(*words, tmp_path / "peace", output=tmp_path / "peace.txt") as calm:
        assert calm.wait() == 0, calm.output
    options = [*words, tmp_path / "flood", "observe.prometheus=:0"]
    with running(*options, output=tmp_path / "flood.txt", files=HARD_LIMIT) as job:
        port = job.port_after("metrics at ")
        with flood(port), flood(port, SENT[1]):
            assert b"meshwright_step" in ask(port, METRICS)
            assert job.wait() == 0, job.output
    assert steps(tmp_path / "flood" / "tiny") == steps(tmp_path / "peace" / "tiny")


def test_the_coordinator(tiny: Path, tmp_path: Path) -> None:
    """Agents without a place train on, and get one: strangers that wait make room."""
    token, port, runs = tmp_path / "token", free_port(), tmp_path / "runs"
    token.write_text("an-old-token-of-this-test\n")
    token.chmod(0o600)
    environment = {"MESHWRIGHT_COORDINATOR": f"127.0.0.1:{port}", "MESHWRIGHT_TOKEN_FILE": str(token)}
    words = ["train", tiny, "cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=60", "checkpoint.every=20"]
    agents = [
        Command(
            *words, "--runs", runs, "--agent", output=tmp_path / f"{n}.txt", environment=environment, files=HARD_LIMIT
        )
        for n in range(2)
    ]
    try:
        time.sleep(1)
        with flood(port), flood(port, SENT[1]), flood(port, SENT[2], 100):
            codes = [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.end()
    output = "\n".join(agent.output for agent in agents)
    assert codes == [0, 0], output
    assert "Traceback" not in output and "restart" not in output, output
    assert [step for step, _ in steps(runs / "tiny")] == list(range(1, 61))


def test_a_server_and_its_router(folder: Path, tmp_path: Path) -> None:
    """Health and texts are answered; a head of many megabytes is cut off at once."""
    words = ["serve", folder, "--port", "0", *OPTIONS]
    with running(*words, output=tmp_path / "serve.txt", files=HARD_LIMIT) as server:
        port = server.port_after("serving ")
        url = f"http://127.0.0.1:{port}"
        with running("route", url, "--port", "0", output=tmp_path / "route.txt", files=HARD_LIMIT) as router:
            ports = [port, router.port_after("routing to ")]
            for sent in SENT:
                with flood(ports[0], sent), flood(ports[1], sent):
                    time.sleep(1)
                    for each in ports * 3:
                        assert ask(each, HEALTH).startswith(b"HTTP/1.1 200 "), server.output + router.output
                        assert ask(each, completion(), b'"usage"').startswith(b"HTTP/1.1 200 ")
                        assert large_head(each) < 30 << 20
                assert ask(ports[1], HEALTH, seconds=60).startswith(b"HTTP/1.1 200 ")
            assert "Traceback" not in server.output + router.output


def test_the_ports_beside_the_api(folder: Path, tmp_path: Path) -> None:
    """Floods of a server's admin port and of the port for other engines: the API answers, and so do both ports."""
    admin, transfer, key = free_port(), free_port(), "a transfer key of a test"
    words = ["serve", folder, "--port", "0", "--admin-port", admin, "--transfer-address", f"127.0.0.1:{transfer}"]
    environment = {"MESHWRIGHT_TRANSFER_KEY": key, "MESHWRIGHT_ADMIN_KEY": "an admin key"}
    output = tmp_path / "serve.txt"
    with running(*words, *OPTIONS, output=output, environment=environment, files=HARD_LIMIT) as server:
        port = server.port_after("serving ")
        for sent in SENT:
            with flood(admin, sent), flood(transfer, sent):
                time.sleep(1)
                assert ask(port, completion(), b'"usage"').startswith(b"HTTP/1.1 200 "), server.output
                assert ask(admin, HEALTH).startswith(b"HTTP/1.1 "), server.output
                prove(transfer, key)
        assert large_head(admin) < 30 << 20
        assert server.process.poll() is None and "Traceback" not in server.output


def prove(port: int, key: str) -> None:
    """Prove a key to an engine or a cache, as another engine does, and check its own proof."""
    challenge = Challenge(key)
    message = json.dumps({"nonce": challenge.nonce}).encode()
    answer = ask(port, len(message).to_bytes(4, "big") + bytes(4) + message)
    challenge.session(**json.loads(answer[8:]))


def test_the_snapshot_servers_of_two_hosts(tiny: Path, tmp_path: Path) -> None:
    """Snapshots go to the other host meanwhile, and the run ends as in peace."""
    token, runs = tmp_path / "token", tmp_path / "runs"
    token.touch(mode=0o600)
    token.write_text("a-token-of-this-test\n")
    environment = {"MESHWRIGHT_COORDINATOR": f"127.0.0.1:{free_port()}", "MESHWRIGHT_TOKEN_FILE": str(token)}
    words = ["train", tiny, "cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=200", "checkpoint.every=20"]
    words += ["checkpoint.partner=host", "--runs", runs, "--agent"]
    agents = [
        Command(*words, output=tmp_path / f"{n}.txt", environment=environment, files=HARD_LIMIT) for n in range(2)
    ]
    try:
        ports = [wait_for_port(agent, "meshwright.checkpoint.memory.server") for agent in agents]
        with flood(ports[0]), flood(ports[1], SENT[1]), flood(ports[0], SENT[2], 100):
            codes = [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.end()
    output = "\n".join(agent.output for agent in agents)
    assert codes == [0, 0] and "Traceback" not in output and "restart" not in output, output
    assert [step for step, _ in steps(runs / "tiny")] == list(range(1, 201))


def wait_for_port(command: Command, module: str) -> int:
    """The port at which a process of a command that runs `module` listens."""
    ports: list[int] = []
    command.wait_for(lambda: ports.extend(listening_ports(command.process.pid, module)) or ports)
    return ports[0]


def completion() -> bytes:
    body = json.dumps({"prompt": "def", "max_tokens": 4, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def large_head(port: int) -> int:
    """Bytes of an endless head that the listener takes before it closes the connection."""
    sent = 0
    with socket.create_connection(("127.0.0.1", port), timeout=5) as end:
        try:
            end.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
            while sent < 200 << 20:
                sent += end.send(b"a" * (1 << 16))
        except ConnectionError:
            pass
    return sent


def test_the_cache(tmp_path: Path) -> None:
    port = free_port()
    environment = {"MESHWRIGHT_TRANSFER_KEY": "a transfer key"}
    address, output = f"127.0.0.1:{port}", tmp_path / "cache.txt"
    with running("cache", address, output=output, environment=environment, files=HARD_LIMIT) as cache:
        cache.wait_for(lambda: "keeping" in cache.output)
        with flood(port), flood(port, b"\0\0\xff\xff\0\0\0\0"):
            time.sleep(1)
            prove(port, "a transfer key")
        assert cache.process.poll() is None and "Traceback" not in cache.output
