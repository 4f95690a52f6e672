"""Ring attention of a divided sample: the passes of `parallel.ring` with parts of unequal lengths.

Keys, values and gradient sums travel between neighbours of the sample's ranks only.

Shapes: q `(1, n, heads, head_dim)`, k and v `(1, n, kv_heads, head_dim)` of the n tokens of a rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.kernels.partial import (
    AttentionAccumulator,
    VisibleBlock,
    partial_attention,
    partial_gradients,
    visible_part,
)
from meshwright.parallel.ring import PendingExchange, start_exchange
from meshwright.parallel.span_part import SpanPart


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, own: SpanPart, group: str, *, reference: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention of the part's tokens over the whole sample, and the log-sum-exp of their scores `(1, heads, n)`. Collective.

    `reference` computes scores explicitly instead of calling an attention kernel; this is so in the backward too.
    """
    combined = None
    keys_values = torch.stack((k, v))
    for turn in _turns(own):
        pending = turn.start_exchange(keys_values, group) if not turn.is_last else None
        queries, keys, causal = turn.visible
        if not turn.is_empty:
            k, v = keys_values[:, :, keys]
            partial = partial_attention(q[:, queries], k, v, causal, lengths_vary=True, reference=reference)
            if combined is None:  # the first turn: a rank's own keys, so that every query attends to some key
                combined = AttentionAccumulator(*partial)
            else:
                combined.add(queries, *partial)
        if pending is not None:
            keys_values = pending.wait()
    assert combined is not None
    return combined.out, combined.logsumexp


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    own: SpanPart,
    group: str,
    *,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `out` and `logsumexp` are results of `ring_forward`. Collective.

    The gradients are summed and sent in the dtype of `logsumexp`.
    """
    wide = logsumexp.dtype
    keys_values = torch.stack((k, v))
    q_sum = torch.zeros(q.shape, dtype=wide, device=q.device)
    pending_sums: PendingExchange | None = None
    for turn in _turns(own):
        pending = turn.start_exchange(keys_values, group) if not turn.is_last else None
        queries, keys, causal = turn.visible
        partial = None
        if not turn.is_empty:
            k, v = keys_values[:, :, keys]
            partial = partial_gradients(
                grad[:, queries],
                q[:, queries],
                k,
                v,
                out[:, queries],
                logsumexp[..., queries],
                causal,
                lengths_vary=True,
                reference=reference,
            )
        # The gradient sums of the keys and values of this turn so far. Each rank starts the sums of its own keys and values with zeros.
        sums = (
            torch.zeros(keys_values.shape, dtype=wide, device=q.device) if pending_sums is None else pending_sums.wait()
        )
        if partial is not None:
            q_sum[:, queries] += partial[0]
            sums[0, :, keys] += partial[1]
            sums[1, :, keys] += partial[2]
        # In the last turn each rank receives the sums of its own keys and values.
        pending_sums = turn.start_exchange(sums, group)
        if pending is not None:
            keys_values = pending.wait()
    assert pending_sums is not None
    k_sum, v_sum = pending_sums.wait()
    return q_sum, k_sum, v_sum


@dataclass(frozen=True)
class _Turn:
    """One turn of the ring. In turn `number` this rank, which has the part `own`, has the keys and values of part `source`."""

    own: SpanPart
    number: int

    @property
    def source(self) -> int:
        return (self.own.part - self.number) % len(self.own.ranks)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == len(self.own.ranks)

    @property
    def visible(self) -> VisibleBlock:
        own = self.own
        return visible_part(own.part, self.source, own.size(own.part), own.size(self.source))

    @property
    def is_empty(self) -> bool:
        """Whether no query attends to any key. This happens because a block of a short sample may have no tokens."""
        queries, keys, _ = self.visible
        return (queries.start or 0) == queries.stop or keys.stop == 0

    def start_exchange(self, sent: Tensor, group: str) -> PendingExchange:
        """Start to send a tensor of part `source` to the next rank, and to receive the tensor of the next turn's part."""
        ranks = self.own.ranks
        part = self.own.part
        tokens = self.own.size((self.source - 1) % len(ranks))[1]
        received = sent.new_empty((*sent.shape[:2], tokens, *sent.shape[3:]))
        return start_exchange(sent, received, group, ranks[(part + 1) % len(ranks)], ranks[part - 1])


def _turns(own: SpanPart) -> Iterator[_Turn]:
    return (_Turn(own, number) for number in range(len(own.ranks)))
