"""Marked secrets in every place that takes one: none is in arguments, in children that need none, in files or output."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.attack.commands import LONGEST_SECONDS, MARKS, Command, ask, descendants, free_port, running
from tests.attack.test_floods import HEALTH, OPTIONS, completion
from tests.server.helpers import write_folder
from tests.training.tiny import make_tiny

pytestmark = MARKS
MARK = "marked-secret-"
API, ADMIN, TRANSFER, TOKEN, CLOUD, WANDB = (
    MARK + name for name in ("api", "admin", "transfer", "token", "cloud", "wandb")
)
KEYS = {"MESHWRIGHT_API_KEY": API, "MESHWRIGHT_ADMIN_KEY": ADMIN, "MESHWRIGHT_TRANSFER_KEY": TRANSFER}
SERVICES = {"AWS_SECRET_ACCESS_KEY": CLOUD, "WANDB_API_KEY": WANDB}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


def in_processes(pid: int, name: str) -> dict[str, str]:
    """The file `name` of /proc of a process and its descendants that has a marked secret, by its arguments.

    A fork of the process that has not executed its program yet is the process itself.
    """
    found = {}
    own = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{each}/cmdline").read_text(errors="replace").replace("\0", " ")
            if (arguments != own or each == pid) and MARK in (
                text := Path(f"/proc/{each}/{name}").read_text(errors="replace")
            ):
                found[f"{each} {arguments[:200]}"] = text
    return found


def in_files(folder: Path, besides: Sequence[Path] = ()) -> list[Path]:
    """Files with a marked secret, but those that the test has written."""
    files = [path for path in folder.rglob("*") if path.is_file() and path not in besides]
    return [path for path in files if MARK.encode() in path.read_bytes()]


def serve_arguments(place: str, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Options and environment by which a server gets its keys."""
    if place == "options":
        return ["--api-key", API, f"--admin-key={ADMIN}", "--transfer-key", TRANSFER], {}
    if place == "environment":
        return [], KEYS
    file = tmp_path / "serve.yaml"
    file.touch(mode=0o600)
    file.write_text(f"api_key: {API}\nadmin_key: {ADMIN}\ntransfer_key: {TRANSFER}\n")
    return ["--config", str(file)], {}


@pytest.mark.parametrize("place", ["options", "environment", "file"])
def test_servers(folder: Path, tmp_path: Path, place: str) -> None:
    """A server that computes prompts for others, a router in front of it, and a cache."""
    words, environment = serve_arguments(place, tmp_path)
    transfer, cache_port = free_port(), free_port()
    words += ["--admin-port", "0", "--transfer-address", f"127.0.0.1:{transfer}", "--host", "127.0.0.2"]
    words += ["--block-cache", f"127.0.0.1:{cache_port}", *map(str, OPTIONS)]
    output, environment = tmp_path / "output.txt", {**environment, **SERVICES}
    key = {"options": ["--transfer-key", TRANSFER]}.get(place, [])
    cache_environment = environment if key else {**environment, "MESHWRIGHT_TRANSFER_KEY": TRANSFER}
    route_key = ["--api-key", API] if place == "options" else []
    route_environment = environment if route_key else {**environment, "MESHWRIGHT_API_KEY": API}
    with (
        running("cache", f"127.0.0.1:{cache_port}", *key, output=output, environment=cache_environment) as cache,
        running("serve", folder, "--port", "0", *words, output=output, environment=environment) as server,
    ):
        port = server.port_after("serving ")
        url = f"http://127.0.0.2:{port}"
        with running("route", url, "--port", "0", *route_key, output=output, environment=route_environment) as router:
            front = router.port_after("routing to ")
            authorized = completion().replace(b"\r\n", f"\r\nauthorization: Bearer {API}\r\n".encode(), 1)
            assert ask(front, HEALTH).startswith(b"HTTP/1.1 200 ")
            assert ask(front, authorized, b'"usage"').startswith(b"HTTP/1.1 200 ")
            assert ask(front, completion()).startswith(b"HTTP/1.1 401 ")
            for command in (cache, server, router):
                assert not in_processes(command.process.pid, "cmdline")
                own = f"{command.process.pid} "
                assert not [name for name in in_processes(command.process.pid, "environ") if not name.startswith(own)]
    assert MARK not in output.read_text()
    assert not in_files(tmp_path, [tmp_path / "serve.yaml"])


def test_a_run_on_two_hosts(tmp_path: Path) -> None:
    """Agents, coordinator, snapshot servers, ranks and writers: only the token's file has the token."""
    tiny, runs, token = make_tiny(tmp_path / "tiny"), tmp_path / "runs", tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    environment = {
        "MESHWRIGHT_COORDINATOR": f"127.0.0.1:{free_port()}",
        "MESHWRIGHT_TOKEN_FILE": str(token),
        **KEYS,
        **SERVICES,
    }
    words = ["train", tiny, "cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=200", "checkpoint.every=20"]
    words += ["checkpoint.partner=host", "--runs", runs, "--agent"]
    agents = [Command(*words, output=tmp_path / f"{n}.txt", environment=environment) for n in range(2)]
    needed = ("meshwright.training.rank", "meshwright coordinate")
    kinds: set[str] = set()
    try:
        deadline = time.monotonic() + LONGEST_SECONDS
        while any(agent.process.poll() is None for agent in agents):
            assert time.monotonic() < deadline
            for agent in agents:
                if agent.process.poll() is not None:
                    continue
                assert not in_processes(agent.process.pid, "cmdline")
                for name, text in in_processes(agent.process.pid, "environ").items():
                    if not name.startswith(f"{agent.process.pid} "):
                        assert any(each in name for each in needed), name
                        assert not any(key in text for key in (API, ADMIN, TRANSFER, TOKEN)), name
                for pid in descendants(agent.process.pid):
                    with contextlib.suppress(OSError):
                        kinds |= set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
            time.sleep(0.1)
        codes = [agent.process.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.end()
    output = "\n".join(agent.output for agent in agents)
    assert codes == [0, 0], output
    assert {
        "meshwright.checkpoint.memory.server",
        "meshwright.training.rank",
        "meshwright.checkpoint.write.writer",
    } <= kinds
    assert MARK not in output
    assert not in_files(tmp_path, [token])


@pytest.mark.parametrize(
    "scheme", ["s3://key:{}@bucket/a", "simplecache::s3://key:{}@bucket/a", "s3://bucket/a?key={}"]
)
def test_a_mirror_with_credentials(tmp_path: Path, scheme: str) -> None:
    tiny, output = make_tiny(tmp_path / "tiny"), tmp_path / "output.txt"
    file = tmp_path / "run.yaml"
    file.write_text(tiny.read_text().replace("checkpoint: {", f"checkpoint: {{mirror: '{scheme.format(CLOUD)}', "))
    with running("train", file, "--runs", tmp_path / "runs", output=output) as command:
        assert command.wait() == 2, command.output
    assert MARK not in command.output and "credentials" in command.output
    assert not in_files(tmp_path, [file])


def test_a_wrong_type_of_a_key(folder: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "serve.yaml", tmp_path / "output.txt"
    file.write_text(json.dumps({"api_key": {"value": API}, "admin_key": [ADMIN], "transfer_key": 123456789}))
    with running("serve", folder, "--config", file, output=output) as command:
        assert command.wait() == 2, command.output
    assert MARK not in command.output and "123456789" not in command.output and "api_key" in command.output
