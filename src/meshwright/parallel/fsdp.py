"""Fully sharded units driven by hand: gather, wait, drop, reduce. The only file that touches FSDP2's internals.

FSDP2's parameter groups hold the shards, the gathered weights and the streams; its hooks are taken off, and the executor says when each
verb runs, because a schedule that keeps parameters over several micro-batches, or splits the backward, cannot be told by hooks.

Gradients are summed, never averaged: the loss is already divided by the step's valid tokens over all ranks, so a sum is the gradient of
the global mean whatever the number of ranks. (FSDP2 divides by default, and on Gloo a factor of 1 needs the plain sum.)
Method: Zhao et al. 2023 (FSDP), Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.distributed.tensor import Shard

from meshwright.kernels.fp8_products import E4M3, Low, rounded_now
from meshwright.kernels.linear import Linear, add_to_gradient
from meshwright.kernels.pack import pack
from meshwright.kernels.sums import add, add_product, product
from meshwright.models.moe import Experts
from meshwright.spec.layout import expert_shard_dimension
from meshwright.spec.plan import Precision

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""torch's name of each number format of the Plan."""


class ShardedUnit:
    """The parameters of some modules, but for those inside that are a unit's already, split over the ranks of a mesh, with four verbs:
    `unshard`, `wait`, `reshard`, `reduce`.

    `places` is how many units of the schedule use it: 2 for tied weights, whose two ends share one unit. It is dropped when all its places
    dropped it, and reduced when all have asked since it last was.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision, places: int = 1) -> None:
        # Casting inputs too would round the rotary tables.
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[precision.compute] if precision.compute == "bf16" else None,
            reduce_dtype=DTYPES[precision.reduce],
            cast_forward_inputs=False,
        )
        experts = {weight for part in _parts(modules, Experts) for weight in part.parameters()}

        def cut(weight: nn.Parameter) -> Shard:
            return Shard(expert_shard_dimension(weight.shape, mesh.size()) if weight in experts else 0)

        fully_shard(list(modules), mesh=mesh, mp_policy=policy, reshard_after_forward=True, shard_placement_fn=cut)
        for module in modules:
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        self._group = _group_of(modules[0])
        self._group.gradient_divide_factor = 1.0
        self._group.force_sum_reduction_for_comms = True
        self._group.reshard_after_backward = False
        self.talks = mesh.size() > 1
        self._width = DTYPES[precision.compute].itemsize
        self._gather: Any = None
        self.places = places
        self._holders = 0
        self._asked: set[Hashable] = set()

    @property
    def parts(self) -> tuple[ShardedUnit, ...]:
        """The units in it: itself (`parallel.joint`)."""
        return (self,)

    def unshard(self, around: AbstractContextManager[None] | None = None) -> None:
        """Start to gather the weights on the communication stream; nothing when they are there or on their way.

        `around` is entered on that stream just before the collective and left just behind it.
        """
        self._holders += 1
        with self._group.use_training_state(TrainingState.FORWARD), _around(self._group, "_all_gather_comm", around):
            self._group.unshard(False)

    def wait(self) -> None:
        """Let compute wait until the weights are gathered."""
        arrived = self._group._all_gather_result
        with self._group.use_training_state(TrainingState.FORWARD):
            self._group.wait_for_unshard()
        if arrived is not None and self._gather is not None:
            self._gather.copied_out(arrived.all_gather_output)

    def reshard(self) -> None:
        """Drop the gathered weights."""
        self._holders -= 1
        if self._holders == 0:
            self.wait()  # a gather that nobody used must be through before its buffer goes
            with self._group.use_training_state(TrainingState.IDLE):
                self._group.reshard()

    def accumulate(self) -> None:
        """Add what a backward left in the gathered weights' gradients to a sum in the format that is reduced in."""
        for parameter in self._group.fsdp_params:
            _join(parameter)
            made, kind = parameter._unsharded_param.grad, parameter.reduce_dtype
            if made is not None and kind not in (None, made.dtype):
                parameter._unsharded_param.grad = None
                parameter.unsharded_accumulated_grad = torch.empty_like(made, dtype=kind)
                _cast((parameter.unsharded_accumulated_grad,), (made,))

    def add_product(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alone: bool) -> None:
        """Add a @ b to the sum of a gathered weight's gradients, in the format of the sum, without the pass of `accumulate` over both.

        With `alone` nothing follows that is added, so that only a sum that was begun goes on.
        """
        parameter = self._of_weight[id(weight)]
        kind = parameter.reduce_dtype or weight.dtype
        if kind == weight.dtype or (alone and parameter.unsharded_accumulated_grad is None):
            add_to_gradient(weight, a, b)
        elif parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_accumulated_grad = product(a, b, kind)
        else:
            add_product(parameter.unsharded_accumulated_grad, a, b)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether a gathered weight is this unit's."""
        return id(weight) in self._of_weight

    @cached_property
    def _of_weight(self) -> dict[int, Any]:
        """FSDP2's parameter by its gathered weight, which stays one object."""
        return {id(parameter._unsharded_param): parameter for parameter in self._group.fsdp_params}

    def reduce(
        self, around: AbstractContextManager[None] | None = None, *, place: Hashable = None, last: bool = True
    ) -> bool:
        """Start to sum the whole gradients over ranks, each rank keeping its shard; added to the shard's sum so far.

        False when another place of the unit than `place` has yet to add its part, and nothing was started; the `last` call of a step starts
        in any case, as places may be reduced at different rhythms. `around` as in `unshard`.
        """
        self._asked.add(place)
        if len(self._asked) < self.places and not last:
            return False
        self._asked.clear()
        self._sum(around)
        return True

    def _sum(self, around: AbstractContextManager[None] | None) -> None:
        for parameter in self._group.fsdp_params:
            _join(parameter)  # FSDP2 would too, an element at a time
        packed = _replaced(_fsdp_collectives, "foreach_reduce_scatter_copy_in", pack)
        with self._keeping(), packed, _around(self._group, "_reduce_scatter_comm", around):
            self._group.post_backward()
        self._group._training_state = TrainingState.IDLE

    def _keeping(self) -> AbstractContextManager[None]:
        """What one reduction runs in: memory of compute's stream where the sum becomes the gradient itself, else of the reduction's.

        FSDP2 takes all sums from the reduction's stream, whose pages nothing else gets: what activations leave cannot become gradients, and
        a device fills by 4 bytes more for each parameter that a rank owns. A sum that is added to another one and dropped must stay there:
        compute would overwrite it before it is added. (The reduction waits for compute behind this allocation, and compute for it before
        the gradient goes, so that neither stream finds the other's leavings.)
        """
        group = self._group
        added = any(parameter.sharded_param.grad is not None for parameter in group.fsdp_params)
        if group.device.type != "cuda" or added or group._reduce_dtype != group._orig_dtype:
            return nullcontext()
        compute = torch.cuda.stream(torch.cuda.current_stream())
        return _replaced(group, "_reduce_scatter_comm", _Inside(group._reduce_scatter_comm, allocating=compute))

    def finish(self) -> None:
        """Let compute wait for every reduction that was started."""
        self._group.finalize_backward()
        self._group.comm_ctx.all_gather_state = None

    @property
    def gathered_bytes(self) -> int:
        """Of the buffer that it is gathered into, at most; uneven shards are padded."""
        shard = sum(parameter.padded_sharded_param_size.numel() for parameter in self._group.fsdp_params)
        return shard * self._group._all_gather_process_group.size() * self._width

    def gather_through(self, gather: Any) -> None:
        """From now on gather with this in place of FSDP2's own `AllGather`; its `copied_out` is told when a buffer is needed no longer."""
        self._group._all_gather_comm = self._gather = gather

    @property
    def reduced(self) -> Any:
        """The event after which the shards' gradients hold the last reduction (None on a CPU)."""
        return self._group._post_reduce_event

    @property
    def whole_parameters(self) -> list[nn.Parameter]:
        """The gathered weights, to add gradients to. They exist from the first gather on, also while their memory is freed."""
        return [parameter._unsharded_param for parameter in self._group.fsdp_params]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """All that a gather brings: the weights, and those in fp8 instead of which others are empty."""
        low = (one.linear.low_weight for one in self.linears())
        return [*self.whole_parameters, *(weight.values for weight in low if weight is not None)]

    def linears(self) -> list[LinearShard]:
        """The weights of its linear layers, each by itself."""
        return [
            LinearShard(parameter)
            for parameter in self._group.fsdp_params
            if isinstance(parameter._module_info.module, Linear) and parameter._module_info.param_name == "weight"
        ]

    def masters(self) -> list[MasterShard]:
        """Its weights as the optimizer steps them, each by itself."""
        return [MasterShard(parameter) for parameter in self._group.fsdp_params]

    @property
    def gradient_shards(self) -> list[torch.Tensor]:
        """The rank's part of every gradient, as plain tensors."""
        shards = (parameter.sharded_param.grad for parameter in self._group.fsdp_params)
        return [shard.to_local() for shard in shards if shard is not None]


