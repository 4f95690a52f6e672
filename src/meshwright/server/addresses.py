"""Checks of the server's addresses and keys, and the sockets on which it listens."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import replace
from functools import partial

from meshwright.server.frames import UNIX
from meshwright.spec.errors import BadInput, call_all
from meshwright.spec.listen_address import listen_address
from meshwright.spec.secrets import ADMIN_KEY, API_KEY, TRANSFER_KEY, key_setting
from meshwright.spec.serve import ServeSpec

ADDRESSES = (
    "host",
    "api_key",
    "admin_port",
    "admin_key",
    "transfer_address",
    "transfer_key",
    "prefill_engines",
    "block_cache",
)
"""The settings of `ServeSpec` that `check_addresses` reads. `with_keys` may change the three keys among them."""


def with_keys(spec: ServeSpec) -> ServeSpec:
    """Return `spec` with its API key, admin key and transfer key; a missing one is taken from the environment.

    Raises BadInput for a key that no client can send, for example one with a line break inside.
    """
    api, admin, transfer = call_all(
        lambda: key_setting("api_key", spec.api_key, API_KEY),
        lambda: key_setting("admin_key", spec.admin_key, ADMIN_KEY),
        lambda: key_setting("transfer_key", spec.transfer_key, TRANSFER_KEY),
    )
    return replace(spec, api_key=api, admin_key=admin, transfer_key=transfer)


def check_addresses(spec: ServeSpec) -> None:
    """Raise BadInput if an address can be reached by others and its key is missing.

    The API's host needs `api_key` unless it is a loopback address. The admin port always needs `admin_key`. An address
    HOST:PORT of an exchange with other engines needs `transfer_key`; a Unix socket needs none.
    """
    addresses = {
        "transfer_address": [spec.transfer_address],
        "prefill_engines": spec.prefill_addresses,
        "block_cache": [spec.block_cache],
    }
    transfers = [
        partial(check_transfer, key, address, spec.transfer_key)
        for key, given in addresses.items()
        for address in given
        if address is not None and not address.startswith(UNIX)
    ]
    call_all(lambda: check_host(spec.host, spec.api_key), lambda: _check_admin_key(spec), *transfers)


def _check_admin_key(spec: ServeSpec) -> None:
    if spec.admin_port is not None and spec.admin_key is None:
        raise BadInput("admin_port: needs admin_key, or MESHWRIGHT_ADMIN_KEY in the environment", key="admin_port")


def check_host(host: str, api_key: str | None) -> None:
    """Raise BadInput if other machines can reach `host` and there is no API key."""
    if not is_loopback(host) and api_key is None:
        raise BadInput(f"host: {host} can be reached from other machines; set api_key, or use 127.0.0.1", key="host")


def check_transfer(key: str, address: str, transfer_key: str | None) -> None:
    """Raise BadInput if `address` is not a valid HOST:PORT, or if there is no `transfer_key`. `key` names the setting."""
    try:
        listen_address(address)
    except ValueError as error:
        raise BadInput(f"{key}: {error}; or {UNIX}PATH", key=key) from None
    if transfer_key is None:
        raise BadInput(f"{key}: {address} needs transfer_key; or use {UNIX}PATH on one host", key=key)


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(host: str, port: int, key: str, *, shared: bool = False) -> socket.socket:
    """Return a TCP socket that is bound to `host` and `port`, but does not listen yet.

    With `shared`, other processes of the same user may bind to the same port. The kernel then divides new connections
    among the processes that listen.

    Raises BadInput if the address cannot be used. The error names the setting `key`, which is the port's; it names
    `host` instead if this machine does not have that address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        end = socket.socket(family, socket.SOCK_STREAM)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        end.bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            key = "host"
        raise BadInput(
            f"{key}: cannot listen at {host}:{port}: {error.strerror or error}; choose another", key=key
        ) from None
    return end


def url_of(end: socket.socket) -> str:
    """Return the http:// URL of a listening socket."""
    host, port = end.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def where_listening(end: socket.socket) -> str:
    """Return in words where a listening socket is reached, and that it is not encrypted if other machines can reach it."""
    host, port = end.getsockname()[:2]
    if is_loopback(host):
        return f"at {url_of(end)}"
    where = f"on all interfaces, port {port}" if ipaddress.ip_address(host).is_unspecified else f"at {url_of(end)}"
    return f"{where}, without TLS: put a proxy with TLS in front"
