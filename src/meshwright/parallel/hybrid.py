"""Attention over slots. A slot is a micro-batch of whole samples; it may begin with a part of a sample that several ranks divide.

Every rank has its own slots (`data.slots`). A block computes each slot like a packed sequence; only attention differs. The tokens of whole
samples attend within the slot, by the mask of documents. The tokens of the part at the beginning attend over their whole sample by
`parallel.span_attention`. All slots have the same shapes and the same operations, so that a compiled block serves all of them.
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
    """The mask of the whole samples in a slot, and the part of a divided sample at its beginning.

    In this mask each token of the part attends to itself only; `span_attention` computes the part's attention.
    """

    span: Tensor = field(default_factory=lambda: no_span(1))
    """The part, encoded by `SpanPart.encode`, on the CPU."""
    divided: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.bool))
    """Whether each token belongs to the part, `(1, capacity)`."""


@dataclass(frozen=True)
class SlotTokens(CountedTokens):
    """The tokens of a slot that routers count, and the part of a divided sample. The divided sample has number 0."""

    span: Tensor = field(default_factory=lambda: no_span(1))
    """The part, encoded by `SpanPart.encode`, on the CPU."""


def divide_samples(model: Decoder, mesh: Mesh) -> DividedSamples | None:
    """Replace the attention of all blocks by attention over slots. Returns None, and does nothing, without hybrid ranks.

    Raises BadInput if the model or the mesh does not allow hybrid ranks.
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
    """Builds the inputs that the blocks of a slot share.

    It has the methods of `SplitSequences`, so that an executor can call either. A slot has only this rank's tokens, so methods that divide
    or gather tokens return their argument.
    """

    def __init__(self, model: Decoder, ranks: int) -> None:
        self._model = model
        self._ranks = ranks

    def local_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch unchanged: its tokens are already this rank's."""
        return batch

    def shared_inputs(self, batch: MicroBatch, dtype: torch.dtype) -> SharedInputs:
        """The inputs that all blocks of a slot share. A micro-batch without document numbers gets the model's usual inputs."""
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
        """Add the slot's part of a divided sample to its counted tokens; the part is taken from the mask in `shared`."""
        _, mask = next(iter(shared.by_kind.values()))  # the masks of all kinds of attention have the same part
        assert isinstance(mask, SlotMask)
        return SlotTokens(counted.sample, counted.samples, mask.span)

    def local_tokens(self, whole: Tensor) -> Tensor:
        """Return a tensor of a slot's tokens unchanged: they are already this rank's."""
        return whole

    def gather_tokens(self, local: Tensor) -> Tensor:
        """Return a tensor of a slot's tokens unchanged. If the slot has a part of a divided sample, the result has only this part."""
        return local


@dataclass(frozen=True)
class SampleLoads:
    """Converts the loads `(samples, experts)` of a slot's tokens to the loads of whole samples; `group` names the hybrid ranks' group."""

    group: str

    def __call__(self, loads: Tensor, counted: CountedTokens) -> Tensor:
        """Return the loads; the loads of a divided sample are summed over its ranks. Collective over these ranks."""
        return sum_span_loads(loads, counted.span, self.group) if isinstance(counted, SlotTokens) else loads


@dataclass(frozen=True)
class SlotAttention:
    """`kernels.attention.attention` for slots; `group` is the name of the hybrid ranks' process group."""

    group: str

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
        """Return the attention output of q `(1, capacity, heads, head_dim)`, with the width of v.

        k and v have `kv_heads` heads. In the ring of a divided sample keys and values travel as one tensor, so narrower values are padded.
        """
        assert sinks is None, "refused by `hybrid_error`"
        whole = attention(q, k, v, mask, reference=reference)
        if not isinstance(mask, SlotMask):
            return whole
        width = v.shape[-1]
        values = F.pad(v, (0, k.shape[-1] - width)) if width < k.shape[-1] else v
        part = span_attention(q, k, values, mask.span, self.group, reference=reference)
        return torch.where(mask.divided[..., None, None], part[..., :width], whole)
