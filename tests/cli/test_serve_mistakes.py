"""Mistakes between keys of `serve`, `route`, `plan` and `bench-serve`, each at the line of the key that it is about."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from meshwright.config.serve_file import load_settings
from meshwright.server.deployment_servers import deployment_servers
from meshwright.server.engine_client import EngineClient
from meshwright.server.engine_process import load_engine
from meshwright.server.engine_setup import EngineSetup
from meshwright.server.metrics import ServerMetrics
from meshwright.server.run import tell_defaults, tell_loading
from meshwright.spec.deployment import Deployment, InstanceSpec
from meshwright.spec.errors import BadConfig, BadInput, CommunicationFailure, OutOfResources
from meshwright.spec.serve import ServeSpec
from tests.cli.command import Answer, meshwright
from tests.server.helpers import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("mistakes") / "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("API", "ADMIN", "TRANSFER"):
        monkeypatch.delenv(f"MESHWRIGHT_{name}_KEY", raising=False)


def check(answer: Answer, expected: str, code: int = 2) -> None:
    """The command has reported this mistake alone."""
    assert answer.code == code and not answer.out
    assert answer.err.splitlines()[0] == "meshwright: 1 mistake in the configuration:"
    assert answer.err.splitlines()[1].startswith(expected) and len(answer.err.splitlines()) == 2, answer.err


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("invariant: true\ntensor: 2", "2:9: tensor: invariant: for one device only; leave out tensor"),
        ("tensor: 3", "1:9: tensor: expected a divisor of model.heads = 4"),
        ("queue: 9\nrole: prefill", "2:7: role: prefill: needs transfer_address"),
        ("queue: 9\nrole: decode", "2:7: role: decode: needs prefill_engines"),
        (
            "block_cache: unix:x\nprefix_cache: false",
            "2:15: prefix_cache: roles: for an engine with a prefix cache and no draft_model",
        ),
        ("block_cache: unix:x\ndraft_model: other", "2:14: draft_model: roles: for an engine with a prefix cache"),
        ("queue: 9\ndraft_model: nowhere", "2:14: draft_model: nowhere: no such folder"),
        ("queue: 9\nhost: 0.0.0.0", "2:7: host: 0.0.0.0 can be reached from other machines; set api_key"),
        ("queue: 9\nadmin_port: 0", "2:13: admin_port: needs admin_key"),
        ("role: prefill\ntransfer_address: 1.2.3.4:80", "2:19: transfer_address: 1.2.3.4:80 needs transfer_key"),
        ("role: decode\nprefill_engines: 'x'", "2:18: prefill_engines: 'x': expected HOST:PORT"),
        ("queue: 9\nfollow: true", "2:9: follow: "),
    ],
)
def test_settings_of_a_server(folder: Path, lines: str, expected: str) -> None:
    Path("serve.yaml").write_text(f"{lines}\n")
    check(meshwright("serve", folder, "--config", "serve.yaml"), f"serve.yaml:{expected}")


def positions(answer: Answer) -> list[str]:
    """File, line, column and key of each mistake that the command has reported."""
    assert answer.code == 2 and not answer.out
    head, *lines = answer.err.splitlines()
    assert head == f"meshwright: {len(lines)} mistakes in the configuration:", answer.err
    return [line.partition(": ")[0] + " " + line.split(": ")[1] for line in lines]


def test_mistakes_of_a_server_that_do_not_depend_on_each_other(folder: Path) -> None:
    """Between settings, with the model, the environment and a folder."""
    lines = ["invariant: true", "tensor: 3", "admin_port: 0", "host: 0.0.0.0", "role: decode", "draft_model: nowhere"]
    Path("serve.yaml").write_text("\n".join([*lines, "follow: true", "block_cache: here"]))
    answer = meshwright("serve", folder, "--config", "serve.yaml")
    assert positions(answer) == [
        "serve.yaml:2:9 tensor",
        "serve.yaml:3:13 admin_port",
        "serve.yaml:4:7 host",
        "serve.yaml:5:7 role",
        "serve.yaml:6:14 draft_model",
        "serve.yaml:7:9 follow",
        "serve.yaml:8:14 block_cache",
    ]


def test_mistakes_of_a_router_that_do_not_depend_on_each_other() -> None:
    Path("route.yaml").write_text("instances:\n- ftp://a\n- http://b:1\n- c\nhost: 0.0.0.0\n")
    answer = meshwright("route", "--config", "route.yaml")
    assert positions(answer) == ["route.yaml:2:3 instances.0", "route.yaml:4:3 instances.2", "route.yaml:5:7 host"]
    answer = meshwright("route", "--host", "0.0.0.0")
    assert positions(answer) == ["command line instances", "command line host"]


def test_an_option_replaces_a_key_and_is_named_as_such(folder: Path) -> None:
    Path("serve.yaml").write_text("tensor: 1\n")
    answer = meshwright("serve", folder, "--config", "serve.yaml", "--tensor", "3")
    check(answer, "command line: tensor: expected a divisor of model.heads = 4")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("instances:\n- {tensor: 3}", "2:12: tensor: expected a divisor of model.heads = 4"),
        ("instances:\n- {expert: 2}", "2:12: expert: expected 1, as the model has no experts"),
        ("instances:\n- {tensor: 2, expert: 2}", "2:23: instances.0.expert: expected 1 beside tensor 2"),
        ("instances:\n- {tensor: 2}\n- {}", "2:1: instances: expected equal instances of role both"),
        ("instances:\n- {role: prefill}\n- {role: decode}", "2:1: instances: expected --role of an instance"),
    ],
)
def test_settings_of_a_plan(folder: Path, lines: str, expected: str) -> None:
    Path("d.yaml").write_text(f"{lines}\n")
    check(meshwright("serve", folder, "--plan", "d.yaml"), f"d.yaml:{expected}")


def test_a_planned_setting_and_one_of_the_file_exclude_each_other(folder: Path) -> None:
    Path("d.yaml").write_text("instances:\n- {tensor: 2}\n")
    Path("serve.yaml").write_text("invariant: true\n")
    answer = meshwright("serve", folder, "--plan", "d.yaml", "--config", "serve.yaml")
    check(answer, "d.yaml:2:12: tensor: invariant: for one device only")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("port: 0", "1:1: instances: expected the URL of at least one server"),
        ("port: 0\ninstances: []", "2:12: instances: expected the URL of at least one server"),
        ("instances:\n- http://a:1\n- ftp://b", "3:3: instances.1: expected http://HOST:PORT, got 'ftp://b'"),
        ("instances: [http://a:1]\nhost: 0.0.0.0", "2:7: host: 0.0.0.0 can be reached from other machines"),
        ("instances: [http://a:1]\nhost: 192.0.2.1\napi_key: k", "2:7: host: cannot listen at 192.0.2.1:8080"),
    ],
)
def test_settings_of_a_router(lines: str, expected: str) -> None:
    Path("route.yaml").write_text(f"{lines}\n")
    check(meshwright("route", "--config", "route.yaml"), f"route.yaml:{expected}")


def test_a_default_without_a_file_has_no_position() -> None:
    answer = meshwright("route")
    assert (answer.code, answer.err) == (2, "meshwright: instances: expected the URL of at least one server\n")


QUESTION = """\
model: llama3-8b
cluster: {gpu: H200, gpus_per_node: 1}
serve:
  workload: {rate: 3, input_tokens: 1200, output_tokens: 20}
  limits:
    ttft_seconds: 0.2
    tpot_seconds: 1e-6
