"""Rewards of answers by a function of the user, which runs in processes of its own.

The run file names a Python file with the function, for example `def correct(prompt, answer, record) -> float | bool | None`. The function
cannot harm the run: each process has an empty environment, a process group of its own, and limits of processor time, waiting time and
memory.

A call gives no reward if it raises, takes too long, or does not return a number. This is not the same as a reward of 0: all answers to such
a prompt are left out of training, and counted.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from meshwright.spec.errors import BadInput
from meshwright.spec.rl import RewardSpec

Outcome = Literal["reward", "no verdict", "error", "timeout"]
WITHOUT_REWARD: tuple[Outcome, ...] = ("no verdict", "error", "timeout")
"""Outcomes of a call that gives no reward."""
WAITING = 10
"""Wall-clock limit of a call as a multiple of its processor time limit. A call may wait for files or locks; then its process is ended."""
START_SECONDS = 120.0
"""Seconds within which the function's file must be imported."""
LONGEST_ANSWER = 2**16
PROGRAM = Path(__file__).with_name("reward_worker.py")


class RewardVerdict(NamedTuple):
    """The result of a reward function for one answer."""

    outcome: Outcome
    reward: float | None = None
    message: str = ""


class RewardProcesses:
    """Processes that call the function of `spec`. Each process handles one call at a time. Close it, or use it in a `with` block.

    Raises BadInput if the file or the function is missing, or if the file cannot be imported.
    """

    def __init__(self, spec: RewardSpec) -> None:
        spec.check_path()
        assert spec.file is not None
        limits = [repr(spec.seconds), str(int(spec.memory_gib * 2**30))]
        self._command = [sys.executable, "-I", str(PROGRAM), str(Path(spec.file).resolve()), spec.function, *limits]
        self._wait = WAITING * spec.seconds
        self._lock = threading.Lock()
        """Held while a process is started, and while all processes are ended."""
        self._closed = False
        self._started: set[_Process] = set()
        """Processes that may be running."""
        self._free: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        """One entry for each thread that is idle: its process, or None if the process is to be started at the next call."""
        self._threads = ThreadPoolExecutor(spec.processes, thread_name_prefix="reward")
        self._free.put(self._start())  # start one now, so that an error in the file is reported before the run begins
        for _ in range(spec.processes - 1):
            self._free.put(None)

    def submit(self, prompt: str, answer: Callable[[], str], record: Mapping[str, Any]) -> Future[RewardVerdict]:
        """Start to judge an answer to a prompt.

        `answer` returns the text of the answer; the thread that makes the call also calls `answer`. `record` contains other facts about the
        prompt, as values of JSON.
        """
        return self._threads.submit(self._judge, prompt, answer, dict(record))

    def close(self) -> None:
        """End all processes. Calls that are in progress give no reward."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for process in list(self._started):
                process.end()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> RewardProcesses:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> _Process:
        """Start a process and wait until it has imported the file. Raises BadInput."""
        with self._lock:
            if self._closed:
                raise BadInput("rl.reward: the run has ended")
            process = _Process(self._command)
            self._started.add(process)
        answer = process.answer(START_SECONDS)
        if "ready" in answer:
            return process
        self._end(process)
        raise BadInput(
            f"rl.reward: {answer.get('error', 'its file was not imported within its limits')}", key="rl.reward"
        )

    def _end(self, process: _Process) -> None:
        process.end()
        self._started.discard(process)

    def _judge(self, prompt: str, answer: Callable[[], str], record: dict[str, Any]) -> RewardVerdict:
        """Make one call in a free process. If the process does not work afterwards, end it."""
        process = self._free.get()
        try:
            process = process or self._start()
            process.ask({"prompt": prompt, "answer": answer(), "record": record})
            verdict = _verdict(process.answer(self._wait))
            if not process.works:
                self._end(process)
                process = None
            return verdict
        except BadInput as error:  # the file could be imported at the beginning, but not now
            process = None
            return RewardVerdict("error", message=str(error))
        finally:
            self._free.put(process)


def _verdict(answer: Mapping[str, Any]) -> RewardVerdict:
    """The verdict in the answer of a process. An empty answer means that a limit was reached."""
    if "reward" in answer:
        reward = answer["reward"]
        return RewardVerdict("no verdict") if reward is None else RewardVerdict("reward", reward)
    if "error" in answer:
        return RewardVerdict("error", message=answer["error"])
    return RewardVerdict(
        "timeout", message=f"it used up rl.reward.seconds, waited {WAITING} times as long, or its process ended"
    )


class _Process:
    """A process of `reward_worker.py`, in a process group of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        self._calls = 0
        self.works = True
        """Whether it can handle another call."""

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a call. If the process has ended in the meantime, `answer` will be empty."""
        assert self._process.stdin is not None
        self._calls += 1
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({**request, "call": self._calls}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The answer to the latest call. If none comes within `seconds`, or another line comes, it is empty and the process is unusable."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n") and len(line) < LONGEST_ANSWER:
            if not select.select([file], [], [], max(deadline - time.monotonic(), 0))[0]:
                break
            more = os.read(file, LONGEST_ANSWER)
            if not more:
                break
            line += more
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.get("call", 0) != self._calls:
            answer = None
        self.works = answer is not None
        return answer or {}

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
