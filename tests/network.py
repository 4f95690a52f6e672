"""What tests of bytes on the wire count, whatever else the host sends: a process's own sockets, or a network of its own."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

PRIVATE_NETWORK = ("unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Words in front of a command that give it a network with nothing but its own loopback interface."""
_RECEIVED, _SENT, _SENT_AGAIN = 128, 200, 208
"""Offsets in the kernel's `struct tcp_info` of its counts of bytes (Linux 4.19)."""


@cache
def private_network_problem() -> str | None:
    """Why a command cannot have a network of its own here; None if it can."""
    try:
        answer = subprocess.run([*PRIVATE_NETWORK, "true"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return f"{PRIVATE_NETWORK[0]}: {error}"
    return (answer.stderr.strip() or f"code {answer.returncode}") if answer.returncode else None


@dataclass(frozen=True)
class OwnSockets:
    """Counts the bytes that this process sends to and receives from others over TCP, without headers.

    Between two ranks that is what `interface_counters.Traffic` counts on loopback, without other programs. It has the
    same methods.
    """

    before: int

    @classmethod
    def start(cls, interface: str = "lo") -> OwnSockets | None:
        """Start a count; None if the kernel does not count."""
        del interface
        return None if (total := _own_bytes()) is None else cls(total)

    def bytes(self) -> int:
        return (_own_bytes() or 0) - self.before


def _own_bytes() -> int | None:
    """Bytes of the sockets that are open; one that is opened later begins with none. None if the kernel does not count."""
    total = 0
    for each in _own_sockets():
        with each:
            information = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(information) < _SENT_AGAIN + 8:
                return None
            received, sent, again = (
                struct.unpack_from("Q", information, at)[0] for at in (_RECEIVED, _SENT, _SENT_AGAIN)
            )
            total += received + sent - again
    return total


def _own_sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()
