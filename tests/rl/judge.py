"""Reward functions of the tests: right ones, and every way to go wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any


def correct(prompt: str, answer: str, record: dict[str, Any]) -> bool:
    return answer.strip() == record["reference"].strip()


def common(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """The share of the reference's letters that the answer has at their places: answers of a random model differ in it."""
    reference = record["reference"]
    return sum(ours == theirs for ours, theirs in zip(answer, reference, strict=False)) / max(len(reference), 1)


def short(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """The fewer letters the better."""
    return -float(len(answer))


def late(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """Like `common`, after waits that differ by answer: verdicts come in another order than answers."""
    time.sleep(zlib.crc32(answer.encode()) % 7 / 100)
    return common(prompt, answer, record)


FOLDER = Path(__file__).parent
CHILD = "import time; time.sleep(1000)"


def wild(prompt: str, answer: str, record: dict[str, Any]) -> Any:
    """Like `common`, but of a tenth of the answers, always the same ones, it does whatever can go wrong; and it kills the run where asked.

    A file `kill-N` beside this one asks for a kill at the N-th call, which it removes. `kill-N-SECONDS` waits before.
    """
    strike()
    kind = zlib.crc32(f"{prompt}|{answer}".encode()) % 90
    if kind == 0:
        time.sleep(1000)
    if kind == 1:
        raise ValueError(answer)
    if kind == 2:
        return float("nan")
    if kind == 3:
        subprocess.Popen([sys.executable, "-c", CHILD, str(FOLDER)])
    if kind == 4:
        os.write(1, b'{"reward": 1e9}\n\xff garbage')
        print("more of it")
    if kind == 5:
        os._exit(0)
    if kind == 6:
        return float(len(bytearray(2**34)))
    if kind == 7 and os.fork() == 0:
        time.sleep(1000)
    if kind == 8:
        sys.exit()
    return common(prompt, answer, record)


def strike() -> None:
    """Count this call, and kill the rank that called if it is asked for."""
    with (FOLDER / "calls").open("a") as file:
        file.write(".")
        file.flush()
        calls = file.tell()
    for marker in FOLDER.glob("kill-*"):
        _, number, *seconds = marker.name.split("-")
        if calls >= int(number):
            with contextlib.suppress(FileNotFoundError):  # another process was first
                marker.unlink()
                time.sleep(float(*seconds or "0"))
                rank = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(rank, signal.SIGKILL)
                time.sleep(1000)


def by_name(prompt: str, answer: str, record: dict[str, Any]) -> Any:
    """Do what the answer says."""
    if answer == "none":
        return None
    if answer == "text":
        return "1.0"
    if answer == "nan":
        return float("nan")
    if answer == "raise":
        raise ValueError("a fault of the judge")
    if answer == "exit":
        sys.exit(3)
    if answer == "kill":
        os._exit(3)
    if answer == "spin":
        while True:
            pass
    if answer == "hide":
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue
    if answer == "sleep":
        time.sleep(1000)
    if answer == "memory":
        return float(len(bytearray(2**33)))
    if answer == "print":
        print("noise that is no answer", flush=True)
        return 0.5
    if answer == "forge":  # a line of its own in the pipe of the answers
        for number in range(3, 12):
            with contextlib.suppress(OSError):
                os.write(number, b'{"reward": 7.0}\n')
        time.sleep(0.3)
        return 0.5
    if answer == "alarm":  # the limit of time that math-verify has; signals reach a process's main thread only
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        signal.pause()
        return 0.75
    if answer == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return float(os.getpgrp())
    if answer == "environment":
        return float(len(os.environ.keys() - {"LC_CTYPE"}))  # which Python sets itself
    return float(answer)
