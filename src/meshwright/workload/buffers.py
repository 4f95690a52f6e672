"""Numbers and sizes of the engine's buffers for transfers between ranks and to the host."""

from __future__ import annotations

import numpy as np

from meshwright.workload.arrays import Array

UNITS_IN_FLIGHT = 2
"""Number of FSDP units whose gathered weights exist at once if they are freed after use.

They are the unit that computes, and the next unit, which is being gathered.
"""
RECEIVES_AHEAD = 2
"""Buffers of receives between pipeline stages that are posted before they are needed: one in each direction."""
DEVICE_LAYERS = 2
"""Layers whose activations are on the device if activations are offloaded: the layer that computes, and the layer that
is being copied.

A pipeline needs one more, because it copies one layer to the host while it copies another one back.
"""
BLOCK_SLOTS = 2
"""Transformer blocks for whose gathered weights the copy engines' window has a slot: the next two blocks.

The window is memory that all ranks have registered. It has one more slot, for the embedding or the head. See
parallel/copy_engine.py.
"""
STAGED_BYTES = 80 << 20
"""Bytes of one chunk of an offloaded optimizer's state (optim/host.py).

Copies of 32 MiB already reach the link's full rate. But the host needs up to 0.75 ms to launch the copies and the
update of a chunk, and the link copies 36 MB in that time.
"""
STAGING_BUFFERS = 6
"""The least number of such chunks that have a buffer on the device: one is being copied out, one is being updated, the
others are being copied in.
"""
TOKEN_SLOTS = 2
"""Slots of the window through which tensor ranks copy tokens by copy engines.

Each slot has the hidden vectors of one micro-batch.

With two slots, one synchronisation per exchange is enough (`PeerMemory`, parallel/peers.py).
"""


def staged_elements(record: Array) -> Array:
    """Return the number of elements in a chunk of an offloaded optimizer's state, rounded down to a multiple of 65,536.

    `record` is the number of bytes per element. With 12 bytes per element, 80 MiB would hold 6,990,506 elements. These
    are 106 whole groups of 65,536 elements:

    >>> float(staged_elements(12)), 106 * 65_536
    (6946816.0, 6946816)
    """
    return np.floor(STAGED_BYTES / np.asarray(record) / (1 << 16)) * (1 << 16)
