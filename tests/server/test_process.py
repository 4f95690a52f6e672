"""`meshwright serve` as a process: start, drain on SIGTERM, and an engine that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.cli.serve import serve
from meshwright.config.deployment_file import deployment_yaml
from meshwright.server import run
from meshwright.server.addresses import listening_socket
from meshwright.server.endpoints import Api
from meshwright.server.engine_client import EngineClient
from meshwright.server.engine_process import load_engine
from meshwright.server.engine_setup import EngineProcess, EngineSetup
from meshwright.server.metrics import ServerMetrics
from meshwright.spec.deployment import Deployment, InstanceSpec
from meshwright.spec.engine import ExpertRanks
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, BadInput
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.serve import MTP, ServeSpec
from tests.models.tiny import QWEN3_MOE
from tests.server.helpers import SIZES, write_folder

OPTIONS = [word for key, value in SIZES.items() for word in (f"--{key.replace('_', '-')}", str(value))]


REPORTING = (
    "from meshwright.server import run; run.FAILED_SECONDS = 300.0; from meshwright.cli.main import main; main()"
)
"""The command, whose server reports a failed engine until it is stopped."""


@contextmanager
def served(
    folder: Path, *options: str, start: tuple[str, str] = ("-m", "meshwright")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command's process and its URL."""
    command = [sys.executable, *start, "serve", str(folder), "--port", "0", *OPTIONS, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://127.0.0.1:" in line, line
            yield process, line.split()[-1]
        finally:
            process.kill()


def ask(url: str, **request: Any) -> Any:
    """The open answer to a request for a completion."""
    body = json.dumps({"prompt": "a secret prompt", "ignore_eos": True, **request}).encode()
    return urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"}), timeout=60
    )


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the engine's ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "engine_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def text_processes_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the server's text processes."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "text_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_sigterm_ends_a_text_process_with_an_endless_template(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "a key")
    template = tmp_path / "endless.jinja"
    template.write_text("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3)
    with served(folder, "--chat-template", str(template), "--drain-seconds", "0.2") as (process, url):
        (text_process,) = text_processes_of(process)
        assert "a key" not in Path(f"/proc/{text_process}/environ").read_text()
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer a key\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
            client.sendall(head.encode() + body)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(partial(client.recv, 1 << 16), b""))
        assert process.wait(60) == EXIT_DONE
    assert b" 503 " in answer.splitlines()[0] and b"stopping" in answer
    assert not Path(f"/proc/{text_process}").exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_lets_running_requests_end(folder: Path, ranks: int) -> None:
    with served(folder, "--tensor", str(ranks)) as (process, url):
        engines = engines_of(process)
        assert len(engines) == ranks
        with ask(url, max_tokens=150, stream=True) as stream:
            first = stream.readline()
            process.send_signal(signal.SIGTERM)
            lines = [first, *stream]
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert lines[-2] == b"data: [DONE]\n"
        assert process.wait(60) == EXIT_DONE
        assert not any(Path(f"/proc/{engine}").exists() for engine in engines)
        log = process.stderr.read()
    assert "killed" not in log
    assert "/v1/completions: 200 prompt=15 new=150" in log and "secret" not in log


def test_an_engine_that_dies_is_reported(folder: Path) -> None:
    with served(folder, start=("-c", REPORTING)) as (process, url):
        with ask(url, max_tokens=2) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
        os.kill(*engines_of(process), signal.SIGKILL)
        status = 200
        while status == 200:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
                    status = answer.status
            except urllib.error.HTTPError as error:
                status = error.code
                assert json.load(error) == {"status": "failed"}
        assert status == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == EXIT_COMMUNICATION
        assert "engine" in process.stderr.read()


def test_a_server_whose_engine_failed_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FAILED_SECONDS", 0.01)
    client, output = EngineClient(ServerMetrics("tiny")), list[str]()
    api = cast(Api, SimpleNamespace(client=client, name="tiny"))

    async def serve() -> None:
        with listening_socket("127.0.0.1", 0, "port") as end:
            server = run._Server(api, cast(EngineProcess, None), [end], Path(), Path(), output.append)
            until_stopped = asyncio.ensure_future(server._until_stopped())
            client._take({"ready": {}})
            while not output:
                await asyncio.sleep(0)
            assert not until_stopped.done()
            client.fail("it ended", EXIT_COMMUNICATION)
            await until_stopped

    asyncio.run(asyncio.wait_for(serve(), 60))


