from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.launch.local import _listening_socket, run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def launch(what: str, folder: Path, ranks: int = 2) -> int:
    return run_ranks("tests.launch.fake_rank", [what, str(folder)], ranks=ranks, logs=folder / "logs", threads=1)


@pytest.mark.parametrize(("what", "code"), [("succeed", 0), ("one-fails", 3), ("victim-first", 4), ("killed", 5)])
def test_exit_code_of_the_job(what: str, code: int, tmp_path: Path) -> None:
    assert launch(what, tmp_path) == code


def test_other_ranks_write_to_their_logs(tmp_path: Path) -> None:
    launch("succeed", tmp_path, ranks=3)
    assert "rank 1 of 3" in (tmp_path / "logs" / "rank-00001.log").read_text()
    assert not (tmp_path / "logs" / "rank-00000.log").exists()


def test_no_rank_outlives_a_failure(tmp_path: Path) -> None:
    launch("one-fails", tmp_path)
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


def test_a_stop_signal_reaches_every_rank(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from meshwright.launch.local import run_ranks; folder = Path(sys.argv[1]);"
        "sys.exit(run_ranks('tests.launch.fake_rank', ['wait', str(folder)], ranks=2, logs=folder / 'logs', threads=1))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    deadline = time.monotonic() + 30
    while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 75


def test_the_store_listens_on_loopback_only() -> None:
    with _listening_socket() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
