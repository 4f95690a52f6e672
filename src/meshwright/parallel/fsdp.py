"""Adapter to FSDP2 that gathers, frees and reduces the parameters of one unit; no other module uses FSDP2's internals.

A unit is a part of the model whose parameters are gathered and reduced together: embedding, block, or head.

FSDP2's parameter groups own the shards, the gathered weights and the streams. Its hooks are removed and the executor
calls each operation, because hooks cannot express a schedule that keeps gathered parameters over several micro-batches
or splits the backward.

Gradients are summed, never averaged: the loss is already divided by the step's valid tokens over all ranks, so the sum
is the gradient of the global mean for any number of ranks. (FSDP2 divides by default, and on Gloo a factor of 1 needs
the plain sum.) Method: Zhao et al. 2023 (FSDP), Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.distributed.tensor import Shard

from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix, round_with_factor
from meshwright.kernels.linear import Linear
from meshwright.kernels.pack import pack
from meshwright.models.moe import Experts, MoELayer
from meshwright.spec.layout import expert_shard_dimension
from meshwright.spec.plan import Precision

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""torch's dtype for each dtype name of a Plan."""
Span = AbstractContextManager[None]
"""Profiler span around a collective or a copy."""


class ParameterGroup:
    """Shards the parameters of some modules over the ranks of a mesh; gathers them and reduces their gradients together.

    An inner module that already has a group of its own is left out. Example: the experts of a block get their group first, so the block's
    group has only its other weights. `sum_dtype` is the dtype in which the gradients of shards are summed; None means the dtype of the
    master weights. The weights in `whole` are not sharded and belong to no group (see `unsharded_weights`).
    """

    stays_gathered = False
    """Whether the weights stay gathered until the end of the step, even if the schedule frees them earlier."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        precision: Precision,
        sum_dtype: torch.dtype | None = None,
        whole: Collection[nn.Parameter] = (),
    ) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[precision.compute] if precision.compute == "bf16" else None,
            reduce_dtype=DTYPES[precision.reduce],
            cast_forward_inputs=False,  # casting inputs too would round the rotary tables
        )
        experts = {weight for part in _submodules(modules, Experts) for weight in part.parameters()}

        def shard_dimension(weight: nn.Parameter) -> Shard:
            return Shard(expert_shard_dimension(weight.shape, mesh.size()) if weight in experts else 0)

        fully_shard(
            list(modules),
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=True,
            shard_placement_fn=shard_dimension,
            ignored_params=set(whole),
        )
        for module in modules:
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        self._group = _group_of(modules[0])
        self._group.gradient_divide_factor = 1.0
        self._group.force_sum_reduction_for_comms = True
        self._group.reshard_after_backward = False
        self.parameters = [ShardedParameter(parameter) for parameter in self._group.fsdp_params]
        self.ranks = mesh.size()
        self.gathered_dtype = DTYPES[precision.compute]
        self.sum_dtype = sum_dtype
        self._copy_gather: Any = None

    @property
    def owner(self) -> ParameterGroup:
        """The group whose shards the optimizer updates: this group, or the wrapped group in a `CopiedParameterGroup`."""
        return self

    @property
    def device(self) -> torch.device:
        return self._group.device

    def gather(self, span: Span | None = None) -> None:
        """Start to gather the weights on the communication stream, unless they are gathered or being gathered.

        `span` is entered on that stream just before the collective and left just after it.
        """
        with self._group.use_training_state(TrainingState.FORWARD), _in_span(self._group, "_all_gather_comm", span):
            self._group.unshard(False)

    @property
    def gathering(self) -> bool:
        """Whether a gather has started and `wait_for_gather` has not been called since."""
        return self._group._all_gather_result is not None

    def wait_for_collective(self) -> None:
        """Make the compute stream wait for the all-gather that has started, but not for the copy out of its buffer."""
        gather = self._group._all_gather_result
        if gather is not None and gather.all_gather_event is not None and self.device.type == "cuda":
            torch.cuda.current_stream().wait_event(gather.all_gather_event)

    def wait_for_gather(self) -> None:
        """Make the compute stream wait until the weights are gathered."""
        gather = self._group._all_gather_result
        with self._group.use_training_state(TrainingState.FORWARD):
            self._group.wait_for_unshard()
        if gather is not None and self._copy_gather is not None:
            self._copy_gather.release_buffer(gather.all_gather_output)

    def free_gathered(self) -> None:
        """Free the gathered weights."""
        self.wait_for_gather()  # a gather that nothing used must end before its buffer is freed
        with self._group.use_training_state(TrainingState.IDLE):
            self._group.reshard()

    def reduce_scatter(self, span: Span | None = None) -> None:
        """Start the reduce-scatter of the whole gradients and add the result to the gradient of each shard.

        The input is the sum set by `ShardedParameter.set_gradient_sum`, or, if none was set, the gradient of the gathered weight. The
        memory of the input is freed. `span` as in `gather`.
        """
        packed = _replace_attribute(_fsdp_collectives, "foreach_reduce_scatter_copy_in", pack)
        with self._output_memory(), self._sums_rounded(), packed, _in_span(self._group, "_reduce_scatter_comm", span):
            self._group.post_backward()
        self._group._training_state = TrainingState.IDLE

    def _output_memory(self) -> AbstractContextManager[None]:
        """Context that chooses the stream on which the output of a reduction is allocated.

        - The output becomes the shard's gradient: the compute stream. FSDP2 would allocate it on the reduction's stream. No other stream
          reuses the memory of that stream, so gradients could not reuse the memory of freed activations. This would cost 4 bytes for each
          parameter of a rank's shards.
        - The output is only added to an earlier gradient, or cast: the reduction's stream. On the compute stream, later compute could
          overwrite it before it is added.

        No stream reads stale contents: the reduction waits for compute after this allocation, and compute waits for the reduction before
        the gradient is freed.
        """
        group = self._group
        added = any(parameter.shard.grad is not None for parameter in self.parameters)
        temporary = added or self.sum_dtype is not None or group._reduce_dtype != group._orig_dtype
        if group.device.type != "cuda" or temporary:
            return nullcontext()
        compute = torch.cuda.stream(torch.cuda.current_stream())
        return _replace_attribute(
            group, "_reduce_scatter_comm", _CollectiveInContext(group._reduce_scatter_comm, allocating=compute)
        )

    @contextmanager
    def _sums_rounded(self) -> Iterator[None]:
        """Context of a reduction in which the new gradients of shards are rounded to `sum_dtype`. FSDP2 adds later gradients to them.

        FSDP2 calls the hooks on the reduction's stream, before it records the event that ends the reduction. FSDP2's gradients are views of
        one buffer. The rounded gradients are too, and their buffer is allocated on the compute stream, so that compute can reuse it.
        """
        if self.sum_dtype is None:
            yield
            return
        rounded: dict[int, torch.Tensor] = {}
        compute = torch.cuda.current_stream() if self.device.type == "cuda" else None

        def round_gradient(shard: nn.Parameter) -> None:
            gradient = parameters[shard].shard_gradient
            assert gradient is not None
            if gradient.dtype == self.sum_dtype:
                return
            storage = gradient.untyped_storage()
            buffer = rounded.get(storage.data_ptr())
            if buffer is None:
                whole = torch.empty(0, dtype=gradient.dtype, device=gradient.device).set_(storage)
                with torch.cuda.stream(compute):
                    buffer = torch.empty_like(whole, dtype=self.sum_dtype)
                rounded[storage.data_ptr()] = buffer.copy_(whole)
            view = buffer.as_strided(gradient.shape, gradient.stride(), gradient.storage_offset())
            shard.grad = None  # the dtype of a gradient can change only while there is none
            parameters[shard].set_shard_gradient(view)

        parameters = {parameter.shard: parameter for parameter in self.parameters if parameter.shard.requires_grad}
        hooks = [shard.register_post_accumulate_grad_hook(round_gradient) for shard in parameters]
        for shard in parameters:
            if shard.grad is None:
                shard.grad_dtype = None  # any dtype is allowed: FSDP2 sets a gradient in the dtype of the master weight
        yield
        for hook in hooks:
            hook.remove()

    def finish_reductions(self) -> None:
        """Make the compute stream wait for every reduction that was started."""
        self._group.finalize_backward()
        self._group.comm_ctx.all_gather_state = None

    @property
    def reduced_event(self) -> Any:
        """The event after which the shards' gradients include the last reduction (None on a CPU)."""
        return self._group._post_reduce_event

    @property
    def gathered_bytes(self) -> int:
        """Size in bytes of the buffer of the gathered weights, with the padding of uneven shards."""
        shard = sum(parameter.padded_shard_elements for parameter in self.parameters)
        return shard * self._group._all_gather_process_group.size() * self.gathered_dtype.itemsize

    def use_copy_gather(self, copy_gather: Any) -> None:
        """Replace FSDP2's `AllGather` by `copy_gather`. Its method `release_buffer` is called when a buffer is no longer read."""
        self._group._all_gather_comm = self._copy_gather = copy_gather


