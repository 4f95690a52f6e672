"""Expert parallelism for inference: each rank has some experts of every MoE layer, all other weights, and its own tokens.

An MoE layer sends each token to the ranks of its experts and gets their outputs back, as in training (`parallel.experts`). All ranks
compute a step at the same time. A rank without tokens must still take part in the exchanges (`exchange_nothing`).
"""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.kernels.grouped import ExpertOrder, from_groups, order_by_expert, sorted_weights, sum_copies, to_groups
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.experts import exchange_loads, experts_of_rows
from meshwright.parallel.linear_exchanges import group_by_name
from meshwright.spec.engine import Dispatch
from meshwright.spec.errors import BadInput
from meshwright.spec.inference_layout import experts_error
from meshwright.spec.layout import AxisPart, even_rows

Stages = Generator[None, None, Tensor]
"""A generator that yields while rows travel between ranks and returns a tensor."""
LARGEST = 127
"""Largest magnitude of a rounded value in int8; -128 is not used."""
SCALE_BYTES = 4
"""Bytes of a token's fp32 scale, which follows its int8 values."""


def distribute_for_inference(
    model: Decoder, part: AxisPart, group: dist.ProcessGroup, dispatch: Dispatch | None = None
) -> None:
    """Keep only this rank's experts in a model on the meta device; the ranks of `group` then send each other tokens.

    The experts are divided evenly, and rank i has the i-th part. `dispatch` is the number format in which tokens travel to the experts;
    None: the model's dtype. Raises BadInput if the experts cannot be divided evenly over the ranks.
    """
    if expected := experts_error(model.spec, part.count):
        raise BadInput(f"expert ranks: expected {expected}, got {part.count}")
    for moe in moe_layers(model):
        for name, weight in list(moe.experts.named_parameters()):
            owned = even_rows(model.spec.experts, part.count, part.index)
            local = weight.new_empty(len(owned), *weight.shape[1:])
            moe.experts.register_parameter(name, nn.Parameter(local, requires_grad=False))
        moe.experts = SharedExperts(moe.experts, group.group_name, part.count, dispatch)


def moe_layers(model: Decoder) -> list[MoELayer]:
    """The MoE layers of the model's blocks, in order."""
    return [block.moe for block in model.layers.values() if isinstance(block, Block) and block.routed]


def moe_in_stages(moe: MoELayer, x: Tensor) -> Stages:
    """Compute the output of an MoE layer for x `(1, tokens, hidden)`. Yields while tokens travel, so that the caller can do other work."""
    choice = moe.choose_experts(moe.router(x))
    load = choice.loads.sum(0)
    order = order_by_expert(choice.chosen.flatten(0, 1), load)
    outputs = yield from _exchange(moe.experts, to_groups(x.flatten(0, 1), order), load)
    scale = sorted_weights(choice.weights.flatten(0, 1), order)
    return moe.with_shared(sum_copies((outputs * scale[:, None]).to(outputs.dtype), order).view_as(x), x)


def exchange_nothing(model: Decoder) -> Generator[None]:
    """Take part in the exchanges of a step in which this rank has no tokens. Yields as often as `moe_in_stages` of all layers does."""
    none = model.embed.weight.new_empty(0, model.spec.hidden)
    load = torch.zeros(model.spec.experts, dtype=torch.int64, device=none.device)
    for moe in moe_layers(model):
        yield from _exchange(moe.experts, none, load)


def _exchange(experts: nn.Module, sorted_rows: Tensor, load: Tensor) -> Stages:
    """Compute rows by the experts of all ranks. Yields once while the rows travel there and once while the outputs travel back."""
    assert isinstance(experts, SharedExperts)
    loads, splits = exchange_loads(load, experts.group, experts.ranks)
    sent, received = splits.tolist()
    packed = pack_int8(sorted_rows) if experts.dispatch == "int8" else sorted_rows
    arriving, work = _start(packed, sent, received, experts.group)
    yield
    work.wait()
    tokens = unpack_int8(arriving, sorted_rows.dtype) if experts.dispatch == "int8" else arriving
    order = order_by_expert(experts_of_rows(loads, tokens), loads.sum(0))
    outputs = from_groups(experts.compute(to_groups(tokens, order), order), order).squeeze(1)
    returning, work = _start(outputs, received, sent, experts.group)
    yield
    work.wait()
    return returning


def _start(tokens: Tensor, sent: list[int], received: list[int], group: str) -> tuple[Tensor, dist.Work]:
    """Start an all-to-all of tokens `(tokens, width)`. `sent` and `received` have the number of tokens to and from each rank.

    Returns the buffer of arriving tokens, which is filled when the returned work has ended.
    """
    arriving = tokens.new_empty(sum(received), tokens.shape[1])
    work = dist.all_to_all_single(
        arriving, tokens.contiguous(), received, sent, group=group_by_name(group), async_op=True
    )
    assert work is not None
    return arriving, work


class SharedExperts(Experts):
    """This rank's experts of an MoE layer. Tokens for the other ranks' experts travel there in the format `dispatch`."""

    def __init__(self, whole: Experts, group: str, ranks: int, dispatch: Dispatch | None) -> None:
        nn.Module.__init__(self)
        # All that whole experts record, so that a new field needs no line here.
        vars(self).update({name: value for name, value in vars(whole).items() if not name.startswith("_")})
        self.group = group
        self.ranks = ranks
        self.dispatch = dispatch
        for name, weight in whole.named_parameters():
            self.register_parameter(name, weight)

    @property
    def takes_few_rows(self) -> bool:
        return False

    def compute(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """Return the outputs of this rank's experts for rows `(rows, hidden)` that are sorted by expert."""
        return super().forward(sorted_rows, order)

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """Return the outputs of all ranks' experts, each multiplied by its element of `weights`. Waits for each exchange."""
        load = order.offsets.diff(prepend=order.offsets.new_zeros(1)).long()
        stages = _exchange(self, sorted_rows, load)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                outputs = end.value
                return outputs if weights is None else (outputs * weights[:, None]).to(outputs.dtype)


def pack_int8(tokens: Tensor) -> Tensor:
    """Round tokens `(tokens, hidden)` to int8. In the result `(tokens, hidden + 4)`, uint8, each token is followed by its fp32 scale."""
    scale = tokens.abs().amax(1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
    values = (tokens.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    # `flatten`, because torch can view numbers as bytes only if they are consecutive, and a column of an empty matrix is not.
    scale_bytes = scale.flatten().view(torch.uint8).view(len(tokens), SCALE_BYTES)
    return torch.cat((values.view(torch.uint8), scale_bytes), 1)


def unpack_int8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tokens `(tokens, hidden)` that `pack_int8` rounded, in `dtype`."""
    values, scale = packed.split((packed.shape[1] - SCALE_BYTES, SCALE_BYTES), 1)
    return (values.contiguous().view(torch.int8).float() * scale.contiguous().view(torch.float32)).to(dtype)
