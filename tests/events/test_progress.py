"""Progress of a rank in shared memory, and in messages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from unittest import mock

from meshwright.events import progress
from meshwright.events.messages import MessageChannel, ProgressMessage, RankMessageReader
from meshwright.events.progress import PROGRESS, PendingWait, ProgressPage, ProgressSender

CHILD = """
import os, signal
from meshwright.events.progress import ProgressPage
page = ProgressPage.from_environment()
page.begin("train", 7)
page.set_action(12)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_parent_reads_the_last_action_of_a_killed_process() -> None:
    page = ProgressPage.create()
    assert (page.read(), page.count) == (ProgressMessage("start", 0, 0), 0)
    child = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, PROGRESS: page.path}, check=False)
    assert child.returncode == -9
    assert (page.read(), page.count) == (ProgressMessage("train", 7, 12), 2)


def test_a_page_holds_large_steps_and_actions() -> None:
    page = ProgressPage.create()
    page.begin("end", 2**32 - 1)
    page.set_action(2**24 - 1)
    assert page.read() == ProgressMessage("end", 2**32 - 1, 2**24 - 1)


def test_messages_follow_phases_and_changes_once_a_second() -> None:
    reading, writing = os.pipe()
    reader, page = RankMessageReader(reading), ProgressPage.create()
    with mock.patch.object(progress, "SEND_SECONDS", 0.02):
        sender = ProgressSender(page, MessageChannel(writing))
        for step in range(3):
            sender.begin("train", step)
        sender.begin("save", 2)
        page.set_action(5)
        deadline, messages = time.monotonic() + 10, []
        while ProgressMessage("save", 2, 5) not in messages and time.monotonic() < deadline:
            messages += reader.read()
    phases = [message for message in messages if message.action == -1]
    assert phases == [ProgressMessage("train", 0), ProgressMessage("save", 2)]
    assert messages[-1] == ProgressMessage("save", 2, 5)


@dataclass(frozen=True)
class Receive:
    """The receive of a gradient, in a schedule."""

    op: str = "recv"
    stage: int = 3
    micro_batch: int = 65000
    unit: int | None = None
    peer: int = 4
    label: str = ""


def test_a_page_shows_for_what_the_host_waits_and_since_when() -> None:
    page = ProgressPage.create()
    assert page.pending_wait is None and page.action_since_ns == 0
    page.begin("train", 3)
    before = time.monotonic_ns()
    page.set_action(9)
    page.begin_wait(Receive())
    wait = page.pending_wait
    assert wait is not None and before <= page.action_since_ns <= wait.since_ns <= time.monotonic_ns()
    assert replace(wait, since_ns=0) == PendingWait("recv", 3, 65000, -1, 4, 0)
    page.begin_wait(Receive("unshard", 0, -1, 16000, -1))
    assert page.pending_wait == PendingWait("unshard", 0, -1, 16000, -1, page.pending_wait.since_ns)
    page.begin_wait(None)
    assert page.pending_wait == PendingWait("all_reduce", -1, -1, -1, -1, page.pending_wait.since_ns)
    page.end_wait()
    assert page.pending_wait is None and page.read() == ProgressMessage("train", 3, 9)
