"""Addresses at which a process listens, as users write them."""

from __future__ import annotations

import ipaddress
import re

LOOPBACK = "127.0.0.1"
"""The address of this host that other hosts cannot reach."""
EXPECTED = "HOST:PORT with a port of 0 to 65535, or :PORT for 127.0.0.1"
"""What messages expect."""
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


def address_text(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[IPV6]:PORT` or `:PORT`. Without a host it is the loopback address.

    Raises ValueError for any other form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 0xFFFF:
        raise ValueError(f"{text!r}: expected {EXPECTED}")
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1])), int(port)
    if host and not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{text!r}: expected {EXPECTED}")
    return host or LOOPBACK, int(port)
