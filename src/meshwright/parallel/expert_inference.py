"""Expert parallelism for inference: each rank has some experts of every mixture, all other layers, and its own tokens.

A mixture sends each token to the ranks of its experts and gets their outputs back, as in training (`parallel.experts`). All ranks compute
a step at the same time; one without tokens takes part in the exchanges (`exchange_nothing`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.kernels.grouped import ExpertOrder, from_groups, order_by_expert, to_groups
from meshwright.models.decoder import Block, Decoder
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.experts import AllToAll, DistributedExperts, exchange_loads, exchange_rows, experts_of_rows
from meshwright.parallel.token_exchange import Compute, TokenExchange
from meshwright.spec.engine import Dispatch
from meshwright.spec.errors import BadInput
from meshwright.spec.inference_layout import experts_error
from meshwright.spec.layout import Part, even_rows

LARGEST = 127
"""Of int8, without -128."""
SCALE_BYTES = 4


def distribute_for_inference(
    model: Decoder, part: Part, group: dist.ProcessGroup, dispatch: Dispatch | None = None
) -> None:
    """Leave a model on the meta device this rank's experts, to which the ranks of `group` send tokens, in order.

    With `dispatch` tokens travel to the experts in that format. Raises BadInput if the ranks cannot share the experts.
    """
    if expected := experts_error(model.spec, part.count):
        raise BadInput(f"expert ranks: expected {expected}, got {part.count}")
    exchange = (RoundedAllToAll if dispatch == "int8" else AllToAll)(group.group_name, part.count)
    for mixture in mixtures(model):
        for name, weight in list(mixture.experts.named_parameters()):
            owned = even_rows(model.spec.experts, part.count, part.index)
            local = weight.new_empty(len(owned), *weight.shape[1:])
            mixture.experts.register_parameter(name, nn.Parameter(local, requires_grad=False))
        mixture.experts = DistributedExperts(mixture.experts, exchange)


def mixtures(model: Decoder) -> list[MixtureOfExperts]:
    """The mixtures of the model's blocks, in order."""
    return [block.moe for block in model.layers.values() if isinstance(block, Block) and block.routed]


def exchange_nothing(model: Decoder) -> None:
    """Take part in the exchanges of a step without tokens of this rank's own."""
    weight, count = model.embed.weight, model.spec.experts
    none = torch.empty(0, dtype=torch.int64, device=weight.device)
    order = ExpertOrder(none, none[:, None], torch.zeros(count, dtype=torch.int32, device=weight.device))
    for mixture in mixtures(model):
        mixture.experts(weight.new_empty(0, model.spec.hidden), order)


class RoundedAllToAll(TokenExchange):
    """The exchange by messages in which tokens travel to the experts in int8, with one scale each; outputs return unrounded.

    It is for inference: rounding has no gradient.
    """

    def __init__(self, group: str, ranks: int) -> None:
        self._group, self._ranks = group, ranks

    def __call__(self, sorted_rows: Tensor, load: Tensor, compute: Compute, local: Tensor | None = None) -> Tensor:
        loads, splits = exchange_loads(load, self._group, self._ranks, local)
        packed = exchange_rows(pack_int8(sorted_rows), splits, None, False, self._group)
        received = unpack_int8(packed, sorted_rows.dtype)
        order = order_by_expert(experts_of_rows(loads, received), loads.sum(0))
        outputs = from_groups(compute(to_groups(received, order), order), order).squeeze(1)
        return exchange_rows(outputs, splits, sorted_rows.shape[0], True, self._group)


def pack_int8(tokens: Tensor) -> Tensor:
    """Tokens `(tokens, hidden)` rounded to int8, each followed by its scale in fp32: `(tokens, hidden + 4)` uint8."""
    scale = tokens.abs().amax(1, keepdim=True).float().clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
    values = (tokens.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    # Flat: torch views bytes of consecutive numbers only, and those of an empty column are not.
    scale_bytes = scale.flatten().view(torch.uint8).view(len(tokens), SCALE_BYTES)
    return torch.cat((values.view(torch.uint8), scale_bytes), 1)


def unpack_int8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens `(tokens, hidden)` of `pack_int8`."""
    values, scale = packed.split((packed.shape[1] - SCALE_BYTES, SCALE_BYTES), 1)
    return (values.contiguous().view(torch.int8).float() * scale.contiguous().view(torch.float32)).to(dtype)
