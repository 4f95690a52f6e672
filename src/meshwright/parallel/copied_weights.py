"""Sparse gathers of experts' weights to the ranks where copies are present, and sparse reductions of the copies' gradients.

Each expert has one owner: the ranks that have its shards, master weights and optimizer state; these never move. A unit is a part of the
model whose parameters are gathered and reduced together, here a block with experts. Before a unit is used, an owner gathers its experts'
weights over its shards, copies them into its slots of a stacked weight, and sends them to the ranks where the expert is present. After the
backward, the gradients of copies are sent back. The owner adds them to its own gradient in the order of ranks, and then reduces the sum
over its shards (spAG and spRS of Hecate, arXiv 2502.02581). If all experts are present everywhere, the sends become one all-gather and one
reduce-scatter. Gathers and reductions run on two streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.fsdp import ParameterGroup, ShardedParameter, Span
from meshwright.parallel.linear_exchanges import ALL_GATHER, REDUCE_SCATTER
from meshwright.parallel.present_experts import PresentExperts
from meshwright.parallel.sharded_unit import GradientAccumulator


class StackedWeight:
    """Weight of all experts in a rank's slots, `(slots, out, in)`. It replaces the `ShardedParameter`, which has only own experts."""

    def __init__(self, owner: ShardedParameter, present: PresentExperts, group: ParameterGroup) -> None:
        self.owner = owner
        self.present = present
        shape = (present.slots, *owner.gathered_shape[1:])
        self.gathered = nn.Parameter(torch.empty(shape, dtype=group.gathered_dtype, device=group.device))
        """The stacked weight. Its memory is allocated from a gather until it is freed."""
        # An alias of `gathered`. Autograd does not count changes that are made through it.
        self.memory = self.gathered.data
        self._bytes = self.memory.nbytes
        self._total: Tensor | None = None
        self.free()

    @property
    def shard(self) -> nn.Parameter:
        return self.owner.shard

    @property
    def shard_gradient(self) -> Tensor | None:
        return self.owner.shard_gradient

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.owner.stored_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.owner.reduce_dtype

    @property
    def own(self) -> Tensor:
        """The part of the stacked weight that has the rank's own experts."""
        return self.memory[self.present.own_slots]

    def allocate(self) -> None:
        self.memory.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def set_gradient_sum(self, total: Tensor) -> None:
        """Set the gradient sum that the next reduction reduces, instead of the gradient of the last backward."""
        self._total = total

    def take_gradient(self) -> Tensor | None:
        """Return and forget the gradient `(slots, out, in)` of all backwards since the last reduction."""
        total = self._total
        self._total = None
        gradient = self.gathered.grad
        self.gathered.grad = None
        return gradient if total is None else total


