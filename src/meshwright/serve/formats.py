"""Number formats of the engine's products: weights in 8 bits, and products whose bits do not depend on the batch.

The layers of the model are replaced by layers of this module and of `quantized_layers`, which keep the names of parameters. Embedding,
norms, router and head keep their dtype; so does `kv_up` of latent attention, whose parts are multiplied with queries and results, and so
do with fp8 experts that ranks share or that a GPU other than Hopper has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.kernels.expert_decode import MOST_COPIES, has_kernels
from meshwright.kernels.fixed_product import fixed_linear
from meshwright.kernels.fp8_products import ALIGNED
from meshwright.kernels.grouped_fp8 import GROUPED_MAJOR
from meshwright.kernels.linear import Linear
from meshwright.kernels.loss import capped
from meshwright.kernels.router import MOST_EXPERTS
from meshwright.models.attention import Attention
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder, Head
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import GatedMLP
from meshwright.models.moe import Experts, MixtureOfExperts
from meshwright.parallel.expert_inference import SharedExperts
from meshwright.serve.quantized_layers import QuantizedExperts, QuantizedGatedMLP, QuantizedLinear, QuantizedWeight
from meshwright.spec.engine import WeightFormat
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import tensor_splits

CAPABILITIES: dict[WeightFormat, tuple[int, int]] = {"fp8": (8, 9), "int8": (8, 0)}
"""The first GPUs that multiply a format here: Ada and Hopper fp8, Ampere int8."""
NOT_ROUNDED = "kv_up"
"""The linear layer of latent attention that has no 8-bit form."""


class InvariantLinear(nn.Module):
    """A linear layer whose result for a token does not depend on the other tokens, on CUDA."""

    scaling = None
    """Read by `kernels.gated`, as in `QuantizedLinear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return fixed_linear(x, self.weight, self.bias)


class InvariantHead(Head):
    """The head `whole` with the product of `InvariantLinear`."""

    def __init__(self, whole: Head) -> None:
        super().__init__(whole.weight, loss_chunk=0, factor=whole.factor, cap=whole.cap)

    def forward(self, hidden: Tensor, targets: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        """Logits of hidden `(batch, seq, hidden)`, as of `models.decoder.Head` without targets."""
        weight = self.weight if tied is None else tied
        assert targets is None and weight is not None
        return capped(fixed_linear(self.scaled(hidden), weight), self.cap)


def use_formats(
    model: Decoder,
    *,
    weights: WeightFormat | None = None,
    invariant: bool = False,
    ranks: dist.ProcessGroup | None = None,
) -> None:
    """Replace the products of the model's blocks, and with `invariant` the head; the memory of rounded weights is freed.

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
                others = ranks if tensor_splits(model.spec).get(f"{path}.{name}") == "columns" else None
                setattr(parent, name, _replacement(linear, weights, invariant, model.plain, others))
        if isinstance(mlp := getattr(block, "mlp", None), GatedMLP) and weights is not None:
            assert isinstance(mlp.gate_up, QuantizedLinear) and isinstance(mlp.down, QuantizedLinear)
            block.add_module("mlp", QuantizedGatedMLP(mlp.gate_up, mlp.down, gelu=mlp.gelu, plain=mlp.plain))
        if weights is not None and block.routed and _rounds_experts(block.moe.experts, weights):
            block.moe.add_module("experts", QuantizedExperts(block.moe.experts, weights, ranks))
        if invariant and block.routed:
            block.moe.invariant = True
    if invariant:
        model.add_module("head", InvariantHead(model.head))
    if weights is not None and model.embed.weight.is_cuda:
        torch.cuda.empty_cache()  # the rounded weights' memory, for the key/value cache


def _rounds_experts(experts: nn.Module, weights: WeightFormat) -> bool:
    """Whether these experts are replaced: not those that expert ranks share, nor those that are replaced already.

    Of GPUs only Hopper has grouped fp8 products for prompts.
    """
    if not isinstance(experts, Experts) or isinstance(experts, SharedExperts):
        return False
    device = experts.down.device
    return weights == "int8" or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == GROUPED_MAJOR


def input_format(layer: nn.Module) -> WeightFormat | None:
    """The 8-bit format that an attention or feed-forward layer takes inputs in, beside the model's dtype."""
    names = ("qkv", "down", "kv_down") if isinstance(layer, Attention | LatentAttention) else ("gate_up", "up")
    first = next(filter(None, (getattr(layer, name, None) for name in names)), None)
    return first.number_format if isinstance(first, QuantizedLinear) else None


@torch.no_grad()
def assign_parameter(model: Decoder, name: str, value: Tensor) -> None:
    """Copy a value into the parameter `name` of the model, in the format that it has here; its memory stays in place."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    target = module if leaf == "weight" else getattr(module, leaf)
    if isinstance(target, QuantizedWeight):
        target.assign(value)
    else:
        getattr(module, leaf).copy_(value)


def _parents(block: Block) -> list[tuple[str, nn.Module]]:
    """Names and modules of a block's attention and of its feed-forward network that is not routed."""
    path, network = ("moe.shared", block.moe.shared) if block.routed else ("mlp", block.mlp)
    return [("attention", block.attention), *([] if network is None else [(path, network)])]


def _linears(parent: nn.Module, weights: WeightFormat | None) -> list[tuple[str, Linear]]:
    """Names and layers that a format replaces in attention or a feed-forward network."""
    exact = () if weights is None else (NOT_ROUNDED,)
    return [(n, child) for n, child in parent.named_children() if isinstance(child, Linear) and n not in exact]


def _replacement(
    linear: Linear, weights: WeightFormat | None, invariant: bool, plain: bool, ranks: dist.ProcessGroup | None
) -> nn.Module:
    if weights is not None:
        return QuantizedLinear(linear.weight, linear.bias, weights, invariant=invariant, plain=plain, ranks=ranks)
    return InvariantLinear(linear.weight, linear.bias)


def _check(model: Decoder, weights: WeightFormat | None, invariant: bool) -> None:
    weight = model.embed.weight
    if any(isinstance(module, Attention) and module.heads != model.spec.heads for module in model.modules()):
        raise BadInput(
            "8-bit weights and invariant results need the whole model on one device, got a part of its heads",
            key="invariant" if invariant else "weights",
        )
    if weights == "int8" and any(isinstance(module, SharedExperts) for module in model.modules()):
        raise BadInput("weights: int8 is not for expert ranks; use fp8, or tensor ranks", key="weights")
    if weights is not None and (model.spec.expert_bias or model.spec.mlp == "clamped_swiglu"):
        raise BadInput(f"weights: {weights} is not for experts with biases or clamped SwiGLU; use bf16", key="weights")
    if not weight.is_cuda:
        return
    if invariant and weight.dtype == torch.float64:
        raise BadInput("invariant results need a model in bf16, fp16 or fp32 on a GPU, got fp64", key="invariant")
    if invariant and any(isinstance(module, LatentAttention) for module in model.modules()):
        raise BadInput(
            "invariant results with latent attention need a CPU: on a GPU no kernel has a fixed order for it",
            key="invariant",
        )
    if invariant:
        _check_invariant_experts(model, weight.dtype)
    if weights is None:
        return
    if torch.cuda.get_device_capability(weight.device) < CAPABILITIES[weights]:
        device = torch.cuda.get_device_name(weight.device)
        raise BadInput(f"{device} does not multiply {weights}; use weights in bf16", key="weights")
    if weights == "fp8":
        _check_fp8_sizes(model)


def _check_invariant_experts(model: Decoder, dtype: torch.dtype) -> None:
    """Other grouped products have an order of addition that depends on the batch."""
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not all(moe.experts.takes_few_rows and has_kernels(dtype, moe.count, moe.per_token) for moe in mixtures):
        raise BadInput(
            "invariant results of a mixture of experts on a GPU: expected SwiGLU without biases in bf16 or fp16 with at most "
            f"{MOST_EXPERTS} experts and {MOST_COPIES} of them for a token; use a CPU",
            key="invariant",
        )


def _check_fp8_sizes(model: Decoder) -> None:
    for block in model.layers.values():
        assert isinstance(block, Block)
        weights = [(name, linear.weight) for _, parent in _parents(block) for name, linear in _linears(parent, "fp8")]
        if block.routed and _rounds_experts(block.moe.experts, "fp8"):
            weights += list(block.moe.experts.named_parameters())
        for name, weight in weights:
            if any(size % ALIGNED for size in weight.shape[-2:]):
                sizes = " × ".join(map(str, weight.shape))
                raise BadInput(
                    f"fp8 weights need dimensions that are multiples of {ALIGNED}, got {name} of {sizes}",
                    key="weights",
                )
