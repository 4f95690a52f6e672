"""Number formats of the engine's matmuls: 8-bit weights, and matmuls whose bits do not depend on the batch (invariant results).

The functions replace layers of the model by layers of this module and of `quantized_layers`. The parameters keep their names. With 8-bit
weights, these parameters are not rounded:

- embedding, norms, router and head;
- `kv_up` of latent attention, because the absorbed form multiplies its parts with queries and with results;
- with fp8, experts that are distributed over expert ranks, and experts on a GPU that is not a Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.kernels.expert_decode import has_kernels
from meshwright.kernels.fixed_matmul import fixed_linear
from meshwright.kernels.grouped_fp8 import GROUPED_MAJOR
from meshwright.kernels.linear import Linear
from meshwright.kernels.loss import capped
from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.models.attention import Attention
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder, Head
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import GatedMLP
from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.expert_inference import SharedExperts
from meshwright.serve.quantized_layers import QuantizedExperts, QuantizedGatedMLP, QuantizedLinear, QuantizedWeight
from meshwright.spec.engine import WeightFormat
from meshwright.spec.errors import BadInput
from meshwright.spec.fp8_limits import FP8_MULTIPLE
from meshwright.spec.layout import tensor_splits
from meshwright.spec.serving_limits import NOT_ROUNDED, fp8_sizes_error, invariant_error, weights_error
from meshwright.spec.weight_scheme import NUMBERS_OF, LayerFormat

CAPABILITIES: dict[WeightFormat, tuple[int, int]] = {"fp8": (8, 9), "int8": (8, 0)}
"""The lowest compute capability for each format: Ada (8.9) for fp8, Ampere (8.0) for int8."""


HOPPER = 9
"""Major number of the compute capability of H100 and H200."""


class InvariantLinear(nn.Module):
    """A linear layer whose result for a token does not depend on the other tokens of the step, on CUDA."""

    scaling = None
    """`kernels.gated` reads this attribute, as in `QuantizedLinear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return fixed_linear(x, self.weight, self.bias)


class InvariantHead(Head):
    """A head with the weights of `whole`, whose logits for a token do not depend on the other tokens of the step."""

    def __init__(self, whole: Head) -> None:
        super().__init__(whole.weight, loss_chunk=0, factor=whole.factor, cap=whole.cap)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the logits `(batch, seq, vocab)` of hidden `(batch, seq, hidden)`. `targets` and `weights` must be None."""
        weight = self.weight if tied is None else tied
        assert targets is weights is None and weight is not None
        return capped(fixed_linear(self.scaled(hidden), weight), self.cap)


def use_formats(
    model: Decoder,
    *,
    weights: WeightFormat | None = None,
    invariant: bool = False,
    ranks: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> None:
    """Replace the linear layers of the model's blocks, and the head if `invariant`.

    The memory of the old weights is freed. Layers that were replaced before are not replaced again.

    - `weights`: 8-bit format of the weights; None to keep their dtype.
    - `invariant`: whether results must not depend on the batch.
    - `ranks`: group of the tensor ranks that divide the model, or None. With a group, the call is collective.
    - `device`: the later device of a model that is on the meta device.

    Raises BadInput if the device or the model does not support the formats.
    """
    if weights is None and not invariant:
        return
    device = device or model.embed.weight.device
    _check(model, weights, invariant, device)
    for number, block in _blocks(model):
        for path, parent in _parents(block):
            _replace(model, f"layers.{number}.{path}", parent, weights, invariant, ranks)
        if weights is not None and block.routed and _rounds_experts(block.moe.experts, weights, device):
            block.moe.add_module("experts", QuantizedExperts(block.moe.experts, weights, ranks))
        if invariant and block.routed:
            block.moe.invariant = True
    if invariant:
        model.add_module("head", InvariantHead(model.head))
        model.norm.kernel = False  # The trainer's exact forward uses this operator too, because it needs gradients.
    if weights is not None and model.embed.weight.is_cuda:
        torch.cuda.empty_cache()  # The memory of the old weights becomes available for the key/value cache.


def use_stored_formats(
    model: Decoder,
    stored: Callable[[str], LayerFormat | None],
    device: torch.device,
    *,
    weights: WeightFormat | None = None,
    invariant: bool = False,
    ranks: dist.ProcessGroup | None = None,
) -> None:
    """Replace layers of a model on the meta device by layers that use the 8-bit weights of a folder as they are stored.

    The layers of an attention, of a feed-forward network, or the experts of an MoE layer are replaced if all these conditions hold:

    - All their weights are stored in the same 8-bit format. Experts in the format `fp8 blocks` are not replaced.
    - If `weights` is given, it is this format. Else the device is a GPU.
    - The device can multiply in this format, and supports the shapes of the weights.

    `stored` returns the format of a parameter in the folder, by the parameter's name. `invariant` and `ranks` are as in `use_formats`.
    """
    if all(weights_error(model.spec, each) for each in get_args(WeightFormat)):
        return
    for number, block in _blocks(model):
        for path, parent in _parents(block):
            prefix = f"layers.{number}.{path}"
            linears = _linears(parent, "fp8")
            found = _usable([f"{prefix}.{name}.weight" for name, _ in linears], stored, weights, device)
            aligned = found == "int8" or not any(_is_odd(linear.weight) for _, linear in linears)
            if found is not None and (aligned or device.type == "cpu"):
                _replace(model, prefix, parent, found, invariant, ranks)
        if (
            not block.routed
            or isinstance(block.moe.experts, SharedExperts)
            or not isinstance(block.moe.experts, Experts)
        ):
            continue
        experts = dict(block.moe.experts.named_parameters())
        found = _usable([f"layers.{number}.moe.experts.{name}" for name in experts], stored, weights, device)
        aligned = found != "fp8" or not any(map(_is_odd, experts.values()))
        if (
            found is not None
            and found != "fp8 blocks"
            and aligned
            and _rounds_experts(block.moe.experts, found, device)
        ):
            block.moe.add_module("experts", QuantizedExperts(block.moe.experts, found, ranks))


def _usable(
    names: list[str],
    stored: Callable[[str], LayerFormat | None],
    weights: WeightFormat | None,
    device: torch.device,
) -> LayerFormat | None:
    """Return the 8-bit format in which all parameters `names` are stored.

    Returns None if they have no common format, if it is not the format `weights`, or if the device cannot multiply in it.
    """
    formats = {stored(name) for name in names}
    found = formats.pop() if len(formats) == 1 else None
    if found is None or weights not in (None, NUMBERS_OF[found]):
        return None
    if device.type != "cuda":
        return None if weights is None else found
    capability = torch.cuda.get_device_capability(device)
    if found == "fp8 blocks" and capability[0] != HOPPER:
        # PyTorch has matmuls with block scales only for Hopper. With many tokens, our own kernel is slower than bf16.
        return None
    return found if capability >= CAPABILITIES[NUMBERS_OF[found]] else None


def rounded_parameters(model: Decoder) -> dict[str, LayerFormat]:
    """Return the parameters that have 8-bit weights in the model: their formats by name."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedWeight))
    return {
        f"{name}.weight" if isinstance(module, QuantizedLinear) else name: module.number_format
        for name, module in modules
    }


def _blocks(model: Decoder) -> list[tuple[str, Block]]:
    return [(number, cast("Block", block)) for number, block in model.layers.items()]


def _replace(
    model: Decoder,
    prefix: str,
    parent: nn.Module,
    weights: LayerFormat | None,
    invariant: bool,
    ranks: dist.ProcessGroup | None,
) -> None:
    """Replace the linear layers of an attention or feed-forward network, whose name in the model is `prefix`.

    A gated network with 8-bit weights is replaced as a whole, because `QuantizedGatedMLP` fuses its activation with the rounding.
    """
    number, _, path = prefix.removeprefix("layers.").partition(".")
    for name, linear in _linears(parent, weights):
        others = ranks if tensor_splits(model.spec).get(f"{path}.{name}") == "columns" else None
        setattr(parent, name, _replacement(linear, weights, invariant, model.reference, others))
    if path == "mlp" and isinstance(parent, GatedMLP) and weights is not None:
        assert isinstance(parent.gate_up, QuantizedLinear) and isinstance(parent.down, QuantizedLinear)
        fused = QuantizedGatedMLP(parent.gate_up, parent.down, gelu=parent.gelu, reference=parent.reference)
        model.layers[number].add_module("mlp", fused)


def _rounds_experts(experts: nn.Module, weights: WeightFormat, device: torch.device) -> bool:
    """Return whether experts get 8-bit weights.

    They do not if they are distributed over expert ranks, or if they were replaced before. On a GPU, fp8 experts must be on a Hopper,
    because PyTorch has no grouped fp8 matmuls, which prompts need, for other GPUs.
    """
    if not isinstance(experts, Experts) or isinstance(experts, SharedExperts):
        return False
    return weights == "int8" or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == GROUPED_MAJOR


def input_format(layer: nn.Module) -> LayerFormat | None:
    """Return the 8-bit format in which an attention or feed-forward network accepts rounded inputs. None if it accepts only tensors."""
    names = ("qkv", "down", "kv_down") if isinstance(layer, Attention | LatentAttention) else ("gate_up", "up")
    first = next(filter(None, (getattr(layer, name, None) for name in names)), None)
    return first.number_format if isinstance(first, QuantizedLinear) else None


@torch.no_grad()
def assign_parameter(model: Decoder, name: str, value: Tensor | RoundedMatrix) -> None:
    """Copy `value` into the parameter `name` of the model, and round it if the parameter has 8 bits. The parameter keeps its memory."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    target = module if leaf == "weight" else getattr(module, leaf)
    if isinstance(target, QuantizedWeight):
        target.assign(value)
    else:
        assert isinstance(value, Tensor), "only rounded layers get rounded weights"
        getattr(module, leaf).copy_(value)


def _parents(block: Block) -> list[tuple[str, nn.Module]]:
    """Return `(name, module)` of a block's attention and of its feed-forward network; in an MoE block, of the shared expert if any."""
    path, network = ("moe.shared", block.moe.shared) if block.routed else ("mlp", block.mlp)
    return [("attention", block.attention), *([] if network is None else [(path, network)])]


def _linears(parent: nn.Module, weights: LayerFormat | None) -> list[tuple[str, Linear]]:
    """Return `(name, layer)` of the linear layers to replace in an attention or feed-forward network, for the format `weights` or None."""
    exact = () if weights is None else (NOT_ROUNDED,)
    return [(n, child) for n, child in parent.named_children() if isinstance(child, Linear) and n not in exact]


def _replacement(
    linear: Linear, weights: LayerFormat | None, invariant: bool, reference: bool, ranks: dist.ProcessGroup | None
) -> nn.Module:
    if weights is not None:
        return QuantizedLinear(
            linear.weight, linear.bias, weights, invariant=invariant, reference=reference, ranks=ranks
        )
    return InvariantLinear(linear.weight, linear.bias)


def _check(model: Decoder, weights: WeightFormat | None, invariant: bool, device: torch.device) -> None:
    weight = model.embed.weight
    if any(isinstance(module, Attention) and module.heads != model.spec.heads for module in model.modules()):
        raise BadInput(
            "8-bit weights and invariant results need the whole model on one device, got a part of its heads",
            key="invariant" if invariant else "weights",
        )
    if weights == "int8" and any(isinstance(module, SharedExperts) for module in model.modules()):
        raise BadInput("weights: int8 is not for expert ranks; use fp8, or tensor ranks", key="weights")
    if weights is not None and (error := weights_error(model.spec, weights)):
        raise BadInput(f"weights: {error}", key="weights")
    if device.type != "cuda":
        return
    if invariant and weight.dtype == torch.float64:
        raise BadInput("invariant results need a model in bf16, fp16 or fp32 on a GPU, got fp64", key="invariant")
    moe_layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if invariant and (error := invariant_error(model.spec)):
        raise BadInput(error, key="invariant")
    if invariant and not all(has_kernels(weight.dtype, moe.count, moe.per_token) for moe in moe_layers):
        raise BadInput("invariant results of an MoE model on a GPU: expected bf16 or fp16", key="invariant")
    if weights is None:
        return
    if torch.cuda.get_device_capability(device) < CAPABILITIES[weights]:
        name = torch.cuda.get_device_name(device)
        raise BadInput(f"{name} does not multiply {weights}; use weights in bf16", key="weights")
    rounded = any(_rounds_experts(moe.experts, weights, device) for moe in moe_layers)
    if weights == "fp8" and (error := fp8_sizes_error(model.spec, experts=rounded)):
        raise BadInput(error, key="weights")


def _is_odd(weight: Tensor) -> bool:
    """Return whether fp8 matmuls do not support the shape of a weight: a size is not a multiple of `FP8_MULTIPLE`."""
    return any(size % FP8_MULTIPLE for size in weight.shape[-2:])
