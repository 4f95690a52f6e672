"""Number formats of the engine's linear layers: weights in fp8, and products whose bits do not depend on the batch.

The layers of the model are replaced by layers of this module, which keep the names of parameters. Embedding, norms, router, routed experts
and head keep their dtype; so does `kv_up` of latent attention, whose parts are multiplied with queries and results.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.kernels.fixed_product import fixed_linear, fp8_linear
from meshwright.kernels.fp8_products import ALIGNED, E4M3, Fp8Matrix, round_with_scale, scale_of
from meshwright.kernels.linear import Linear
from meshwright.kernels.row_quantize import quantize_rows, quantize_swiglu
from meshwright.models.decoder import Attention, Block, Decoder
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import GatedMLP
from meshwright.spec.engine import Fp8
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import TENSOR_SPLITS

FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply fp8: Ada, Hopper."""
NOT_ROUNDED = "kv_up"
"""The linear layer of latent attention that has no fp8 form."""


class Fp8Linear(nn.Module):
    """A linear layer with its weight in e4m3, one scale per output; inputs are rounded with one scale per token.

    `ranks` are the tensor ranks that have the other columns of the weight, if it is divided so: scales are those of whole outputs, and
    creating and assigning are collective. Each rank scales its part of a token by itself.
    """

    scaling = None
    """Read by `kernels.gated`: this layer is not one of the trainer's fp8 layers."""
    values: Tensor
    scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        invariant: bool = False,
        plain: bool = False,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.bias, self.invariant, self.plain = weight.dtype, bias, invariant, plain
        self.ranks = ranks
        rounded = self._round(weight.detach())
        self.register_buffer("values", rounded.values)
        self.register_buffer("scale", rounded.scale)

    def assign(self, weight: Tensor) -> None:
        """Round another weight `(out, in)` into the memory of this one, so that CUDA graphs stay valid."""
        rounded = self._round(weight.detach().to(self.values.device))
        self.values.copy_(rounded.values)
        self.scale.copy_(rounded.scale)

    def _round(self, weight: Tensor) -> Fp8Matrix:
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        if self.ranks is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.ranks)
        scale = scale_of(largest, E4M3)
        return Fp8Matrix(round_with_scale(weight, scale, E4M3), scale)

    def forward(self, x: Tensor | Fp8Matrix) -> Tensor:
        """`(…, out)` of x `(…, in)`, rounded here unless it is in fp8."""
        x = x if isinstance(x, Fp8Matrix) else quantize_rows(x, plain=self.plain)
        weight = Fp8Matrix(self.values, self.scale)
        return fp8_linear(x, weight, self.bias, self.dtype, invariant=self.invariant)


