"""Runs the HTTP server: the engine's process, the listening sockets, signals, and the end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.server.engine_client import EngineClient, EngineProcess
from meshwright.server.metrics import ServerMetrics
from meshwright.spec.errors import BadInput, MeshwrightError
from meshwright.spec.serve import ServeSpec

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from meshwright.server.endpoints import Api

FAILED_SECONDS = 2.0
"""Time for which /health reports an engine that cannot continue, before the server ends."""
LARGEST_HEADERS = 64 << 10
ENGINE_OPTIONS = ("sequences", "step_tokens", "tokens_per_block", "cache_blocks", "context", "prefix_cache")
"""Keys that are passed to the engine."""


def run_server(folder: Path, spec: ServeSpec, say: Callable[[str], None]) -> None:
    """Serve the model in `folder` until SIGTERM or Ctrl-C; `say` receives the address once requests are taken.

    Raises BadInput for wrong settings, and the engine's error if it cannot continue.
    """
    _check_packages()
    spec = with_keys(spec)
    check_addresses(spec)
    tokenizer = next((p for p in (folder, folder.parent.parent) if (p / "tokenizer.json").is_file()), None)
    process = EngineProcess(
        folder,
        None if tokenizer is None else tokenizer / "tokenizer.json",
        {name: getattr(spec, name) for name in ENGINE_OPTIONS},
    )
    try:
        from meshwright.server.endpoints import Api  # while the engine's process imports torch
        from meshwright.server.model_files import read_model_files

        files = read_model_files(folder, None if spec.chat_template is None else Path(spec.chat_template))
        name = spec.name or folder.resolve().name
        client = EngineClient(ServerMetrics(name))
        api = Api(spec, name, files, client)
        sockets = {"api": listening_socket(spec.host, spec.port, "port")}
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_Server(api, process, sockets, folder, say).run())
    finally:
        process.close()
    if client.failure is not None:
        message, code = client.failure
        error = MeshwrightError(message)
        error.exit_code = code
        raise error


class _Server:
    def __init__(
        self,
        api: Api,
        process: EngineProcess,
        sockets: dict[str, socket.socket],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._api, self._client, self._process, self._sockets, self._say = api, api.client, process, sockets, say
        self._folder = folder
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> None:
        from meshwright.server.app import api_app

        spec = self._api.spec
        servers = [uvicorn_server(api_app(self._api, loopback=is_loopback(spec.host)))]
        await self._process.connect(self._client)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        with _logging(spec.log_requests):
            tasks = [
                asyncio.ensure_future(server.serve(sockets=[sock]))
                for server, sock in zip(servers, self._sockets.values(), strict=True)
            ]
            await self._until_stopped()
            await self._drain()
            for server in servers:
                server.should_exit = True
            self._client.abort_all()
            await asyncio.gather(*tasks)
        self._client.close()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _until_stopped(self) -> None:
        """Wait for a signal, or until the engine cannot continue."""
        stop = asyncio.ensure_future(self._stop.wait())
        served = False
        while not stop.done():
            changed = asyncio.ensure_future(self._client.changed.wait())
            await asyncio.wait([stop, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            self._client.changed.clear()
            if self._client.failure is not None:
                if served:
                    await asyncio.wait([stop], timeout=FAILED_SECONDS)
                break
            if self._client.usable and not served:
                served = True
                self._say(f"serving {self._api.name} at {url_of(self._sockets['api'])}")
        stop.cancel()

    async def _drain(self) -> None:
        """Refuse new requests, and wait for those that run."""
        self._api.draining = True
        now = asyncio.ensure_future(self._stop_now.wait())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._api.spec.drain_seconds):
                while self._client.unfinished and not now.done():
                    await asyncio.wait([now], timeout=0.02)
        now.cancel()


def uvicorn_server(app: ASGIApp) -> uvicorn.Server:
    """A uvicorn server that leaves signals to its caller."""
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return nullcontext()

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )
    return Server(config)


def with_keys(spec: ServeSpec) -> ServeSpec:
    """The settings with keys that only the environment has."""
    keys = {"api_key": "MESHWRIGHT_API_KEY", "admin_key": "MESHWRIGHT_ADMIN_KEY"}
    return replace(spec, **{key: getattr(spec, key) or os.environ.get(name) or None for key, name in keys.items()})


def check_addresses(spec: ServeSpec) -> None:
    """Raise BadInput for an address that needs a key and has none."""
    if not is_loopback(spec.host) and spec.api_key is None:
        raise BadInput(
            f"host: {spec.host} can be reached from other machines; set api_key, or use 127.0.0.1", key="host"
        )
    if spec.admin_port is not None and spec.admin_key is None:
        raise BadInput("admin_port: needs admin_key", key="admin_port")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(host: str, port: int, key: str) -> socket.socket:
    """A socket that listens; `key` names the port's setting. Raises BadInput if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        end = socket.socket(family, socket.SOCK_STREAM)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.bind(address)
    except OSError as error:
        raise BadInput(
            f"{key}: cannot listen at {host}:{port}: {error.strerror or error}; choose another", key=key
        ) from None
    return end


def url_of(end: socket.socket) -> str:
    """The address of a listening socket for a browser."""
    host, port = end.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _check_packages() -> None:
    for package in ("starlette", "uvicorn", "jinja2"):
        if find_spec(package) is None:
            raise BadInput(f"serving needs {package}: pip install 'meshwright[serve]'")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop, which is faster, where it is installed."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


@contextmanager
def _logging(requests: bool) -> Iterator[None]:
    """Print the log of requests, and warnings of uvicorn, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    loggers = [logging.getLogger("uvicorn.error")] + [logging.getLogger("meshwright.server")] * requests
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("meshwright.server").setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
