"""Linear layers and routed experts with weights in 8 bits, in place of the trainer's modules.

Activations are rounded with one scale per token, or one per 128 numbers of a token. Where possible the kernel that computes an activation
also rounds it. `assign` writes new weights into the same memory, so CUDA graphs stay valid.
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
    """A weight `(…, out, in)` in 8 bits, with one scale per output, or, in the format `fp8 blocks`, per block of 128 × 128.

    If tensor ranks divide the inputs of the weight, `ranks` are these ranks: a scale is then computed over all of them, and creating and
    assigning are collective. For a weight on the meta device it has no values yet. Raises BadInput for an int8 weight with so many inputs
    that sums may exceed 32 bits.
    """

    values: Tensor
    scale: Tensor

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
        """Copy or round another weight `(…, out, in)` into the memory of this one; a rounded one has this one's format."""
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
        # One matrix at a time, because the experts of a layer in fp32 may not fit beside the model.
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
            library_agrees(self.values.device, *self.values.shape)  # now, while memory is free


class QuantizedLinear(QuantizedWeight):
    """A linear layer with a `QuantizedWeight`; its inputs are rounded with one scale per token, or per 128 numbers of it.

    Each tensor rank scales its part of a token by itself.
    """

    scaling = None
    """Read by `kernels.gated`: this layer is not one of the trainer's fp8 layers."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        number_format: LayerFormat,
        *,
        invariant: bool = False,
        plain: bool = False,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(weight, number_format, ranks)
        self.dtype = weight.dtype
        self.bias = bias
        self.invariant = invariant
        self.plain = plain

    def forward(self, x: Tensor | RoundedMatrix) -> Tensor:
        """`(…, out)` of x `(…, in)`, rounded here unless it is in this layer's format."""
        if isinstance(x, Tensor):
            x = quantize_rows(x, self.number_format, plain=self.plain)
        if isinstance(x, Int8Matrix):
            return int8_linear(x, Int8Matrix(self.values, self.scale), self.bias, self.dtype)
        if isinstance(x, Fp8Groups):
            weight = Fp8Blocks(self.values, self.scale)
            return block_linear(x, weight, self.bias, self.dtype, invariant=self.invariant)
        assert isinstance(x, Fp8Matrix), "activations have no blocks"
        return fp8_linear(x, Fp8Matrix(self.values, self.scale), self.bias, self.dtype, invariant=self.invariant)


class QuantizedGatedMLP(nn.Module):
    """A gated network of two quantised layers of one format, whose activation is rounded by the kernel that computes it."""

    def __init__(self, gate_up: QuantizedLinear, down: QuantizedLinear, *, gelu: bool, plain: bool) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.gelu = gelu
        self.plain = plain

    def forward(self, x: Tensor | RoundedMatrix) -> Tensor:
        number_format = self.gate_up.number_format
        return self.down(quantize_gated(self.gate_up(x), number_format, gelu=self.gelu, plain=self.plain))


class QuantizedExperts(nn.Module):
    """`models.moe.Experts` with weights in 8 bits. `ranks` are the tensor ranks that have the other columns of `down`, if any."""

    def __init__(self, experts: Experts, number_format: WeightFormat, ranks: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.activation = experts.activation
        self.gated = experts.gated
        self.plain = experts.plain
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
        x = quantize_rows(sorted_rows, self.number_format, plain=self.plain)
        projected = self._multiply(x, self.input_name, order)
        if self.gated:
            gelu = self.activation == "geglu"
            values, scale = quantize_gated(projected, self.number_format, gelu=gelu, plain=self.plain)
        else:
            active = F.gelu(projected, approximate="tanh")
            values, scale = quantize_rows(active, self.number_format, plain=self.plain)
        # The scale of a row times its weight is the scale of the weighted row.
        scale = scale if weights is None else scale * weights[:, None]
        return self._multiply(rounded_matrix(values, scale, self.number_format), "down", order)

    def _multiply(self, x: RoundedMatrix, name: str, order: ExpertOrder) -> Tensor:
        matrices = self._matrices(name)
        if isinstance(x, Int8Matrix) and isinstance(matrices, Int8Matrix):
            return grouped_int8(x, matrices, order.offsets, self.dtype, plain=self.plain)
        assert isinstance(x, Fp8Matrix) and isinstance(matrices, Fp8Matrix)
        return grouped_matmul(x, matrices, order.offsets, self.dtype, plain=self.plain)

    def _matrices(self, name: str) -> RoundedMatrix:
        weight = self.get_submodule(name)
        assert isinstance(weight, QuantizedWeight)
        return rounded_matrix(weight.values, weight.scale, self.number_format)
