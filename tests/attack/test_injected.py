"""Errors of the operating system at each write and accept of a process in turn: work goes on, or ends and continues."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from meshwright.checkpoint.format.inventory import choose_newest
from meshwright.connections.accept import listen_at
from meshwright.observe.metrics import read_metrics
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE
from tests.attack import injected
from tests.attack.commands import LONGEST_SECONDS, MARKS, Command, ask, free_port, running
from tests.attack.standin_rank import VALUE
from tests.attack.test_floods import HEALTH, OPTIONS, completion
from tests.server.helpers import write_folder
from tests.training.tiny import make_tiny

pytestmark = MARKS
ERRORS = ("ENOSPC", "EIO", "EMFILE")
EVERY_CALL_AFTER = 1 << 30
AT_ONCE = 8
"""Cases whose processes run at the same time, as most of them wait for each other."""
DOCUMENTED = {0, 2, 3, 4, 5}
"""Codes of a run that cannot write: docs/reference/exit-codes.md."""


@dataclass(frozen=True)
class Fault:
    """Calls of a process, `part`, that fail: `count` of them from the `first`; none with a count of 0."""

    part: str
    kind: str = "write"
    error: str = "EIO"
    first: int = 0
    count: int = 0

    @property
    def words(self) -> list[str]:
        """It as arguments of `tests.attack.injected`."""
        part = "coordinator" if self.part == "coordinator" else "command"
        return [self.kind, self.error, str(self.first), str(self.count), part]


@dataclass(frozen=True)
class Ended:
    """A command that has ended; its code is None if it did not end."""

    code: int | None
    output: str
    log: str

    @property
    def call(self) -> str:
        """The first call that failed."""
        return next((line for line in self.log.splitlines() if line.endswith("FAILS")), "none")

    @property
    def documented(self) -> bool:
        said = "Traceback" in self.output or "internal error" in self.output
        return self.code in DOCUMENTED and not said


class Started:
    """`meshwright train` with stand-in ranks in a folder, by an agent and a coordinator unless `part` is the launcher."""

    def __init__(self, processes: BaseContext, tiny: Path, folder: Path, fault: Fault) -> None:
        folder.mkdir(exist_ok=True)
        self._output, self._log = folder / f"output-{fault.count}.txt", folder / f"calls-{fault.count}.txt"
        for file in (self._output, self._log):
            file.touch()
        token, port = folder / "token", folder / "port"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text("a-token-of-this-test\n")
            port.write_text(str(free_port()))
        words = ["train", str(tiny), "cluster.gpus_per_node=1", "checkpoint.every=3", "--runs", str(folder / "runs")]
        words += [] if fault.part == "launcher" else ["--agent"]
        environment = {COORDINATOR_VARIABLE: f"127.0.0.1:{port.read_text()}", TOKEN_VARIABLE: str(token)}
        arguments = [str(self._log), *fault.words, "standin", *words]
        variables = {} if fault.part == "launcher" else environment
        self._process: BaseProcess = processes.Process(  # type: ignore[attr-defined]
            target=injected.run_forked, args=(str(self._output), variables, arguments)
        )
        self._process.start()

    def end(self) -> Ended:
        """Wait for the end; kill a process that does not come to it."""
        self._process.join(LONGEST_SECONDS)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        return Ended(code, self._output.read_text(), self._log.read_text())


Launch = Callable[[Sequence[tuple[Path, Fault]]], list[Ended]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def launch(tiny: Path) -> Iterator[Launch]:
    """Runs commands in folders to their ends. They are forked from a process that has imported all: a case takes half a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.attack.preloaded"])

    def launch(cases: Sequence[tuple[Path, Fault]]) -> list[Ended]:
        ended: list[Ended] = []
        for begin in range(0, len(cases), AT_ONCE):
            started = [Started(context, tiny, folder, fault) for folder, fault in cases[begin : begin + AT_ONCE]]
            ended += [each.end() for each in started]
        return ended

    yield launch


def trained(folder: Path) -> tuple[int, int]:
    """The step and the number that the stand-in rank's newest checkpoint has."""
    step, value = json.loads((choose_newest(folder / "runs" / "tiny").path / VALUE).read_text())
    return step, value


