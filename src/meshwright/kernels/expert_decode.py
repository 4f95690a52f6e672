"""MoE layers for few tokens in inference: three kernels on CUDA choose experts and compute them.

`models.moe` computes the same with grouped matmuls, for training, for other devices and for more tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.spec.serving_limits import MOST_COPIES, MOST_EXPERTS

MOST_TOKENS = 512
"""Maximum number of tokens that the kernels compute at a time: each program looks through all tokens to find the rows of its expert."""
MOST_ROWS = 32
"""Maximum of the mean number of rows of an expert.

Up to this number, nearly all experts have one tile of rows, so their weights are read once.
"""


class Routing(NamedTuple):
    """How a token chooses its experts."""

    copies: int
    """Number of experts per token (top-k)."""
    sigmoid: bool
    """Whether scores are sigmoids of the logits; otherwise they are the softmax of the logits."""
    normalised: bool
    """Whether the scores of a token's experts are divided by their sum."""
    scale: float
    """Factor by which the weights are multiplied after that."""
    groups: int = 1
    """Number of groups into which experts are divided."""
    kept_groups: int = 1
    """Number of groups, those with the best scores, from which a token chooses its experts."""


class Choices(NamedTuple):
    """The experts that tokens have chosen. A copy is a pair of a token and one of its experts.

    Example: token 0 with experts 5 and 2 has chosen[0] = [5, 2], places[5, 0] = 0 and places[2, 0] = 1.
    """

    chosen: Tensor
    """`(tokens, copies)` int32: the chosen experts."""
    weights: Tensor
    """`(tokens, copies)` fp32: the factors of the experts' outputs."""
    places: Tensor
    """`(experts, tokens)` int8: which copy of the token the expert computes; -1 if none."""


def runs_kernels(x: Tensor, experts: int, copies: int) -> bool:
    """Whether the kernels can compute rows x `(tokens, hidden)`: few tokens, on CUDA, without gradients."""
    few = 0 < x.shape[0] <= most_tokens(experts, copies)
    differentiated = torch.is_grad_enabled() and x.requires_grad
    return x.is_cuda and few and not differentiated and has_kernels(x.dtype, experts, copies)


def has_kernels(dtype: torch.dtype, experts: int, copies: int) -> bool:
    """Whether the kernels can compute MoE layers of this kind on CUDA."""
    return dtype in (torch.bfloat16, torch.float16) and experts <= MOST_EXPERTS and copies <= MOST_COPIES


def most_tokens(experts: int, copies: int) -> int:
    """Return how many tokens the kernels can compute at a time. With 128 experts and 8 copies: min(512, 32 · 128 / 8) = 512."""
    return max(1, min(MOST_TOKENS, MOST_ROWS * experts // copies))


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Choices:
    """Return the experts that a router `weight` `(experts, hidden)` chooses for rows x `(tokens, hidden)`.

    `bias` `(experts,)` is added to scores only to choose experts; see `models.moe`.
    """
    from meshwright.kernels import expert_decode_triton

    return expert_decode_triton.route(x.contiguous(), weight, bias, routing)


def expert_outputs(x: Tensor, gate_up: Tensor, down: Tensor, choices: Choices) -> Tensor:
    """Return the weighted outputs `(tokens, copies, hidden)` of the chosen experts for rows x `(tokens, hidden)`.

    `gate_up` is `(experts, 2 · width, hidden)` with the gates first; `down` is `(experts, hidden, width)`.
    """
    from meshwright.kernels import expert_decode_triton as kernels

    outputs = kernels.down(kernels.gate_up(x.contiguous(), gate_up, choices, x.dtype), down, choices, x.dtype)
    return outputs.view(*choices.chosen.shape, -1)


def rounded_expert_outputs(x: Tensor, gate_up: RoundedMatrix, down: RoundedMatrix, choices: Choices) -> Tensor:
    """As `expert_outputs`, for experts in 8 bits. Rows and activations are rounded to the experts' format, with a scale for each row."""
    from meshwright.kernels import expert_decode_triton as kernels
    from meshwright.kernels.row_quantize_triton import round_rows

    number_format = gate_up.values.dtype
    active = kernels.gate_up(round_rows(x, number_format), gate_up, choices, x.dtype)
    outputs = kernels.down(round_rows(active, number_format), down, choices, x.dtype)
    return outputs.view(*choices.chosen.shape, -1)
