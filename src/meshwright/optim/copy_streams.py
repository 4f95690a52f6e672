"""The streams that copy an optimizer's chunks between host and device and update them, and how these streams wait for each other.

| stream | work | waits for |
|---|---|---|
| in | copies to a staging buffer | earlier copies from that buffer to the host |
| update | updates of chunks | the copies of the chunk to the device; at the beginning of an update also the compute stream |
| out | copies to the host | the update of the chunk |
| compute | everything else | the updates of the weights that it reads next |

Updates have a stream of their own. On the compute stream the updates of later chunks would be queued behind the forward of earlier units,
and the link between host and device would be idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

QUEUED_COPIES = 128
"""Number of copies, in both directions together, that may be queued. Beyond it copies are only launched when they are needed.

The launch queue of a stream holds about a thousand operations, a copy consists of three to five, and the host waits if a queue is full.
With 128 queued copies, half of them in each direction, the link is busy for more than 0.1 s.
"""


class CopyStreams:
    """The streams, and for each staging buffer the events by which they wait for each other.

    `runtime` has the interface of `torch.cuda`. None on a CPU: all operations then run in order, without streams.
    """

    def __init__(self, device: torch.device, buffers: int, runtime: Any = None) -> None:
        self._device = device
        self._runtime = torch.cuda if runtime is None and device.type == "cuda" else runtime
        self._in_events: list[Any] = [None] * buffers
        self._out_events: list[Any] = [None] * buffers
        self._queued: deque[Any] = deque()
        """Events at the ends of copies that had not ended when `crowded` last looked, in the order of launch."""
        self._latest_update: Any = None
        if self._runtime is not None:
            self._in, self._update, self._out = (self._runtime.Stream(device) for _ in range(3))
            self._in.wait_stream(self._compute)  # the staging buffers were zeroed there

    @property
    def _compute(self) -> Any:
        return self._runtime.current_stream(self._device)

    def copy_in(self, buffer: int, span: AbstractContextManager[None] | None) -> AbstractContextManager[Any]:
        """Context of copies to a staging buffer. They wait for the copies from this buffer to the host.

        The event is that of the newest copy from the buffer. So the copies also wait for the earlier result of the chunk that is fetched.
        """
        if self._runtime is None:
            return _in_span(span)
        if self._out_events[buffer] is not None:
            self._in.wait_event(self._out_events[buffer])
        return self._on(self._in, span, self._in_events, buffer)

    def copy_out(
        self, buffer: int, update: Any, span: AbstractContextManager[None] | None
    ) -> AbstractContextManager[Any]:
        """Context of copies from a staging buffer to the host. They wait for the event `update` (see `latest_update`)."""
        if self._runtime is None:
            return _in_span(span)
        self._out.wait_event(update)
        return self._on(self._out, span, self._out_events, buffer)

    def crowded(self) -> bool:
        """Whether at least `QUEUED_COPIES` copies have not ended yet; False on a CPU."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued) >= QUEUED_COPIES

    def begin_updates(self) -> None:
        """Make the update stream wait for the compute work queued so far, which produces the gradients and their factor."""
        if self._runtime is not None:
            self._update.wait_stream(self._compute)

    def update(self) -> AbstractContextManager[Any]:
        """Context in which a chunk's update is launched."""
        stack = ExitStack()
        if self._runtime is not None:
            stack.enter_context(self._runtime.stream(self._update))
            stack.callback(self._record_update)
        return stack

    @property
    def latest_update(self) -> Any:
        """The event at the end of the update launched last; None on a CPU."""
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
        """Make the compute stream wait for the event of an update (see `latest_update`), and so for all earlier updates."""
        if self._runtime is not None:
            self._compute.wait_event(event)

    def snapshot(self) -> AbstractContextManager[Any]:
        """Context of copies to the host that are not part of an update. They wait for the compute work queued so far."""
        if self._runtime is None:
            return ExitStack()
        self._out.wait_stream(self._compute)
        return self._runtime.stream(self._out)

    def record_end(self) -> Callable[[], object]:
        """Return a function that waits until the copies to the host launched so far have ended."""
        if self._runtime is None:
            return lambda: None
        return self._out.record_event(self._runtime.Event(blocking=True)).synchronize

    def finish(self) -> None:
        """Wait until all copies in both directions have ended."""
        if self._runtime is not None:
            self._in.synchronize()
            self._out.synchronize()
            self._queued.clear()

    def _on(
        self, stream: Any, span: AbstractContextManager[None] | None, events: list[Any], buffer: int
    ) -> AbstractContextManager[Any]:
        """Context in which copies run on `stream` inside `span`. At its end an event is recorded in `events`."""
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
