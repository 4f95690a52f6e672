"""Bytes through an interface are the kernel's, and loopback's count holds what was sent over it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshwright.observe import interface_counters as traffic
from meshwright.observe.interface_counters import Traffic, sent_bytes
from tests.network import PRIVATE_NETWORK, private_network_problem

ROOT = Path(__file__).parents[2]
SIZE = 8 << 20
COUNTERS = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1000 10 0 0 0 0 0 0 1000 10 0 0 0 0 0 0
  eth0:5000 10 0 0 0 0 0 0 {sent} 10 0 0 0 0 0 0
"""


def test_sent_bytes_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dev"
    file.write_text(COUNTERS.format(sent=700))
    assert [sent_bytes(name, file) for name in ("lo", "eth0", "eth", "face |bytes")] == [1000, 700, None, None]
    assert sent_bytes("lo", tmp_path / "none") is None
    monkeypatch.setattr(traffic.sent_bytes, "__defaults__", (file,))
    counted = Traffic.start("eth0")
    assert counted is not None
    file.write_text(COUNTERS.format(sent=1950))
    assert counted.bytes() == 1250
    assert Traffic.start("eth1") is None


def test_loopback_counts_what_goes_over_it_once() -> None:
    """In a network of its own, where nothing else is sent."""
    if (problem := private_network_problem()) is not None:
        pytest.skip(f"a process cannot have a network of its own: {problem}")
    command = [*PRIVATE_NETWORK, sys.executable, "-c", f"from {__name__} import *; print(counted({SIZE}))"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    assert SIZE <= int(answer.stdout) < 1.01 * SIZE


def counted(size: int) -> int:
    """Bytes that loopback counts while so many go over it."""
    counting = Traffic.start()
    assert counting is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        writer = threading.Thread(target=lambda: (client.sendall(bytes(size)), client.shutdown(socket.SHUT_WR)))
        writer.start()
        with peer:
            while peer.recv(1 << 20):
                pass
        writer.join()
    return counting.bytes()
