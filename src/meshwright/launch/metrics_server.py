"""The HTTP server of `launch.metrics_endpoint`, a module of its own as `http.server` takes time to import."""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from meshwright.events.exposition import CONTENT_TYPE

REQUEST_SECONDS = 10.0
"""Longest time that a connection may take to send its request and to take the answer."""


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers `GET /metrics`; each request has a thread, which does not keep the process alive."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        """Listen at `address`; `text` returns the answer. Raises OSError if the address cannot be used."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.text = text
        super().__init__(address, MetricsRequest)

    @property
    def url(self) -> str:
        """URL of the metrics."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if self.address_family == socket.AF_INET6 else host}:{port}/metrics"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that hangs up."""


class MetricsRequest(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: MetricsServer  # pyrefly: ignore

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        content = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""
