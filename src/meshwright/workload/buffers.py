"""Numbers and sizes of the engine's buffers for transfers."""

UNITS_IN_FLIGHT = 2
"""FSDP units with gathered weights at once, if these are freed after use: the computing unit and the next one."""
RECEIVES_AHEAD = 2
"""Buffers of receives that are posted before their compute, one in each direction."""
DEVICE_LAYERS = 2
"""Layers with activations on the device if activations are offloaded: the computing layer and the copied layer. A pipeline needs one
more, because it copies one layer to the host while it copies another back."""
BLOCK_SLOTS = 2
"""Blocks that fit into the window of copy engines (parallel/copy_engine.py) beside one end of the model: the next two units."""
STAGED_ELEMENTS, STAGING_BUFFERS = 1 << 23, 3
"""Elements of a chunk of an optimizer in host memory (optim/host.py): copies of 32 MiB reach the link's full rate. And chunks on the device
at once: one is copied in, one is updated, one is copied out."""
TOKEN_SLOTS = 2
"""Slots of the window in which tensor ranks copy tokens; each holds the hidden vectors of a whole micro-batch. With two slots one
synchronisation per exchange suffices (`PeerMemory`, parallel/peers.py)."""
