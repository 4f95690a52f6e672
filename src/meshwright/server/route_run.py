"""Runs the router: its listening socket, health checks of the servers, signals, and shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.connections.limits import raise_file_limit
from meshwright.server.addresses import check_host, listening_socket, where_listening
from meshwright.server.background import guarded
from meshwright.server.instances import Instances, targets_of
from meshwright.server.process_memory import keep_loaded
from meshwright.server.router import ClientConnection
from meshwright.server.router_state import Router
from meshwright.server.run import logging_on_stderr, loop_factory
from meshwright.spec.errors import BadInput, call_all
from meshwright.spec.route import RouteSpec
from meshwright.spec.secrets import API_KEY, hide_arguments, key_setting

BACKLOG = 1024
"""Connections that may wait to be accepted."""


def run_router(spec: RouteSpec, say: Callable[[str], None]) -> None:
    """Route requests to servers until SIGTERM or Ctrl-C.

    `say` is called with a line that has the router's address. Raises BadInput for wrong settings.
    """
    raise_file_limit()
    hide_arguments([spec.api_key])
    spec = replace(spec, api_key=key_setting("api_key", spec.api_key, API_KEY))
    call_all(lambda: _check_urls(spec.instances), lambda: check_host(spec.host, spec.api_key))
    instances = Instances(spec.instances, spec.requests, spec.health_seconds, spec.silent_seconds)
    with (
        listening_socket(spec.host, spec.port, "port", shared=spec.share_port) as end,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
        logging_on_stderr(requests=True),
    ):
        runner.run(route(Router(spec, instances), end, say))


def _check_urls(urls: Sequence[str]) -> None:
    if not urls:
        raise BadInput("instances: expected the URL of at least one server", key="instances")
    targets_of(urls)


async def route(router: Router, end: socket.socket, say: Callable[[str], None]) -> None:
    """Route the requests that arrive at the listening socket `end`, until a signal comes.

    After the first signal, requests that are being answered may finish, for at most `drain_seconds`. A second signal
    ends them at once.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stop_now = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            stop_now.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    watching = asyncio.ensure_future(guarded("health", router.instances.watch, router.task_failures))
    await router.instances.known.wait()
    server = await loop.create_server(lambda: ClientConnection(router), sock=end, backlog=BACKLOG)
    keep_loaded()
    ready = sum(instance.healthy for instance in router.instances.all.values())
    count = len(router.spec.instances)
    say(f"routing to {count} server{'s' * (count > 1)}, {ready} of them ready, {where_listening(end)}")
    await stop.wait()
    router.draining = True
    server.close()
    now = asyncio.ensure_future(stop_now.wait())
    try:
        async with asyncio.timeout(router.spec.drain_seconds):
            while router.unfinished and not now.done():
                await asyncio.wait([now], timeout=0.02)
    except TimeoutError:
        pass
    now.cancel()
    watching.cancel()
    for client in list(router.clients):
        client.transport.abort()
    await asyncio.gather(watching, now, return_exceptions=True)
