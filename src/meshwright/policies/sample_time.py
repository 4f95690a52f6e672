"""Seconds and activation memory of a sample by its length, and the fewest ranks that it fits on.

The method is from ByteScale (Ge et al. 2025, arXiv 2502.21231, section 5). Attention time grows with the square of the length; all other
work, and the memory of activations, grow with the length. So a longer sample can overlap more offload with its own work, and needs fewer
ranks per token. Operations are elementwise and correctly rounded, so all ranks get bitwise equal values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwright.spec.errors import BadInput

FORWARD_SHARE = 1 / 3.5
"""Share of the forward in the time of attention. In other work the forward takes a third."""
ROUNDING = 1e-12
"""Allowed relative error of a capacity divided by a share."""


@dataclass(frozen=True)
class SampleTime:
    """Seconds of forward and backward: `quadratic` · s² + `linear` · s for a sample of s tokens, plus `fixed` for each micro-batch."""

    quadratic: float
    linear: float
    fixed: float = 0.0
    ring: float = 0.0
    """Seconds per token of a divided sample in which keys and values go round a ring, for any number of ranks. Attention overlaps this."""
    exchange: float = math.inf
    """Seconds per token of a part to exchange tokens for heads (Ulysses). Nothing overlaps this. Infinite if a ring must always be used."""
    always_exchange: bool = False
    """Whether ranks exchange tokens for heads whenever their number divides the heads, even if a ring would be faster."""

    def shared(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds `(S,)` of samples of `lengths` `(S,)` tokens on one rank. If a sample is divided, its ranks share this work."""
        tokens = lengths.astype(np.float64)
        return (self.quadratic * tokens + self.linear) * tokens

    def attention(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds `(S,)` of attention: the part of `shared` that grows with the square of the length."""
        tokens = lengths.astype(np.float64)
        return self.quadratic * tokens * tokens

    def parts(self, lengths: np.ndarray, ranks: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of one part of each sample, `(S,)`, and whether its ranks exchange tokens for heads, `(S,)` bool.

        Sample i has `lengths[i]` tokens and is divided among `ranks[i]` ranks. The ranks exchange tokens for heads if their number divides
        the `heads` key/value heads, and if this takes no longer than a ring or `always_exchange` is set.
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
    """The largest share `(S,)` of a sample's activations that can be copied to host memory while the sample is computed.

    `bytes_per_token` are the activations of all layers. `bytes_per_second` is the bandwidth of a rank's copies in the slower direction.
    """
    tokens = lengths.astype(np.float64)
    hidden = (time.quadratic * tokens + time.linear) * (bytes_per_second / bytes_per_token)
    return np.minimum(hidden, 1.0)


def memory_shares(ratios: np.ndarray, layers: int) -> np.ndarray:
    """Device memory of a sample's activations if the share `ratios` of them is offloaded, relative to the memory without offload.

    Activations of the last two of `layers` layers stay on the device, because the backward needs them at once.
    """
    stay = min(2, layers)
    return (stay + (1.0 - ratios) * (layers - stay)) / layers


def shortest_hiding(time: SampleTime, copy_seconds: float) -> float:
    """Tokens of the shortest sample whose forward takes as long as its copies, at `copy_seconds` per token; infinite if there is none.

    The forward decides, because it is shorter than the backward, and each of them has the copies of one direction.
    """
    missing = copy_seconds - FORWARD_SHARE * time.linear
    if missing <= 0:
        return 1.0
    return missing / (FORWARD_SHARE * time.quadratic) if time.quadratic > 0 else math.inf


def least_ranks(lengths: np.ndarray, shares: np.ndarray, capacity: int) -> np.ndarray:
    """The fewest ranks `(S,)` on which each sample fits.

    A rank has memory for `capacity` tokens at full memory per token. The tokens of a sample need only the share `shares` `(S,)` of that.
    Example: a sample of 10,000 tokens with a share of 0.5 and a capacity of 4096 needs two ranks, of 8192 tokens each. Raises BadInput if
    `capacity` is odd, because a rank of a divided sample has two blocks of equal size.
    """
    if capacity < 2 or capacity % 2:
        raise BadInput(f"capacity {capacity}: expected an even, positive number of tokens")
    tokens = 2 * np.floor(capacity / (2.0 * shares) * (1 + ROUNDING)).astype(np.int64)
    return -(-lengths // tokens)