class Fp8GatedMLP(nn.Module):
    """SwiGLU of two fp8 layers, whose activation is rounded by the kernel that computes it."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, plain: bool) -> None:
        super().__init__()
        self.gate_up, self.down, self.plain = gate_up, down, plain

    def forward(self, x: Tensor | Fp8Matrix) -> Tensor:
        return self.down(quantize_swiglu(self.gate_up(x), plain=self.plain))


class InvariantLinear(nn.Module):
    """A linear layer whose result for a token does not depend on the other tokens, on CUDA."""

    scaling = None
    """Read by `kernels.gated`, as in `Fp8Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return fixed_linear(x, self.weight, self.bias)


class InvariantHead(nn.Module):
    """The head with the product of `InvariantLinear`."""

    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor, targets: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        """Logits of hidden `(batch, seq, hidden)`, as of `models.decoder.Head` without targets."""
        weight = self.weight if tied is None else tied
        assert targets is None and weight is not None
        return fixed_linear(hidden, weight)


def use_formats(
    model: Decoder, *, weights: Fp8 | None = None, invariant: bool = False, ranks: dist.ProcessGroup | None = None
) -> None:
    """Replace the linear layers of the model's blocks, and with `invariant` the head; the memory of rounded weights is freed.

    Layers that are replaced already stay. `ranks` is the group of tensor ranks that divide the model, if any; then this is collective.
    Raises BadInput for a device or a model that these formats do not support.
    """
    if weights is None and not invariant:
        return
    _check(model, weights, invariant)
    for block in model.layers.values():
        assert isinstance(block, Block)
        for path, parent in _parents(block):
            for name, linear in _linears(parent, weights):
                others = ranks if TENSOR_SPLITS.get(f"{path}.{name}") == "columns" else None
                setattr(parent, name, _replacement(linear, weights, invariant, model.plain, others))
        if isinstance(mlp := getattr(block, "mlp", None), GatedMLP) and weights is not None:
            block.add_module("mlp", Fp8GatedMLP(mlp.gate_up, mlp.down, mlp.plain))
            for hook in mlp._forward_hooks.values():  # the sum over tensor ranks
                block.mlp.register_forward_hook(hook)
    if invariant:
        model.add_module("head", InvariantHead(model.head.weight))
    if weights is not None and model.embed.weight.is_cuda:
        torch.cuda.empty_cache()  # the rounded weights' memory, for the key/value cache


def takes_fp8(layer: nn.Module) -> bool:
    """Whether an attention or feed-forward layer takes inputs in fp8."""
    names = ("qkv", "down", "kv_down") if isinstance(layer, Attention | LatentAttention) else ("gate_up", "up")
    first = next(filter(None, (getattr(layer, name, None) for name in names)), None)
    return isinstance(first, Fp8Linear)


@torch.no_grad()
def assign_parameter(model: Decoder, name: str, value: Tensor) -> None:
    """Copy a value into the parameter `name` of the model, in the format that it has here; its memory stays in place."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Fp8Linear) and leaf == "weight":
        module.assign(value)
    else:
        getattr(module, leaf).copy_(value)


def _parents(block: Block) -> list[tuple[str, nn.Module]]:
    """Names and modules of a block's attention and of its feed-forward network that is not routed."""
    path, network = ("moe.shared", block.moe.shared) if block.routed else ("mlp", block.mlp)
    return [("attention", block.attention), *([] if network is None else [(path, network)])]


def _linears(parent: nn.Module, weights: Fp8 | None) -> list[tuple[str, Linear]]:
    """Names and layers that a format replaces in attention or a feed-forward network."""
    exact = () if weights is None else (NOT_ROUNDED,)
    return [(n, child) for n, child in parent.named_children() if isinstance(child, Linear) and n not in exact]


def _replacement(
    linear: Linear, weights: Fp8 | None, invariant: bool, plain: bool, ranks: dist.ProcessGroup | None
) -> nn.Module:
    if weights is not None:
        return Fp8Linear(linear.weight, linear.bias, invariant=invariant, plain=plain, ranks=ranks)
    return InvariantLinear(linear.weight, linear.bias)


def _check(model: Decoder, weights: Fp8 | None, invariant: bool) -> None:
    weight = model.embed.weight
    if any(isinstance(module, Attention) and module.heads != model.spec.heads for module in model.modules()):
        raise BadInput("fp8 weights and invariant results need the whole model on one device, got a part of its heads")
    if not weight.is_cuda:
        return
    if invariant and weight.dtype == torch.float64:
        raise BadInput("invariant results need a model in bf16, fp16 or fp32 on a GPU, got fp64")
    if invariant and model.spec.kv_rank:
        raise BadInput(
            "invariant results with latent attention need a CPU: on a GPU no kernel has a fixed order for it"
        )
    if invariant and any(isinstance(block, Block) and block.routed for block in model.layers.values()):
        raise BadInput(
            "invariant results of a mixture of experts need a CPU: on a GPU the grouped products' order of addition depends on the batch"
        )
    if weights is None:
        return
    if torch.cuda.get_device_capability(weight.device) < FP8_CAPABILITY:
        raise BadInput(f"{torch.cuda.get_device_name(weight.device)} does not multiply fp8; use weights in bf16")
    for block in model.layers.values():
        assert isinstance(block, Block)
        for _, parent in _parents(block):
            for name, linear in _linears(parent, weights):
                if any(size % ALIGNED for size in linear.weight.shape):
                    sizes = " × ".join(map(str, linear.weight.shape))
                    raise BadInput(
                        f"fp8 weights need dimensions that are multiples of {ALIGNED}, got {name} of {sizes}"
                    )
