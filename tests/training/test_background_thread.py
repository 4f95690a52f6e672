"""A background thread: order, errors, and the end of a process in which a call never returns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.training.background_thread import BackgroundThread

HUNG = """
import threading
from meshwright.training.background_thread import BackgroundThread

started = threading.Event()
BackgroundThread("hung").submit(lambda: (started.set(), threading.Event().wait()))
started.wait()
print("ended")
"""


def test_calls_run_in_their_order() -> None:
    thread, seen = BackgroundThread("test"), []
    for number in range(100):
        thread.submit(seen.append, number)
    thread.wait()
    assert seen == list(range(100))


def test_an_error_belongs_to_its_call() -> None:
    thread = BackgroundThread("test")
    failed, later = thread.submit(int, "x"), thread.submit(int, "7")
    assert later.result() == 7
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()


def test_a_process_ends_while_a_call_hangs() -> None:
    """The time limit is only reached if the process waits for ever."""
    completed = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60, check=False)
    assert (completed.returncode, completed.stdout) == (0, "ended\n"), completed.stderr
