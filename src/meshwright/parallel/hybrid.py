"""Attention over slots: micro-batches of whole samples and at most one part of a sample that several ranks divide.

Every rank has its own slots (`data.slots`). A block computes each slot like a packed sequence; only attention differs. Whole samples
attend within the slot, by the mask of documents. The part at the beginning attends over its sample by `parallel.span_attention`. All slots
have the same shapes and the same operations, so that a compiled block serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.kernels.attention import AttentionMask, attention
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.models.moe import CountedTokens
from meshwright.parallel.blocks import blocks_with_layer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.span_attention import span_attention
from meshwright.parallel.span_loads import sum_span_loads
from meshwright.parallel.span_part import SpanPart, no_span
from meshwright.spec.errors import BadInput
from meshwright.spec.hybrid import model_error


@dataclass(frozen=True)
class SlotMask(AttentionMask):
    """The mask of whole samples in a slot, and the part of a divided sample.

    In the mask each token of the part attends to itself only.
    """

    span: Tensor = field(default_factory=lambda: no_span(1))
    """The part, as a tensor of `SpanPart.encode`, on the CPU."""
    divided: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.bool))
    """Whether each token belongs to the part, `(1, capacity)`."""


@dataclass(frozen=True)
class SlotTokens(CountedTokens):
    """The counted tokens of a slot, and the part of a divided sample, whose number is 0."""

    span: Tensor = field(default_factory=lambda: no_span(1))
    """The part, as a tensor of `SpanPart.encode`, on the CPU."""


def divide_samples(model: Decoder, mesh: Mesh) -> DividedSamples | None:
    """Replace the model's attention by attention over slots; returns None without hybrid ranks.

    Raises BadInput if the model or the mesh cannot have hybrid ranks.
    """
    group = mesh.group("hybrid")
    if group is None:
        return None
    if error := model_error(model.spec, dict(mesh.layout.axes)):
        raise BadInput(f"plan.hybrid: expected {error}")
    for _, block in blocks_with_layer(model):
        block.hooks.attend = SlotAttention(group.group_name)
        block.hooks.whole_sample_loads = SampleLoads(group.group_name)
    return DividedSamples(model, mesh.axis_size("hybrid"))


class DividedSamples:
    """Builds the inputs that the blocks of a slot share; the other methods change nothing."""

    def __init__(self, model: Decoder, ranks: int) -> None:
        self._model = model
        self._ranks = ranks

    def local_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch unchanged: its tokens are already this rank's."""
        return batch

    def shared_inputs(self, batch: MicroBatch, dtype: torch.dtype) -> SharedInputs:
        """The inputs that all blocks of a slot share; micro-batches without documents get the model's usual ones."""
        if batch.documents is None:
            return self._model.shared_inputs(batch.tokens, batch.positions, None, dtype)
        part = None if batch.slot is None else batch.slot.divided
        seq = batch.tokens.shape[1]
        device = batch.tokens.device
        index = torch.arange(seq, device=device)[None]
        divided = index < (0 if part is None else part.tokens)
        documents = torch.where(divided, index - seq, batch.documents)
        shared = self._model.shared_inputs(batch.tokens, batch.positions, documents, dtype)
        span = no_span(self._ranks)
        if part is not None:
            span = SpanPart(part.length, part.ranks, part.part, part.by_heads).encode(self._ranks)
        by_kind = {}
        for kind, (rope, mask) in shared.by_kind.items():
            assert mask is not None, "documents make a mask"
            by_kind[kind] = rope, SlotMask(mask.dense, mask.blocks, span=span, divided=divided)
        return shared._replace(by_kind=by_kind)

    def counted_tokens(self, counted: CountedTokens, shared: SharedInputs) -> CountedTokens:
        """Return the counted tokens of a slot, with the part from the mask of its shared inputs."""
        _, mask = next(iter(shared.by_kind.values()))  # all have the same span
        assert isinstance(mask, SlotMask)
        return SlotTokens(counted.sample, counted.samples, mask.span)

    def local_tokens(self, whole: Tensor) -> Tensor:
        """Return a tensor of a slot's tokens unchanged: they are already this rank's."""
        return whole

    def gather_tokens(self, local: Tensor) -> Tensor:
        """Return a tensor of a slot's tokens unchanged. A slot may have a part of a divided sample."""
        return local


@dataclass(frozen=True)
class SampleLoads:
    """Converts loads `(samples, experts)` of a slot's tokens to those of whole samples, in the process group named `group`."""

    group: str

    def __call__(self, loads: Tensor, counted: CountedTokens) -> Tensor:
        """The loads, those of a divided sample summed over its ranks; collective over them."""
        return sum_span_loads(loads, counted.span, self.group) if isinstance(counted, SlotTokens) else loads


@dataclass(frozen=True)
class SlotAttention:
    """`kernels.attention.attention` for slots of the hybrid ranks of the process group named `group`."""

    group: str

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask | None = None,
        *,
        sinks: Tensor | None = None,
        plain: bool = False,
    ) -> Tensor:
        """Attention of q `(1, capacity, heads, head_dim)` over k and v with `kv_heads`; shaped like q, with the width of v.

        Narrower values are padded for the part's ring, since keys and values travel as one tensor.
        """
        assert sinks is None, "refused by `hybrid_error`"
        whole = attention(q, k, v, mask, plain=plain)
        if not isinstance(mask, SlotMask):
            return whole
        width = v.shape[-1]
        values = F.pad(v, (0, k.shape[-1] - width)) if width < k.shape[-1] else v
        part = span_attention(q, k, values, mask.span, self.group, plain=plain)
        return torch.where(mask.divided[..., None, None], part[..., :width], whole)