"""


@pytest.mark.parametrize(
    ("old", "new", "expected", "code"),
    [
        ("", "", "7:19: serve.limits.tpot_seconds: no deployment meets the limits", 3),
        ("llama3-8b", "llama3-405b", "2:37: cluster.gpus_per_node: expected at least 8", 3),
        ("H200", "cpuu", "2:16: cluster.gpu: ", 2),
        ("gpu: H200", "gpu: H200, profile: none.json", "2:31: cluster.profile: ", 2),
    ],
)
def test_questions_for_a_plan(old: str, new: str, expected: str, code: int) -> None:
    Path("serve.yaml").write_text(QUESTION.replace(old, new))
    check(meshwright("plan", "serve.yaml"), f"serve.yaml:{expected}", code)


@pytest.mark.parametrize(
    ("model", "instances", "expected"),
    [
        ("llama-nano", "[{}]", "serve.yaml:1:8: model.init: expected --model FOLDER"),
        ("{init: hf:nowhere}", "[{}]", "serve.yaml:1:15: model.init: "),
        ("{init: hf:FOLDER, hidden: 128}", "[{}]", "serve.yaml:1:"),
        (
            "{init: hf:FOLDER}",
            "[{tensor: 3}]",
            "d.yaml:1:22: instances.0.tensor: expected a divisor of model.heads = 4",
        ),
        ("{init: hf:FOLDER}", "[{expert: 2}]", "d.yaml:1:22: instances.0.expert: expected 1, as the model has no"),
        ("{init: hf:FOLDER}", "[{}, {role: prefill}]", "d.yaml:1:12: instances: expected instances of role both, or"),
    ],
)
def test_load_tests(folder: Path, model: str, instances: str, expected: str) -> None:
    cpu = QUESTION.replace("llama3-8b", model.replace("FOLDER", str(folder))).replace("H200", "cpu")
    Path("serve.yaml").write_text(cpu.replace("1200", "12"))
    Path("d.yaml").write_text(f"instances: {instances}\n")
    check(meshwright("bench-serve", "serve.yaml", "--plan", "d.yaml", "--rates", "1"), expected)


def test_mistakes_of_a_load_test_that_do_not_depend_on_each_other(folder: Path) -> None:
    """In both files: first those of single keys, and with the model's weights, then those between keys."""
    arguments = ["bench-serve", "serve.yaml", "--plan", "d.yaml", "--model", folder, "--rates", "1"]
    Path("serve.yaml").write_text(QUESTION.replace("rate:", "rates:"))
    Path("d.yaml").write_text("instances:\n- {tensr: 2}\n")
    assert positions(meshwright(*arguments)) == ["serve.yaml:4:14 serve.workload.rates", "d.yaml:2:4 instances.0.tensr"]
    model = f"model:\n  init: hf:{folder}\n  layers: 3\n  hidden: 128\n"
    Path("serve.yaml").write_text(
        QUESTION.replace("model: llama3-8b\n", model).replace("H200", "cpu").replace("1200", "12")
    )
    Path("d.yaml").write_text("instances:\n- {tensor: 3}\n- {role: prefill}\n- {expert: 2}\n")
    assert positions(meshwright(*arguments)) == ["serve.yaml:3:11 model.layers", "serve.yaml:4:11 model.hidden"]
    Path("serve.yaml").write_text(Path("serve.yaml").read_text().replace("  layers: 3\n  hidden: 128\n", ""))
    assert positions(meshwright(*arguments)) == [
        "d.yaml:2:1 instances",
        "d.yaml:2:12 instances.0.tensor",
        "d.yaml:4:12 instances.2.expert",
    ]


def test_files_of_another_command(folder: Path) -> None:
    Path("serve.yaml").write_text(QUESTION)
    for arguments in (["--plan", "serve.yaml"], ["--config", "serve.yaml"]):
        answer = meshwright("serve", folder, *arguments)
        check(
            answer, "serve.yaml:4:3: serve: expected " + ("a deployment" if "--plan" in arguments else "settings of a")
        )
    Path("d.yaml").write_text("instances:\n- {role: both}\n")
    for command in ("plan", "train"):
        check(meshwright(command, "d.yaml"), "d.yaml:1:1: instances: no key of a run file; `serve --plan`")
    check(meshwright("train", "serve.yaml"), "serve.yaml:3:1: serve: no key of a run file; `meshwright plan`")


def test_an_interrupted_plan_says_so_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.cli.plan_deployment.plan_deployment", interrupt)
    Path("serve.yaml").write_text(QUESTION)
    answer = meshwright("plan", "serve.yaml", "--out", "d.yaml")
    assert (answer.code, answer.err) == (130, "meshwright: interrupted\n") and not Path("d.yaml").exists()


def test_a_load_test_of_another_model(folder: Path) -> None:
    Path("serve.yaml").write_text(QUESTION.replace("H200", "cpu"))
    answer = meshwright("bench-serve", "serve.yaml", "--model", folder, "--rates", "1")
    check(answer, f"serve.yaml:1:8: model.layers: expected 2, as in the weights {folder}, got 32")


def test_a_deployment_that_is_rendered() -> None:
    Path("d.yaml").write_text("instances:\n- {tensor: 2, expert: 2}\n")
    arguments = ["--model", "/m", "--image", "i", "--claim", "c"]
    answer = meshwright("launch", "--to", "serving", "d.yaml", *arguments)
    check(answer, "d.yaml:2:23: instances.0.expert: expected 1 beside tensor 2")


@pytest.mark.parametrize(
    ("options", "draft", "key"),
    [
        ({"context": 600}, None, "context"),
        ({}, "mtp", "draft_model"),
        ({"invariant": True}, "mtp", "draft_model"),
        ({"absorb": False}, None, "absorb"),
    ],
)
def test_what_only_the_engine_knows_names_its_key(
    folder: Path, options: dict[str, object], draft: str | None, key: str
) -> None:
    with pytest.raises(BadInput) as caught:
        load_engine(EngineSetup(folder=str(folder), tokenizer=None, options=dict(options), draft_model=draft))
    assert caught.value.key == key


