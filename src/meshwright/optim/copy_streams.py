"""The two streams that copy an optimizer's chunks between host and device, and their synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


class CopyStreams:
    """The two copy streams, and the events that synchronise them per staging buffer.

    On a CPU all operations run in order, without streams.
    """

    def __init__(self, device: torch.device, buffers: int) -> None:
        cuda = device.type == "cuda"
        self._in, self._out = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self._in_events: list[Any] = [None] * buffers
        self._out_events: list[Any] = [None] * buffers
        if self._in is not None:
            self._in.wait_stream(torch.cuda.current_stream(device))  # the staging buffers were zeroed there

    def copy_in(self, buffer: int, span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
        """Context of the copies to the staging buffer, after the copies to the host from it.

        These are the latest copies of its last chunk, and so later than those of the chunk that is copied now.
        """
        if self._in is not None and self._out_events[buffer] is not None:
            self._in.wait_event(self._out_events[buffer])
        return _on(self._in, span, self._in_events, buffer)

    def wait_for_copy_in(self, buffer: int) -> None:
        """Make the compute stream wait for the copies to a staging buffer."""
        if self._in is not None:
            torch.cuda.current_stream(self._in.device).wait_event(self._in_events[buffer])

    def copy_out(self, buffer: int, span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
        """Context of the copies from a staging buffer to the host, after the work queued on the compute stream so far."""
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._out.device))
        return _on(self._out, span, self._out_events, buffer)

    def snapshot(self) -> AbstractContextManager[Any]:
        """Context of copies to the host outside of an update, after the work queued on the compute stream so far."""
        if self._out is None:
            return ExitStack()
        self._out.wait_stream(torch.cuda.current_stream(self._out.device))
        return torch.cuda.stream(self._out)

    def wait_for_copies_out(self) -> None:
        """Make the compute stream wait for all copies to the host that were started so far."""
        if self._out is not None:
            torch.cuda.current_stream(self._out.device).wait_stream(self._out)

    def record_end(self) -> Callable[[], object]:
        """Return a function that waits until the copies to the host that were started so far have ended."""
        return (
            (lambda: None) if self._out is None else self._out.record_event(torch.cuda.Event(blocking=True)).synchronize
        )

    def finish(self) -> None:
        """Wait until every copy in both directions has ended."""
        if self._in is not None and self._out is not None:
            self._in.synchronize()
            self._out.synchronize()


def _on(
    stream: torch.cuda.Stream | None, span: AbstractContextManager[None] | None, events: list[Any], buffer: int
) -> AbstractContextManager[Any]:
    """Run copies on `stream` inside `span`, and record an event after them in `events`."""
    stack = ExitStack()
    if stream is not None:
        stack.enter_context(torch.cuda.stream(stream))

        def record_event() -> None:
            events[buffer] = stream.record_event()

        stack.callback(record_event)
    if span is not None:
        stack.enter_context(span)
    return stack