def unsharded_weights(modules: Sequence[nn.Module], ranks: int) -> Iterator[nn.Parameter]:
    """The weights that stay whole on every rank, in the dtype in which they are stored, without a parameter group.

    These are the biases of routers, which the training run updates itself (`ParameterSpec.trained`). On a single rank they are also all
    frozen weights, because a group would copy them at each gather.
    """
    biases = {moe.choice_bias for moe in _submodules(modules, MoELayer)}
    weights = (weight for module in modules for weight in module.parameters())
    return (weight for weight in weights if not weight.requires_grad and (ranks == 1 or weight in biases))


class UnsharedParameterGroup(ParameterGroup):
    """A parameter group on a single rank: a gather is one cast per weight, and gradients are not copied.

    FSDP2 on a single rank casts the weights and then copies the result. It also casts the gradients, divides them by one and copies the
    quotient. The extra copies move 26 bytes per parameter, 4% of the step time of a 3B model on an H200.
    """

    @torch.no_grad()
    def wait_for_gather(self) -> None:
        if self._group._all_gather_result is None:
            return
        fsdp_parameters = self._group.fsdp_params
        sources = [parameter.gather_sources() for parameter in self.parameters]
        for parameter, pairs in zip(fsdp_parameters, sources, strict=True):
            sizes = [source.numel() for source, _ in pairs]
            dtypes = [dtype for _, dtype in pairs]
            parameter.init_all_gather_outputs(sizes, dtypes, 1, self._group.device)
            parameter.alloc_all_gather_outputs()
        outputs = tuple(output for parameter in fsdp_parameters for output in parameter.all_gather_outputs)
        with torch.autograd._unsafe_preserve_version_counter(outputs):
            cast_tensors(outputs, [source for pairs in sources for source, _ in pairs])
        for parameter in fsdp_parameters:
            parameter.init_unsharded_param()
        self._group._to_unsharded()
        self._group._all_gather_result = None

    def record_reduction(self) -> None:
        """Set `reduced_event` to an event after the work launched so far on the compute stream."""
        if self._group.device.type == "cuda":
            self._group._post_reduce_event = torch.cuda.current_stream().record_event()


