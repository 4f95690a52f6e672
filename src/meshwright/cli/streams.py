"""Standard input, output and error of a process that was started without some of them, in a locale without Unicode, or before `head`."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
ENCODING_VARIABLE = "PYTHONIOENCODING"
"""Environment variable of Python: `ENCODING:ERRORS` of the three streams; without `ENCODING` that of the locale."""


def complete_streams() -> None:
    """Open the null device for streams that are closed, and print `?` for characters that the locale's encoding lacks.

    Output that nobody reads any more, as in `meshwright plan … | head`, is left out: the command does its work and ends with its own
    exit code.

    Otherwise a file or socket of this process gets the number of a closed stream, and processes that it starts write
    their messages there. Those processes take the treatment of characters from the environment.
    """
    for number, (name, mode) in enumerate(STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            null = _null_device(number)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", errors="replace", closefd=False))
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            if not stream.isatty():
                stream = _outliving_its_reader(stream, name, number)
            if name == "stdout":  # standard error prints escapes already
                stream.reconfigure(errors="replace")
    encoding = os.environ.get(ENCODING_VARIABLE, "")
    if ":" not in encoding:
        os.environ[ENCODING_VARIABLE] = f"{encoding}:replace"


class _Output(io.FileIO):
    """A file that becomes the null device once its reader is gone, also for processes that are started later."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def _outliving_its_reader(stream: io.TextIOWrapper, name: str, number: int) -> io.TextIOWrapper:
    """The stream of `sys`, replaced by one whose writes do not fail for a closed pipe."""
    if stream.fileno() != number:
        return stream
    stream.flush()
    raw = _Output(number, "w", closefd=False)
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw)
    replaced = io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, replaced)
    return replaced


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
