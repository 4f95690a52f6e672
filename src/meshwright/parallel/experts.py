"""Expert parallelism for a decoder: the experts of a layer are distributed over ranks, and tokens are sent to them.

Each rank of a group has some of a layer's experts. It sorts its token copies by expert, as the model does on one device; here a row is the
activation of one copy. One all-to-all sends the rows to the ranks of their experts, and after the experts a second all-to-all returns them
to their old positions. Backward sends gradients in the same way (GShard, Lepikhin et al. 2021). No row is dropped. An expert therefore
processes the tokens of the whole group, so its gradient is already a sum over the group, and only ranks with the same experts reduce it.
Context and tensor ranks have a part of each sequence, so they belong to the group. Tensor ranks always have different experts.

The number of rows for each expert depends on the router. A first all-to-all exchanges these counts. The host then reads them, because the
second one needs its message sizes on the host: one synchronisation per layer and forward. Recompute saves the counts with the router's
choices, so it sends the same rows again.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.grouped import ExpertOrder, from_groups, order_by_expert, to_groups
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.blocks import numbered_blocks
from meshwright.parallel.linear_exchanges import group_by_name
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.present_experts import PresentExperts
from meshwright.parallel.token_exchange import Compute, TokenExchange, open_peer_exchange
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import CONTEXT_AXES, ExpertPlan

ALL_TO_ALL = dist.all_to_all_single


def distribute_experts(model: Decoder, mesh: Mesh, plan: ExpertPlan | None = None) -> dict[int, PresentExperts]:
    """Replace the experts of each layer by this rank's experts, to which the ranks of a group send tokens.

    With a `plan` that copies experts, returns by layer which of them are present on which ranks. No effect if each rank has all experts.
    Raises BadInput if the ranks cannot divide the experts evenly, or if there are too many of them for copies.
    """
    if not model.spec.routed_layers or (group := mesh.experts) is None:
        return {}
    if model.spec.experts % group.size():
        raise BadInput(
            f"plan.expert × plan.tensor: expected a divisor of model.experts = {model.spec.experts}, got {group.size()}"
        )
    if plan is None or plan.exchange == "all_to_all":
        exchange: TokenExchange = AllToAll(group.group_name, group.size())
    else:
        exchange = open_peer_exchange(mesh, plan)
    if plan is None or plan.policy == "none":
        for moe in _moe_layers(model):
            moe.experts = DistributedExperts(moe.experts, exchange)
        return {}
    nodes = [mesh.layout.node(rank) for rank in dist.get_process_group_ranks(group)]
    presents = {}
    for layer, block in numbered_blocks(model):
        if block.routed:
            presents[layer] = PresentExperts(model.spec.experts, plan, nodes, group.rank(), mesh.device)
            block.moe.experts = CopiedExperts(block.moe.experts, exchange, presents[layer])
    return presents


def count_expert_loads_over_whole_sequences(model: Decoder, mesh: Mesh) -> None:
    """Make the balance loss use loads of whole sequences: sums over context and tensor ranks, which have parts of each.

    A load is the number of tokens that chose an expert. With whole loads the balance losses of a sequence's parts add up to that of the
    sequence.
    """
    if model.spec.routed_layers and (group := mesh.group_over((*CONTEXT_AXES, "tensor"))) is not None:
        for moe in _moe_layers(model):
            moe.hooks.whole_sequence_loads = partial(sum_loads, group=group.group_name)


def _moe_layers(model: Decoder) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


class DistributedExperts(Experts):
    """This rank's experts of a layer, to which the other ranks' rows come by `exchange`."""

    local: Tensor | None = None
    """See `TokenExchange`."""

    def __init__(self, whole: Experts, exchange: TokenExchange) -> None:
        nn.Module.__init__(self)
        self.activation = whole.activation
        self.gated = whole.gated
        self.biased = whole.biased
        self.plain = whole.plain
        self.exchange = exchange
        self.adapter = whole.adapter
        for name, weight in whole.named_parameters(recurse=False):
            self.register_parameter(name, weight)

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """The expert outputs of this rank's rows `(rows, hidden)`, which are sorted by expert; `order` is that sort.

        Each is multiplied by its element of `weights` `(rows,)` when it is back: the other ranks do not get the weights.
        """
        sent, load, sent_order = self.rows_to_send(sorted_rows, order)
        return self.weighted(self.exchange(sent, load, self.compute, self.local), sent_order, weights)

    def rows_to_send(self, sorted_rows: Tensor, order: ExpertOrder) -> tuple[Tensor, Tensor, ExpertOrder | None]:
        """Rows in the order in which they are sent, their number for each expert of each rank, and that order.

        The order is None if it is that of the sorted rows.
        """
        return sorted_rows, order.offsets.diff(prepend=order.offsets.new_zeros(1)), None

    def compute(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """The outputs of this rank's experts for the rows that all ranks sent to them, sorted by expert."""
        return super().forward(sorted_rows, order)

    def weighted(self, returned: Tensor, sent_order: ExpertOrder | None, weights: Tensor | None) -> Tensor:
        """The outputs `returned` in the order of the sorted rows, times their weights."""
        outputs = returned if sent_order is None else from_groups(returned, sent_order).squeeze(1)
        return outputs if weights is None else (outputs * weights[:, None]).to(outputs.dtype)