class ShardedParameter:
    """One parameter of a group: this rank's shard, the gathered weight, and the gradients of both."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        module = self.module = parameter._module_info.module
        self.name: str = parameter._module_info.param_name
        is_weight = isinstance(module, Linear) and self.name == "weight"
        self.linear: Linear | None = module if is_weight else None
        """The linear layer whose weight this is; None for other parameters."""

    @property
    def shard(self) -> nn.Parameter:
        """This rank's shard. It is the parameter that the model and the optimizer have."""
        return self._parameter.sharded_param

    @property
    def gathered(self) -> nn.Parameter:
        """The gathered weight. It is the same object from the first gather on, even while its memory is freed."""
        return self._parameter._unsharded_param

    @property
    def gathered_shape(self) -> torch.Size:
        return self._parameter._orig_size

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are summed; None means the dtype of the gathered weight."""
        return self._parameter.reduce_dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._parameter.orig_dtype

    @property
    def padded_shard_elements(self) -> int:
        return self._parameter.padded_sharded_param_size.numel()

    @property
    def flat_shard(self) -> torch.Tensor:
        """This rank's shard, flat and padded to the size of the largest shard. Valid once `CommunicationStreams` exist."""
        return self._parameter._sharded_param_data

    @property
    def shard_gradient(self) -> torch.Tensor | None:
        """The gradient of this rank's shard as a plain tensor."""
        gradient = self._parameter.sharded_param.grad
        return None if gradient is None else gradient.to_local()

    def set_shard_gradient(self, gradient: torch.Tensor) -> None:
        """Set the gradient of the shard to `gradient`, the gradient of the whole parameter. Only for a single rank."""
        self._parameter.sharded_param.grad_dtype = gradient.dtype
        self._parameter.sharded_param.grad = self._parameter.to_sharded_dtensor(gradient)

    def set_gradient_sum(self, total: torch.Tensor) -> None:
        """Set the gradient sum of the whole weight. The next `reduce_scatter` uses it instead of the gathered weight's `.grad`."""
        self._parameter.unsharded_accumulated_grad = total

    def gather_sources(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """Return pairs of a tensor and a dtype: on a single rank the gathered weight is a cast of the tensor to the dtype."""
        if hasattr(self._parameter._sharded_local_tensor, "fsdp_pre_all_gather"):  # fp8, see `gather_in_fp8`
            return [(rounded, rounded.dtype) for rounded in self._parameter.all_gather_inputs]
        return [(self.flat_shard, self._parameter.param_dtype or self._parameter.orig_dtype)]

    def gather_in_fp8(self, scale: torch.Tensor, inverse: torch.Tensor) -> None:
        """Round the shard of a linear layer's weight to fp8 before each gather.

        `scale` and `inverse`, its reciprocal, are scalars `()`. The layer computes with the gathered fp8 values, which are in its
        `fp8_weight`. Its `weight` keeps the shape and receives the gradient, but has no memory. Both objects stay the same over all
        gathers. FSDP2 finds the two functions for this as attributes of the shard's tensor.
        """
        self._scale = scale
        self._inverse = inverse
        local = self._parameter._sharded_local_tensor
        local.fsdp_pre_all_gather = self._round_shard
        local.fsdp_post_all_gather = self._store_gathered
        self._parameter._init_extensions()
        dtype = self._parameter.param_dtype or self._parameter.orig_dtype
        shape_only = torch.empty((), dtype=dtype, device=local.device).expand(self._parameter._orig_size)
        self._parameter._unsharded_param = nn.Parameter(shape_only)

    def _round_shard(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        del mesh, size, stride, module, policy
        shard = self.flat_shard.view(self._parameter.padded_sharded_param_size)
        rounded = round_with_factor(shard, self._inverse, E4M3)
        return (rounded.view(torch.uint8),), None  # as bytes, because collectives do not support every fp8 dtype

    def _store_gathered(
        self, outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: torch.Tensor
    ) -> None:
        del metadata, dtype, out
        assert self.linear is not None, "only weights of linear layers are gathered in fp8"
        if self.linear.fp8_weight is None:
            values = outputs[0].view(E4M3)[: self.linear.out_features]
            self.linear.fp8_weight = Fp8Matrix(values, self._scale)

    @torch.no_grad()
    def release_master_weight(self) -> torch.Tensor:
        """Free the shard in the stored dtype (the master weight) and return a copy in the gathered dtype, of the shard's shape.

        Call it once `CommunicationStreams` exist, while nothing is gathered. The parameter keeps its shape and dtype, because its gradient
        needs them, but has no values any more.
        """
        whole = self._parameter._sharded_param_data
        part = self._parameter._sharded_local_tensor
        assert not part.numel() or part.data_ptr() == whole.data_ptr()
        rounded = whole.to(self._parameter.param_dtype)
        assert rounded is not whole, (
            "the weight is gathered in its stored dtype, so there is no master weight to release"
        )
        # Later gathers read this copy, which has the same padding; torch 2.11 to 2.13 read no other tensor of the shard.
        self._parameter._sharded_param_data = rounded
        whole.untyped_storage().resize_(0)
        return rounded[: part.numel()].view(part.shape)


def cast_tensors(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its output. Pairs with the same two dtypes are copied by one kernel."""
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for output, source in zip(outputs, sources, strict=True):
        left, right = pairs.setdefault((output.dtype, source.dtype), ([], []))
        left.append(output)
        right.append(source.view_as(output))
    for left, right in pairs.values():
        torch._foreach_copy_(left, right)


class CommunicationStreams:
    """The communication streams that the parameter groups of one rank share."""

    def __init__(self, groups: Iterable[ParameterGroup], device: torch.device) -> None:
        self._context = FSDPCommContext()
        self._context.lazy_init(device)
        self._device = device
        for group in groups:
            group._group.comm_ctx = self._context
            group._group.lazy_init()

    def follow_compute(self) -> None:
        """Make later gathers wait for the work launched so far on the compute stream, which includes the optimizer's update."""
        if self._device.type == "cuda":
            current = torch.cuda.current_stream()
            self._context.all_gather_copy_in_stream.wait_stream(current)
            self._context.all_gather_stream.wait_stream(current)


class _CollectiveInContext:
    """Wraps a collective of FSDP2: it allocates buffers inside the context `allocating` and runs inside the context `calling`.

    FSDP2 calls the wrapper on the collective's stream, after this stream has waited for compute.
    """

    def __init__(
        self,
        collective: Any,
        *,
        allocating: AbstractContextManager[Any] = nullcontext(),
        calling: AbstractContextManager[Any] = nullcontext(),
    ) -> None:
        self._collective = collective
        self._allocating = allocating
        self._calling = calling

    def allocate(self, *args: Any, **options: Any) -> Any:
        with self._allocating:
            return self._collective.allocate(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._calling:
            return self._collective(*args, **options)


def _in_span(group: Any, name: str, span: Span | None) -> AbstractContextManager[None]:
    """Context in which the group's collective `name` runs inside `span`."""
    return (
        nullcontext()
        if span is None
        else _replace_attribute(group, name, _CollectiveInContext(getattr(group, name), calling=span))
    )


@contextmanager
def _replace_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Context in which an attribute of `owner` is replaced."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _submodules(modules: Iterable[nn.Module], module_class: type[nn.Module]) -> Iterator[nn.Module]:
    return (inner for module in modules for inner in module.modules() if isinstance(inner, module_class))


def _group_of(module: nn.Module) -> Any:
    """FSDP2's parameter group of a module: the only entry of a list from torch 2.12 on."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    assert len(groups) == 1
    return groups[0]
