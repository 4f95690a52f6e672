"""Dying, or failing, at the k-th call that touches the disk."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
FILES = "io.open"
"""Python's own `open` of a file to write, under both of its names; not among CALLS."""
KILLED = 42


@contextmanager
def touched(act: Callable[[int, str, tuple[Any, ...]], None], names: tuple[str, ...] = CALLS) -> Iterator[list[str]]:
    """Call `act(k, name, arguments)` before the k-th call of an `os` function in `names`; yields the names so far."""
    made: list[str] = []
    places = [(os, name, name) for name in names if name != FILES]
    places += [(module, "open", FILES) for module in (io, builtins) if FILES in names]
    real = {(module, attribute): getattr(module, attribute) for module, attribute, _ in places}

    def wrapped(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def acting(*arguments: Any, **options: Any) -> Any:
            if name == FILES and not set("".join(arguments[1:2])) & set("wa"):
                return call(*arguments, **options)
            made.append(name)
            act(len(made) - 1, name, arguments)
            return call(*arguments, **options)

        return acting

    for module, attribute, name in places:
        setattr(module, attribute, wrapped(real[module, attribute], name))
    try:
        yield made
    finally:
        for (module, attribute), call in real.items():
            setattr(module, attribute, call)


def count(work: Callable[[], object], names: tuple[str, ...] = CALLS) -> list[str]:
    """The calls that `work` makes."""
    with touched(lambda *_: None, names) as made:
        work()
    return made


def die_at(k: int, work: Callable[[], object], names: tuple[str, ...] = CALLS) -> bool:
    """Run `work` in a child process that is gone at its k-th call, half of the bytes written if that is a write, the file made empty if it
    opens one to write.

    Returns whether it came that far.
    """
    child = os.fork()
    if child == 0:
        write, open_file = os.write, io.open

        def act(number: int, name: str, arguments: tuple[Any, ...]) -> None:
            if number == k:
                if name == "write":
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == FILES:
                    open_file(arguments[0], arguments[1])
                os._exit(KILLED)

        code = 1
        try:
            with touched(act, names):
                work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED
