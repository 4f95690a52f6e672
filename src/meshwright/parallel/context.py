"""Context parallelism for a decoder: every rank has a part of every sequence; only attention is replaced.

There are two mesh axes, which can be combined.

- `context_ulysses`: around attention the ranks exchange heads for tokens, so that each rank has all tokens of some heads (Jacobs et al.
  2023).
- `context_ring`: keys and values are sent round a ring of ranks while attention is computed (`parallel.ring`). With a mask of documents or
  a sliding window they are all-gathered instead, because each query then attends to few keys (Grattafiori et al. 2024, §3.3.2).

With both axes, the Ulysses exchange first collects all tokens of a ring rank. `spec.layout.local_tokens` returns the tokens of each rank.

For parameters a context rank is like a data rank: it shards weights and sums gradients (`Mesh.shards`). In an MoE layer only the balance
loss needs counts over whole sequences (`parallel.experts.count_expert_loads_over_whole_sequences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.kernels.attention import AttentionMask, attention
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.parallel.blocks import blocks_with_layer
from meshwright.parallel.exchanges import gather_heads, gather_sequence, scatter_heads
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.recompute import with_recompute
from meshwright.parallel.ring import ring_attention
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import AxisPart, context_split_error, local_tokens
from meshwright.spec.plan import CONTEXT_AXES, Plan, Recompute


def divide_sequences(model: Decoder, plan: Plan, mesh: Mesh) -> SplitSequences | None:
    """Replace the attention of all blocks by attention over context ranks. Returns None, and does nothing, on a single context rank.

    Call it after `divide_over_tensor_ranks`, which divides the heads. Raises BadInput if the ranks cannot divide the heads.
    """
    ring, ulysses, tensor = (mesh.part(axis) for axis in ("context_ring", "context_ulysses", "tensor"))
    if ring.count * ulysses.count == 1:
        return None
    if error := context_split_error(
        ring.count, ulysses.count, tensor.count, model.spec.heads, model.spec.kv_heads, None
    ):
        raise BadInput(f"plan.{error[0]}: expected {error[1]}, got {mesh.axis_size(error[0])}")
    axes = _axis_ranks(mesh, "context_ring"), _axis_ranks(mesh, "context_ulysses")
    # Creating the group is collective over all ranks, so it is done here and not at first use.
    group = mesh.group_over(CONTEXT_AXES)
    assert group is not None
    for layer, block in blocks_with_layer(model):
        # A block with activation recompute gathers keys and values again anyway. Without compilation, attention itself would also be
        # computed again in the backward, so the gathered keys and values are saved.
        saves_activations = plan.strategy(layer, model.spec.layers).recompute == "none"
        regather: Recompute = "selective" if saves_activations and plan.compile else "none"
        block.hooks.attend = SplitAttention(*axes, regather)
    return SplitSequences(model, mesh, group, ring, ulysses)


class SplitSequences:
    """Divides micro-batches along the sequence over context ranks, and gathers results such as logits."""

    def __init__(self, model: Decoder, mesh: Mesh, group: dist.ProcessGroup, ring: AxisPart, ulysses: AxisPart) -> None:
        self._model = model
        self._mesh = mesh
        self._group = group
        self._ring = ring
        self._ulysses = ulysses

    def local_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's tokens of a micro-batch of whole sequences, with their targets (already shifted by one) and positions."""
        local = self.local_tokens
        targets, positions, not_padding, weights = (
            None if whole is None else local(whole)
            for whole in (batch.targets, batch.positions, batch.real, batch.weights)
        )
        if positions is None:
            ranges = local_tokens(batch.tokens.shape[1], self._ring, self._ulysses)
            positions = _token_positions(ranges, batch.tokens.device).expand(len(batch.tokens), -1)
        return replace(
            batch, tokens=local(batch.tokens), targets=targets, positions=positions, real=not_padding, weights=weights
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that divide a sequence."""
        return self._ring.index == self._ulysses.index == 0

    def local_tokens(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor `(batch, seq, …)` of whole sequences."""
        ranges = local_tokens(whole.shape[1], self._ring, self._ulysses)
        return torch.cat([whole[:, tokens.start : tokens.stop] for tokens in ranges], dim=1)

    def shared_inputs(self, batch: MicroBatch, dtype: torch.dtype) -> SharedInputs:
        """The inputs that all blocks share, for this rank's tokens. `batch` is from `local_batch`.

        The batch's document numbers are not divided over ranks, because the mask needs the document of every key.
        """
        assert batch.positions is not None
        seq = batch.tokens.shape[1] * self._ring.count * self._ulysses.count
        device = batch.tokens.device
        queries = None
        if self._ring.count > 1:
            queries = _token_positions(local_tokens(seq, self._ring), device)
        inputs = self._model.attention_inputs(
            batch.positions, batch.documents, seq, dtype, queries=queries, document_sizes=batch.document_sizes
        )
        return SharedInputs(batch.positions, inputs)

    def gather_tokens(self, local: Tensor) -> Tensor:
        """All-gather a tensor of tokens from `(batch, seq / ranks, …)` to `(batch, seq, …)`. Collective over context ranks."""
        ranks = dist.get_process_group_ranks(self._group)
        parts = [torch.empty_like(local) for _ in ranks]
        dist.all_gather(parts, local.contiguous(), group=self._group)
        seq = len(ranks) * local.shape[1]
        whole = local.new_empty((local.shape[0], seq, *local.shape[2:]))
        for rank, part in zip(ranks, parts, strict=True):
            coordinates = self._mesh.layout.coordinates(rank)
            ring = AxisPart(coordinates.get("context_ring", 0), self._ring.count)
            ulysses = AxisPart(coordinates.get("context_ulysses", 0), self._ulysses.count)
            whole[:, _token_positions(local_tokens(seq, ring, ulysses), local.device)] = part
        return whole


def _token_positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(tokens.start, tokens.stop, device=device) for tokens in ranges])