class LoneUnit(ShardedUnit):
    """A unit that one rank has to itself: one pass over the weights, and none over gradients that nothing is added to.

    FSDP2 casts the weights and then copies what it cast, and it casts the gradients, divides them by one and copies the quotient: 26 bytes
    a parameter more, 4% of a 3B model's step on an H200. With `final` nothing is added to the gradients of one backward, and they stay as
    they were made: a wider format would hold the same numbers.
    """

    def __init__(
        self, modules: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision, places: int = 1, *, final: bool
    ) -> None:
        super().__init__(modules, mesh, precision, places)
        self._final = final

    @torch.no_grad()
    def wait(self) -> None:
        if self._group._all_gather_result is None:
            return
        parameters = self._group.fsdp_params
        sources = [_sources(parameter) for parameter in parameters]
        for parameter, rows in zip(parameters, sources, strict=True):
            sizes, kinds = [source.numel() for source, _ in rows], [kind for _, kind in rows]
            parameter.init_all_gather_outputs(sizes, kinds, 1, self._group.device)
            parameter.alloc_all_gather_outputs()
        whole = tuple(part for parameter in parameters for part in parameter.all_gather_outputs)
        with torch.autograd._unsafe_preserve_version_counter(whole):
            _cast(whole, [source for rows in sources for source, _ in rows])
        for parameter in parameters:
            parameter.init_unsharded_param()
        self._group._to_unsharded()
        self._group._all_gather_result = None

    def add_product(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alone: bool) -> None:
        """Here what earlier micro-batches left is the shard's gradient, once the first was reduced."""
        kept = self._of_weight[id(weight)].sharded_param.grad
        if kept is None:
            super().add_product(weight, a, b, alone=alone)
        else:
            add_product(kept.to_local(), a, b)

    @torch.no_grad()
    def _sum(self, around: AbstractContextManager[None] | None) -> None:
        del around  # nothing travels
        fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in self._group.fsdp_params:
            _join(parameter)
            summed, single = parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad
            parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
            whole, kept = single if summed is None else summed, parameter.sharded_param.grad
            if whole is None:
                continue
            if kept is not None:
                add(kept.to_local(), whole)
                continue
            stays = whole.dtype if self._final else parameter.orig_dtype
            if whole.dtype != stays or not whole.is_contiguous():
                fresh.append((torch.empty(whole.shape, dtype=stays, device=whole.device), whole))
                whole = fresh[-1][0]
            parameter.sharded_param.grad_dtype = whole.dtype
            parameter.sharded_param.grad = parameter.to_sharded_dtensor(whole)
        if fresh:
            _cast(*zip(*fresh, strict=True))
        if self._group.device.type == "cuda":
            self._group._post_reduce_event = torch.cuda.current_stream().record_event()


