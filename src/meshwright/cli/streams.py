"""Repairs standard input, output and error: if one is closed, if the locale lacks Unicode, or if a reader such as `head` ends early."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""The standard streams in the order of their file descriptors, with the mode in which each is opened."""
ENCODING_VARIABLE = "PYTHONIOENCODING"
"""Python's environment variable `ENCODING:ERRORS` for the three streams. Without `ENCODING`, the encoding is that of the locale."""


def complete_streams() -> None:
    """Open the null device for closed streams, and let output print `?` for characters that its encoding lacks.

    Without the first, a file or socket of this process would get the file descriptor of a closed stream, and processes
    that it starts would write messages into that file. Started processes learn about unknown characters from the
    environment.

    If nobody reads the output any more, as in `meshwright plan … | head`, further output is dropped. The command still
    does its work and ends with its own exit code.
    """
    for number, (name, mode) in enumerate(STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            null = _null_device(number)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", errors="replace", closefd=False))
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            if not stream.isatty():
                stream = _outliving_its_reader(stream, name, number)
            if name == "stdout":  # Standard error prints escapes already.
                stream.reconfigure(errors="replace")
    encoding = os.environ.get(ENCODING_VARIABLE, "")
    if ":" not in encoding:
        os.environ[ENCODING_VARIABLE] = f"{encoding}:replace"


class _Output(io.FileIO):
    """A file that becomes the null device once its reader is gone. Processes that are started later inherit this."""

    def write(self, data: Any) -> int | None:
        """Write bytes. If the reader is gone, redirect the file descriptor to the null device and report all bytes as written."""
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def _outliving_its_reader(stream: io.TextIOWrapper, name: str, number: int) -> io.TextIOWrapper:
    """Replace a stream of `sys` by one whose writes do not fail if the pipe is closed, and return it."""
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
    """Return a file descriptor of the null device. It is `number` if that is closed, otherwise another one."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(descriptor, number)
        os.close(descriptor)
        return number
    os.set_inheritable(descriptor, True)
    return descriptor