@dataclass(frozen=True)
class AxisRanks:
    """The ranks along one axis: the name of their group, and this rank's index among them."""

    group: str
    part: AxisPart


def _axis_ranks(mesh: Mesh, axis: str) -> AxisRanks | None:
    group = mesh.group(axis)
    return None if group is None else AxisRanks(group.group_name, mesh.part(axis))


@dataclass(frozen=True)
class SplitAttention:
    """`kernels.attention.attention` for sequences that ring ranks, Ulysses ranks or both divide."""

    ring: AxisRanks | None
    ulysses: AxisRanks | None
    regather: Recompute = "none"
    """Recompute mode of attention. `selective` gathers keys and values again in the backward instead of saving the gathered ones."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask | None = None,
        *,
        sinks: Tensor | None = None,
        reference: bool = False,
    ) -> Tensor:
        """Return the attention output of this rank's tokens, shaped like q `(batch, seq / ranks, heads, head_dim)`.

        k and v have `kv_heads` heads. `mask` is for the queries that the rank has after the Ulysses exchange. Keys and values travel as one
        tensor. If values are narrower than keys, they are therefore padded to the width of keys, and the padding is cut off the result.
        """
        if (width := v.shape[-1]) < k.shape[-1]:
            return self(q, k, F.pad(v, (0, k.shape[-1] - width)), mask, sinks=sinks, reference=reference)[..., :width]
        if self.ulysses is None:
            return self._over_ring(q, k, v, mask, sinks, reference)
        group = self.ulysses.group
        ranks = self.ulysses.part.count
        kv_heads_per_rank = -(-k.shape[2] // ranks)
        widths = [q.shape[2] // ranks, kv_heads_per_rank, kv_heads_per_rank]
        # With fewer key/value heads than ranks, neighbouring ranks get the same head. One all-to-all sends q, k and v.
        k, v = (heads.repeat_interleave(max(1, ranks // k.shape[2]), dim=2) for heads in (k, v))
        joined = torch.cat([heads.unflatten(2, (ranks, -1)) for heads in (q, k, v)], dim=3).flatten(2, 3)
        q, k, v = scatter_heads(joined, group, ranks).split(widths, dim=2)
        if sinks is not None:
            # After the all-to-all this rank computes a part of the heads, and needs their sinks only.
            sinks = sinks.chunk(ranks)[self.ulysses.part.index]
        return gather_heads(self._over_ring(q, k, v, mask, sinks, reference), group, ranks)

    def _over_ring(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, sinks: Tensor | None, reference: bool
    ) -> Tensor:
        if self.ring is None:
            return attention(q, k, v, mask, sinks=sinks, reference=reference)
        group = self.ring.group
        part = self.ring.part
        if mask is None:
            return ring_attention(q, k, v, group, part.index, part.count, sinks=sinks, reference=reference)

        def over_all_keys(q: Tensor, joined: Tensor, sinks: Tensor | None) -> Tensor:
            k, v = gather_sequence(joined, group, part.count).chunk(2, dim=2)
            return attention(q, k, v, mask, sinks=sinks, reference=reference)

        return with_recompute(over_all_keys, self.regather)(q, torch.cat((k, v), dim=2), sinks)
