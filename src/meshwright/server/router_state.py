"""State of a router that its connections share, and the paths that it answers itself."""

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
OWN_PATHS = (b"/health", b"/metrics")
RETRY_SECONDS = 1
_FIRST_BYTE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)


class Router:
    """State that all client connections share: settings, servers and figures."""

    def __init__(self, spec: RouteSpec, instances: Instances) -> None:
        self.spec = spec
        self.instances = instances
        self._key = None if spec.api_key is None else spec.api_key.encode()
        self.clients: ConnectionTable[ClientConnection] = ConnectionTable(ROUTE)
        self.unread: dict[ClientConnection, float] = {}
        """Clients that must read their answer first, and since when; the longest first."""
        self.draining = False
        """Whether new requests are refused."""
        self.statuses: Counter[int] = Counter()
        self.task_failures: Counter[str] = Counter()
        """Failures of tasks that run beside requests, by task."""
        self.numbers = itertools.count(1)
        """Ids of requests whose client gives none."""
        self.retries = self.broken = 0
        """Requests that were sent to another server; answers that ended early."""
        self.first_byte = Histogram(f"{PREFIX}first_byte_seconds", "Time from a request to its answer.", _FIRST_BYTE)

    @property
    def unfinished(self) -> int:
        """Requests that are not answered to the end."""
        return sum(client.request is not None for client in self.clients)

    def drop_unread(self, before: float) -> bool:
        """Disconnect the client that has read nothing of its answer for longest, since `before`; whether there was one.

        Clients that never read would else keep the places of all servers for as long as each may be idle.
        """
        client = next(
            (each for each, since in self.unread.items() if since <= before and each.server is not None), None
        )
        if client is not None:
            client.drop()
        return client is not None

    def admit(self, request: RoutedRequest) -> None:
        """Raise RequestError for a request whose body is not to be read."""
        if request.path != b"/health":
            self.check(request)
        if request.path not in OWN_PATHS:
            return
        if request.method not in (b"GET", b"HEAD"):
            raise RequestError(405, "the path has another method", headers=[(b"allow", b"GET, HEAD")])
        if request.length or request.chunks is not None:
            raise RequestError(413, "the path takes no body")

    def check(self, request: RoutedRequest) -> None:
        """Raise RequestError for a request that is not taken."""
        if self._key is not None and not hmac.compare_digest(request.key, self._key):
            raise RequestError(401, "expected the header Authorization: Bearer KEY with the server's key")
        if self.draining:
            raise RequestError(503, "the router is stopping", code="draining", retry_after=RETRY_SECONDS)

    def own_answer(self, request: RoutedRequest) -> tuple[int, bytes, bytes] | None:
        """Status, content type and content of a path that the router answers itself."""
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
        """All metrics in the text format of Prometheus."""
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
