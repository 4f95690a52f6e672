"""Relays network frames between the two devices of each link, with a delay and with losses. For kernels without netem.

It needs Linux and root.

    python -m meshwright.chaos.relay SECONDS LOSS NAMESPACE/DEVICE-NAMESPACE/DEVICE…

Each NAMESPACE/DEVICE is an existing TAP device, and each pair of them is a link. A frame arrives after SECONDS. The
share LOSS of the frames from the first device to the second is lost. The program prints `ready`, and ends when its
standard input ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 1 << 16
MOST_FRAMES = 20_000
"""Most frames that are in transit. Further frames are lost, as in a full queue."""


def open_tap(namespace: str, device: str) -> int:
    """Open an existing TAP device in a named network namespace, and return its file descriptor.

    This process stays in that namespace.
    """
    with open(f"/run/netns/{namespace}", "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def relay(links: Sequence[tuple[int, int]], seconds: float, loss: float) -> None:
    """Relay frames between the two file descriptors of each link, until standard input ends."""
    other = {**dict(links), **{second: first for first, second in links}}
    lossy = {first for first, _ in links}
    poll = select.poll()
    for descriptor in (*other, sys.stdin.fileno()):
        poll.register(descriptor, select.POLLIN)
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    drawn = random.Random(0)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            with suppress(OSError):  # the device is down, or its queue is full
                os.write(target, frame)
        wait = None if not waiting else max(0.0, 1000 * (waiting[0][0] - now))
        for descriptor, _ in poll.poll(wait):
            if descriptor not in other:
                return
            try:
                frame = os.read(descriptor, FRAME_BYTES)
            except OSError:
                continue
            if len(waiting) < MOST_FRAMES and not (descriptor in lossy and drawn.random() < loss):
                number += 1
                heapq.heappush(waiting, (time.monotonic() + seconds, number, other[descriptor], frame))


def main() -> None:
    """Relay the links that the arguments name."""
    seconds, loss, *names = sys.argv[1:]
    ends = [[open_tap(*end.split("/")) for end in name.split("-")] for name in names]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay([(first, second) for first, second in ends], float(seconds), float(loss))


if __name__ == "__main__":
    main()
