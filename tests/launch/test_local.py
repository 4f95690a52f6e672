from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.events.messages import CHANNEL, Message, StepMessage
from meshwright.events.start import START_TIME_VARIABLE
from meshwright.launch.local import _environment, listening_socket, run_ranks, started_ranks
from meshwright.policies import job_end
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import CommunicationFailure
from meshwright.spec.network import NetworkSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def launch(behaviour: str, folder: Path, ranks: int = 2) -> int:
    cluster = ClusterSpec(gpus_per_node=ranks)
    return run_ranks(
        "tests.launch.fake_rank", [behaviour, str(folder)], cluster=cluster, logs=folder / "logs", threads=1
    )


def until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("behaviour", "code"), [("succeed", 0), ("one-fails", 3), ("victim-first", 4), ("killed", 5)])
def test_exit_code_of_the_job(behaviour: str, code: int, tmp_path: Path) -> None:
    assert launch(behaviour, tmp_path) == code


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are told to end and do not are killed soon."""
    monkeypatch.setattr(job_end, "GRACE_SECONDS", 0.2)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(
    ("behaviour", "printed"),
    [
        ("hangs", "rank 1 did not answer while others waited for it; the last step it finished is 4; the"),
        (
            "killed",
            "rank 1 was killed by signal 9 (Killed), often because the host ran out of memory; it had not finished",
        ),
        ("one-fails", "rank 1 ended with exit code 3 and without a message"),
    ],
)
def test_a_rank_without_a_last_word_is_named(
    behaviour: str, printed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(behaviour, tmp_path)
    err = capfd.readouterr().err
    assert err.startswith(f"meshwright: {printed}") and err.count("\n") == 1


def test_the_other_ranks_are_told_the_cause_and_may_finish(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("end", tmp_path) == 4
    assert (tmp_path / "cause").read_text() == "rank 1 failed: torn"
    assert capfd.readouterr().err == "meshwright: rank 1: torn\n"


def test_a_listener_gets_every_message_of_every_rank(tmp_path: Path) -> None:
    messages: list[tuple[int, Message]] = []
    code = run_ranks(
        "tests.launch.fake_rank",
        ["steps", str(tmp_path)],
        cluster=ClusterSpec(gpus_per_node=2),
        logs=tmp_path / "logs",
        threads=1,
        listener=lambda rank, message: messages.append((rank, message)),
    )
    assert code == 0
    assert [message for rank, message in messages if rank == 0] == [
        StepMessage(n, {"loss": 1.0 / n}) for n in range(1, 6)
    ]
    assert [message for rank, message in messages if rank == 1] == [StepMessage(n) for n in range(1, 6)]


def test_what_a_listener_raises_ends_the_ranks(tmp_path: Path) -> None:
    def refuse(rank: int, message: Message) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(
            "tests.launch.fake_rank",
            ["steps", str(tmp_path)],
            cluster=ClusterSpec(gpus_per_node=2),
            logs=tmp_path / "logs",
            threads=1,
            listener=refuse,
        )


def test_other_ranks_write_to_their_logs(tmp_path: Path) -> None:
    launch("succeed", tmp_path, ranks=3)
    assert "rank 1 of 3" in (tmp_path / "logs" / "rank-00001.log").read_text()
    assert not (tmp_path / "logs" / "rank-00000.log").exists()


@pytest.mark.usefixtures("short_grace")
def test_no_rank_outlives_a_failure(tmp_path: Path) -> None:
    launch("one-fails", tmp_path)
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


def test_enough_ends_the_ranks_and_is_no_failure(tmp_path: Path) -> None:
    ready_files = [tmp_path / f"ready-{rank}" for rank in (0, 1)]
    code = run_ranks(
        "tests.launch.fake_rank",
        ["wait", str(tmp_path)],
        cluster=ClusterSpec(gpus_per_node=2),
        logs=tmp_path / "logs",
        threads=1,
        quiet=True,
        enough=lambda: all(file.exists() for file in ready_files),
    )
    assert code == 0 and (tmp_path / "logs" / "rank-00000.log").exists()
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


def test_ranks_that_started_already_begin_later(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterSpec(gpus_per_node=2)
    with started_ranks("tests.launch.fake_rank", ["begin", str(tmp_path)], cluster=cluster, threads=1) as ranks:
        until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
        assert ranks.finish(tmp_path, assignment=Path("train this")) == 0
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "rank 0: train this", "rank 1: train this"]


def test_ranks_end_when_their_parent_has_nothing_for_them(tmp_path: Path) -> None:
    cluster = ClusterSpec(gpus_per_node=2)
    with (
        pytest.raises(ZeroDivisionError),
        started_ranks("tests.launch.fake_rank", ["begin", str(tmp_path)], cluster=cluster, threads=1),
    ):
        until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)))
        raise ZeroDivisionError
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


def test_a_training_rank_whose_launcher_dies_before_the_run_begins_ends_with_0() -> None:
    command = [sys.executable, "-m", "meshwright.training.rank", "cpu"]
    reading, writing = os.pipe()
    answer = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, CHANNEL: str(writing)},
        pass_fds=[writing],
    )
    os.close(reading)
    os.close(writing)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_a_rank_that_is_gone_before_it_is_told_shows_in_the_code(tmp_path: Path) -> None:
    cluster = ClusterSpec(gpus_per_node=2)
    with started_ranks("tests.launch.no_such_rank", [], cluster=cluster, threads=1) as ranks:
        until(lambda: all(process.poll() is not None for process in ranks.processes))
        assert ranks.finish(tmp_path, assignment=Path("train this")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_reaches_every_rank(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from meshwright.launch.local import run_ranks; folder = Path(sys.argv[1]);"
        "from meshwright.spec.cluster import ClusterSpec; host = ClusterSpec(gpus_per_node=2);"
        "import signal; signal.signal(int(sys.argv[2]), signal.SIG_DFL);"  # nohup, which may run pytest, ignores SIGHUP
        "sys.exit(run_ranks('tests.launch.fake_rank', ['wait', str(folder)], cluster=host, logs=folder / 'logs', threads=1))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(int(number))])
    until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    parent.send_signal(number)
    assert parent.wait(60) == 75


def test_the_store_listens_on_loopback_only() -> None:
    with listening_socket() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_host_without_loopback_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    refusal = r"127\.0\.0\.1, which cannot be reached: Network is unreachable"
    with pytest.raises(CommunicationFailure, match=refusal), listening_socket():
        pass


def environments(cluster: ClusterSpec) -> list[dict[str, str]]:
    with listening_socket() as listener:
        return [_environment(rank, cluster, listener, threads=3) for rank in range(cluster.ranks)]


def test_ranks_talk_over_loopback_unless_the_cluster_or_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    typed = ClusterSpec(network=NetworkSpec(interface="eth7"))
    assert [environments(ClusterSpec())[0][name] for name in names] == ["lo", "lo"]
    assert [environments(typed)[0][name] for name in names] == ["eth7", "eth7"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert [environments(typed)[0][name] for name in names] == ["eth7", "ib0"]


def test_a_rank_gets_its_place_and_its_emulated_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rank_environments = environments(ClusterSpec(gpus_per_node=4, emulate_nodes=2))
    assert [env["NCCL_HOSTID"] for env in rank_environments] == ["node0", "node0", "node1", "node1"]
    assert [(env["RANK"], env["LOCAL_WORLD_SIZE"], env["OMP_NUM_THREADS"]) for env in rank_environments] == [
        (str(rank), "4", "3") for rank in range(4)
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environments(ClusterSpec())[0]["OMP_NUM_THREADS"] == "2"


def test_torch_keeps_what_it_compiled_where_the_user_says_or_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (env,) = environments(ClusterSpec(gpus_per_node=1))
    cache_folder = tmp_path / "meshwright" / "compiled"
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(cache_folder) and cache_folder.stat().st_mode & 0o777 == 0o700
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "3"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert environments(ClusterSpec(gpus_per_node=1))[0]["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert "TORCHINDUCTOR_CACHE_DIR" not in environments(ClusterSpec(gpus_per_node=1))[0]


def test_ranks_know_when_the_command_began() -> None:
    (env,) = environments(ClusterSpec(gpus_per_node=1))
    assert 0 < float(env[START_TIME_VARIABLE]) <= time.monotonic()