def test_a_connection_accepted_while_the_server_closes_is_closed_with_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing is asked")

    async def end_with_a_late_connection() -> bytes:
        server, loop = run.uvicorn_server(app), asyncio.get_running_loop()
        client, accepted = socket.socketpair()
        accepted.setblocking(False)
        client.setblocking(False)

        async def accept() -> None:
            protocol = server.config.http_protocol_class
            settings = {"config": server.config, "server_state": server.server_state, "app_state": {}}
            await loop.connect_accepted_socket(lambda: protocol(**settings), accepted)

        with client, listening_socket("127.0.0.1", 0, "port") as end:
            serving = asyncio.ensure_future(server.serve(sockets=[end]))
            while not server.started:
                await asyncio.sleep(0)
            server.lifespan.shutdown = accept  # the last that the server waits for
            server.should_exit = True
            await serving
            return await loop.sock_recv(client, 1)

    assert asyncio.run(asyncio.wait_for(end_with_a_late_connection(), 60)) == b""


def test_mistakes_in_the_settings(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 80\nseqences: 3\nmax_logprobs: 99\n")
    command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--config", str(file), "--queue", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    for part in (
        "serve.yaml:2:1: seqences:",
        "nearest: sequences",
        "serve.yaml:3:15: max_logprobs:",
        "command line: queue:",
    ):
        assert part in result.stderr, result.stderr


def test_settings_have_options_of_the_same_names() -> None:
    import dataclasses
    import inspect

    from meshwright.cli.serve import serve

    keys = [field.name for field in dataclasses.fields(ServeSpec)]
    assert list(inspect.signature(serve).parameters) == ["model", "config", "plan", *keys]


