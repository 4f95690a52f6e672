"""Requests that wait: those in order of admission, samples whose prompt another request computes, and deadlines."""

from __future__ import annotations

import heapq

from meshwright.policies.batch_request import RequestProgress


class RequestQueue:
    """Waiting requests. Entries of requests that have ended are dropped when they come to the front."""

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[float, int], RequestProgress]] = []
        self._samples: dict[int, list[RequestProgress]] = {}
        self._deadlines: list[tuple[float, int, RequestProgress]] = []

    def push(self, progress: RequestProgress) -> None:
        """Add a request that can be admitted."""
        heapq.heappush(self._ready, (progress.key, progress))

    def head(self) -> RequestProgress | None:
        """The request to admit next."""
        ready = self._ready
        while ready and ready[0][1].ended:
            heapq.heappop(ready)
        return ready[0][1] if ready else None

    def pop(self) -> None:
        """Remove the head."""
        heapq.heappop(self._ready)

    def wait_for(self, leader: int, progress: RequestProgress) -> None:
        """Keep a sample back until `release_samples(leader)`."""
        self._samples.setdefault(leader, []).append(progress)

    def release_samples(self, leader: int) -> None:
        """Make the samples of a computed prompt ready."""
        for progress in self._samples.pop(leader, ()):
            if not progress.ended:
                self.push(progress)

    def replace_leader(self, leader: int) -> None:
        """Let the first of the samples that wait for a request which has ended compute the prompt for the others."""
        waiting = [progress for progress in self._samples.pop(leader, ()) if not progress.ended]
        if waiting:
            self.push(waiting[0])
            self._samples.setdefault(waiting[0].request.number, []).extend(waiting[1:])

    def watch_deadline(self, progress: RequestProgress, deadline: float) -> None:
        """Remember when a request has to end."""
        heapq.heappush(self._deadlines, (deadline, progress.request.number, progress))

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].ended:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def take_late(self, now: float) -> RequestProgress | None:
        """A request whose deadline is not after `now`; None if there is none."""
        if not self._deadlines:
            return None
        deadline = self.next_deadline()
        return None if deadline is None or deadline > now else heapq.heappop(self._deadlines)[2]
