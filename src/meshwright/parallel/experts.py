"""Expert parallelism for a decoder: the experts of a layer are distributed over ranks, and tokens are sent to them.

Each rank of a group holds a part of a layer's experts, whole ones. Its tokens, sorted by expert as the model sorts
them, go to the ranks that hold their experts by one all-to-all, pass them there, and come back by another to where they
were; backward does the same with gradients (GShard, Lepikhin et al. 2021). Every row arrives (dropless), so what an
expert's weights gather is the sum over the whole group: only ranks that hold the same experts have something left to
add up. Context and tensor ranks, each of which has a part of every sequence's tokens, take part: context ranks as
shards do, tensor ranks by holding different experts always.

How many rows go where only the router knows. The counts travel first, and the host reads them, once a layer and
forward: the sizes of messages are its to say. Recompute keeps them beside the router's choice and so sends the same
rows again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.kernels.grouped import ExpertOrder, from_groups, order_by_expert, to_groups
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts, MixtureOfExperts
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.products import group_by_name
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import CONTEXT_AXES

ALL_TO_ALL = dist.all_to_all_single


def spread_experts(model: Decoder, mesh: Mesh) -> None:
    """Exchange tokens between the ranks that hold a layer's experts; no effect if each rank has all of them.

    Raises BadInput where the ranks do not divide the experts.
    """
    if not model.spec.experts or (group := mesh.experts) is None:
        return
    if model.spec.experts % group.size():
        raise BadInput(
            f"plan.expert × plan.tensor: expected a divisor of model.experts = {model.spec.experts}, got {group.size()}"
        )
    for mixture in _mixtures(model):
        mixture.experts = SpreadExperts(mixture.experts, group.group_name, group.size())


def count_whole_sequences(model: Decoder, mesh: Mesh) -> None:
    """Sum the expert counts of whole sequences over context and tensor ranks, for the balance loss.

    With these counts the balance losses of a sequence's parts add up to that of the sequence.
    """
    if model.spec.experts and (group := mesh.group_over((*CONTEXT_AXES, "tensor"))) is not None:
        for mixture in _mixtures(model):
            mixture.whole_sequence_loads = partial(summed_loads, group=group.group_name)


def _mixtures(model: Decoder) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


class SpreadExperts(Experts):
    """This rank's experts of a layer, for the tokens of all `ranks` ranks of the named group that holds the others."""

    def __init__(self, whole: Experts, group: str, ranks: int) -> None:
        nn.Module.__init__(self)
        self.gated, self.plain, self.group, self.ranks = whole.gated, whole.plain, group, ranks
        for name, weight in whole.named_parameters():
            self.register_parameter(name, weight)

    def forward(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """This rank's rows `(rows, hidden)` sorted by expert, each through its own, wherever that is."""
        load = order.offsets.diff(prepend=order.offsets.new_zeros(1))
        here, splits = exchanged_loads(load, self.group, self.ranks)
        arrived = exchanged_rows(sorted_rows, splits, None, False, self.group)
        mine = order_by_expert(_expert_of_rows(here, arrived), here.sum(0))
        passed = from_groups(super().forward(to_groups(arrived, mine), mine), mine).squeeze(1)
        return exchanged_rows(passed, splits, sorted_rows.shape[0], True, self.group)


def _expert_of_rows(here: Tensor, arrived: Tensor) -> Tensor:
    """Which of this rank's experts each arrived row is for, `(rows, 1)`: rows come by rank, and in one rank's by expert."""
    runs = here.flatten().cumsum(0)
    positions = torch.arange(arrived.shape[0], device=here.device)
    return (torch.searchsorted(runs, positions, right=True) % here.shape[1])[:, None]


# Operators of their own: a compiler could see through neither sizes that the host reads nor what other ranks send.
@torch.library.custom_op("meshwright::exchanged_loads", mutates_args=())
def exchanged_loads(load: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    """What `load` `(experts,)`, this rank's rows by expert, and those of the other ranks mean for this one.

    Rows that come from each rank for each expert here `(ranks, experts / ranks)`; and on the host `(2, ranks)`, how many rows go to each
    rank and how many come. The host waits for the device.
    """
    mine = load.view(ranks, -1).contiguous()
    here = torch.empty_like(mine)
    ALL_TO_ALL(here, mine, group=group_by_name(group))
    return here, torch.stack([mine.sum(1), here.sum(1)]).cpu()


@exchanged_loads.register_fake
def _(load: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    del group
    return load.new_empty(ranks, load.shape[0] // ranks), torch.empty(2, ranks, dtype=torch.int64)


@torch.library.custom_op("meshwright::summed_loads", mutates_args=())
def summed_loads(loads: Tensor, group: str) -> Tensor:
    """Loads `(batch, experts)` of sequences of which each rank of the group has a part of the tokens."""
    total = loads.clone()
    dist.all_reduce(total, group=group_by_name(group))
    return total


@summed_loads.register_fake
def _(loads: Tensor, group: str) -> Tensor:
    del group
    return torch.empty_like(loads)


@torch.library.custom_op("meshwright::exchanged_rows", mutates_args=())
def exchanged_rows(sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str) -> Tensor:
    """The rows `(count, width)` received in exchange for the rows `(rows, width)` sent.

    `splits` sends them to the ranks that hold experts, or `back` again. `count` is None if only the splits determine it.
    """
    go, come = splits.flip(0).tolist() if back else splits.tolist()
    assert count is None or count == sum(come)
    arrived = sent.new_empty(sum(come), sent.shape[1])
    ALL_TO_ALL(arrived, sent.contiguous(), come, go, group=group_by_name(group))
    return arrived


@exchanged_rows.register_fake
def _(sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str) -> Tensor:
    del splits, back, group
    return sent.new_empty(torch.library.get_ctx().new_dynamic_size() if count is None else count, sent.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int | None, bool, str], output: Tensor) -> None:
    del output
    sent, splits, _, ctx.back, ctx.group = inputs
    ctx.row_count = sent.shape[0]
    ctx.save_for_backward(splits)


def _return(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (splits,) = ctx.saved_tensors
    return exchanged_rows(grad, splits, ctx.row_count, not ctx.back, ctx.group), None, None, None, None


exchanged_rows.register_autograd(_return, setup_context=_keep)
