"""A proxy before an S3 server of the tests that answers late, and some requests wrongly."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = ("503", "cut", "short", "reset", "stall")
STALL_SECONDS = 7.0


class AnswerProxy:
    """Forwards requests to `port` after `delay` seconds; of reads of contents a share `faulty` gets a fault of one of `kinds`.

    503: that status. cut: the connection ends within the body. short: a complete answer with fewer bytes than asked for. reset: no answer.
    stall: half the body, and then nothing. `faults` counts them by kind, `requests` all requests. `on_fault` is called in the middle of an
    answer whose body is not whole.
    """

    def __init__(self, port: int) -> None:
        self.delay, self.faulty, self.kinds = 0.0, 0.0, KINDS[:-1]
        self.faults: dict[str, int] = {}
        self.requests = 0
        self.on_fault: Callable[[], None] = lambda: None
        self._random, self._lock = random.Random(1), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._forward(self, port)

            do_HEAD = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _fault(self, handler: BaseHTTPRequestHandler) -> str | None:
        with self._lock:
            self.requests += 1
            reads = handler.command == "GET" and "Range" in handler.headers
            if not reads or self._random.random() >= self.faulty:
                return None
            kind = self._random.choice(self.kinds)
            self.faults[kind] = self.faults.get(kind, 0) + 1
            return kind

    def _forward(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        time.sleep(self.delay)
        fault = self._fault(handler)
        if fault == "503":
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if fault == "reset":
            handler.close_connection = True
            handler.connection.close()
            return
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        server = http.client.HTTPConnection("127.0.0.1", port)
        server.request(handler.command, handler.path, body, dict(handler.headers))
        answer = server.getresponse()
        content = answer.read()
        server.close()
        sent = content[: len(content) // 2] if fault else content
        length = answer.headers.get("Content-Length", str(len(content))) if fault != "short" else str(len(sent))
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", length)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(sent)
        if fault:
            handler.wfile.flush()
            self.on_fault()
        if fault in ("cut", "stall"):
            time.sleep(STALL_SECONDS if fault == "stall" else 0)
            handler.close_connection = True
