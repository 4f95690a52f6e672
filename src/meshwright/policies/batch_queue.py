"""Waiting requests: those ready for admission, samples that wait until another request has computed their prompt, and deadlines."""

from __future__ import annotations

import heapq

from meshwright.policies.batch_request import RequestProgress


class RequestQueue:
    """Queues of waiting requests. A request that has ended is dropped only when it reaches the front of a queue."""

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[float, int], RequestProgress]] = []
        self._samples: dict[int, list[RequestProgress]] = {}
        self._deadlines: list[tuple[float, int, RequestProgress]] = []

    def push(self, progress: RequestProgress) -> None:
        """Add a request that is ready for admission."""
        heapq.heappush(self._ready, (progress.key, progress))

    def head(self) -> RequestProgress | None:
        """The request to admit next; None if no request is ready."""
        ready = self._ready
        while ready and ready[0][1].ended:
            heapq.heappop(ready)
        return ready[0][1] if ready else None

    def pop(self) -> None:
        """Remove the head."""
        heapq.heappop(self._ready)

    def wait_for(self, leader: int, progress: RequestProgress) -> None:
        """Hold a sample back until `release_samples(leader)`. `leader` is the number of the request that computes its prompt."""
        self._samples.setdefault(leader, []).append(progress)

    def release_samples(self, leader: int) -> None:
        """Make the samples of request `leader` ready, because their prompt is computed."""
        for progress in self._samples.pop(leader, ()):
            if not progress.ended:
                self.push(progress)

    def replace_leader(self, leader: int) -> None:
        """Request `leader` has ended: its first waiting sample becomes ready and computes the prompt, and the other samples wait for it."""
        waiting = [progress for progress in self._samples.pop(leader, ()) if not progress.ended]
        if waiting:
            self.push(waiting[0])
            self._samples.setdefault(waiting[0].request.number, []).extend(waiting[1:])

    def watch_deadline(self, progress: RequestProgress, deadline: float) -> None:
        """Add a request to the queue of deadlines."""
        heapq.heappush(self._deadlines, (deadline, progress.request.number, progress))

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has not ended; None without one."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].ended:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def take_late(self, now: float) -> RequestProgress | None:
        """Remove and return a request whose deadline is at or before `now`; None if there is none."""
        if not self._deadlines:
            return None
        deadline = self.next_deadline()
        return None if deadline is None or deadline > now else heapq.heappop(self._deadlines)[2]