class CopiedExperts(DistributedExperts):
    """This rank's experts of a layer and copies of others: rows of an expert that is `present` stay on their rank."""

    def __init__(self, whole: Experts, exchange: TokenExchange, present: PresentExperts) -> None:
        super().__init__(whole, exchange)
        stacked = copy(whole)
        stacked._parameters = {}
        self.present = present
        self.local = present.local
        self.stacked = (stacked,)
        """The experts in this rank's slots. In a tuple, because their weights are no parameters of the model."""

    def use_stacked(self, name: str, weight: nn.Parameter) -> None:
        """Compute with `weight` `(slots, out, in)` in place of this rank's own experts' parameter `name`."""
        self.stacked[0].register_parameter(name, weight)
        self.stacked[0].fp8 = self.fp8

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """As `DistributedExperts.forward`. Weights multiply activations where all experts are present in every step."""
        if self.present.always_all:
            return self.stacked[0].forward(sorted_rows, order, weights)
        return super().forward(sorted_rows, order, weights)

    def rows_to_send(self, sorted_rows: Tensor, order: ExpertOrder) -> tuple[Tensor, Tensor, ExpertOrder | None]:
        """As `DistributedExperts.rows_to_send`, for the slots of each rank."""
        load = order.offsets.diff(prepend=order.offsets.new_zeros(1)).long()
        sent_order, sent_loads = _order_by_slot(self.present, load, sorted_rows.shape[0])
        return to_groups(sorted_rows, sent_order), sent_loads, sent_order

    def compute(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """As `DistributedExperts.compute`, by the experts in this rank's slots."""
        return self.stacked[0].forward(sorted_rows, order)


class AllToAll(TokenExchange):
    """The exchange by messages of NCCL or Gloo; `group` is the name of the process group of `ranks` ranks."""

    def __init__(self, group: str, ranks: int) -> None:
        self.group = group
        self.ranks = ranks

    def __call__(self, sorted_rows: Tensor, load: Tensor, compute: Compute, local: Tensor | None = None) -> Tensor:
        received_loads, splits = exchange_loads(load, self.group, self.ranks, local)
        received = exchange_rows(sorted_rows, splits, None, False, self.group)
        return exchange_rows(
            compute_received(compute, received, received_loads), splits, sorted_rows.shape[0], True, self.group
        )


def compute_received(compute: Compute, received: Tensor, received_loads: Tensor) -> Tensor:
    """The outputs `(rows, hidden)` of received rows, which are ordered by sending rank, then by expert.

    `received_loads` `(ranks, experts)` counts them.
    """
    order = order_by_expert(experts_of_rows(received_loads, received), received_loads.sum(0))
    return from_groups(compute(to_groups(received, order), order), order).squeeze(1)


def _order_by_slot(present: PresentExperts, load: Tensor, count: int) -> tuple[ExpertOrder, Tensor]:
    """The order of `count` rows, sorted by expert with `load` `(experts,)`, by the rank and slot to which they go.

    Returns also the rows for each slot of each rank, `(ranks · slots,)`.
    """
    ranks = present.ranks
    slots = present.slots
    destinations = present.destinations(load)
    padded = F.pad(destinations, (0, 0, 0, 1))  # no rows for free slots
    sent = padded.t().gather(1, present.expert_in).flatten()
    keys = (torch.arange(ranks, device=load.device)[:, None] * slots + present.slot_of).t().flatten()
    ends = destinations.flatten().cumsum(0)
    pairs = torch.searchsorted(ends, torch.arange(count, device=load.device), right=True)
    return order_by_expert(keys[pairs][:, None], sent), sent


def experts_of_rows(received_loads: Tensor, received: Tensor) -> Tensor:
    """Index of the local expert of each received row, `(rows, 1)`; rows are ordered by sending rank, then by expert."""
    ends = received_loads.flatten().cumsum(0)
    positions = torch.arange(received.shape[0], device=received_loads.device)
    return (torch.searchsorted(ends, positions, right=True) % received_loads.shape[1])[:, None]


# Custom operators, because torch.compile can trace neither sizes that the host reads nor data from other ranks.
@torch.library.custom_op("meshwright::exchange_loads", mutates_args=())
def exchange_loads(load: Tensor, group: str, ranks: int, local: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Exchange row counts before `exchange_rows`. `load` `(experts,)` has this rank's number of rows for each expert.

    Returns the rows that each rank sends for each local expert `(ranks, experts / ranks)`, and on the host splits `(2, ranks)`: the rows
    sent to each rank, and the rows received from each rank. The host waits for the device. If `local` `(1,)`, on the host, is not 0, rows
    stay on their rank: nothing is sent, the host does not wait, and the splits are -1.
    """
    sent = load.view(ranks, -1).contiguous()
    if local is not None and local.item():
        own = dist.get_rank(group_by_name(group))
        received = torch.zeros_like(sent)
        received[own] = sent[own]
        return received, torch.full((2, ranks), -1)
    received = torch.empty_like(sent)
    ALL_TO_ALL(received, sent, group=group_by_name(group))
    return received, torch.stack([sent.sum(1), received.sum(1)]).cpu()


@exchange_loads.register_fake
def _(load: Tensor, group: str, ranks: int, local: Tensor | None = None) -> tuple[Tensor, Tensor]:
    del group, local
    return load.new_empty(ranks, load.shape[0] // ranks), torch.empty(2, ranks, dtype=torch.int64)


@torch.library.custom_op("meshwright::sum_loads", mutates_args=())
def sum_loads(loads: Tensor, group: str) -> Tensor:
    """Sum over the group of loads `(batch, experts)`, where each rank has a part of each sequence's tokens."""
    total = loads.clone()
    dist.all_reduce(total, group=group_by_name(group))
    return total


@sum_loads.register_fake
def _(loads: Tensor, group: str) -> Tensor:
    del group
    return torch.empty_like(loads)


@torch.library.custom_op("meshwright::exchange_rows", mutates_args=())
def exchange_rows(sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str) -> Tensor:
    """Send rows `(rows, width)` to the ranks of their experts, or with `back` return them; returns rows `(count, width)`.

    `splits` is from `exchange_loads`. `count` is the number of rows that this rank receives, or None to compute it from `splits`, which a
    compiled graph cannot read.
    """
    return start_exchange(sent, splits, count, back, group).wait()


class RowsOnTheWay(NamedTuple):
    """Rows that ranks may still exchange: those sent, which must not change, and the buffer of those received."""

    sent: Tensor
    received: Tensor
    work: Any = None
    """None after a synchronous call, which already made compute wait."""

    def wait(self) -> Tensor:
        """Make compute wait for the rows and return them."""
        if self.work is not None:
            self.work.wait()
        return self.received


def start_exchange(
    sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str, *, asynchronous: bool = False
) -> RowsOnTheWay:
    """Start `exchange_rows`; with `asynchronous` it overlaps with compute until `wait`. Not differentiable."""
    sent_counts, received_counts = splits.flip(0).tolist() if back else splits.tolist()
    if sent_counts[0] < 0:
        return RowsOnTheWay(sent, sent.clone())
    assert count is None or count == sum(received_counts)
    sent, received = sent.contiguous(), sent.new_empty(sum(received_counts), sent.shape[1])
    work = ALL_TO_ALL(received, sent, received_counts, sent_counts, group=group_by_name(group), async_op=asynchronous)
    return RowsOnTheWay(sent, received, work)


@exchange_rows.register_fake
def _(sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str) -> Tensor:
    del splits, back, group
    return sent.new_empty(torch.library.get_ctx().new_dynamic_size() if count is None else count, sent.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int | None, bool, str], output: Tensor) -> None:
    del output
    sent, splits, _, ctx.back, ctx.group = inputs
    ctx.row_count = sent.shape[0]
    ctx.save_for_backward(splits)


def _exchange_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (splits,) = ctx.saved_tensors
    return exchange_rows(grad, splits, ctx.row_count, not ctx.back, ctx.group), None, None, None, None


exchange_rows.register_autograd(_exchange_gradients, setup_context=_save_for_backward)
