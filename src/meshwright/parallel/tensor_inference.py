"""Tensor parallelism for inference. Every rank has all tokens, because a step may have any number of tokens.

A rank computes its heads and its part of the width of each feed-forward network. An all-reduce adds the ranks' outputs (Shoeybi et al.
2019): one per parallel block, two per other block. All ranks get the same bits of every sum and of the gathered logits.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.loss import capped
from meshwright.models.attention import Attention
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder, Embedding, Head
from meshwright.parallel.linear_exchanges import ALL_GATHER
from meshwright.parallel.norms import norm_divided_heads
from meshwright.spec.errors import BadInput
from meshwright.spec.inference_layout import rank_dimensions, rank_shape, split_error
from meshwright.spec.layout import AxisPart, even_rows
from meshwright.spec.model import parameters


def divide_for_inference(model: Decoder, part: AxisPart, group: dist.ProcessGroup) -> None:
    """Make a model on the meta device compute this rank's part. `group` has the ranks in order.

    Afterwards `model.spec` has the dimensions of this rank's blocks. Raises BadInput if the ranks cannot divide the model.
    """
    spec = model.spec
    if expected := split_error(spec, part.count):
        raise BadInput(f"tensor ranks: expected {expected}, got {part.count}")
    _shrink_parameters(model, part)
    model.spec = rank_dimensions(spec, part.count)
    sum_ranks = partial(_sum_ranks, group)
    copies = max(1, part.count // spec.kv_heads)
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.attention.heads = model.spec.heads
        block.attention.kv_heads = model.spec.kv_heads
        block.hooks.sum_ranks = sum_ranks
        if isinstance(block.attention, Attention) and block.attention.whole_norm:
            name = group.group_name
            block.hooks.norm_all_heads = partial(norm_divided_heads, group=name, ranks=part.count, copies=copies)
    vocabulary = [even_rows(spec.vocab_size, part.count, index) for index in range(part.count)]
    model.embed = DividedEmbedding(model.embed.weight, vocabulary[part.index].start, group)
    model.head = DividedHead(model.head, [len(rows) for rows in vocabulary], group)


class DividedEmbedding(Embedding):
    """This rank's rows of the token embedding. Its first row is row `first` of the vocabulary."""

    def __init__(self, weight: nn.Parameter, first: int, group: dist.ProcessGroup) -> None:
        super().__init__(weight)
        self.first = first
        self.group = group

    def forward(self, indices: Tensor) -> Tensor:
        """Return the vectors `(…, hidden)` of tokens `(…)`. One rank has the row of a token; the others add zeros."""
        rows = indices - self.first
        count = self.weight.shape[0]
        embedded = F.embedding(rows.clamp(0, count - 1), self.weight)
        embedded = embedded.masked_fill(((rows < 0) | (rows >= count))[..., None], 0.0)
        dist.all_reduce(embedded, group=self.group)
        return embedded


class DividedHead(Head):
    """This rank's rows of the head `whole`. `sizes` has the number of rows of each rank."""

    def __init__(self, whole: Head, sizes: list[int], group: dist.ProcessGroup) -> None:
        super().__init__(whole.weight, loss_chunk=0, factor=whole.factor, cap=whole.cap)
        self.sizes = sizes
        self.group = group

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return logits `(1, tokens, vocab)` for hidden `(1, tokens, hidden)`, gathered from all ranks."""
        weight = self.weight if tied is None else tied
        assert targets is weights is None and weight is not None, (
            "a model that is divided for inference computes no loss"
        )
        logits = capped(F.linear(self.scaled(hidden), weight), self.cap)
        logits = F.pad(logits, (0, max(self.sizes) - logits.shape[-1]))
        gathered = logits.new_empty((len(self.sizes) * logits.shape[0], *logits.shape[1:]))
        ALL_GATHER(gathered, logits, group=self.group)
        parts = zip(gathered.split(logits.shape[0]), self.sizes, strict=True)
        return torch.cat([part[..., :size] for part, size in parts], dim=-1)


def _shrink_parameters(model: Decoder, part: AxisPart) -> None:
    """Give each parameter the shape of this rank's part."""
    specs = {parameter.name: parameter for parameter in parameters(model.spec)}
    for name, parameter in list(model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        shape = rank_shape(model.spec, specs[name], part)
        local = None if shape is None else nn.Parameter(parameter.new_empty(shape), requires_grad=False)
        model.get_submodule(path).register_parameter(attribute, local)


def _sum_ranks(group: dist.ProcessGroup, output: Tensor) -> Tensor:
    """Replace this rank's output by the sum of the outputs of all ranks, and return it."""
    dist.all_reduce(output, group=group)
    return output
