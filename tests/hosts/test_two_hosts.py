"""Two hosts on this machine: what is their own, the rate of their links, and a partition. `make test-hosts` runs all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from meshwright.chaos.hosts import Hosts, Links, address, host_name, namespace_obstacle
from meshwright.chaos.suite import Suite, scenario_named
from tests.training.tiny import make_tiny, tiny_run

pytestmark = pytest.mark.skipif(namespace_obstacle() is not None, reason=f"two hosts: {namespace_obstacle()}")
LINKS = Links("400mbit")
"""Links under jobs: 50 MB/s each way."""

SEND = """
import socket, sys
sent = socket.create_connection((sys.argv[1], 5000), timeout=20)
for size in sys.stdin:
    sent.sendall(bytes(int(size)))
"""
"""Connects to a host and sends as many bytes as each line of standard input says."""
RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
print("ready", flush=True)
taken, total, began = server.accept()[0], 0, time.monotonic()
while data := taken.recv(1 << 20):
    total += len(data)
    print(total, time.monotonic() - began, flush=True)
"""
"""Prints the bytes that have arrived, and the seconds since the connection."""


ECHO = """
import socket
echo = socket.socket(type=socket.SOCK_DGRAM)
echo.bind(("", 5000))
print("ready", flush=True)
while True:
    echo.sendto(*echo.recvfrom(2000))
"""
"""Sends back what comes."""
ASK = """
import contextlib, socket, sys, time
asking = socket.socket(type=socket.SOCK_DGRAM)
asking.connect((sys.argv[1], 5000))
asking.settimeout(0.5)
heard = b""
while heard != b"begin":  # the hosts may lose the question for the other's hardware address
    asking.send(b"begin")
    with contextlib.suppress(TimeoutError):
        heard = asking.recv(2000)
sent = {}
for number in range(100):
    sent[str(number).encode()] = time.monotonic()
    asking.send(str(number).encode())
with contextlib.suppress(TimeoutError):
    while True:
        if (heard := asking.recv(2000)) in sent:
            print(time.monotonic() - sent[heard])
"""
"""Sends 100 datagrams, and prints the seconds until each that comes back."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with closing(Hosts(2, tmp_path, Links("80mbit"), shared=[tmp_path])) as made:
        yield made


def on(hosts: Hosts, host: int, *command: str) -> str:
    return subprocess.run(
        [*hosts.prefix(host), *command], check=True, capture_output=True, text=True, timeout=30
    ).stdout


class Flow:
    """Bytes from host 0 to host 1 over one connection."""

    def __init__(self, hosts: Hosts) -> None:
        self.total, self.seconds = 0, 0.0
        self.receiver = self._start(hosts.prefix(1), RECEIVE)
        self._line()
        self.sender = self._start(hosts.prefix(0), SEND, address(1))

    def _start(self, prefix: Sequence[str], code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-c", code, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _line(self) -> str:
        assert self.receiver.stdout is not None
        return self.receiver.stdout.readline()

    def send(self, count: int) -> None:
        assert self.sender.stdin is not None
        self.sender.stdin.write(f"{count}\n")
        self.sender.stdin.flush()

    def wait_for(self, total: int) -> float:
        """Seconds since the connection at which `total` bytes had arrived."""
        while self.total < total:
            total_text, seconds = self._line().split()
            self.total, self.seconds = int(total_text), float(seconds)
        return self.seconds

    def close(self) -> None:
        for process in (self.sender, self.receiver):
            process.kill()
            process.communicate()


def test_names_temporary_files_and_shared_memory_are_of_each_host(hosts: Hosts, tmp_path: Path) -> None:
    assert [on(hosts, host, "uname", "-n").strip() for host in (0, 1)] == [host_name(0), host_name(1)]
    assert on(hosts, 1, "getent", "hosts", host_name(0)).split() == [address(0), host_name(0)]
    (tmp_path / "common").touch()
    on(hosts, 0, "touch", "/tmp/mine", "/dev/shm/mine")
    for folder in ("/tmp", "/dev/shm"):
        assert "mine" in on(hosts, 0, "ls", folder) and "mine" not in on(hosts, 1, "ls", folder)
    assert "common" in on(hosts, 1, "ls", str(tmp_path))
    assert on(hosts, 1, "pwd").strip() == str(Path.cwd())
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/mine").exists()


def test_links_have_their_rate_and_a_partition_only_delays_what_is_sent(hosts: Hosts) -> None:
    with closing(Flow(hosts)) as flow:
        flow.send(3_000_000)
        assert flow.wait_for(3_000_000) > 0.2  # 10 MB/s; 0.26 MB pass at once
        hosts.set_reachable(1, False)
        flow.send(1000)
        time.sleep(0.3)
        hosts.set_reachable(1, True)
        flow.wait_for(3_001_000)
        hosts.set_link(1, False)
        flow.send(1000)
        time.sleep(0.3)
        hosts.set_link(1, True)
        flow.wait_for(3_002_000)


@pytest.mark.parametrize("links", [Links(seconds=0.03), Links(loss=0.2)], ids=str)
def test_links_are_late_or_lose_frames(links: Links, tmp_path: Path) -> None:
    with closing(Hosts(2, tmp_path, links)) as hosts:
        (relay,) = [process for process in hosts._processes if process not in hosts._holders]
        echo = subprocess.Popen([*hosts.prefix(1), sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        answered = sorted(map(float, on(hosts, 0, sys.executable, "-c", ASK, address(1)).split()))
        echo.kill()
        echo.communicate()
        if links.loss:
            assert 45 <= len(answered) <= 83  # (1 - 0.2) ** 2 of them, and four deviations
        else:
            assert len(answered) == 100 and answered[0] >= 0.06 and answered[50] < 0.09
    assert relay.returncode is not None


def test_namespaces_end_with_the_hosts(tmp_path: Path) -> None:
    hosts = Hosts(2, tmp_path)
    names = list(hosts._names)
    hosts.close()
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert len(names) == 3 and not any(name in left for name in names)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    file = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    return Suite(tiny_run(file), [str(file)], tmp_path_factory.mktemp("runs"), steps=36, patience=3.0, links=LINKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lose-host-partner", "lose-coordinator", "partition", "lost-gpu", "drain-host"])
def test_a_promise_is_kept_over_slow_links(suite: Suite, name: str) -> None:
    """Agents, coordinator, store, Gloo and snapshots of partners share links of 400 Mbit/s."""
    verdict = suite.run(scenario_named(name))
    assert verdict.ok, verdict.observed
