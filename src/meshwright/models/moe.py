"""A mixture of experts in place of a feed-forward network: Mixtral (Jiang et al. 2024) and Qwen3-MoE (Yang et al. 2025).

A router sends each token to the experts it finds likeliest; every token is served (dropless), however uneven that makes the experts'
loads. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.grouped import ExpertOrder, combine_copies, grouped_linear, order_by_expert, to_groups
from meshwright.kernels.linear import Linear
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.swiglu import swiglu
from meshwright.models.mlp import feed_forward
from meshwright.spec.model import ModelSpec


class Routed(NamedTuple):
    """An output `(batch, seq, hidden)` and what the router behind it did.

    `balance`: the sum of the sequences' balance losses, a scalar to be differentiated; `load` `(experts,)`: tokens sent to each expert.
    """

    x: Tensor
    balance: Tensor
    load: Tensor


class MixtureOfExperts(nn.Module):
    """Router, routed experts, and an expert that every token passes where the spec has one.

    `of_sequences` tells how often whole sequences chose each expert, `(batch, experts)`, of what the tokens here chose: all of them, unless
    ranks have parts of sequences (`parallel.experts`).
    """

    of_sequences: Callable[[Tensor], Tensor]

    def __init__(self, spec: ModelSpec, plain: bool) -> None:
        super().__init__()
        self.count, self.per_token, self.normalised = spec.experts, spec.experts_per_token, spec.normalised_routing
        self.router = Linear(spec.hidden, spec.experts, bias=False)
        self.experts = Experts(spec, plain)
        self.shared = feed_forward(spec, spec.shared_expert_hidden, plain) if spec.shared_expert_hidden else None
        self.of_sequences = lambda loads: loads

    def forward(self, x: Tensor) -> Routed:
        """x `(batch, seq, hidden)`."""
        likely = torch.softmax(self.router(x), dim=-1, dtype=accumulate_dtype(x.dtype))
        weights, chosen = likely.topk(self.per_token, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        loads = _loads(chosen, self.count)
        load = loads.sum(0)
        order = order_by_expert(chosen.flatten(0, 1), load)
        rows = self.experts(to_groups(x.flatten(0, 1), order), order)
        y = combine_copies(rows, weights.flatten(0, 1), order).to(x.dtype).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return Routed(y, _balance(likely, self.of_sequences(loads), self.per_token), load)


class Experts(nn.Module):
    """The feed-forward networks of all routed experts, stacked along dimension 0."""

    gate_up: nn.Parameter
    up: nn.Parameter

    def __init__(self, spec: ModelSpec, plain: bool) -> None:
        super().__init__()
        self.gated, self.plain = spec.mlp == "swiglu", plain
        width = 2 * spec.expert_hidden if self.gated else spec.expert_hidden
        into = nn.Parameter(torch.empty(spec.experts, width, spec.hidden))
        self.register_parameter("gate_up" if self.gated else "up", into)
        self.down = nn.Parameter(torch.empty(spec.experts, spec.hidden, spec.expert_hidden))

    def forward(self, sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
        """Rows `(rows, hidden)` sorted by expert, each through its own."""
        into = self.gate_up if self.gated else self.up
        inside = grouped_linear(sorted_rows, into, order.offsets, plain=self.plain)
        active = swiglu(inside, plain=self.plain) if self.gated else F.gelu(inside, approximate="tanh")
        return grouped_linear(active, self.down, order.offsets, plain=self.plain)


def _loads(chosen: Tensor, experts: int) -> Tensor:
    """How often each sequence chose each expert, `(batch, experts)`, of `chosen` `(batch, seq, copies)`.

    By comparison, which the compiler turns into one pass, and not by atomics, of which all sequences would hit the same few numbers.
    """
    every = torch.arange(experts, device=chosen.device)
    return (chosen.flatten(1)[..., None] == every).sum(1)


def _balance(likely: Tensor, loads: Tensor, copies: int) -> Tensor:
    """Σ over sequences of experts · Σₑ fₑ·pₑ: fₑ the share of the sequence's choices that fell on e, pₑ its mean probability.

    `loads` are of whole sequences; of tokens that are part of them this is the part of the sum that they make.

    1 a sequence when all experts are equally loaded, up to the number of experts when one has everything. Switch's loss (Fedus et al.
    2022, equations 4–6), for each sequence alone as in DeepSeek-V2 (2024), so that it does not depend on how a batch is divided.
    """
    choices = loads.sum(1, keepdim=True)
    share, mean = loads.to(likely.dtype) / choices, likely.sum(1) * copies / choices
    return loads.shape[1] * (share * mean).sum()
