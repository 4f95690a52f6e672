"""How many buffers the engine keeps for what is on its way."""

UNITS_IN_FLIGHT = 2
"""FSDP units whose gathered weights exist at once where they are dropped after use: the one computing and the one on the wire."""
RECEIVES_AHEAD = 2
"""Buffers of receives that are posted before their compute: one in each direction."""
LAYERS_STAYING = 2
"""Layers whose activations stay on the device where the others' wait in host memory: the one that computes and the one on the link. Under
a pipeline, where backwards follow forwards of other micro-batches, one more: one is on its way out while another comes back."""
BLOCK_SLOTS = 2
"""Blocks that copy engines have room for in their window (parallel/copy_engine.py), beside one of the ends: the unit that compute waits
for next, and the one behind it."""
STAGED_ELEMENTS, STAGING_BUFFERS = 1 << 23, 3
"""Elements of a chunk of an optimizer in host memory (optim/host.py): copies of 32 MiB, long enough for the whole of the link's rate. And
the chunks on the device at once: one that comes, one that is stepped, one that leaves."""
TOKEN_SLOTS = 2
"""Slots of the window of tensor ranks that copy, each for all tokens of a micro-batch, one hidden vector wide. With two, one meeting an
exchange is enough: see `PeerMemory` (parallel/peers.py)."""
