"""Linear layers and routed experts with 8-bit weights. The engine uses them in place of the trainer's modules.

The inputs of a layer are rounded to 8 bits too, with one scale per token, or one scale per 128 values of a token (format `fp8 blocks`).
Where possible, the kernel that computes the inputs also rounds them. `assign` writes new weights into the same memory, so CUDA graphs stay
valid.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import int8_matmuls
from meshwright.kernels.block_matmuls import (
    Fp8Blocks,
    Fp8Groups,
    block_linear,
    library_agrees,
    quantize_blocks,
    scale_shape,
)
from meshwright.kernels.expert_decode import Choices, rounded_expert_outputs
from meshwright.kernels.fixed_matmul import fp8_linear
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix, round_with_scale, scale_of
from meshwright.kernels.grouped import ExpertOrder
from meshwright.kernels.grouped_fp8 import grouped_matmul
from meshwright.kernels.int8_matmuls import MOST_INPUTS, Int8Matrix, grouped_int8, int8_linear
from meshwright.kernels.row_quantize import DTYPES, RoundedMatrix, quantize_gated, quantize_rows, rounded_matrix
from meshwright.models.moe import Experts
from meshwright.spec.engine import WeightFormat
from meshwright.spec.errors import BadInput
from meshwright.spec.weight_scheme import LayerFormat


class QuantizedWeight(nn.Module):
    """A weight `(…, out, in)` in 8 bits. It has one scale per output; in the format `fp8 blocks`, one scale per block of 128 × 128 values.

    `ranks` is the group of tensor ranks that each have some of the weight's inputs, or None. With such a group, a scale is computed over
    the inputs of all ranks, so the constructor and `assign` are collective. A weight on the meta device has no values until `assign`.

    Raises BadInput for an int8 weight that has so many inputs that the sum of their products may not fit into 32 bits.
    """

    values: Tensor
    """`(…, out, in)`: the 8-bit values."""
    scale: Tensor
    """fp32 `(…, out, 1)`, or one value for each block in the format `fp8 blocks` (`block_matmuls.scale_shape`)."""

    def __init__(self, weight: Tensor, number_format: LayerFormat, ranks: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if number_format == "int8" and weight.shape[-1] > MOST_INPUTS:
            raise BadInput(
                f"int8 weights: expected at most {MOST_INPUTS:,} inputs, got {weight.shape[-1]:,}", key="weights"
            )
        self.number_format = number_format
        self.ranks = ranks
        values = torch.empty(weight.shape, dtype=DTYPES[number_format], device=weight.device)
        self.register_buffer("values", values)
        blocks = number_format == "fp8 blocks"
        shape = scale_shape(*weight.shape) if blocks else (*weight.shape[:-1], 1)
        self.register_buffer("scale", torch.empty(shape, dtype=torch.float32, device=weight.device))
        if not weight.is_meta:
            self.assign(weight)

    @torch.no_grad()
    def assign(self, weight: Tensor | RoundedMatrix) -> None:
        """Write another weight `(…, out, in)` into the memory of this one.

        A `RoundedMatrix` must have the format of this weight and is copied; a tensor is rounded to the format.
        """
        if self.number_format == "fp8 blocks":
            self._assign_blocks(
                quantize_blocks(weight.to(self.values.device)) if isinstance(weight, Tensor) else weight
            )
            return
        if not isinstance(weight, Tensor):
            self.values.copy_(weight.values)
            self.scale.copy_(weight.scale)
            return
        matrices = weight.flatten(0, -3) if weight.dim() > 2 else weight[None]
        # One matrix at a time, because the memory may not be enough for all experts of a layer in fp32 in addition to the model.
        for matrix, values, scale in zip(
            matrices, self.values.view(matrices.shape), self.scale.view(*matrices.shape[:-1], 1), strict=True
        ):
            matrix = matrix.to(values.device)
            largest = matrix.abs().amax(dim=1, keepdim=True).float()
            if self.ranks is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.ranks)
            if self.number_format == "int8":
                scale.copy_(int8_matmuls.scale_of(largest))
                values.copy_(int8_matmuls.round_with_scale(matrix, scale))
            else:
                scale.copy_(scale_of(largest, E4M3))
                values.copy_(round_with_scale(matrix, scale, E4M3))

    def _assign_blocks(self, weight: RoundedMatrix) -> None:
        self.values.copy_(weight.values)
        self.scale.zero_()[:, : weight.scale.shape[1]] = weight.scale
        if self.values.is_cuda:
            library_agrees(self.values.device, *self.values.shape)  # The check needs memory, which is free now.


class QuantizedLinear(QuantizedWeight):
    """A linear layer with an 8-bit weight. Its inputs are rounded with one scale per token, or one scale per 128 values of a token.

    If tensor ranks divide the inputs, each rank computes the scales from its own part of a token. With `invariant` the result for a token
    does not depend on the other tokens. With `reference` PyTorch's operators round the inputs, instead of our kernel.
    """

    scaling = None
    """`kernels.gated` reads this attribute. None means that this is not one of the trainer's fp8 layers."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        number_format: LayerFormat,
        *,
        invariant: bool = False,
        reference: bool = False,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(weight, number_format, ranks)
        self.dtype = weight.dtype
        self.bias = bias
        self.invariant = invariant
        self.reference = reference

    def forward(self, x: Tensor | RoundedMatrix) -> Tensor:
        """Compute `(…, out)` from x `(…, in)`. If x is a tensor, it is rounded here; otherwise it already has this layer's format."""
        if isinstance(x, Tensor):
            x = quantize_rows(x, self.number_format, reference=self.reference)
        if isinstance(x, Int8Matrix):
            return int8_linear(x, Int8Matrix(self.values, self.scale), self.bias, self.dtype)
        if isinstance(x, Fp8Groups):
            weight = Fp8Blocks(self.values, self.scale)
            return block_linear(x, weight, self.bias, self.dtype, invariant=self.invariant)
        assert isinstance(x, Fp8Matrix), "activations have no blocks"
        return fp8_linear(x, Fp8Matrix(self.values, self.scale), self.bias, self.dtype, invariant=self.invariant)


