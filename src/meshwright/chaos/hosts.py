"""Several hosts on one machine: network namespaces with links to a switch; without root, processes on loopback."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE, HOST_VARIABLE

INTERFACE = "host0"
"""Name of every host's network interface."""
PORT = 29400
"""Port of the coordinator in the network that the hosts share."""


def namespace_obstacle() -> str | None:
    """Return why this process cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    missing = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    return f"there is no command {missing[0]}" if missing else None


class Hosts:
    """Emulated hosts, numbered from 0. Without root they share the loopback interface and their links cannot be cut."""

    def __init__(self, count: int, folder: Path) -> None:
        """Make the hosts; the job's token is written to `folder`."""
        self._prefix = f"mw{secrets.token_hex(3)}"
        self.emulation = "processes on the loopback interface" if namespace_obstacle() else "network namespaces"
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(16))
        self._names: list[str] = []
        if not namespace_obstacle():
            try:
                self._make(count)
            except BaseException:
                self.close()
                raise

    def _make(self, count: int) -> None:
        switch = f"{self._prefix}s"
        self._add(switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in range(count):
            name, port = f"{self._prefix}{host}", f"port{host}"
            self._add(name)
            _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._names.append(name)

    def prefix(self, host: int) -> list[str]:
        """Words before a command that runs it on a host."""
        return ["nsenter", f"--net=/run/netns/{self._prefix}{host}"] if self._names else []

    def environment(self, host: int) -> dict[str, str]:
        """Environment variables of the agent of a host; host 0 has the coordinator."""
        address = _address(0) if self._names else "127.0.0.1"
        coordinator_variables = {
            COORDINATOR_VARIABLE: f"{address}:{PORT}",
            TOKEN_VARIABLE: str(self._token),
            HOST_VARIABLE: host_name(host),
        }
        return coordinator_variables | ({"GLOO_SOCKET_IFNAME": INTERFACE} if self._names else {})

    def set_link(self, host: int, up: bool) -> None:
        """Cut the link between a host and the switch, or restore it."""
        _ip("-n", f"{self._prefix}s", "link", "set", f"port{host}", "up" if up else "down")

    def close(self) -> None:
        """Remove the namespaces with their interfaces."""
        while self._names:
            _ip("netns", "delete", self._names.pop())


def host_name(host: int) -> str:
    """The name of an emulated host."""
    return f"emulated{host}"


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
