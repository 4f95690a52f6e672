"""Mixtures of experts of few tokens in inference: choice of experts, and their products, in three kernels on CUDA.

`models.moe` has the same computation by grouped products, for training, other devices and more tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.spec.serving_limits import MOST_COPIES, MOST_EXPERTS

MOST_TOKENS = 512
"""Tokens up to which a program finds the rows of an expert among those of all tokens."""
MOST_ROWS = 32
"""Rows of an expert, if all have the same, up to which most experts have one tile of rows and so read their weights once."""


class Routing(NamedTuple):
    """How experts are chosen: `copies` for each token by sigmoids or a softmax, whether weights are `normalised`, their `scale`, groups."""

    copies: int
    sigmoid: bool
    normalised: bool
    scale: float
    groups: int = 1
    kept_groups: int = 1


class Choices(NamedTuple):
    """The experts of tokens.

    `chosen` `(tokens, copies)` int32, `weights` of the same shape in fp32; `places` `(experts, tokens)` int8: which copy of the token the
    expert computes, −1 if none.
    """

    chosen: Tensor
    weights: Tensor
    places: Tensor


def runs_kernels(x: Tensor, experts: int, copies: int) -> bool:
    """Whether the kernels take rows x `(tokens, hidden)`."""
    few = 0 < x.shape[0] <= most_tokens(experts, copies)
    differentiated = torch.is_grad_enabled() and x.requires_grad
    return x.is_cuda and few and not differentiated and has_kernels(x.dtype, experts, copies)


def has_kernels(dtype: torch.dtype, experts: int, copies: int) -> bool:
    """Whether the kernels compute mixtures of this kind on CUDA."""
    return dtype in (torch.bfloat16, torch.float16) and experts <= MOST_EXPERTS and copies <= MOST_COPIES


def most_tokens(experts: int, copies: int) -> int:
    """The most tokens that the kernels take at a time."""
    return max(1, min(MOST_TOKENS, MOST_ROWS * experts // copies))


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Choices:
    """The choices of rows x `(tokens, hidden)` by a router `weight` `(experts, hidden)`.

    `bias` `(experts,)` is added to scores for the choice only; see `models.moe`.
    """
    from meshwright.kernels import expert_decode_triton

    return expert_decode_triton.route(x.contiguous(), weight, bias, routing)


def expert_outputs(x: Tensor, gate_up: Tensor, down: Tensor, choices: Choices) -> Tensor:
    """The weighted outputs `(tokens, copies, hidden)` of the experts of rows x `(tokens, hidden)`.

    `gate_up` is `(experts, 2 · width, hidden)` with the gates first, `down` `(experts, hidden, width)`.
    """
    from meshwright.kernels import expert_decode_triton as kernels

    outputs = kernels.down(kernels.gate_up(x.contiguous(), gate_up, choices, x.dtype), down, choices, x.dtype)
    return outputs.view(*choices.chosen.shape, -1)


def rounded_expert_outputs(x: Tensor, gate_up: RoundedMatrix, down: RoundedMatrix, choices: Choices) -> Tensor:
    """`expert_outputs` of experts in 8 bits; rows and activations are rounded to their format, with a scale for each row."""
    from meshwright.kernels import expert_decode_triton as kernels
    from meshwright.kernels.row_quantize_triton import round_rows

    number_format = gate_up.values.dtype
    active = kernels.gate_up(round_rows(x, number_format), gate_up, choices, x.dtype)
    outputs = kernels.down(round_rows(active, number_format), down, choices, x.dtype)
    return outputs.view(*choices.chosen.shape, -1)
