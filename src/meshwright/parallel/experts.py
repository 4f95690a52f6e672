"""Expert parallelism for a decoder: the experts of a layer are distributed over ranks, and tokens are sent to them.

Each rank of a group has some of a layer's experts. It sorts its token copies by expert, as the model does on one device. (A token that
chooses k experts has k copies. A row is the activation of one copy.) One all-to-all sends the rows to the ranks of their experts. After the
experts, a second all-to-all returns the outputs to the positions that the rows had. Backward sends gradients in the same way (GShard,
Lepikhin et al. 2021). No row is dropped.

An expert processes the rows of all ranks of the group, so its gradient is already a sum over the group. It is reduced only over ranks that
have the same experts. Context and tensor ranks have a part of each sequence, so they belong to the group. Tensor ranks always have
different experts.

The number of rows for each expert depends on the router. A first all-to-all exchanges these counts. The host then reads them, because the
all-to-all of the rows needs its message sizes on the host. This is one synchronisation per layer and forward. Recompute saves the counts
with the router's choices, so it sends the same rows again.
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
    """Replace the experts of each layer by this rank's experts; the other ranks of the group send their rows to them.

    If the `plan` copies experts, returns for each layer which experts are present on which ranks; otherwise an empty dictionary. Does
    nothing if each rank has all experts. Raises BadInput if the experts cannot be divided evenly over the ranks.
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
    """Make the balance loss use the loads of whole sequences, summed over the context and tensor ranks that divide a sequence.

    A load is the number of tokens that chose an expert. The balance loss of a sequence multiplies the load of each expert in the sequence
    by its mean probability. If each rank uses the loads of the whole sequence and the probabilities of its own tokens, the ranks' balance
    losses add up to the loss of the sequence.
    """
    if model.spec.routed_layers and (group := mesh.group_over((*CONTEXT_AXES, "tensor"))) is not None:
        for moe in _moe_layers(model):
            moe.hooks.whole_sequence_loads = partial(sum_loads, group=group.group_name)


def _moe_layers(model: Decoder) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


class DistributedExperts(Experts):
    """This rank's experts of a layer. Other ranks send rows to them, and this rank sends rows to theirs, by `exchange`."""

    local: Tensor | None = None
    """The argument `local` of `TokenExchange`: on the host, not 0 if no row leaves its rank. None: rows are always exchanged."""

    def __init__(self, whole: Experts, exchange: TokenExchange) -> None:
        nn.Module.__init__(self)
        self.activation = whole.activation
        self.gated = whole.gated
        self.biased = whole.biased
        self.reference = whole.reference
        self.exchange = exchange
        self.adapter = whole.adapter
        for name, weight in whole.named_parameters(recurse=False):
            self.register_parameter(name, weight)

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """Return the expert outputs for this rank's rows `(rows, hidden)`, which are sorted by expert; `order` is that sort.

        If `weights` `(rows,)` are given, each output is multiplied by its weight after it has returned. The weights are not sent.
        """
        sent, load, sent_order = self.rows_to_send(sorted_rows, order)
        return self.weighted(self.exchange(sent, load, self.compute, self.local), sent_order, weights)

    def rows_to_send(self, sorted_rows: Tensor, order: ExpertOrder) -> tuple[Tensor, Tensor, ExpertOrder | None]:
        """Return the rows to send, their counts `(ranks · experts per rank,)`, and the order in which they are sent.

        The order is None if the rows are sent as they are sorted.
        """
        return sorted_rows, order.offsets.diff(prepend=order.offsets.new_zeros(1)), None

    def compute(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """Return the outputs of this rank's experts for received rows from all ranks, which are sorted by expert."""
        return super().forward(sorted_rows, order)

    def weighted(self, returned: Tensor, sent_order: ExpertOrder | None, weights: Tensor | None) -> Tensor:
        """Bring the `returned` outputs back into the order of the sorted rows and multiply them by their weights."""
        outputs = returned if sent_order is None else from_groups(returned, sent_order).squeeze(1)
        return outputs if weights is None else (outputs * weights[:, None]).to(outputs.dtype)


class CopiedExperts(DistributedExperts):
    """This rank's experts and copies of other ranks' experts. A row stays on its rank if its expert is `present` there."""

    def __init__(self, whole: Experts, exchange: TokenExchange, present: PresentExperts) -> None:
        super().__init__(whole, exchange)
        stacked = copy(whole)
        stacked._parameters = {}
        self.present = present
        self.local = present.local
        self.stacked = (stacked,)
        """An `Experts` module with the weights in this rank's slots: its own experts and the copies.

        It is in a tuple so that its weights do not become parameters of the model.
        """

    def use_stacked(self, name: str, weight: nn.Parameter) -> None:
        """Compute with `weight` `(slots, out, in)` instead of the parameter `name`, which has this rank's own experts only."""
        self.stacked[0].register_parameter(name, weight)
        self.stacked[0].fp8 = self.fp8

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """Compute what `DistributedExperts.forward` computes.

        If all experts are present on every rank in every step, nothing is sent. The `weights` then multiply activations inside the experts,
        not their outputs.
        """
        if self.present.always_all:
            return self.stacked[0].forward(sorted_rows, order, weights)
        return super().forward(sorted_rows, order, weights)

    def rows_to_send(self, sorted_rows: Tensor, order: ExpertOrder) -> tuple[Tensor, Tensor, ExpertOrder | None]:
        """Return what `DistributedExperts.rows_to_send` returns, with slots in place of experts.

        A slot is the place of one expert in the memory of a rank. The counts have the shape `(ranks · slots,)`.
        """
        load = order.offsets.diff(prepend=order.offsets.new_zeros(1)).long()
        sent_order, sent_loads = _order_by_slot(self.present, load, sorted_rows.shape[0])
        return to_groups(sorted_rows, sent_order), sent_loads, sent_order

    def compute(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """As `DistributedExperts.compute`, with the experts in this rank's slots."""
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
    """Return the outputs `(rows, hidden)` for received rows, in the order in which they arrived: by sending rank, then by expert.

    `received_loads` `(ranks, experts)` has the number of rows from each rank for each local expert.
    """
    order = order_by_expert(experts_of_rows(received_loads, received), received_loads.sum(0))
    return from_groups(compute(to_groups(received, order), order), order).squeeze(1)


def _order_by_slot(present: PresentExperts, load: Tensor, count: int) -> tuple[ExpertOrder, Tensor]:
    """Return the order by target rank and slot for `count` rows that are sorted by expert, and the rows per slot `(ranks · slots,)`.

    `load` `(experts,)` has the number of rows for each expert.
    """
    ranks = present.ranks
    slots = present.slots
    destinations = present.destinations(load)
    # A free slot has the expert number E in `expert_in`, so it reads the row of zeros that is appended here.
    padded = F.pad(destinations, (0, 0, 0, 1))
    sent = padded.t().gather(1, present.expert_in).flatten()
    # Sort key of each pair (expert, rank): the number of the slot among all ranks' slots, rank · slots + slot.
    keys = (torch.arange(ranks, device=load.device)[:, None] * slots + present.slot_of).t().flatten()
    ends = destinations.flatten().cumsum(0)
    pairs = torch.searchsorted(ends, torch.arange(count, device=load.device), right=True)
    return order_by_expert(keys[pairs][:, None], sent), sent


def experts_of_rows(received_loads: Tensor, received: Tensor) -> Tensor:
    """Index of the local expert of each received row, `(rows, 1)`. Rows are ordered by sending rank, then by expert.

    Example with 2 ranks and 2 local experts: loads [[2, 1], [1, 0]] give the indices 0, 0, 1, 0.
    """
    ends = received_loads.flatten().cumsum(0)
    positions = torch.arange(received.shape[0], device=received_loads.device)
    return (torch.searchsorted(ends, positions, right=True) % received_loads.shape[1])[:, None]


# Custom operators, because torch.compile can trace neither sizes that the host reads nor data from other ranks.
@torch.library.custom_op("meshwright::exchange_loads", mutates_args=())
def exchange_loads(load: Tensor, group: str, ranks: int, local: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Exchange row counts before `exchange_rows`. `load` `(experts,)` has this rank's number of rows for each expert of all ranks.

    Returns the number of rows that each rank sends for each local expert `(ranks, experts / ranks)`, and on the host the splits
    `(2, ranks)`: first the numbers of rows that this rank sends to each rank, then the numbers that it receives. The host waits for the
    device. If `local` `(1,)`, on the host, is not 0, all rows stay on their rank: nothing is sent, the host does not wait, and the splits
    are -1.
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
    """Sum loads `(batch, experts)` over the ranks of the group; each rank counted its part of each sequence's tokens."""
    total = loads.clone()
    dist.all_reduce(total, group=group_by_name(group))
    return total


@sum_loads.register_fake
def _(loads: Tensor, group: str) -> Tensor:
    del group
    return torch.empty_like(loads)


@torch.library.custom_op("meshwright::exchange_rows", mutates_args=())
def exchange_rows(sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str) -> Tensor:
    """Send rows `(rows, width)` to the ranks of their experts, or with `back` return outputs to the ranks of their rows.

    Returns the rows that arrive, `(count, width)`. `splits` is from `exchange_loads`. With `count` None the number is computed from
    `splits`. A compiled graph cannot read `splits`, so it passes `count` where it knows the number.
    """
    return start_exchange(sent, splits, count, back, group).wait()


class RowsOnTheWay(NamedTuple):
    """Rows of an exchange that may still run. `sent` must not change and `received` must not be read before `wait`."""

    sent: Tensor
    received: Tensor
    work: Any = None
    """The running exchange. None after a synchronous call, which already made the compute stream wait."""

    def wait(self) -> Tensor:
        """Make the compute stream wait for the received rows and return them."""
        if self.work is not None:
            self.work.wait()
        return self.received


def start_exchange(
    sent: Tensor, splits: Tensor, count: int | None, back: bool, group: str, *, asynchronous: bool = False
) -> RowsOnTheWay:
    """Start `exchange_rows`, whose arguments it has. With `asynchronous` it overlaps with compute until `wait`. Not differentiable."""
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
