"""A real S3-protocol server on loopback, and a proxy before it that fails in chosen ways."""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from typing import Any
from urllib.request import Request, urlopen

ANSWER_503 = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Server:
    """moto's server, with an empty bucket `runs`."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.reset()

    def reset(self) -> None:
        with urlopen(Request(f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST")):
            pass
        with urlopen(Request(f"http://127.0.0.1:{self.port}/runs", method="PUT")):
            pass

    def close(self) -> None:
        self._server.stop()


class FaultProxy:
    """A proxy that forwards connections to `port`, with faults according to `mode`.

    `mode` is `pass` (no faults), `503` (answer with that status), `hang` (do not answer) or `drop` (end the connection
    within the body of a large request). `faults` counts the faults.
    """

    def __init__(self, port: int) -> None:
        self.mode, self.faults, self.dropped_after = "pass", 0, 3 << 20
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.request, port)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, client: socket.socket, port: int) -> None:
        with suppress(OSError):
            if self.mode == "hang":
                self.faults += 1
                while self.mode == "hang" and client.recv(1 << 16):
                    pass
                return
            with socket.create_connection(("127.0.0.1", port)) as server:
                threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
                self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        while data := client.recv(1 << 16):
            sent += len(data)
            if self.mode == "503":
                self.faults += 1
                client.sendall(ANSWER_503)
                return
            if self.mode == "drop" and sent > self.dropped_after:
                self.faults += 1
                client.shutdown(socket.SHUT_RDWR)
                return
            if self.mode == "hang":
                self.faults += 1
                threading.Event().wait(5)
                return
            server.sendall(data)

    @staticmethod
    def _copy(source: socket.socket, target: Any) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