@pytest.mark.parametrize("options", [("--host", "0.0.0.0"), ("--admin-port", "0")])
def test_open_addresses_without_a_key_are_refused(folder: Path, options: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "meshwright", "serve", str(folder), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "_key" in result.stderr


@pytest.mark.slow
def test_tensor_ranks_give_the_texts_of_one_device(folder: Path) -> None:
    texts = []
    for options in ((), ("--tensor", "2")):
        with served(folder, *options) as (process, url):
            with ask(url, max_tokens=40, temperature=0) as answer:
                texts.append(json.load(answer)["choices"][0]["text"])
            if options:
                os.kill(engines_of(process)[-1], signal.SIGKILL)
                assert process.wait(60) == EXIT_COMMUNICATION
                assert "ranks" in process.stderr.read()
            else:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == EXIT_DONE
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)])
def test_roles_on_tensor_ranks_give_the_texts_of_one_device(
    folder: Path, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    request = {"prompt": "the quick brown fox jumps over the lazy dog " * 3, "max_tokens": 30, "temperature": 0}
    with served(folder) as (_, url), ask(url, **request) as answer:
        expected = json.load(answer)["choices"][0]["text"]
    prefill, decode = (("--tensor", str(count)) for count in ranks)
    address = f"unix:{tmp_path}/prefill"
    with (
        served(folder, *prefill, "--role", "prefill", "--transfer-address", address) as (_, sender),
        served(folder, *decode, "--role", "decode", "--prefill-engines", address) as (_, url),
    ):
        wait_for_metric(url, "kv_peers_usable", 1)
        with ask(url, **request) as answer:
            assert json.load(answer)["choices"][0]["text"] == expected
        blocks = metric(url, "kv_blocks_received_total")
        assert blocks == len(request["prompt"]) // SIZES["tokens_per_block"]
        wait_for_metric(sender, "kv_blocks_sent_total", blocks)
        for server in (sender, url):
            wait_for_metric(server, "kv_cache_usage_perc", 0)
            wait_for_metric(server, "kv_blocks_unacknowledged", 0)


def metric(url: str, name: str) -> float:
    """The value of a server's metric."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"meshwright:{name}{{"))


def wait_for_metric(url: str, name: str, value: float) -> None:
    deadline = time.monotonic() + 60
    while metric(url, name) != value:
        assert time.monotonic() < deadline, name
        time.sleep(0.05)


def test_settings_reach_the_engine(folder: Path) -> None:
    spec = ServeSpec(**SIZES, kv_cache="fp8", weights="fp8", speculate=3, draft_model=str(folder))
    setup = EngineSetup(
        folder=str(folder), tokenizer=None, options=spec.engine, speculate=spec.speculate, draft_model=spec.draft_model
    )
    engine = load_engine(from_plain(EngineSetup, json.loads(json.dumps(to_plain(setup)))))
    assert (engine.options.kv_cache, engine.options.weights) == ("fp8", "fp8")
    engine.submit([1, 2, 3], new_tokens=20)
    assert sum(len(update.tokens) for update in engine.run()) == 20
    proposed, accepted = engine.drafts
    assert proposed >= 15 and accepted > 0


def test_prediction_modules_are_asked_for(folder: Path) -> None:
    """The model has none."""
    spec = ServeSpec(**SIZES, draft_model=MTP)
    setup = EngineSetup(folder=str(folder), tokenizer=None, options=spec.engine, draft_model=spec.draft_model)
    with pytest.raises(BadInput, match="the model has 0; expected at most that many draft tokens, got 1"):
        load_engine(from_plain(EngineSetup, json.loads(json.dumps(to_plain(setup)))))


@pytest.mark.parametrize("given", [{"invariant": True}, {"speculate": 2}])
def test_ranks_exclude_what_is_for_one_device(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="for one device only; leave out tensor"):
        ServeSpec(tensor=2, **given)


def test_switches_of_a_deployment_reach_the_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups: list[EngineSetup] = []

    def start(setup: EngineSetup) -> None:
        setups.append(from_plain(EngineSetup, json.loads(json.dumps(to_plain(setup)))))
        raise BadInput("not started")

    monkeypatch.setattr(run, "EngineProcess", start)
    model = write_folder(tmp_path / "experts", QWEN3_MOE)
    (tmp_path / "shared.yaml").write_text(
        "instances: [{expert: 2}]\nengine: {expert_dispatch: int8, expert_micro_batches: 3}\n"
    )
    (tmp_path / "expanded.yaml").write_text("instances: [{}]\nengine: {absorb: false}\n")
    for served_model, plan in ((model, "shared.yaml"), (folder, "expanded.yaml")):
        with pytest.raises(BadInput, match="not started"):
            serve(served_model, plan=tmp_path / plan)
    assert setups[0].experts == ExpertRanks(count=2, dispatch="int8", micro_batches=3)
    with pytest.raises(BadInput, match="absorb: only latent attention"):  # the model has none
        load_engine(setups[1])


@pytest.mark.slow
def test_expert_ranks_serve_requests_of_their_own(tmp_path: Path) -> None:
    """The choices of a prompt are on one rank, other prompts on the other one."""
    folder, texts, plan = write_folder(tmp_path / "experts", QWEN3_MOE), [], tmp_path / "plan.yaml"
    deployment = Deployment(instances=(InstanceSpec(expert=2, token_budget=64),))
    plan.write_text(deployment_yaml(deployment), encoding="utf-8")
    rounded = tmp_path / "rounded.yaml"
    rounded.write_text("instances: [{expert: 2}]\nengine: {expert_dispatch: int8, expert_micro_batches: 2}\n")
    for options in ((), ("--plan", str(plan)), ("--plan", str(rounded))):
        with served(folder, *options) as (process, url):
            with ask(url, prompt=["def", "class", "import"], n=2, max_tokens=20, temperature=0.5, seed=1) as answer:
                texts.append([choice["text"] for choice in json.load(answer)["choices"]])
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == EXIT_DONE
    assert texts[0] == texts[1] and len(texts[2]) == len(texts[0])
