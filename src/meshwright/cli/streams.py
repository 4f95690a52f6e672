"""Standard input, output and error of a process that was started without some of them, or in a locale without Unicode."""

from __future__ import annotations

import io
import os
import sys

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
ENCODING_VARIABLE = "PYTHONIOENCODING"
"""Environment variable of Python: `ENCODING:ERRORS` of the three streams; without `ENCODING` that of the locale."""


def complete_streams() -> None:
    """Open the null device for streams that are closed, and print `?` for characters that the locale's encoding lacks.

    Otherwise a file or socket of this process gets the number of a closed stream, and processes that it starts write
    their messages there. Those processes take the treatment of characters from the environment.
    """
    for number, (name, mode) in enumerate(STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            null = _null_device(number)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", errors="replace", closefd=False))
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):  # standard error prints escapes already
            stream.reconfigure(errors="replace")
    encoding = os.environ.get(ENCODING_VARIABLE, "")
    if ":" not in encoding:
        os.environ[ENCODING_VARIABLE] = f"{encoding}:replace"


def _null_device(number: int) -> int:
    """A descriptor of the null device: `number` if that is closed, else another."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(descriptor, number)
        os.close(descriptor)
        return number
    os.set_inheritable(descriptor, True)
    return descriptor
