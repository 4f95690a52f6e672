"""Context parallelism for a decoder: every rank has a part of every sequence, and only attention is changed.

Two axes, which multiply. Along `context_ulysses` ranks exchange heads for tokens around attention: each then has all
tokens of a part of the heads (Jacobs et al. 2023). Along `context_ring` keys and values come to the queries: they
travel round the ring while attention is computed (parallel/ring.py); where a mask cuts sequences into documents, whose
pieces are small, they are gathered at once (Grattafiori et al. 2024, §3.3.2). With both, the exchange makes whole what
a ring rank has. Who holds which tokens: `spec.layout.local_tokens`.

Weights know nothing of it: a context rank shards them, and its gradients are summed, as a data rank's are
(`Mesh.shards`). Of a mixture of experts only the balance loss asks for whole sequences
(`parallel.experts.count_whole_sequences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.kernels.attention import AttentionMask, attention
from meshwright.models.decoder import Block, Decoder, SharedInputs
from meshwright.parallel.exchanges import exchanged_heads, exchanged_tokens, gathered_sequence
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.recompute import recomputing
from meshwright.parallel.ring import ring_attention
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Part, context_split_error, local_tokens
from meshwright.spec.plan import CONTEXT_AXES, Plan, Recompute


def divide_sequences(model: Decoder, plan: Plan, mesh: Mesh) -> SplitSequences | None:
    """Let the model's attention work on this context rank's part of sequences; None, and nothing done, on one context rank.

    After tensor ranks have divided heads. Raises BadInput when that many ranks cannot divide them.
    """
    ring, ulysses, tensor = (mesh.part(axis) for axis in ("context_ring", "context_ulysses", "tensor"))
    if ring.count * ulysses.count == 1:
        return None
    if wrong := context_split_error(
        ring.count, ulysses.count, tensor.count, model.spec.heads, model.spec.kv_heads, None
    ):
        raise BadInput(f"plan.{wrong[0]}: expected {wrong[1]}, got {mesh.axis_size(wrong[0])}")
    names = _ranks(mesh, "context_ring"), _ranks(mesh, "context_ulysses")
    # Collective over all ranks, so here and not at first use.
    group = mesh.group_over(CONTEXT_AXES)
    assert group is not None
    for layer, block in model.layers.items():
        assert isinstance(block, Block)
        # A block that is recomputed gathers anew in any case; uncompiled, attention would be computed twice.
        keeps = plan.strategy(int(layer), model.spec.layers).recompute == "none"
        block.attention.attend = SplitAttention(*names, "selective" if keeps and plan.compile else "none")
    return SplitSequences(model, mesh, group, ring, ulysses)


class SplitSequences:
    """What of a micro-batch is this rank's, and how logits of its parts become whole again."""

    def __init__(self, model: Decoder, mesh: Mesh, group: dist.ProcessGroup, ring: Part, ulysses: Part) -> None:
        self._model, self._mesh, self._group, self._ring, self._ulysses = model, mesh, group, ring, ulysses

    def part_of(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of whole sequences; targets were shifted before, so that none is lost at a cut."""
        seq = batch.tokens.shape[1]
        held = local_tokens(seq, self._ring, self._ulysses)

        def taken(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[:, one.start : one.stop] for one in held], dim=1)

        targets, positions = (None if one is None else taken(one) for one in (batch.targets, batch.positions))
        if positions is None:
            positions = _token_positions(held, batch.tokens.device).expand(len(batch.tokens), -1)
        return replace(batch, tokens=taken(batch.tokens), targets=targets, positions=positions)

    def shared(self, batch: MicroBatch, dtype: torch.dtype) -> SharedInputs:
        """What every block is handed beside its input. `batch` is this rank's part, in which document numbers are whole."""
        assert batch.positions is not None
        seq = batch.tokens.shape[1] * self._ring.count * self._ulysses.count
        device, queries = batch.tokens.device, None
        if self._ring.count > 1:
            queries = _token_positions(local_tokens(seq, self._ring), device)
        mask = self._model.mask(batch.documents, seq, device, dtype, queries=queries)
        return SharedInputs(batch.positions, self._model.rope(batch.positions, dtype), mask)

    def joined(self, logits: Tensor) -> Tensor:
        """`(batch, seq, vocab)` of every rank's `(batch, seq / ranks, vocab)`. Collective over context ranks."""
        ranks = dist.get_process_group_ranks(self._group)
        found = [torch.empty_like(logits) for _ in ranks]
        dist.all_gather(found, logits.contiguous(), group=self._group)
        seq = len(ranks) * logits.shape[1]
        whole = logits.new_empty((logits.shape[0], seq, logits.shape[2]))
        for rank, part in zip(ranks, found, strict=True):
            place = self._mesh.layout.coordinates(rank)
            ring = Part(place.get("context_ring", 0), self._ring.count)
            ulysses = Part(place.get("context_ulysses", 0), self._ulysses.count)
            whole[:, _token_positions(local_tokens(seq, ring, ulysses), logits.device)] = part
        return whole


def _token_positions(held: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in held])


@dataclass(frozen=True)
class Ranks:
    """A group by its name, and this rank's place in it."""

    group: str
    part: Part


def _ranks(mesh: Mesh, axis: str) -> Ranks | None:
    group = mesh.group(axis)
    return None if group is None else Ranks(group.group_name, mesh.part(axis))


@dataclass(frozen=True)
class SplitAttention:
    """`kernels.attention.attention` of sequences of which each rank of a ring, of Ulysses ranks, or of both has a part."""

    ring: Ranks | None
    ulysses: Ranks | None
    regather: Recompute = "none"
    """selective: a sequence's keys and values, once gathered, are gathered again in backward and not kept until then."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None = None, *, plain: bool = False
    ) -> Tensor:
        """As the function, of this rank's tokens. A mask is one for the queries that the rank has after the exchange."""
        if self.ulysses is None:
            return self._over_ring(q, k, v, mask, plain)
        group, ranks = self.ulysses.group, self.ulysses.part.count
        widths = [q.shape[2] // ranks, *[-(-k.shape[2] // ranks)] * 2]
        # Fewer key/value heads than ranks: neighbours get the same one. They travel together, rank by rank.
        k, v = (one.repeat_interleave(max(1, ranks // k.shape[2]), dim=2) for one in (k, v))
        joined = torch.cat([one.unflatten(2, (ranks, -1)) for one in (q, k, v)], dim=3).flatten(2, 3)
        q, k, v = exchanged_heads(joined, group, ranks).split(widths, dim=2)
        return exchanged_tokens(self._over_ring(q, k, v, mask, plain), group, ranks)

    def _over_ring(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, plain: bool) -> Tensor:
        if self.ring is None:
            return attention(q, k, v, mask, plain=plain)
        group, part = self.ring.group, self.ring.part
        if mask is None:
            return ring_attention(q, k, v, group, part.index, part.count, plain=plain)

        def over_all_keys(q: Tensor, joined: Tensor) -> Tensor:
            k, v = gathered_sequence(joined, group, part.count).chunk(2, dim=2)
            return attention(q, k, v, mask, plain=plain)

        return recomputing(over_all_keys, self.regather)(q, torch.cat((k, v), dim=2))
