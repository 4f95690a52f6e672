"""How many buffers the engine keeps for what is on its way."""

UNITS_IN_FLIGHT = 2
"""FSDP units with gathered weights at a time if they are freed after use: one computing and one being gathered."""
RECEIVES_AHEAD = 2
"""Buffers of receives that are posted before their compute: one in each direction."""
LAYERS_STAYING = 2
"""Layers with activations on the device if others are offloaded: one computing and one being copied.

One more under a pipeline, where backwards follow forwards of other micro-batches: one is copied out while another is
copied back.
"""
BLOCK_SLOTS = 2
"""Blocks that fit into the window of copy engines (parallel/copy_engine.py), besides one of the ends.

The unit for which compute waits next, and the one after it.
"""
STAGED_ELEMENTS, STAGING_BUFFERS = 1 << 23, 3
"""Elements of a chunk of an offloaded optimizer (optim/host.py), and the number of chunks on the device at once.

Copies of 32 MiB, long enough for the full rate of the link. One chunk arrives, one is updated, one leaves.
"""
TOKEN_SLOTS = 2
"""Slots of the window of tensor ranks that use copy engines, each for all tokens of a micro-batch, one hidden vector wide.

With two, one synchronisation per exchange is enough: see `PeerMemory` (parallel/peers.py).
"""
