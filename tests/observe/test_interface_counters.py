"""Bytes through an interface are the kernel's, and loopback's count holds what was sent over it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from meshwright.observe import interface_counters as traffic
from meshwright.observe.interface_counters import Traffic, sent_bytes

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


@pytest.mark.skipif(not traffic.COUNTERS.exists(), reason="the kernel has no /proc/net/dev")
def test_loopback_counts_what_goes_over_it_once() -> None:
    """In the quietest of some tries: others use loopback too."""
    size = 64 << 20
    counts = [_counted(size) for _ in range(3)]
    assert size <= min(counts) < 1.3 * size


def _counted(size: int) -> int:
    counted = Traffic.start()
    assert counted is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        writer = threading.Thread(target=lambda: (client.sendall(bytes(size)), client.shutdown(socket.SHUT_WR)))
        writer.start()
        with peer:
            while peer.recv(1 << 20):
                pass
        writer.join()
    return counted.bytes()
