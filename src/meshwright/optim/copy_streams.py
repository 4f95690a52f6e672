"""The streams that copy an optimizer's chunks between host and device and update them, and their synchronisation.

| stream | work | waits for |
|---|---|---|
| in | copies to a staging buffer | the copies to the host from that buffer |
| update | updates of chunks | the copies of the chunk to the device; at the begin of an update the compute stream |
| out | copies to the host | the update of the chunk |
| compute | everything else | the updates of the weights that it reads next |

Updates have a stream of their own: on the compute stream those of later chunks would queue behind the forward of earlier units, and the
link would idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

QUEUED_COPIES = 128
"""Copies that may be queued in both directions together before further ones are only launched when they are needed.

A stream's launch queue holds about a thousand operations, a copy takes three to five of them, and the host waits where a queue is full.
With 128 copies of a chunk, half of them each way, the link is busy for more than 0.1 s.
"""


class CopyStreams:
    """The streams, and the events that synchronise them per staging buffer.

    `runtime` has the interface of `torch.cuda`; None: a CPU, where all operations run in order, without streams.
    """

    def __init__(self, device: torch.device, buffers: int, runtime: Any = None) -> None:
        self._device = device
        self._runtime = torch.cuda if runtime is None and device.type == "cuda" else runtime
        self._in_events: list[Any] = [None] * buffers
        self._out_events: list[Any] = [None] * buffers
        self._queued: deque[Any] = deque()
        """Ends of copies that had not ended when `crowded` looked last, in the order of their launch."""
        self._latest_update: Any = None
        if self._runtime is not None:
            self._in, self._update, self._out = (self._runtime.Stream(device) for _ in range(3))
            self._in.wait_stream(self._compute)  # the staging buffers were zeroed there

    @property
    def _compute(self) -> Any:
        return self._runtime.current_stream(self._device)

    def copy_in(self, buffer: int, span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
        """Context of the copies to the staging buffer, after the copies to the host from it.

        The event is that of the newest copy out of the buffer, which is not before the copy out of the chunk that is fetched.
        """
        if self._runtime is None:
            return _in_span(span)
        if self._out_events[buffer] is not None:
            self._in.wait_event(self._out_events[buffer])
        return self._on(self._in, span, self._in_events, buffer)

    def copy_out(
        self, buffer: int, update: Any, span: AbstractContextManager[None] | None
    ) -> AbstractContextManager[Any]:
        """Context of the copies from a staging buffer to the host, after the event `update`, see `latest_update`."""
        if self._runtime is None:
            return _in_span(span)
        self._out.wait_event(update)
        return self._on(self._out, span, self._out_events, buffer)

    def crowded(self) -> bool:
        """Whether `QUEUED_COPIES` copies or more have not ended. On a CPU they have."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued) >= QUEUED_COPIES

    def begin_updates(self) -> None:
        """Make the update stream wait for the work queued on the compute stream so far: gradients and their factor."""
        if self._runtime is not None:
            self._update.wait_stream(self._compute)

    def update(self) -> AbstractContextManager[Any]:
        """Context of a chunk's update."""
        stack = ExitStack()
        if self._runtime is not None:
            stack.enter_context(self._runtime.stream(self._update))
            stack.callback(self._record_update)
        return stack

    @property
    def latest_update(self) -> Any:
        """The event at the end of the update that was launched last; None on a CPU."""
        return self._latest_update

    def _record_update(self) -> None:
        self._latest_update = self._update.record_event()

    def wait_for_copy_in(self, buffer: int) -> None:
        """Make the update stream wait for the copies to a staging buffer."""
        if self._runtime is not None:
            self._update.wait_event(self._in_events[buffer])

    def wait_for_copies_out(self) -> None:
        """Make the update stream wait for all copies to the host that were started so far."""
        if self._runtime is not None:
            self._update.wait_stream(self._out)

    def wait_for_update(self, event: Any) -> None:
        """Make the compute stream wait for the end of an update and of all before it, see `latest_update`."""
        if self._runtime is not None:
            self._compute.wait_event(event)

    def snapshot(self) -> AbstractContextManager[Any]:
        """Context of copies to the host outside of an update, after the work queued on the compute stream so far."""
        if self._runtime is None:
            return ExitStack()
        self._out.wait_stream(self._compute)
        return self._runtime.stream(self._out)

    def record_end(self) -> Callable[[], object]:
        """Return a function that waits until the copies to the host that were started so far have ended."""
        if self._runtime is None:
            return lambda: None
        return self._out.record_event(self._runtime.Event(blocking=True)).synchronize

    def finish(self) -> None:
        """Wait until every copy in both directions has ended."""
        if self._runtime is not None:
            self._in.synchronize()
            self._out.synchronize()
            self._queued.clear()

    def _on(
        self, stream: Any, span: AbstractContextManager[None] | None, events: list[Any], buffer: int
    ) -> AbstractContextManager[Any]:
        """Run copies on `stream` inside `span`, and record an event after them in `events`."""
        stack = ExitStack()
        stack.enter_context(self._runtime.stream(stream))

        def record_event() -> None:
            events[buffer] = stream.record_event()
            self._queued.append(events[buffer])

        stack.callback(record_event)
        if span is not None:
            stack.enter_context(span)
        return stack


def _in_span(span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
    return ExitStack() if span is None else span
