"""Runs the HTTP server: the engine's processes, the listening sockets, signals and shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.connections.limits import ADMIN, SERVE, ListenerLimits, raise_file_limit
from meshwright.connections.table import ConnectionTable
from meshwright.data.text_format import no_tokenizer, tokenizer_file
from meshwright.events.terminal import write_line
from meshwright.server.addresses import check_addresses, is_loopback, listening_socket, where_listening, with_keys
from meshwright.server.background import guarded
from meshwright.server.engine_client import EngineClient
from meshwright.server.engine_setup import EngineProcess, EngineSetup
from meshwright.server.follow import Follower, newest
from meshwright.server.metrics import ServerMetrics
from meshwright.server.model_files import read_model_files
from meshwright.server.process_memory import keep_loaded
from meshwright.server.transfers import TransferSetup
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.engine import ONE_RANK, ExpertRanks
from meshwright.spec.errors import EXIT_INTERNAL, BadInput, MeshwrightError
from meshwright.spec.secrets import hide_arguments
from meshwright.spec.serve import ServeSpec

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from meshwright.checkpoint.format.inventory import Chosen
    from meshwright.server.endpoints import Api

FAILED_SECONDS = 2.0
"""Seconds for which /health still reports that the engine has failed, before the server ends."""
LOADING_SECONDS = 10.0
"""Seconds between two lines that say that the engine is still loading."""
TICKS_OF_SWEEP = 10
"""Ticks of uvicorn's loop (0.1 s each) between two checks for connections that have exceeded a time limit."""


def run_server(
    folder: Path,
    spec: ServeSpec,
    say: Callable[[str], None],
    cluster: ClusterSpec | None = None,
    experts: ExpertRanks = ONE_RANK,
    *,
    absorb: bool = True,
) -> None:
    """Serve the model in `folder` until SIGTERM or Ctrl-C.

    `say` is called with a line that has the server's address, once the server accepts requests. `cluster` is this host
    with as many devices as the tensor ranks (`spec.tensor`) or the expert ranks (`experts.count`). Without it, the
    engine runs on one device. `absorb` says whether decodes with latent attention attend to latents
    (`EngineOptions.absorb`).

    Raises BadInput for wrong settings, and the engine's error if the engine cannot continue.
    """
    _check_packages()
    raise_file_limit()
    given = (spec.api_key, spec.admin_key, spec.transfer_key)
    spec = with_keys(spec)
    hide_arguments(given)
    check_addresses(spec)
    # Without `spec.follow`, the engine's process chooses the checkpoint, and verifies every byte.
    chosen = newest(folder) if spec.follow else None
    served = folder if chosen is None else chosen.path
    if tokenizer_file(folder) is None:
        raise no_tokenizer(folder)
    setup = EngineSetup(
        folder=str(served.absolute()),
        tokenizer=None if (file := tokenizer_file(served)) is None else str(file),
        options={**spec.engine, "absorb": absorb},
        adapter=None if spec.adapter is None else str(Path(spec.adapter).absolute()),
        speculate=spec.speculate,
        draft_model=spec.draft_model,
        cluster=cluster,
        experts=experts,
        transfer=transfer_setup(spec),
    )
    with ExitStack() as opened:
        # The sockets come before the engine's process, which takes seconds to start: a port in use is the most common
        # mistake.
        sockets = [opened.enter_context(listening_socket(spec.host, spec.port, "port"))]
        if spec.admin_port is not None:
            sockets.append(opened.enter_context(listening_socket(spec.host, spec.admin_port, "admin_port")))
        process = EngineProcess(setup)
        opened.callback(process.close)
        # Imported late, so that the engine's process imports torch at the same time.
        from meshwright.server.endpoints import Api

        template = None if spec.chat_template is None else Path(spec.chat_template)
        files = read_model_files(folder, template, defaults=spec.generation_config == "auto")
        name = spec.name or folder.resolve().name
        tell_defaults(files.sampling)
        # Which tokens begin each text, and where the files of the model contradict each other.
        for sentence in files.text.sentences():
            write_line(sentence, sys.stderr)
        client = EngineClient(ServerMetrics(name), exchanges=spec.exchanges)
        api = Api(spec, name, files, client)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_Server(api, process, sockets, folder, served, say, chosen).run())
    if client.failure is not None:
        message, code = client.failure
        error = MeshwrightError(message, key=client.failure_key)
        error.exit_code = code
        raise error