def await_free(port: int) -> None:
    """Wait until nothing listens at a port."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        try:
            listen_at(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.2)


@pytest.mark.parametrize("count", [pytest.param(1, id="once"), pytest.param(EVERY_CALL_AFTER, id="from then on")])
@pytest.mark.parametrize("kind", ["write", "accept"])
@pytest.mark.parametrize("part", ["launcher", "agent", "coordinator"])
def test_the_supervisor_cannot_write_or_accept(
    launch: Launch, tmp_path: Path, part: str, kind: str, count: int
) -> None:
    """Each call fails once, with the errors in turn; or with all calls after it: the disk stays full.

    The command ends with a documented code, and started again it trains to the numbers of a run in peace.
    """
    peace = Fault(part, kind)
    (calm,) = launch([(tmp_path / "peace", peace)])
    assert calm.code == 0, calm.output
    calls, expected = len(calm.log.splitlines()), trained(tmp_path / "peace")
    assert calls
    step = 1 if count == 1 else max(1, calls // 12)
    faults = {
        tmp_path / str(first): Fault(part, kind, ERRORS[first % len(ERRORS)] if count == 1 else "ENOSPC", first, count)
        for first in range(1, calls + 1, step)
    }
    ended = dict(zip(faults, launch(list(faults.items())), strict=True))
    wrong = [f"{each.call}: code {each.code}: {each.output[-800:]}" for each in ended.values() if not each.documented]
    assert sum(each.call != "none" for each in ended.values()) >= 0.5 * len(ended)  # some depend on times
    if (part, kind) == ("coordinator", "accept") and count > 1:  # the cause is gone with its coordinator
        for folder in faults:
            await_free(int((folder / "port").read_text()))
    again = dict(zip(faults, launch([(folder, peace) for folder in faults]), strict=True))
    wrong += [
        f"{ended[folder].call}: code {ended[folder].code}, then {each.code}: {ended[folder].output}{each.output}"
        for folder, each in again.items()
        if each.code != 0 or trained(folder) != expected
    ]
    assert not wrong, f"{len(wrong)} of {len(faults)} calls:\n" + "\n".join(wrong)


Losses = dict[int, float]
TRAIN = ["cluster.gpus_per_node=1", "checkpoint.every=3", "train.steps=30", "--runs"]


def losses(folder: Path) -> Losses:
    lines = read_metrics(folder / "tiny" / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


@pytest.fixture(scope="module")
def calm_losses(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of ranks that train in peace."""
    folder = tmp_path_factory.mktemp("calm")
    with running("train", tiny, *TRAIN, folder / "runs", output=folder / "output.txt") as command:
        assert command.wait() == 0, command.output
    return losses(folder / "runs")


@pytest.mark.parametrize(
    ("part", "kind", "first", "count"),
    [("launcher", "write", 38, 6), ("agent", "accept", 1, 1), ("coordinator", "write", 38, 6)],
)
def test_the_supervisor_of_ranks_that_train(
    tiny: Path, tmp_path: Path, calm_losses: Losses, part: str, kind: str, first: int, count: int
) -> None:
    """Calls fail for a while, such as writes of the journal: the run trains on or continues, with the losses of a run in peace."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-this-test\n")
    words, environment = ["train", tiny, *TRAIN, tmp_path / "runs"], dict[str, str]()
    if part != "launcher":
        words.append("--agent")
        environment = {COORDINATOR_VARIABLE: f"127.0.0.1:{free_port()}", TOKEN_VARIABLE: str(token)}
    fault = Fault(part, kind, "ENOSPC" if kind == "write" else "EMFILE", first, count)
    attacked = [tmp_path / "calls.txt", *fault.words, "own", *words]
    options = {"environment": environment, "module": "tests.attack.injected"}
    with running(*attacked, output=tmp_path / "output.txt", **options) as command:
        assert command.wait() in DOCUMENTED and "Traceback" not in command.output, command.output
    assert "FAILS" in (tmp_path / "calls.txt").read_text()
    with running(*words, output=tmp_path / "again.txt", environment=environment) as command:
        assert command.wait() == 0, command.output
    assert losses(tmp_path / "runs") == calm_losses and len(calm_losses) == 30


def test_servers_and_routers_cannot_accept(tmp_path: Path) -> None:
    """The second to seventh connection of each cannot be accepted: later ones are."""
    model = write_folder(tmp_path / "model")
    fault = ("accept", "EMFILE,ENOBUFS,EIO", 2, 6, "command", "own")
    words = ["serve", model, "--port", 0, *OPTIONS]
    options = {"module": "tests.attack.injected"}
    with running(tmp_path / "server.txt", *fault, *words, output=tmp_path / "serve.txt", **options) as server:
        port = server.port_after("serving ")
        words = ["route", f"http://127.0.0.1:{port}", "--port", 0]
        with running(tmp_path / "router.txt", *fault, *words, output=tmp_path / "route.txt", **options) as router:
            front = router.port_after("routing to ")
            for each in (port, front):
                for _ in range(9):
                    assert ask(each, HEALTH, seconds=60).startswith(b"HTTP/1.1 200 "), server.output + router.output
                assert ask(each, completion(), b'"usage"', seconds=60).startswith(b"HTTP/1.1 200 ")
            _assert_injected(tmp_path / "server.txt", server)
            _assert_injected(tmp_path / "router.txt", router)


def test_servers_and_routers_cannot_write(tmp_path: Path) -> None:
    """No file can be written: they need none to answer."""
    model = write_folder(tmp_path / "model")
    fault = ("write", "ENOSPC,EIO,EMFILE", 1, EVERY_CALL_AFTER, "command", "own")
    options = {"module": "tests.attack.injected"}
    words = ["serve", model, "--port", 0, *OPTIONS]
    with running(tmp_path / "server.txt", *fault, *words, output=tmp_path / "serve.txt", **options) as server:
        words = ["route", f"http://127.0.0.1:{server.port_after('serving ')}", "--port", 0]
        with running(tmp_path / "router.txt", *fault, *words, output=tmp_path / "route.txt", **options) as router:
            front = router.port_after("routing to ")
            assert ask(front, completion(), b'"usage"', seconds=60).startswith(b"HTTP/1.1 200 ")
            assert "Traceback" not in server.output + router.output


def _assert_injected(log: Path, command: Command) -> None:
    assert log.read_text().count("FAILS") == 6, log.read_text()
    assert command.process.poll() is None
