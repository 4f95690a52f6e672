"""Numbers and sizes of the engine's buffers for transfers."""

from __future__ import annotations

import numpy as np

from meshwright.workload.arrays import Array

UNITS_IN_FLIGHT = 2
"""FSDP units with gathered weights at once, if these are freed after use: the computing unit and the next one."""
RECEIVES_AHEAD = 2
"""Buffers of receives that are posted before their compute, one in each direction."""
DEVICE_LAYERS = 2
"""Layers with activations on the device if activations are offloaded: the computing and the copied layer.

A pipeline needs one more, because it copies one layer to the host while it copies another back.
"""
BLOCK_SLOTS = 2
"""Slots in the window of copy engines for gathered weights of transformer blocks: the next two blocks.

The window is memory that all ranks have registered. It has one more slot, for the embedding or the head. See parallel/copy_engine.py.
"""
STAGED_BYTES = 80 << 20
STAGING_BUFFERS = 6
"""Bytes of a chunk of an offloaded optimizer (optim/host.py), and the least chunks on the device at once.

Copies of 32 MiB reach the link's full rate, but the host takes up to 0.75 ms to launch the copies and the update of a chunk, in which the
link copies 36 MB. One chunk is copied out, one is updated, the others are copied in.
"""
TOKEN_SLOTS = 2
"""Slots of the window in which tensor ranks copy tokens; each holds the hidden vectors of a micro-batch.

With two slots one synchronisation per exchange suffices (`PeerMemory`, parallel/peers.py).
"""


def staged_elements(record: Array) -> Array:
    """Elements of a chunk whose record has `record` bytes an element: whole groups of 65,536.

    With 12 bytes an element 80 MiB hold 6,990,506 elements, in 106 whole groups:

    >>> float(staged_elements(12)), 106 * 65_536
    (6946816.0, 6946816)
    """
    return np.floor(STAGED_BYTES / np.asarray(record) / (1 << 16)) * (1 << 16)
