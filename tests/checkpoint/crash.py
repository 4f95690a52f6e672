"""Dying, or failing, at the k-th call that touches the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
KILLED = 42


@contextmanager
def touched(act: Callable[[int, str, tuple[Any, ...]], None], names: tuple[str, ...] = CALLS) -> Iterator[list[str]]:
    """Call `act(k, name, arguments)` before the k-th call of an `os` function in `names`; yields the names so far."""
    made: list[str] = []
    real = {name: getattr(os, name) for name in names}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            act(len(made) - 1, name, arguments)
            return real[name](*arguments, **options)

        return call

    for name in names:
        setattr(os, name, wrapped(name))
    try:
        yield made
    finally:
        for name in names:
            setattr(os, name, real[name])


def count(work: Callable[[], object], names: tuple[str, ...] = CALLS) -> list[str]:
    """The calls that `work` makes."""
    with touched(lambda *_: None, names) as made:
        work()
    return made


def die_at(k: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child process that is gone at its k-th call, half of the bytes written if that is a write.

    Returns whether it came that far.
    """
    child = os.fork()
    if child == 0:
        write = os.write

        def act(number: int, name: str, arguments: tuple[Any, ...]) -> None:
            if number == k:
                if name == "write":
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os._exit(KILLED)

        code = 1
        try:
            with touched(act):
                work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED
