"""Errors of the operating system at each write and accept of a process in turn: work goes on, or ends and continues."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.checkpoint.inventory import choose_newest
from meshwright.observe.metrics import read_metrics
from tests.attack import injected
from tests.attack.commands import Command, ask, running
from tests.attack.standin_rank import VALUE
from tests.attack.test_floods import HEALTH, OPTIONS, completion
from tests.server.helpers import write_folder
from tests.training.tiny import make_tiny

pytestmark = [pytest.mark.attack, pytest.mark.slow, pytest.mark.timeout(600)]
ERRORS = ("ENOSPC", "EIO", "EMFILE")
LONGEST_SECONDS = 120
EVERY_CALL_AFTER = 1 << 30
DOCUMENTED = {0, 2, 3, 4, 5}
"""Codes of a run that cannot write: docs/reference/exit-codes.md."""
PRELOADED = [
    "meshwright.cli.main",
    "meshwright.cli.train",
    "meshwright.launch.job",
    "meshwright.launch.prepare",
    "meshwright.launch.attempts",
    "meshwright.planner.search",
    "tests.attack.injected",
]


@dataclass(frozen=True)
class Ended:
    code: int | None
    output: str
    log: str


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def processes() -> Iterator[multiprocessing.context.BaseContext]:
    """Starts processes by fork from one that has imported the launcher: a case takes a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    yield context


def _run(output: str, arguments: tuple[str, ...]) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for each in (1, 2):
        os.dup2(descriptor, each)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        injected.run(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def launch(
    processes: multiprocessing.context.BaseContext,
    tiny: Path,
    folder: Path,
    error: str = "EIO",
    first: int = 0,
    count: int = 0,
) -> Ended:
    """`meshwright train` with stand-in ranks, to its end; code None if it does not end."""
    folder.mkdir(exist_ok=True)
    output, log = folder / f"output-{first}.txt", folder / f"calls-{first}.txt"
    words = ["train", str(tiny), "cluster.gpus_per_node=1", "checkpoint.every=3", "--runs", str(folder / "runs")]
    arguments = (str(log), "write", error, str(first), str(count), "standin", *words)
    for file in (output, log):
        file.touch()
    process = processes.Process(target=_run, args=(str(output), arguments))  # type: ignore[attr-defined]
    process.start()
    process.join(LONGEST_SECONDS)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return Ended(code, output.read_text(), log.read_text())


def trained(folder: Path) -> tuple[int, int]:
    """The step and the number that the stand-in rank's newest checkpoint has."""
    step, value = json.loads((choose_newest(folder / "runs" / "tiny").path / VALUE).read_text())
    return step, value


@pytest.fixture(scope="module")
def peace(
    processes: multiprocessing.context.BaseContext, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, tuple[int, int]]:
    """The calls of a launcher in peace, and what its ranks compute."""
    folder = tmp_path_factory.mktemp("peace")
    ended = launch(processes, tiny, folder)
    assert ended.code == 0, ended.output
    return len(ended.log.splitlines()), trained(folder)


@pytest.mark.parametrize(("error", "count"), [*((error, 1) for error in ERRORS), ("ENOSPC", EVERY_CALL_AFTER)])
def test_the_launcher_cannot_write(
    processes: multiprocessing.context.BaseContext,
    tiny: Path,
    tmp_path: Path,
    peace: tuple[int, tuple[int, int]],
    error: str,
    count: int,
) -> None:
    """Every call fails, once with one of the errors, and every fourth with all calls after it: the disk stays full."""
    calls, expected = peace
    begin, step = (2, 4) if count > 1 else (1 + ERRORS.index(error), len(ERRORS))
    wrong = []
    for first in range(begin, calls + 1, step):
        folder = tmp_path / str(first)
        ended = launch(processes, tiny, folder, error, first, count)
        call = next((line for line in ended.log.splitlines() if line.endswith("FAILS")), "none")
        if ended.code not in DOCUMENTED or "Traceback" in ended.output or "internal error" in ended.output:
            wrong.append(f"{call}: code {ended.code}: {ended.output[-600:]}")
            continue
        again = launch(processes, tiny, folder)
        if again.code != 0 or trained(folder) != expected:
            wrong.append(f"{call}: code {ended.code}, then {again.code}: {again.output[-600:]}")
    assert not wrong, f"{len(wrong)} of {calls} calls:\n" + "\n".join(wrong)


def test_a_launcher_of_real_ranks_cannot_write(tiny: Path, tmp_path: Path) -> None:
    """The journal of supervision fails for a while: the run trains on or continues, with the losses of a run in peace."""
    words = ["train", tiny, "cluster.gpus_per_node=1", "checkpoint.every=3", "train.steps=30", "--runs"]
    with running(*words, tmp_path / "peace", output=tmp_path / "peace.txt") as calm:
        assert calm.process.wait(200) == 0, calm.output
    fault = (tmp_path / "calls.txt", "write", "ENOSPC", 38, 6, "own")
    output = tmp_path / "output.txt"
    with running(*fault, *words, tmp_path / "full", output=output, module="tests.attack.injected") as command:
        assert command.process.wait(200) in DOCUMENTED, command.output
    with running(*words, tmp_path / "full", output=tmp_path / "again.txt") as command:
        assert command.process.wait(200) == 0, command.output
    losses = [
        {
            line["step"]: line["loss"]
            for line in read_metrics(tmp_path / name / "tiny" / "metrics.jsonl")
            if line["kind"] == "step"
        }
        for name in ("peace", "full")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 30


@pytest.mark.parametrize("error", ["EMFILE", "ENOBUFS", "EIO"])
def test_servers_and_routers_cannot_accept(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, error: str
) -> None:
    """The second to sixth connection of each cannot be accepted: later ones are."""
    model = write_folder(tmp_path / "model")
    fault = ("accept", error, 2, 5, "own")
    words = ["serve", model, "--port", 0, *OPTIONS]
    options = {"module": "tests.attack.injected"}
    with running(tmp_path / "server.txt", *fault, *words, output=tmp_path / "serve.txt", **options) as server:
        port = server.port_after("serving ")
        words = ["route", f"http://127.0.0.1:{port}", "--port", 0]
        with running(tmp_path / "router.txt", *fault, *words, output=tmp_path / "route.txt", **options) as router:
            front = router.port_after("routing to ")
            for each in (port, front):
                for _ in range(8):
                    assert ask(each, HEALTH, seconds=60).startswith(b"HTTP/1.1 200 "), server.output + router.output
                assert ask(each, completion(), b'"usage"', seconds=60).startswith(b"HTTP/1.1 200 ")
            _assert_injected(tmp_path / "server.txt", server)
            _assert_injected(tmp_path / "router.txt", router)


def _assert_injected(log: Path, command: Command) -> None:
    assert log.read_text().count("FAILS") == 5, log.read_text()
    assert command.process.poll() is None
