"""Kills a process, or raises an error, at the k-th call that changes the disk."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
FILE_OPEN = "io.open"
"""Python's own `open` of a file to write, under both of its names; not among CALLS."""
KILLED = 42


@contextmanager
def intercept_calls(
    act: Callable[[int, str, tuple[Any, ...]], None], names: tuple[str, ...] = CALLS
) -> Iterator[list[str]]:
    """Call `act(k, name, arguments)` before the k-th `os` call in `names`; yields the names of the calls so far."""
    call_names: list[str] = []
    targets = [(os, name, name) for name in names if name != FILE_OPEN]
    targets += [(module, "open", FILE_OPEN) for module in (io, builtins) if FILE_OPEN in names]
    originals = {(module, attribute): getattr(module, attribute) for module, attribute, _ in targets}

    def wrap(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def intercepted(*arguments: Any, **options: Any) -> Any:
            if name == FILE_OPEN and not set("".join(arguments[1:2])) & set("wa"):
                return call(*arguments, **options)
            call_names.append(name)
            act(len(call_names) - 1, name, arguments)
            return call(*arguments, **options)

        return intercepted

    for module, attribute, name in targets:
        setattr(module, attribute, wrap(originals[module, attribute], name))
    try:
        yield call_names
    finally:
        for (module, attribute), call in originals.items():
            setattr(module, attribute, call)


def count(work: Callable[[], object], names: tuple[str, ...] = CALLS) -> list[str]:
    """The calls that `work` makes."""
    with intercept_calls(lambda *_: None, names) as call_names:
        work()
    return call_names


def die_at(k: int, work: Callable[[], object], names: tuple[str, ...] = CALLS) -> bool:
    """Run `work` in a child process that exits at its k-th call; return whether it made that many calls.

    If the call is a write, half of the bytes are written first; if it opens a file to write, the file is emptied first.
    """
    child = os.fork()
    if child == 0:
        write, pwrite, open_file = os.write, os.pwrite, io.open

        def act(number: int, name: str, arguments: tuple[Any, ...]) -> None:
            if number == k:
                if name == "write":
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == "pwrite":
                    pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                if name == FILE_OPEN:
                    open_file(arguments[0], arguments[1])
                os._exit(KILLED)

        code = 1
        try:
            with intercept_calls(act, names):
                work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED
