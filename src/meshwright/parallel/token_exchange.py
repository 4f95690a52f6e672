"""Exchange of rows between the ranks of a layer's experts: the interface, and the variant by kernels that write into mapped memory.

There are two variants. `parallel.experts.AllToAll` sends messages by an all-to-all of NCCL or Gloo, for which the host must read the counts
of rows. `PeerTokenExchange` (`plan.expert_exchange: peer`) reads nothing on the host, and all its shapes are static
(`parallel.token_exchange_peers`). Its ranks must be GPUs of one node that map each other's memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.grouped import ExpertOrder
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.token_exchange_peers import MappedWindow, PeerExchange, Route
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import ExpertPlan

Compute = Callable[[Tensor, ExpertOrder], Tensor]
"""A function that returns the outputs of this rank's experts for rows `(rows, hidden)` that are sorted by expert."""


class TokenExchange(ABC):
    """Computes rows by the experts of all ranks of a group. Collective over the group; differentiable."""

    @abstractmethod
    def __call__(self, sorted_rows: Tensor, load: Tensor, compute: Compute, local: Tensor | None = None) -> Tensor:
        """Send rows `(rows, hidden)` to the ranks of their experts, compute them there, and return the outputs in the order of the rows.

        The rows are sorted by expert, and `load` `(experts,)` has this rank's number of rows for each expert. `local` `(1,)`, on the host,
        is not 0 if every rank's rows are all for experts on that rank; nothing is sent then.
        """


class PeerTokenExchange(TokenExchange):
    """The exchange by kernels that write into other ranks' memory. `group` is the name of the group of ranks that have the experts."""

    def __init__(self, group: str, peers: PeerExchange) -> None:
        self._group = group
        self._peers = peers
        _peers_by_group[group] = peers

    def __call__(self, sorted_rows: Tensor, load: Tensor, compute: Compute, local: Tensor | None = None) -> Tensor:
        del local  # rows for this rank's own experts pass through the window too; only the host could skip it, and it must not wait
        peers = self._peers
        most_rows = peers.most_received(sorted_rows.shape[0])
        offsets, *route = route_tokens(load, sorted_rows, peers.ranks, most_rows, self._group)
        received = move_tokens(sorted_rows, *route, False, peers.fp8, self._group)
        outputs = compute(received, _order_of_groups(offsets, most_rows))
        return move_tokens(outputs, *route, True, False, self._group)


def open_peer_exchange(mesh: Mesh, plan: ExpertPlan) -> PeerTokenExchange:
    """Open the exchange by kernels between the ranks that have a layer's experts. There must be at least two such ranks.

    Raises BadInput if the ranks are not GPUs of one node that map each other's memory.
    """
    option = "plan.expert_exchange = peer"
    group = mesh.experts
    assert group is not None, "experts on one rank need no exchange"
    if mesh.device.type == "cpu":
        raise BadInput(f"{option}: expected GPUs; CPU ranks exchange tokens by all_to_all")
    ranks = dist.get_process_group_ranks(group)
    mesh.world.refuse_across_nodes(ranks, option)
    mesh.world.refuse_unmapped(ranks, option)
    bound = float(len(ranks)) if plan.receive_bound is None else plan.receive_bound
    open_window = partial(open_symmetric_window, group, mesh.device)
    return PeerTokenExchange(
        group.group_name, PeerExchange(group.rank(), len(ranks), bound, plan.exchange == "peer_fp8", open_window)
    )


def open_symmetric_window(group: dist.ProcessGroup, device: torch.device, size: int) -> MappedWindow:
    """Allocate a window of `size` zero bytes on each rank of the group and map the windows of all ranks.

    Collective; synchronises the device. Raises BadInput if the ranks ask for different sizes.
    """
    # Symmetric memory would otherwise set up multicast, which these kernels do not use.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    sizes = [0] * group.size()
    dist.all_gather_object(sizes, size, group=group)
    if len(set(sizes)) > 1:
        raise BadInput(
            f"plan.expert_exchange = peer needs equal numbers of rows on all expert ranks, got windows of {sizes} bytes"
        )
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    # After this no rank uses an earlier window any more, and the flags are zero before a peer writes one.
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(memory, group.group_name)
    addresses = [handle.get_buffer(owner, (1,), torch.uint8, 0).data_ptr() for owner in range(group.size())]
    return MappedWindow(memory, torch.tensor(addresses, dtype=torch.int64, device=device))


