"""The program of a reward process: calls a reward function for one answer after another. Uses only the standard library.

    python -I reward_worker.py FILE FUNCTION SECONDS BYTES

SECONDS is the processor time after which a call is stopped. BYTES is the limit of the address space.

Each line of standard input is a JSON object `{"call", "prompt", "answer", "record"}`. For each, one line is written to the original
standard output: `{"reward": number or null}`, `{"error": text}` or `{"timeout": true}`, together with the number `call`. Before these, the
first line is `{"ready": true}` or `{"error": text}`. Text that the function prints goes to standard error, which nobody reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TextIO

LONGEST_MESSAGE = 2000
"""Characters of an error message, at most."""
PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl: the signal that a process gets when its parent ends."""


class OutOfTime(BaseException):
    """The call has used up its processor time. It is no Exception, so that `except Exception` in a reward function does not catch it."""


def main(file: str, function: str, seconds: str, size: str) -> None:
    """Serve calls in a child process until standard input ends. Then kill everything that the calls have started."""
    signal.signal(signal.SIGTERM, _end_group)
    with contextlib.suppress(
        OSError, AttributeError
    ):  # elsewhere than on Linux the end of standard input ends an idle process
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if child := os.fork():
        os.close(0)
        os.close(1)
        os.waitpid(child, 0)
        _end_group()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    serve(file, function, seconds, size)


def serve(file: str, function: str, seconds: str, size: str) -> None:
    """Serve calls in this process until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (int(size), int(size)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, _stop)
    try:
        call = load(Path(file), function)
    except BaseException as error:
        _write(answers, {"error": _described(error)})
        return
    _write(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _write(answers, {"call": request["call"], **_verdict(call, request, float(seconds))})


def load(file: Path, function: str) -> Callable[..., Any]:
    """Import a Python file and return its function. Its folder is added to the import path. Raises whatever the file raises."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("meshwright_reward", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call = getattr(module, function, None)
    if not callable(call):
        names = sorted(
            name for name, value in vars(module).items() if isinstance(value, FunctionType) and name[0] != "_"
        )
        raise AttributeError(f"{file}: expected a function {function}; it has {', '.join(names) or 'none'}")
    with contextlib.suppress(ValueError):  # a callable without a signature
        _check_arguments(inspect.signature(call), f"{file}: {function}")
    return call


def _check_arguments(signature: inspect.Signature, name: str) -> None:
    """Raise TypeError if the function cannot be called with (prompt, answer, record)."""
    try:
        signature.bind("", "", {})
    except TypeError as error:
        raise TypeError(f"{name}{signature}: expected the arguments (prompt, answer, record): {error}") from error


def _verdict(call: Callable[..., Any], request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Call the function for one request within its limit of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
    try:
        reward = call(request["prompt"], request["answer"], request["record"])
        if reward is None:
            return {"reward": None}
        number = float(reward)
        if isinstance(reward, str | bytes) or not math.isfinite(number):
            return {"error": f"expected a finite number or None, got {reward!r}"[:LONGEST_MESSAGE]}
        return {"reward": number}
    except OutOfTime:
        return {"timeout": True}
    except (Exception, SystemExit) as error:
        return {"error": _described(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]


def _end_group(*_: object) -> None:
    """Kill this process and everything that calls have started. It is called when the run has ended, or when the child has ended."""
    os.killpg(0, signal.SIGKILL)


def _stop(number: int, frame: object) -> None:
    raise OutOfTime


def _write(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
