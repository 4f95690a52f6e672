"""Seconds and activation memory of a sample by its length, and the fewest ranks that it fits on.

The method is that of ByteScale (Ge et al. 2025, arXiv 2502.21231, section 5): attention grows with the square of the length, the other work
and all activations with the length, so a longer sample hides more offload behind its own work and needs fewer ranks per token.
Operations are elementwise and correctly rounded, so all ranks get the same values bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.spec.errors import BadInput

FORWARD_SHARE = 1 / 3.5
"""Share of attention's time that is forward; of other work it is a third."""
ROUNDING = 1e-12
"""Relative error of a capacity divided by a share."""


@dataclass(frozen=True)
class SampleTime:
    """Seconds of forward and backward: `quadratic` · s² + `linear` · s for s tokens, and `fixed` for each micro-batch."""

    quadratic: float
    linear: float
    fixed: float = 0.0
    ring: float = 0.0
    """Seconds per token of a divided sample for keys and values to go round a ring of any ranks; attention overlaps it."""
    exchange: float = math.inf
    """Seconds per token of a part to exchange tokens for heads (Ulysses), not overlapped; infinite: always a ring."""
    always_exchange: bool = False
    """Whether ranks exchange wherever their number divides the heads, even if a ring is faster."""

    def shared(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds `(S,)` of samples of `lengths` `(S,)` tokens, which ranks divide among them."""
        tokens = lengths.astype(np.float64)
        return (self.quadratic * tokens + self.linear) * tokens

    def attention(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds `(S,)` of the part of `shared` that grows with the square of the length."""
        tokens = lengths.astype(np.float64)
        return self.quadratic * tokens * tokens

    def parts(self, lengths: np.ndarray, ranks: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a part of samples of `lengths` tokens on `ranks` ranks each, and whether these exchange heads, `(S,)`.

        They do if their number divides the `heads` key/value heads, and if that takes no longer than the ring or with `always_exchange`.
        """
        tokens = lengths.astype(np.float64)
        shared = self.shared(lengths) / ranks
        exposed = np.maximum(self.ring * tokens - self.attention(lengths) / ranks, 0.0)
        ring = np.where(ranks > 1, shared + exposed, shared)
        exchanged = shared + self.exchange * tokens / ranks
        by_heads = (ranks > 1) & (heads % ranks == 0) & (self.always_exchange | (exchanged <= ring))
        return np.where(by_heads, exchanged, ring), by_heads


def offload_ratios(
    lengths: np.ndarray, time: SampleTime, bytes_per_token: float, bytes_per_second: float
) -> np.ndarray:
    """Largest share `(S,)` of a sample's activations whose copy to host memory is hidden behind the sample's work.

    `bytes_per_token` are the activations of all layers, `bytes_per_second` the slower direction of a rank's copies.
    """
    tokens = lengths.astype(np.float64)
    hidden = (time.quadratic * tokens + time.linear) * (bytes_per_second / bytes_per_token)
    return np.minimum(hidden, 1.0)


def memory_shares(ratios: np.ndarray, layers: int) -> np.ndarray:
    """Device memory of a sample's activations with `ratios` of them offloaded, as a share of that without offload.

    The activations of the last two of `layers` layers stay on the device, as the backward needs them at once.
    """
    stay = min(2, layers)
    return (stay + (1.0 - ratios) * (layers - stay)) / layers


def shortest_hiding(time: SampleTime, copy_seconds: float) -> float:
    """Tokens of the shortest sample in whose forward copies of `copy_seconds` per token are hidden; infinite if in none.

    The forward is the shorter of the two passes, and each has the copies of one direction.
    """
    missing = copy_seconds - FORWARD_SHARE * time.linear
    if missing <= 0:
        return 1.0
    return missing / (FORWARD_SHARE * time.quadratic) if time.quadratic > 0 else math.inf


def least_ranks(lengths: np.ndarray, shares: np.ndarray, capacity: int) -> np.ndarray:
    """Fewest ranks `(S,)` whose memory for `capacity` tokens holds samples that need `shares` `(S,)` of the usual memory.

    Raises BadInput if `capacity` is odd: a rank of a divided sample has two blocks of equal size.
    """
    if capacity < 2 or capacity % 2:
        raise BadInput(f"capacity {capacity}: expected an even, positive number of tokens")
    tokens = 2 * np.floor(capacity / (2.0 * shares) * (1 + ROUNDING)).astype(np.int64)
    return -(-lengths // tokens)