class QuantizedGatedMLP(nn.Module):
    """A gated feed-forward network with 8-bit weights. The kernel that computes the activation also rounds it for `down`.

    Both layers have the same format. `gelu` says whether the activation is GELU, or else SiLU.
    """

    def __init__(self, gate_up: QuantizedLinear, down: QuantizedLinear, *, gelu: bool, reference: bool) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.gelu = gelu
        self.reference = reference

    def forward(self, x: Tensor | RoundedMatrix) -> Tensor:
        number_format = self.gate_up.number_format
        return self.down(quantize_gated(self.gate_up(x), number_format, gelu=self.gelu, reference=self.reference))


class QuantizedExperts(nn.Module):
    """The routed experts of an MoE layer (`models.moe.Experts`) with 8-bit weights.

    `ranks` is the group of tensor ranks that each have some inputs of `down`, or None.
    """

    def __init__(self, experts: Experts, number_format: WeightFormat, ranks: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.activation = experts.activation
        self.gated = experts.gated
        self.reference = experts.reference
        self.dtype = experts.down.dtype
        self.number_format: WeightFormat = number_format
        self.input_name = "gate_up" if experts.gated else "up"
        self.add_module(self.input_name, QuantizedWeight(getattr(experts, self.input_name), number_format))
        self.down = QuantizedWeight(experts.down, number_format, ranks)

    @property
    def takes_few_rows(self) -> bool:
        """Whether `of_choices` has kernels for these experts."""
        return self.activation == "swiglu"

    def of_choices(self, x: Tensor, choices: Choices) -> Tensor:
        """The weighted outputs `(tokens, copies, hidden)` of the chosen experts for x `(tokens, hidden)`."""
        return rounded_expert_outputs(x, self._matrices(self.input_name), self._matrices("down"), choices)

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """The expert outputs of rows `(rows, hidden)`, as of `Experts`."""
        x = quantize_rows(sorted_rows, self.number_format, reference=self.reference)
        projected = self._multiply(x, self.input_name, order)
        if self.gated:
            gelu = self.activation == "geglu"
            values, scale = quantize_gated(projected, self.number_format, gelu=gelu, reference=self.reference)
        else:
            active = F.gelu(projected, approximate="tanh")
            values, scale = quantize_rows(active, self.number_format, reference=self.reference)
        # The scale of a row times its weight is the scale of the weighted row.
        scale = scale if weights is None else scale * weights[:, None]
        return self._multiply(rounded_matrix(values, scale, self.number_format), "down", order)

    def _multiply(self, x: RoundedMatrix, name: str, order: ExpertOrder) -> Tensor:
        matrices = self._matrices(name)
        if isinstance(x, Int8Matrix) and isinstance(matrices, Int8Matrix):
            return grouped_int8(x, matrices, order.offsets, self.dtype, reference=self.reference)
        assert isinstance(x, Fp8Matrix) and isinstance(matrices, Fp8Matrix)
        return grouped_matmul(x, matrices, order.offsets, self.dtype, reference=self.reference)

    def _matrices(self, name: str) -> RoundedMatrix:
        weight = self.get_submodule(name)
        assert isinstance(weight, QuantizedWeight)
        return rounded_matrix(weight.values, weight.scale, self.number_format)