def _sources(parameter: Any) -> list[tuple[torch.Tensor, torch.dtype]]:
    """What a whole parameter is made of on its only rank, and the format of each when it is whole."""
    if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):  # fp8, see LinearShard
        return [(rounded, rounded.dtype) for rounded in parameter.all_gather_inputs]
    return [(parameter._sharded_param_data, parameter.param_dtype or parameter.orig_dtype)]


def _join(parameter: Any) -> None:
    """What a backward left in the gathered weight's gradient joins the sum, where one was begun."""
    summed, made = parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad
    if summed is not None and made is not None:
        add(summed, made)
        parameter._unsharded_param.grad = None


def _cast(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor, one kernel for all of the same two formats."""
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for made, source in zip(into, sources, strict=True):
        left, right = pairs.setdefault((made.dtype, source.dtype), ([], []))
        left.append(made)
        right.append(source.view_as(made))
    for left, right in pairs.values():
        torch._foreach_copy_(left, right)


class LinearShard:
    """A linear layer's weight in a unit, which can be told to travel in fp8."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.linear: Linear = parameter._module_info.module

    @property
    def shard(self) -> torch.Tensor:
        """This rank's rows, padded to those of other ranks, as one row of numbers. To be asked once there are `Streams`."""
        return self._parameter._sharded_param_data

    def gather_low(self, scale: torch.Tensor, factor: torch.Tensor) -> None:
        """From now on round the shard to fp8 with `scale` `()` and its inverse `factor` whenever the unit is gathered.

        What computes finds the gathered weight in the layer's `low_weight`. `weight` is of its shape and takes the gradient, but has no
        memory. Both objects stay the same over all gathers. FSDP2 asks the shard's own tensor for these two functions.
        """
        self._scale, self._factor = scale, factor
        local = self._parameter._sharded_local_tensor
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._round, self._take
        self._parameter._init_extensions()
        kind = self._parameter.param_dtype or self._parameter.orig_dtype
        shape_only = torch.empty((), dtype=kind, device=local.device).expand(self._parameter._orig_size)
        self._parameter._unsharded_param = nn.Parameter(shape_only)

    def _round(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[torch.Tensor], None]:
        del mesh, size, stride, module, policy
        rows = self.shard.view(self._parameter.padded_sharded_param_size)
        return (
            rounded_now(rows, self._factor, E4M3).view(torch.uint8),
        ), None  # bytes: all that collectives need to know

    def _take(self, outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: torch.Tensor) -> None:
        del metadata, dtype, out
        if self.linear.low_weight is None:
            values = outputs[0].view(E4M3)[: self.linear.out_features]
            self.linear.low_weight = Low(values, self._scale)


class MasterShard:
    """This rank's part of a parameter, of which a copy in the format it is gathered in may be all that stays on the device."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def weight(self) -> nn.Parameter:
        """The parameter as the model has it."""
        return self._parameter.sharded_param

    @torch.no_grad()
    def leave(self) -> torch.Tensor:
        """Let go of the master's memory, and return its copy in the narrower format, laid out as the part. To be asked once there are
        `Streams`, while nothing is gathered. The parameter keeps shape and format, for its gradient's sake, and has no values."""
        whole, part = self._parameter._sharded_param_data, self._parameter._sharded_local_tensor
        assert not part.numel() or part.data_ptr() == whole.data_ptr()
        rounded = whole.to(self._parameter.param_dtype)
        assert rounded is not whole, "gathered as it is stored: a master has nothing to leave behind"
        # What is gathered from here on; padded as the master was (torch 2.11 to 2.13 read nothing else of it).
        self._parameter._sharded_param_data = rounded
        whole.untyped_storage().resize_(0)
        return rounded[: part.numel()].view(part.shape)


class Streams:
    """The communication streams that the units of one rank share."""

    def __init__(self, units: Iterable[ShardedUnit], device: torch.device) -> None:
        self._context = FSDPCommContext()
        self._context.lazy_init(device)
        self._device = device
        for unit in units:
            unit._group.comm_ctx = self._context
            unit._group.lazy_init()

    def follow_compute(self) -> None:
        """Let gathers begin only after what compute was given until now: the optimizer's update."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream()
            self._context.all_gather_copy_in_stream.wait_stream(current)
            self._context.all_gather_stream.wait_stream(current)


class _Inside:
    """A collective of FSDP2's that asks for buffers inside one context and is called inside another: on the stream that runs it, behind all
    that stream waits for."""

    def __init__(
        self,
        collective: Any,
        *,
        allocating: AbstractContextManager[Any] = nullcontext(),
        calling: AbstractContextManager[Any] = nullcontext(),
    ) -> None:
        self._collective, self._allocating, self._calling = collective, allocating, calling

    def allocate(self, *args: Any, **options: Any) -> Any:
        with self._allocating:
            return self._collective.allocate(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._calling:
            return self._collective(*args, **options)


def _around(group: Any, name: str, context: AbstractContextManager[None] | None) -> AbstractContextManager[None]:
    return nullcontext() if context is None else _replaced(group, name, _Inside(getattr(group, name), calling=context))


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _parts(modules: Iterable[nn.Module], kind: type[nn.Module]) -> Iterator[nn.Module]:
    return (part for module in modules for part in module.modules() if isinstance(part, kind))


def _group_of(module: nn.Module) -> Any:
    """FSDP2's parameter group of a unit: a list of one from torch 2.12 on."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    assert len(groups) == 1
    return groups[0]