def test_the_engines_key_and_code_reach_the_file() -> None:
    """A message of the engine's process, as `run_server` raises it."""

    async def failed() -> EngineClient:
        client = EngineClient(ServerMetrics("tiny"))
        client._take({"failed": "too long", "code": 3, "key": "context"})
        return client

    client = asyncio.run(failed())
    assert (client.failure, client.failure_key) == (("too long", 3), "context")
    Path("serve.yaml").write_text("port: 1\ncontext: 9\n")
    settings = load_settings(ServeSpec, Path("serve.yaml"), {})
    with pytest.raises(BadConfig, match=r"^serve.yaml:2:10: context: too long$") as caught, settings.at_keys():
        raise OutOfResources("too long", key=client.failure_key)
    assert caught.value.exit_code == 3
    with pytest.raises(OutOfResources), settings.at_keys():
        raise OutOfResources("of another file", key="train.steps")


def test_a_server_says_that_it_loads_until_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.server.run.LOADING_SECONDS", 0.01)

    async def load() -> None:
        client = EngineClient(ServerMetrics("tiny"))
        telling = asyncio.ensure_future(tell_loading(client, "tiny"))
        while not (said := capsys.readouterr().err):
            await asyncio.sleep(0.01)
        assert said.startswith("loading tiny: 0 s\n")
        client.ready = {}
        await telling

    asyncio.run(load())


@pytest.mark.slow
def test_servers_of_a_load_test_that_is_killed_end() -> None:
    code = """
import os, time
from meshwright.server.deployment_servers import _Process
process = _Process("router", ["route", "http://127.0.0.1:1", "--port", "0"], os.environ)
process.address(time.monotonic() + 60)
print(process._process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        router = Path("/proc") / parent.stdout.readline().strip()
        assert router.exists()
        parent.kill()
    deadline = time.monotonic() + 30
    with suppress(FileNotFoundError, ProcessLookupError):  # it has gone
        while "State:\tZ" not in (router / "status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("queue: 9\ncontext: 600", "2:10: context: expected at most 512, the model's context, got 600"),
        ("queue: 9\nport: PORT", "2:7: port: cannot listen at 127.0.0.1:"),
        ("queue: 9\nchat_template: none.jinja", "2:16: chat_template: none.jinja: cannot be read"),
    ],
)
def test_a_server_that_ends_while_its_engine_starts(folder: Path, lines: str, expected: str) -> None:
    """Neither the server nor its engine prints a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        Path("serve.yaml").write_text(lines.replace("PORT", str(taken.getsockname()[1])))
        command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--config", "serve.yaml"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    check(Answer(result.returncode, result.stdout, result.stderr), f"serve.yaml:{expected}")


@pytest.mark.slow
def test_a_router_that_ends_during_a_load_test_is_named(folder: Path) -> None:
    deployment = Deployment(instances=(InstanceSpec(token_budget=64),))
    with deployment_servers(folder, deployment, gpu=False) as running:
        running.check()
        (router,) = (int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1:])
        os.kill(router, signal.SIGKILL)
        with pytest.raises(CommunicationFailure, match="^the router ended during the test, with code -9:\n"):
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                running.check()
                time.sleep(0.02)


def test_a_sampling_value_of_the_model_out_of_range(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 7}')
    answer = meshwright("serve", str(model))
    assert answer.code == 2 and not answer.out
    assert f"{model}/generation_config.json: top_p: expected 0 to 1, got 7" in answer.err
    assert "generation_config: none" in answer.err


def test_sampling_values_of_the_model_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    tell_defaults({})
    tell_defaults({"temperature": 0.6, "top_k": 20})
    (line,) = capsys.readouterr().err.splitlines()
    assert "temperature 0.6, top_k 20" in line and "--generation-config none" in line


def test_a_port_in_use_or_a_wrong_folder_starts_no_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.server.run.EngineProcess", lambda setup: pytest.fail("an engine was started"))
    Path("empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        check(meshwright("serve", folder, "--port", port), f"command line: port: cannot listen at 127.0.0.1:{port}")
    answer = meshwright("serve", "empty", "--port", 0)
    assert answer.code == 2 and answer.err.startswith("meshwright: empty has no tokenizer.json; ")


def test_an_engine_that_still_loads_ends_at_once_and_in_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    monkeypatch.setattr("meshwright.server.engine_setup.END_SECONDS", 1e9)
    answer = meshwright("serve", folder, "--port", 0)
    (folder / "generation_config.json").unlink()
    assert answer.code == 2 and "temperature" in answer.err and "killed" not in answer.err + caplog.text
