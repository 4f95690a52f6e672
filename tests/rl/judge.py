"""Reward functions of the tests: right ones, and every way to go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


def correct(prompt: str, answer: str, record: dict[str, Any]) -> bool:
    return answer.strip() == record["reference"].strip()


def common(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """The share of the reference's letters that the answer has at their places: answers of a random model differ in it."""
    reference = record["reference"]
    return sum(ours == theirs for ours, theirs in zip(answer, reference, strict=False)) / max(len(reference), 1)


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
    if answer == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return float(os.getpid())
    if answer == "environment":
        return float(len(os.environ.keys() - {"LC_CTYPE"}))  # which Python sets itself
    return float(answer)
