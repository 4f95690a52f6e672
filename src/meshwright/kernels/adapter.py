"""Low-rank adapters of one linear layer: y = xWᵀ + s · (xAᵀ)Bᵀ, where W is frozen (`spec.blocks.adapter`).

A fused layer has an adapter for each of its parts, because folders of adapters store the parts as separate layers. All A are applied in one
matmul. The B form a block-diagonal matrix, so that one matmul adds to the layer's output.

Shapes: x `(…, in)`, y `(…, out)`; A `(rank, in)`, B `(outputs of the part, rank)`; h = xAᵀ of all parts together `(…, ranks)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.grouped import grouped_linear
from meshwright.spec.blocks.table import AdapterPart


class ExpertAdapter(nn.Module):
    """The adapters of all routed experts, for each linear layer by name, with an adapter for each part of a fused layer.

    A is `(experts, rank, in)` and B `(experts, outputs of the part, rank)`.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[AdapterPart]], experts: int, inputs: Mapping[str, int], scale: float
    ) -> None:
        super().__init__()
        self.parts = {layer: tuple(of_layer) for layer, of_layer in parts.items()}
        self.scale = scale
        for layer, of_layer in self.parts.items():
            for part in of_layer:
                a = torch.empty(experts, part.rank, inputs[layer])
                b = torch.zeros(experts, part.outputs, part.rank)
                self.register_parameter(f"{layer}_{part.parameter('a')}", nn.Parameter(a))
                self.register_parameter(f"{layer}_{part.parameter('b')}", nn.Parameter(b))

    def forward(self, layer: str, rows: Tensor, y: Tensor, offsets: Tensor, *, reference: bool) -> Tensor:
        """Return y `(rows, out)` plus what a layer's adapters add for its input `rows` `(rows, in)`; rows are sorted by expert."""
        a, b = (self._of(layer, name) for name in "ab")
        if len(a) == 1:
            reduce = a[0]
            expand = b[0]
        else:  # the B of both parts form one block-diagonal matrix for each expert
            rank = a[0].shape[1]
            reduce = torch.cat(a, dim=1)
            expand = torch.cat([F.pad(b[0], (0, rank)), F.pad(b[1], (rank, 0))], dim=1)
        reduced = grouped_linear(rows, reduce, offsets, reference=reference)
        return y + self.scale * grouped_linear(reduced, expand, offsets, reference=reference)

    def _of(self, layer: str, name: str) -> list[Tensor]:
        return [self.get_parameter(f"{layer}_{part.parameter(name)}") for part in self.parts[layer]]


class Adapter(nn.Module):
    """The adapters of a linear layer. `fused` has the name and outputs of each part of the layer, in order."""

    def __init__(
        self,
        parts: Sequence[AdapterPart],
        fused: Sequence[tuple[str, int]],
        inputs: int,
        scale: float,
        *,
        magnitudes: bool = False,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.scale = scale
        self.magnitudes = magnitudes
        self.rows = {part.part: part.outputs for part in parts} if parts[0].part == "" else dict(fused)
        """Number of outputs on this rank for each part of the layer, including parts without an adapter."""
        for part in parts:
            self.register_parameter(part.parameter("a"), nn.Parameter(torch.empty(part.rank, inputs)))
            self.register_parameter(part.parameter("b"), nn.Parameter(torch.zeros(part.outputs, part.rank)))
            if magnitudes:
                self.register_parameter(part.parameter("magnitude"), nn.Parameter(torch.ones(part.outputs)))

    def reduced(self, x: Tensor) -> Tensor:
        """Return h = xAᵀ."""
        return F.linear(x, self._stacked("a"))

    def add_to(self, y: Tensor, h: Tensor) -> Tensor:
        """Return y + s · h · Bᵀ."""
        expansion = self._expansion()
        total = torch.addmm(y.flatten(0, -2), h.flatten(0, -2), expansion.t(), alpha=self.scale)
        return total.view(y.shape)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the layer's output without its bias; y is the output of the frozen `weight` for x."""
        total = self.add_to(y, self.reduced(x))
        return total * self._row_factors(weight).to(total.dtype) if self.magnitudes else total

    def _stacked(self, name: str) -> Tensor:
        values: list[Tensor] = [self.get_parameter(part.parameter(name)) for part in self.parts]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _expansion(self) -> Tensor:
        """Return the block-diagonal matrix of the B of all parts, `(out, ranks)`."""
        if len(self.rows) == 1:
            return self.get_parameter(self.parts[0].parameter("b"))
        ranks = sum(part.rank for part in self.parts)
        blocks = []
        before = 0
        of_part = {part.part: part for part in self.parts}
        reference = self.get_parameter(self.parts[0].parameter("b"))
        for name, rows in self.rows.items():
            part = of_part.get(name)
            if part is None:
                blocks.append(reference.new_zeros(rows, ranks))
                continue
            b = self.get_parameter(part.parameter("b"))
            blocks.append(F.pad(b, (before, ranks - before - part.rank)))
            before += part.rank
        return torch.cat(blocks)

    def _row_factors(self, weight: Tensor) -> Tensor:
        """Return DoRA's factor of each output, `(out,)`: its magnitude divided by the norm of its row of W + s · BA.

        The norm has no gradient. It is computed from matmuls with A and B, without W + s · BA itself.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            a = self._stacked("a").to(wide)
            b = self._expansion().to(wide)
            w = weight.to(wide)
            squares = w.square().sum(1) + 2 * self.scale * (b * (w @ a.t())).sum(1)
            squares = squares + self.scale**2 * ((b @ (a @ a.t())) * b).sum(1)
            lengths = squares.clamp_min(0).sqrt()
        if len(self.rows) == 1:
            return self._stacked("magnitude").to(wide) / lengths
        of_part = {part.part: part for part in self.parts}
        factors = []
        start = 0
        for name, rows in self.rows.items():
            part = of_part.get(name)
            length = lengths[start : start + rows]
            if part is None:
                factors.append(torch.ones_like(length))
            else:
                factors.append(self.get_parameter(part.parameter("magnitude")).to(wide) / length)
            start += rows
        return torch.cat(factors)