class _Server:
    """A running server, from the start of its processes to their end.

    `sockets` has the socket of the API and, with an admin port, the admin socket. `folder` is the folder that the user
    named, and `served` the checkpoint that the engine loads. With `spec.follow`, `chosen` describes that checkpoint.
    """

    def __init__(
        self,
        api: Api,
        process: EngineProcess,
        sockets: Sequence[socket.socket],
        folder: Path,
        served: Path,
        say: Callable[[str], None],
        chosen: Chosen | None = None,
    ) -> None:
        self._chosen = chosen
        self._api = api
        self._client = api.client
        self._process = process
        self._sockets = sockets
        self._say = say
        self._folder = folder
        self._served = served
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal comes or the engine fails. Then wait for running requests, and shut down."""
        from meshwright.server.app import admin_app, api_app

        spec = self._api.spec
        apps = [api_app(self._api, loopback=is_loopback(spec.host)), admin_app(self._api)]
        # Without an admin port there is only the server of the API.
        servers = [uvicorn_server(*each) for each in zip(apps, (SERVE, ADMIN), strict=True)][: len(self._sockets)]
        await self._process.connect(self._client)
        if self._api.has_template:
            self._api.workers.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        with logging_on_stderr(spec.log_requests):
            tasks = [
                self._guard("HTTP", partial(server.serve, [listening]), required=True)
                for server, listening in zip(servers, self._sockets, strict=True)
            ]
            follower = Follower(self._api, self._folder, self._served, spec.follow_seconds)
            watching = [
                self._guard("follow", follower.follow) if spec.follow else None,
                self._guard("ranks", partial(self._process.watch, self._client), required=True),
                self._guard("loading", partial(tell_loading, self._client, self._api.name)),
            ]
            await self._until_stopped()
            for task in filter(None, watching):
                task.cancel()
            await self._drain()
            self._client.abort_all()
            self._api.workers.close()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks)
        self._client.close()

    def _guard(
        self, name: str, work: Callable[[], Awaitable[object]], *, required: bool = False
    ) -> asyncio.Future[None]:
        """Start a background task. If it is `required`, the server fails when the task fails."""
        fatal = partial(self._client.fail, code=EXIT_INTERNAL) if required else None
        return asyncio.ensure_future(guarded(name, work, self._client.metrics.task_failures, fatal=fatal))

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _until_stopped(self) -> None:
        """Wait for a signal, or until the engine fails. When the engine is ready, print the server's address."""
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
                keep_loaded()
                if self._chosen is not None:
                    self._client.weights = self._chosen.facts()
                    self._client.warning = self._chosen.warning
                if self._client.warning is not None:
                    write_line(self._client.warning, sys.stderr)
                self._say(f"serving {self._api.name} {where_listening(self._sockets[0])}")
        stop.cancel()

    async def _drain(self) -> None:
        """Refuse new requests, and wait until the running ones end, `drain_seconds` pass, or a second signal comes."""
        self._api.draining = True
        now = asyncio.ensure_future(self._stop_now.wait())
        with suppress(TimeoutError):
            async with asyncio.timeout(self._api.spec.drain_seconds):
                while (self._client.unfinished or self._api.workers.unfinished) and not now.done():
                    await asyncio.wait([now], timeout=0.02)
        now.cancel()


def tell_defaults(sampling: Mapping[str, Any]) -> None:
    """Print on stderr which sampling values of generation_config.json are defaults of requests."""
    if sampling:
        values = ", ".join(f"{key} {value}" for key, value in sampling.items())
        line = f"defaults of requests by generation_config.json: {values}; without: --generation-config none"
        write_line(line, sys.stderr)


async def tell_loading(client: EngineClient, name: str) -> None:
    """While the engine loads the model, print a line on stderr every `LOADING_SECONDS`."""
    began = time.monotonic()
    while client.ready is None:
        await asyncio.sleep(LOADING_SECONDS)
        if client.ready is None and client.failure is None:
            write_line(f"loading {name}: {time.monotonic() - began:.0f} s", sys.stderr)


def transfer_setup(spec: ServeSpec) -> TransferSetup | None:
    """Return the settings for the exchange of cache blocks with other engines; None if this engine exchanges none."""
    if not spec.exchanges:
        return None
    return TransferSetup(
        role=spec.role,
        address=spec.transfer_address,
        peers=spec.prefill_addresses,
        store=spec.block_cache,
        key=spec.transfer_key or "",
        seconds=spec.transfer_seconds,
    )


def uvicorn_server(app: ASGIApp, limits: ListenerLimits = SERVE) -> uvicorn.Server:
    """Return a uvicorn server whose connections obey `limits`.

    It does not handle signals; its caller does. When it ends, it closes all connections.
    """
    import uvicorn

    from meshwright.server.limited_protocol import close_late, limited_protocol

    table: ConnectionTable[Any] = ConnectionTable(limits)

    class Server(uvicorn.Server):
        """A uvicorn server that also closes connections which exceed a time limit or are left at shutdown."""

        def capture_signals(self) -> Any:
            return nullcontext()

        async def on_tick(self, counter: int) -> bool:
            if counter % TICKS_OF_SWEEP == 0:
                close_late(table)
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            # A connection accepted while the listening socket closed would get no answer, and stay open until the
            # process ends.
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

    config = uvicorn.Config(
        app,
        http=limited_protocol(table),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=5,
    )
    return Server(config)


def _check_packages() -> None:
    for package in ("starlette", "uvicorn", "httptools", "jinja2"):
        if find_spec(package) is None:
            raise BadInput(f"serving needs {package}: pip install 'meshwright[serve]'")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop, which is faster than asyncio's; None if uvloop is not installed."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


@contextmanager
def logging_on_stderr(requests: bool) -> Iterator[None]:
    """Print uvicorn's warnings on stderr, and with `requests` also the request log."""
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
