"""Emulates several hosts on one machine. Without root, hosts are only processes on the loopback interface.

Each emulated host has a network namespace with a link to a switch, a hostname, a /dev/shm, and an /etc/hosts that names
all hosts. It can also have a /tmp of its own. Links can be slow, delayed or lossy. They can be down, or stay up while
the switch drops everything.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import meshwright
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE, HOST_VARIABLE

INTERFACE = "host0"
"""Name of the network interface of every host."""
PORT = 29400
"""TCP port of the coordinator in the network of the hosts."""
QUEUE = ("burst", "256kb", "latency", "50ms")
"""Size of bursts and longest delay in the queue of a slow link, as arguments of tc(8)."""
_HOLD = """
set -e
name=$1; names=$2; own=$3; shift 3
echo "$name" > /proc/sys/kernel/hostname
mount --bind "$names" /etc/hosts
mount -t tmpfs shm /dev/shm
if [ "$own" ]; then
    for shared; do mkdir -p "$own/${shared#/tmp/}"; mount --bind "$shared" "$own/${shared#/tmp/}"; done
    mount --rbind "$own" /tmp
fi
echo ready
exec cat
"""
"""Script of a process that keeps the namespaces of a host until its standard input ends.

Arguments: the host's name, its /etc/hosts, the folder of its own /tmp or nothing, and folders of /tmp that stay shared.
"""


@cache
def namespace_obstacle() -> str | None:
    """Return why this process cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    missing = [name for name in ("ip", "tc", "bridge", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"there is no command {missing[0]}"
    made = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"this root may not make namespaces: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True)
class Links:
    """The links between the hosts and their switch."""

    rate: str | None = None
    """Most bits per second in each direction of each link, for example `400mbit`; None for no limit."""
    seconds: float = 0.0
    """Delay from one host to another, in seconds."""
    loss: float = 0.0
    """Share of the frames that are lost, 0 to 1."""

    @property
    def relayed(self) -> bool:
        """Whether frames are delayed or lost. Such links need the process `chaos.relay`."""
        return bool(self.seconds or self.loss)

    def __str__(self) -> str:
        parts = [f"of {self.rate}"] if self.rate else []
        parts += [f"with {1000 * self.seconds:g} ms between hosts"] if self.seconds else []
        parts += [f"that lose {self.loss:.1%}"] if self.loss else []
        return " ".join(["links", *parts])


class Hosts:
    """Emulated hosts, numbered from 0. Without root they share the loopback interface, and their links cannot be cut."""

    def __init__(self, count: int, folder: Path, links: Links = Links(), shared: Sequence[Path] | None = None) -> None:
        """Make `count` hosts. The job's token is written into `folder`.

        With `shared`, each host has a /tmp of its own. Only the folders in `shared` are in the /tmp of every host.
        """
        self._prefix = f"mw{secrets.token_hex(3)}"
        self.emulation = "processes on the loopback interface"
        """How the hosts are emulated, in words."""
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(16))
        self._names: list[str] = []
        self._holders: list[subprocess.Popen[bytes]] = []
        """For each host, the process that keeps its namespaces."""
        self._processes: list[subprocess.Popen[bytes]] = []
        """The processes in `_holders`, and the relay."""
        if not namespace_obstacle():
            self.emulation = "namespaces" if links == Links() else f"namespaces, {links}"
            try:
                self._make(count, links)
                if links.relayed:
                    self._relay(count, links)
                names = folder / "hosts"
                lines = ["127.0.0.1 localhost", *(f"{address(host)} {host_name(host)}" for host in range(count))]
                names.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
                for host in range(count):
                    own = None if shared is None else folder / f"tmp-{host}"
                    self._hold(host, names, own, shared or ())
            except BaseException:
                self.close()
                raise

    def _make(self, count: int, links: Links) -> None:
        """Make the network: a namespace with a bridge as switch, and a namespace with a link to the switch for each host."""
        switch = f"{self._prefix}s"
        self._add(switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in range(count):
            name = f"{self._prefix}{host}"
            port = f"port{host}"
            self._add(name)
            if links.relayed:
                for namespace, device in ((name, INTERFACE), (switch, port)):
                    _ip("-n", namespace, "tuntap", "add", "dev", device, "mode", "tap")
            else:
                _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            if links.rate:
                self.set_rate(host, links.rate)

    def _relay(self, count: int, links: Links) -> None:
        """Start the process that connects the two devices of each link.

        A link delays frames by half of the time between two hosts.
        """
        ends = [f"{self._prefix}{host}/{INTERFACE}-{self._prefix}s/port{host}" for host in range(count)]
        command = [sys.executable, "-m", "meshwright.chaos.relay", str(links.seconds / 2), str(links.loss), *ends]
        source = str(Path(meshwright.__file__).parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        self._await_ready(command, "the relay of the links", {**os.environ, "PYTHONPATH": path})

    def _add(self, name: str) -> None:
        _ip("netns", "add", name)
        self._names.append(name)

    def _hold(self, host: int, names: Path, own: Path | None, shared: Sequence[Path]) -> None:
        """Start the process that keeps a host's namespaces, with its name, the hosts file `names`, its /dev/shm and its
        /tmp.

        `own` is the folder of its own /tmp; None for the usual one. Its own /tmp also contains the working directory
        and the program, if these are in the usual /tmp.
        """
        needed = (*shared, Path.cwd(), Path(meshwright.__file__).parents[1], Path(sys.prefix))
        folders = [str(path.resolve()) for path in needed if path.resolve().is_relative_to("/tmp")]
        if own is not None:
            own.mkdir(mode=0o1777, exist_ok=True)
        network = f"--net=/run/netns/{self._prefix}{host}"
        namespaces = ["nsenter", network, "unshare", "--uts", "--mount", "--propagation", "private"]
        arguments = [host_name(host), str(names.resolve()), "" if own is None else str(own.resolve()), *folders]
        script = ["sh", "-c", _HOLD, "sh", *arguments]
        self._holders.append(self._await_ready([*namespaces, *script], f"the namespaces of {host_name(host)}"))

    def _await_ready(
        self, command: Sequence[str], what: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that runs until `close`, and wait until it prints that it is ready."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._processes.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise OSError(f"{what} cannot be made: exit code {process.wait()}")
        return process

    def prefix(self, host: int) -> list[str]:
        """Return the arguments to put before a command, so that it runs on a host, in the working directory of this process."""
        if not self._holders:
            return []
        namespaces = ["nsenter", f"--target={self._holders[host].pid}", "--net", "--uts", "--mount"]
        return [*namespaces, "env", "-C", os.getcwd()]

    def environment(self, host: int) -> dict[str, str]:
        """Return environment variables for the agent of a host. They name host 0 as the coordinator's host."""
        coordinator_variables = {
            COORDINATOR_VARIABLE: f"{address(0) if self._names else '127.0.0.1'}:{PORT}",
            TOKEN_VARIABLE: str(self._token),
        }
        own = {"GLOO_SOCKET_IFNAME": INTERFACE} if self._names else {HOST_VARIABLE: host_name(host)}
        return coordinator_variables | own

    def set_link(self, host: int, up: bool) -> None:
        """Take the link between a host and the switch down, or up again. The host can see that the link is down."""
        _ip("-n", f"{self._prefix}s", "link", "set", f"port{host}", "up" if up else "down")

    def set_rate(self, host: int, rate: str | None) -> None:
        """Limit both directions of a host's link, for example to `400mbit`. None removes the limit."""
        for namespace, device in ((f"{self._prefix}{host}", INTERFACE), (f"{self._prefix}s", f"port{host}")):
            if rate is None:
                _run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
            else:
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *QUEUE)

    def set_reachable(self, host: int, reachable: bool) -> None:
        """Let the switch drop everything that a host sends or should receive, or forward it again. The link stays up."""
        state = "3" if reachable else "0"  # states of a bridge port: 3 is forwarding, 0 is disabled
        _run("bridge", "-n", f"{self._prefix}s", "link", "set", "dev", f"port{host}", "state", state)

    def close(self) -> None:
        """Remove the namespaces and their interfaces, and end the processes."""
        self._holders.clear()
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        while self._names:
            _ip("netns", "delete", self._names.pop())


def host_name(host: int) -> str:
    """Return the name of an emulated host."""
    return f"emulated{host}"


def address(host: int) -> str:
    """Return the IP address of an emulated host."""
    return f"10.77.0.{host + 1}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