class CopiedParameterGroup:
    """The weights of a unit's experts, with copies. It has the methods of `ParameterGroup` and gathers and reduces through `owner`.

    - `owner`: the parameter group of the rank's own experts.
    - `presents`: which experts are present, for each weight of `owner`.
    - `group`: a process group of the ranks that have the layer's experts, for weights only. On a shared group, messages of tokens would
      wait until the weights before them are transferred.
    - `keep`: the weights stay gathered until the end of the step.
    """

    def __init__(
        self, owner: ParameterGroup, presents: Sequence[PresentExperts], group: dist.ProcessGroup, *, keep: bool
    ) -> None:
        self.owner = owner
        self.stays_gathered = keep
        self._group_of_copies = group
        device = owner.device
        self.parameters = [
            StackedWeight(parameter, present, owner)
            for parameter, present in zip(owner.parameters, presents, strict=True)
        ]
        self.ranks = owner.ranks * group.size()
        self._accumulator = GradientAccumulator.of(owner)
        is_cuda = device.type == "cuda"
        self._gathers, self._reductions = (torch.cuda.Stream(device) if is_cuda else None for _ in range(2))
        self._is_gathered = False
        self._works = []
        self._sources = []
        self._gathered_event: Any = None
        self.reduced_event: Any = None

    @property
    def device(self) -> torch.device:
        return self.owner.device

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the stacked weights."""
        return sum(weight.memory.nbytes for weight in self.parameters)

    def gather(self, span: Span | None = None) -> None:
        """Start to gather the weights of present experts, unless they are gathered.

        `span` is a profiler span: a context manager that is entered on the communication stream for the time of the collectives.
        """
        if self._is_gathered:
            return
        self._is_gathered = True
        with _on_stream(self._gathers), span or nullcontext():
            self.owner.gather()
            self.owner.wait_for_gather()
            for weight in self.parameters:
                weight.allocate()
                weight.own.copy_(weight.owner.gathered.data)
            self.owner.free_gathered()
            self._start_copies()
            if self._gathers is not None:
                self._wait_for_works()
                self._gathered_event = self._gathers.record_event()

    @property
    def gathering(self) -> bool:
        """Whether a gather has started and compute has not waited for it yet."""
        return bool(self._works) or self._gathered_event is not None

    def wait_for_collective(self) -> None:
        """Make the compute stream wait until the weights are gathered."""
        self.wait_for_gather()

    def wait_for_gather(self) -> None:
        """Make the compute stream wait until the weights are gathered."""
        if self._gathered_event is not None:
            torch.cuda.current_stream().wait_event(self._gathered_event)
            self._gathered_event = None
        self._wait_for_works()

    def free_gathered(self) -> None:
        """Free the stacked weights."""
        self.wait_for_gather()
        for weight in self.parameters:
            weight.free()
        self._is_gathered = False

    def reduce_scatter(self, span: Span | None = None) -> None:
        """Start to add the gradients of copies to their owners' gradients and to reduce the sums. `span` as in `gather`."""
        pairs = [(weight, weight.take_gradient()) for weight in self.parameters]
        gradients = [(weight, gradient) for weight, gradient in pairs if gradient is not None]
        with _on_stream(self._reductions), span or nullcontext():
            for weight, total in zip((weight for weight, _ in gradients), self._add_copies(gradients), strict=True):
                self._accumulator.set_sum(weight.owner, total)
            self._accumulator.start_reduction(None)
            if self._reductions is not None:
                for _, gradient in gradients:
                    gradient.record_stream(self._reductions)
                self.reduced_event = self._reductions.record_event()

    def finish_reductions(self) -> None:
        """Make the compute stream wait for every reduction that was started."""
        if self.reduced_event is not None:
            torch.cuda.current_stream().wait_event(self.reduced_event)
        self.owner.finish_reductions()

    def _start_copies(self) -> None:
        operations = []
        for weight in self.parameters:
            if weight.present.all_present:
                self._sources.append(weight.own.clone())
                work = ALL_GATHER(weight.memory, self._sources[-1], group=self._group_of_copies, async_op=True)
                self._works.append(work)
                continue
            operations += [
                self._message(dist.isend if copy.sends else dist.irecv, weight.memory[copy.slot], copy.peer)
                for copy in weight.present.transfers
            ]
        if operations:
            self._works += dist.batch_isend_irecv(operations)

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._sources.clear()

    def _add_copies(self, gradients: Sequence[tuple[StackedWeight, Tensor]]) -> list[Tensor]:
        """Return the gradients of own experts plus those of their copies on other ranks: one `(owned, out, in)` for each weight."""
        operations = []
        totals = []
        received = []
        for weight, gradient in gradients:
            present = weight.present
            dtype = weight.reduce_dtype or gradient.dtype
            if present.all_present:
                total = gradient.new_empty((present.owned, *gradient.shape[1:]), dtype=dtype)
                whole = gradient.to(dtype).contiguous()
                REDUCE_SCATTER(total, whole, group=self._group_of_copies)
                totals.append(total)
                continue
            totals.append(gradient[present.own_slots].to(dtype, copy=True))
            for copy in present.transfers:
                if copy.sends:
                    buffer = torch.empty(gradient.shape[1:], dtype=dtype, device=gradient.device)
                    operations.append(self._message(dist.irecv, buffer, copy.peer))
                    received.append((copy.peer, totals[-1][copy.slot - present.own_slots.start], buffer))
                else:
                    part = gradient[copy.slot].to(dtype).contiguous()
                    operations.append(self._message(dist.isend, part, copy.peer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        # A rank has one copy of an expert, so each sum occurs once in a pass.
        for rank in range(self._group_of_copies.size()):
            sums = [(total, buffer) for peer, total, buffer in received if peer == rank]
            if sums:
                torch._foreach_add_([total for total, _ in sums], [buffer for _, buffer in sums])
        return totals

    def _message(self, operation: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        """A send to or receive from a rank of the group. Two ranks issue their messages in the same order, so these match."""
        return dist.P2POp(operation, tensor, group=self._group_of_copies, group_peer=peer)


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """Context in which work runs on `stream`, after the work launched so far on the current stream. None: on the current stream."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