def check_received_rows() -> None:
    """Raise BadInput if a finished exchange had more rows than a rank has room for. The results of such an exchange are NaN."""
    for peers in _peers_by_group.values():
        peers.check()


def _order_of_groups(offsets: Tensor, row_count: int) -> ExpertOrder:
    """The order of `row_count` rows that are already sorted by expert; `offsets` are the ends of the experts' rows."""
    positions = torch.arange(row_count, device=offsets.device)
    return ExpertOrder(positions, positions[:, None], offsets)


# Custom operators get a group's name as argument and look the peers up here. An entry does not keep the peers alive.
_peers_by_group: WeakValueDictionary[str, PeerExchange] = WeakValueDictionary()


# Custom operators, because torch.compile cannot trace data from other ranks.
@torch.library.custom_op("meshwright::route_tokens", mutates_args=())
def route_tokens(
    load: Tensor, activations: Tensor, ranks: int, most: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exchange the row counts `load` `(experts,)` of all ranks and compute the target of every row.

    `activations` are the rows to be sent later. Each of the `ranks` ranks receives at most `most` rows. Returns the offset of the end of
    each local expert's received rows `(experts / ranks,)`, then the three tensors of a `Route`.
    """
    peers = _peers_by_group[group]
    assert peers.ranks == ranks and peers.most_received(activations.shape[0]) == most
    peers.start_route(load, activations)
    offsets, route = peers.finish_route(activations.shape[0])
    return offsets, route.sent, route.received, route.totals


@route_tokens.register_fake
def _(load: Tensor, activations: Tensor, ranks: int, most: int, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del group
    offsets, totals = (load.new_empty(size, dtype=torch.int32) for size in (load.shape[0] // ranks, 3))
    sent, received = (load.new_empty(size, dtype=torch.int64) for size in (activations.shape[0], most))
    return offsets, sent, received, totals


@torch.library.custom_op("meshwright::move_tokens", mutates_args=())
def move_tokens(
    activations: Tensor, sent: Tensor, received: Tensor, totals: Tensor, back: bool, fp8: bool, group: str
) -> Tensor:
    """Send rows `(rows, width)` to the ranks of their experts, or with `back` to the ranks they came from.

    `sent`, `received` and `totals` are the tensors of a `Route`. Returns the rows that arrive. On the way to the experts, the shape is
    `(maximum of rows received, width)`, and rows after the received ones are undefined. On the way back it is `(rows sent, width)`. With
    `fp8` the rows are sent in e4m3 with one scale per row.
    """
    peers = _peers_by_group[group]
    route = Route(sent, received, totals)
    peers.start_move(activations, route, back, fp8)
    return peers.finish_move(
        route, back, activations.new_empty((sent if back else received).shape[0], activations.shape[1]), fp8
    )


@move_tokens.register_fake
def _(activations: Tensor, sent: Tensor, received: Tensor, totals: Tensor, back: bool, fp8: bool, group: str) -> Tensor:
    del totals, fp8, group
    return activations.new_empty((sent if back else received).shape[0], activations.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, *targets, ctx.back, _, ctx.group = inputs
    ctx.save_for_backward(*targets)


def _move_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Send the gradients in the opposite direction, in their own dtype. The gradient of rounding to fp8 is taken as 1."""
    grad_x = move_tokens(grad, *ctx.saved_tensors, not ctx.back, False, ctx.group)
    return grad_x, None, None, None, None, None, None


move_tokens.register_autograd(_move_gradients, setup_context=_save_for_backward)
