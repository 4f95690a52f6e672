"""Work at idle priority, and the usual priority of everything after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.training import idle_priority
from meshwright.training.idle_priority import run_at_idle_priority

WHOLE_PROCESS = """
import os, pathlib, threading
from meshwright.training.idle_priority import run_at_idle_priority

group = pathlib.Path("/proc/self/autogroup")
weight = lambda: (group.exists() and group.read_text().rpartition("nice")[2].strip()) or "none"
stay = threading.Event()

def work():
    threading.Thread(target=stay.wait, daemon=True).start()  # as native libraries do
    return weight()

print(weight(), run_at_idle_priority(work, threading.Event()), weight())
print(*(os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")))
"""


def test_only_the_thread_of_the_work_has_idle_priority() -> None:
    inside = run_at_idle_priority(
        lambda: (os.sched_getscheduler(0), os.sched_getscheduler(os.getpid())), threading.Event()
    )
    assert inside == (os.SCHED_IDLE, os.SCHED_OTHER)


def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ImportError, match="no such module"):
        run_at_idle_priority(_fail, threading.Event())


def _fail() -> None:
    raise ImportError("no such module")


@pytest.mark.skipif(os.getuid() != 0, reason="only a privileged process leaves idle priority")
def test_urgent_work_continues_at_usual_priority() -> None:
    urgent = threading.Event()
    policies = []

    def work() -> None:
        policies.append(os.sched_getscheduler(0))
        urgent.set()
        deadline = time.monotonic() + 30
        while os.sched_getscheduler(0) == os.SCHED_IDLE and time.monotonic() < deadline:
            time.sleep(0.01)
        policies.append(os.sched_getscheduler(0))

    run_at_idle_priority(work, urgent)
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]


@pytest.mark.skipif(os.getuid() != 0, reason="only a privileged process leaves idle priority")
def test_a_session_of_its_own_has_the_least_weight_meanwhile() -> None:
    command = [sys.executable, "-c", WHOLE_PROCESS]
    weights, policies = subprocess.run(
        command, start_new_session=True, text=True, check=True, capture_output=True
    ).stdout.splitlines()
    assert weights in ("0 19 0", "none none none")
    assert set(policies.split()) == {"0"}


@pytest.mark.skipif(os.getuid() != 0, reason="only a privileged process leaves idle priority")
def test_the_launcher_ends_the_idle_priority_of_a_process_that_cannot() -> None:
    """Its threads get no processor time: here they wait for a message that never comes."""
    code = "import sys, threading\nfrom meshwright.training.idle_priority import run_at_idle_priority\n"
    code += "run_at_idle_priority(lambda: (print('idle', flush=True), sys.stdin.read()), threading.Event())"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "idle\n"
    os.kill(process.pid, signal.SIGSTOP)

    def policies() -> set[int]:
        return {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{process.pid}/task")}

    group = Path(f"/proc/{process.pid}/autogroup")
    assert policies() == {os.SCHED_IDLE, os.SCHED_OTHER}
    assert not group.exists() or group.read_text().split()[-1] == "19"
    idle_priority.end_idle_priority(process.pid)
    assert policies() == {os.SCHED_OTHER}
    assert not group.exists() or group.read_text().split()[-1] == "0"
    process.kill()
    process.communicate()
    idle_priority.end_idle_priority(process.pid)  # it has ended


def test_the_session_of_another_process_is_not_changed() -> None:
    group = Path("/proc/self/autogroup")
    if os.getsid(0) == os.getpid() or not group.exists():
        pytest.skip("this process has a session of its own, or Linux groups no sessions")
    before = group.read_text()
    assert run_at_idle_priority(group.read_text, threading.Event()) == before


@pytest.mark.parametrize("text", ["", "/autogroup-7 nice\n"])
def test_a_process_without_a_group_works_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    group = tmp_path / "autogroup"
    group.write_text(text)
    monkeypatch.setattr(idle_priority, "_autogroup", lambda process: group)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    assert run_at_idle_priority(lambda: 3, threading.Event()) == 3
    assert group.read_text() == text
