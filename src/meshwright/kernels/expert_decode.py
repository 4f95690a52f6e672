"""Mixtures of experts of few tokens in inference: choice of experts, and their products, in three kernels on CUDA.

`models.moe` has the same computation by grouped products, for training, other devices and more tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.router import MOST_EXPERTS

MOST_TOKENS = 512
"""Tokens up to which a program finds the rows of an expert among those of all tokens."""
MOST_COPIES = 64
"""Experts of a token."""


class Routing(NamedTuple):
    """How experts are chosen: `copies` for each token, whether weights are `normalised`, their `scale`, groups of experts."""

    copies: int
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
    few = 0 < x.shape[0] <= MOST_TOKENS and experts <= MOST_EXPERTS and copies <= MOST_COPIES
    differentiated = torch.is_grad_enabled() and x.requires_grad
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and few and not differentiated


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Choices:
    """The choices of rows x `(tokens, hidden)` by a router `weight` `(experts, hidden)`.

    Scores are a softmax, or with `bias` `(experts,)` sigmoids, to which it is added for the choice only; see `models.moe`.
    """
    from meshwright.kernels import expert_decode_triton

    return expert_decode_triton.route(x.contiguous(), weight, bias, routing)


def expert_outputs(x: Tensor, gate_up: Tensor, down: Tensor, choices: Choices) -> Tensor:
    """The weighted outputs `(tokens, copies, hidden)` of the experts of rows x `(tokens, hidden)`.

    `gate_up` is `(experts, 2 · width, hidden)` with the gates first, `down` `(experts, hidden, width)`.
    """
    from meshwright.kernels import expert_decode_triton as kernels

    return kernels.down(kernels.gate_up(x.contiguous(), gate_up, choices), down, choices)
