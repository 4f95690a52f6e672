"""The state that all connections of a router share, and the paths that the router answers itself."""

from __future__ import annotations

import hmac
import itertools
from collections import Counter
from typing import TYPE_CHECKING

from meshwright.connections.limits import ROUTE
from meshwright.connections.table import ConnectionTable
from meshwright.events.exposition import CONTENT_TYPE, Histogram, Metric, exposition
from meshwright.server.errors import RequestError
from meshwright.server.instances import Instances
from meshwright.server.route_requests import RoutedRequest
from meshwright.spec.route import RouteSpec

if TYPE_CHECKING:
    from meshwright.server.router import ClientConnection

PREFIX = "meshwright_router:"
"""Beginning of the names of all metrics."""
OWN_PATHS = (b"/health", b"/metrics")
"""Paths that the router answers itself."""
RETRY_SECONDS = 1
"""`retry-after` of answers while the router stops."""
_FIRST_BYTE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
"""Bounds of the histogram, in seconds."""


class Router:
    """Settings, servers and figures of a router."""

    def __init__(self, spec: RouteSpec, instances: Instances) -> None:
        self.spec = spec
        self.instances = instances
        self._key = None if spec.api_key is None else spec.api_key.encode()
        self.clients: ConnectionTable[ClientConnection] = ConnectionTable(ROUTE)
        self.unread: dict[ClientConnection, float] = {}
        """Clients that do not read their answers, so that these wait; with the time since when. The client that has read
        nothing for the longest time is first.
        """
        self.draining = False
        """Whether new requests are refused because the router stops."""
        self.statuses: Counter[int] = Counter()
        """Answers by HTTP status."""
        self.task_failures: Counter[str] = Counter()
        """Failures of background tasks, by the task's name."""
        self.numbers = itertools.count(1)
        """Request ids for requests whose client gives none."""
        self.retries = self.broken = 0
        """`retries`: requests that were sent to another server. `broken`: answers that ended too early."""
        self.first_byte = Histogram(f"{PREFIX}first_byte_seconds", "Time from a request to its answer.", _FIRST_BYTE)

    @property
    def unfinished(self) -> int:
        """Number of requests that have not been answered completely."""
        return sum(client.request is not None for client in self.clients)

    def drop_unread(self, latest: float) -> bool:
        """Disconnect the client that has read nothing of its answer for the longest time.

        A client is disconnected only if it has read nothing since the time `latest` of the event loop, or for longer.
        Returns whether a client was disconnected. Without this, clients that never read could use up the requests that the
        servers accept at a time, each client for as long as a connection may be idle.
        """
        client = next(
            (each for each, since in self.unread.items() if since <= latest and each.server is not None), None
        )
        if client is not None:
            client.drop()
        return client is not None

    def admit(self, request: RoutedRequest) -> None:
        """Raise RequestError if the request can be refused by its head, before its body is read."""
        if request.path != b"/health":
            self.check(request)
        if request.path not in OWN_PATHS:
            return
        if request.method not in (b"GET", b"HEAD"):
            raise RequestError(405, "the path has another method", headers=[(b"allow", b"GET, HEAD")])
        if request.length or request.chunks is not None:
            raise RequestError(413, "the path takes no body")

    def check(self, request: RoutedRequest) -> None:
        """Raise RequestError if the request has a wrong key, or if the router is stopping."""
        if self._key is not None and not hmac.compare_digest(request.key, self._key):
            raise RequestError(401, "expected the header Authorization: Bearer KEY with the server's key")
        if self.draining:
            raise RequestError(503, "the router is stopping", code="draining", retry_after=RETRY_SECONDS)

    def own_answer(self, request: RoutedRequest) -> tuple[int, bytes, bytes] | None:
        """Return status, content type and body for a path of `OWN_PATHS`; None for other paths."""
        if request.path == b"/health":
            ready = bool(self.instances.usable) and not self.draining
            return (
                (200, b"application/json", b'{"status": "ready"}')
                if ready
                else (503, b"application/json", b'{"status": "no servers"}')
            )
        if request.path == b"/metrics":
            return 200, CONTENT_TYPE.encode("ascii"), self.metrics().encode()
        return None

    def metrics(self) -> str:
        """Return all metrics in Prometheus's text format."""
        servers = [({"server": each.name, "role": each.role}, each) for each in self.instances.all.values()]
        statuses: list[tuple[dict[str, str], float]] = [
            ({"status": str(status)}, n) for status, n in self.statuses.items()
        ]
        failed: list[tuple[dict[str, str], float]] = [({"task": task}, n) for task, n in self.task_failures.items()]
        figures = (
            ("requests", "gauge", "Unfinished requests.", [(labels, each.requests) for labels, each in servers]),
            ("healthy", "gauge", "Whether a server is healthy.", [(labels, each.healthy) for labels, each in servers]),
            ("answers_total", "counter", "Answers of a server.", [(labels, each.answered) for labels, each in servers]),
            ("statuses_total", "counter", "Answers by status.", statuses),
            ("retries_total", "counter", "Requests sent to another server.", [({}, self.retries)]),
            ("task_failures_total", "counter", "Failures of tasks beside requests.", failed),
            ("broken_total", "counter", "Answers that ended early.", [({}, self.broken)]),
        )
        metrics = [Metric(PREFIX + name, type, help, samples) for name, type, help, samples in figures]
        return exposition(metrics) + "".join(f"{line}\n" for line in self.first_byte.lines({}))
