"""The HTTP listener of `launch.metrics_endpoint`: `GET /metrics`, in a thread of its own, without a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from meshwright.connections.accept import listen_at
from meshwright.connections.limits import METRICS
from meshwright.events.exposition import CONTENT_TYPE
from meshwright.events.terminal import write_line
from meshwright.launch.http_listener import HttpConnection, HttpListener, HttpReply, HttpRequest
from meshwright.spec.listen_address import address_text

POLL_SECONDS = 0.1
"""Time between two looks at whether the job has ended."""
END_SECONDS = 1.0
"""Longest time that the job's end waits for an answer that is being made."""
FRESH_SECONDS = 0.2
"""Time for which an answer is given again: a flood of requests reads the run folder no more often."""
PAUSE_SECONDS = 1.0
"""Pause after an error of the thread itself."""


class MetricsServer(HttpListener):
    """Answers `GET /metrics`. Nothing that clients do reaches the process around it."""

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        """Listen at `address`; `text` returns the answer. Raises OSError if the address cannot be used."""
        listener = listen_at(address, METRICS.connections)
        super().__init__(listener, METRICS)
        self._text = text
        self._stop = threading.Event()
        self._content = b""
        self._made = float("-inf")
        host, port = listener.getsockname()[:2]
        self.url = f"http://{address_text(host, port)}/metrics"
        """URL of the metrics."""
        self._thread = threading.Thread(target=self._run, name="metrics endpoint", daemon=True)
        self._thread.start()

    def admit(self, connection: HttpConnection, request: HttpRequest) -> int:
        """0 for a GET of the metrics."""
        return 0 if request.method == "GET" and request.path.partition("?")[0] == "/metrics" else 404

    def answer(self, connection: HttpConnection, request: HttpRequest, body: bytes) -> HttpReply:
        """The metrics; 503 while they cannot be read."""
        if time.monotonic() - self._made > FRESH_SECONDS:
            try:
                self._content = self._text().encode()
                self._made = time.monotonic()
            except OSError:
                return HttpReply(503, b"the figures of the run cannot be read\n", CONTENT_TYPE)
        return HttpReply(200, self._content, CONTENT_TYPE)

    def end(self) -> None:
        """End the thread, and close all connections."""
        self._stop.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.serve(POLL_SECONDS)
            except Exception as error:  # training goes on without this port
                write_line(f"meshwright: metrics endpoint: {type(error).__name__}: {error}")
                self._stop.wait(PAUSE_SECONDS)
        self.close()
