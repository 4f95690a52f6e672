"""An MoE layer in place of a feed-forward network: Mixtral (Jiang et al. 2024), Qwen3-MoE, DeepSeek-V2/V3.

A router sends each token to the experts with the highest scores. No token is dropped, however uneven the experts' loads are. The host does
not wait for the device.

In tensor shapes, `copies` is the number of experts that each token chooses (top-k): the token is copied to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import router
from meshwright.kernels.adapter import ExpertAdapter
from meshwright.kernels.expert_decode import Choices, Routing, expert_outputs, most_tokens, route, runs_kernels
from meshwright.kernels.grouped import (
    ExpertOrder,
    add_weighted_rows,
    group_rows,
    grouped_linear,
    order_by_expert,
    order_of,
    sorted_weights,
    sum_copies,
    to_groups,
)
from meshwright.kernels.grouped_fp8 import grouped_linear_fp8
from meshwright.kernels.linear import Linear
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.router import ExpertChoice, choose, has_kernel
from meshwright.kernels.swiglu import clamped_activation, gated_activation
from meshwright.models.mlp import feed_forward_of
from meshwright.spec.blocks.moe import LEAST_SUM, MoESpec

if TYPE_CHECKING:
    from meshwright.models.hooks import BlockHooks


@dataclass(frozen=True)
class CountedTokens:
    """The tokens of a micro-batch that count in the losses and loads of routers, and the sample of each token."""

    sample: Tensor
    """Number of each token's sample in the micro-batch `(batch, seq)`; -1 for a token that does not count."""
    samples: int
    """Number of samples in the micro-batch; the sample numbers are below it."""

    @property
    def mask(self) -> Tensor:
        """Whether each token counts, `(batch, seq)`."""
        return self.sample >= 0

    def loads(self, chosen: Tensor, experts: int) -> Tensor:
        """Return how often tokens of each sample chose each expert, `(samples, experts)`. `chosen` is `(batch, seq, copies)`."""
        entries = (self.sample[..., None] * experts + chosen).masked_fill(~self.mask[..., None], self.samples * experts)
        counts = entries.new_zeros(self.samples * experts + 1)  # the last counter is for tokens that do not count
        counts = counts.scatter_add(0, entries.flatten(), torch.ones_like(entries).flatten())
        return counts[:-1].view(self.samples, experts)


class RoutedOutput(NamedTuple):
    """The output of an MoE layer or block, with the losses and loads of its router.

    - `x` `(batch, seq, hidden)`: the output.
    - `balance`: the sum of the balance losses of all sequences. If only some tokens count, each sample's loss is multiplied by the sample's
      number of counted tokens, and `balance` is the sum over the samples.
    - `load` `(experts,)`: the number of tokens that are sent to each expert.
    - `squares`: the sum over tokens of the squared log-sum-exp of the router logits; 0 without a router z-loss.

    `balance` and `squares` are differentiable scalars.
    """

    x: Tensor
    balance: Tensor
    load: Tensor
    squares: Tensor


class RoutedTokens(NamedTuple):
    """The tokens of a micro-batch, sorted by expert.

    - `sorted_rows` `(tokens · copies, hidden)`: a row for each expert that a token chose.
    - `order`: the sort by expert.
    - `weights`: the router's weight of each row.
    - `balance`, `load`, `squares`: as in `RoutedOutput`.
    """

    sorted_rows: Tensor
    order: ExpertOrder
    weights: Tensor
    balance: Tensor
    load: Tensor
    squares: Tensor


class MoELayer(nn.Module):
    """Router, routed experts and, if the description has one, a shared expert for all tokens.

    - `z_loss`: whether `RoutedOutput.squares` is computed, for the router z-loss of ST-MoE (Zoph et al. 2022, equation 5).
    - `replayed` `(batch · seq, experts)`: if set, these scores choose each token's experts instead of the router's
      (`parallel.replayed_routing`).
    - `invariant`: in inference on CUDA, the bits of a token's output do not depend on the other tokens.
    """

    def __init__(self, spec: MoESpec, hidden: int, reference: bool, hooks: BlockHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.reference = reference
        router = spec.router
        self.count = spec.experts
        self.per_token = spec.per_token
        self.normalised = router.normalised
        self.groups = router.groups
        self.groups_per_token = router.groups_per_token
        self.scale = router.scale
        self.sigmoid = router.score == "sigmoid"
        self.choice_bias: nn.Parameter | None = None
        if router.choice_bias:
            self.choice_bias = nn.Parameter(torch.zeros(spec.experts), requires_grad=False)
        self.router = Linear(hidden, spec.experts, bias=router.bias)
        self.experts = Experts(spec, hidden, reference)
        self.shared = None if spec.shared is None else feed_forward_of(spec.shared, hidden, reference)
        self.shared_gate = Linear(hidden, 1, bias=False) if spec.shared_gate else None
        self.z_loss = False
        self.replayed: Tensor | None = None
        self.invariant = False

    def forward(self, x: Tensor, counted: CountedTokens | None = None, *, losses: bool = True) -> RoutedOutput | Tensor:
        """Compute the layer's output for x `(batch, seq, hidden)`, and its losses and loads.

        Losses and loads are those of the `counted` tokens, or of all tokens if it is None. Without `losses` (inference) only the output is
        computed and returned.
        """
        if not losses:
            return self._output(x)
        tokens = self.route(x, counted)
        y = self.combine(self.experts(tokens.sorted_rows, tokens.order, tokens.weights), tokens.order, x)
        return RoutedOutput(y, tokens.balance, tokens.load, tokens.squares)

    def _output(self, x: Tensor) -> Tensor:
        """Compute only the output for x `(batch, seq, hidden)`, without gradients, losses and loads."""
        if (outputs := self.outputs_by_copy(x)) is not None:
            return self.with_shared(outputs.sum(1).view_as(x), x)
        weights, chosen = self._pick(self.router(x))
        order = order_of(chosen.flatten(0, 1), self.count)
        sorted_rows = to_groups(x.flatten(0, 1), order)
        return self.combine(self.experts(sorted_rows, order, sorted_weights(weights.flatten(0, 1), order)), order, x)

    def outputs_by_copy(self, x: Tensor) -> Tensor | None:
        """Return the weighted outputs of the routed experts, one for each expert that a token chose, without gradients.

        x is `(batch, seq, hidden)`, the result `(batch · seq, copies, hidden)`. Returns None if the kernels for few tokens cannot be used.
        """
        rows = x.flatten(0, 1)
        parts = rows.split(most_tokens(self.count, self.per_token)) if self.invariant and len(rows) else (rows,)
        takes_rows = self.experts.takes_few_rows and runs_kernels(parts[0], self.count, self.per_token)
        if self.reference or self.replayed is not None or not takes_rows:
            return None
        routing = Routing(self.per_token, self.sigmoid, self.normalised, self.scale, self.groups, self.groups_per_token)
        outputs = [
            self.experts.of_choices(part, route(part, self.router.weight, self.choice_bias, routing)) for part in parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _pick(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, `(batch, seq, copies)` each, without gradients."""
        unsupported = self.groups_per_token != self.groups or self.replayed is not None
        if self.reference or unsupported or not has_kernel(logits, self.count):
            return self._route(logits)[1:]
        return router.pick(
            logits,
            self.choice_bias,
            sigmoid=self.sigmoid,
            copies=self.per_token,
            normalised=self.normalised,
            scale=self.scale,
        )

    def route(self, x: Tensor, counted: CountedTokens | None = None) -> RoutedTokens:
        """Choose experts for the tokens x `(batch, seq, hidden)` and sort the copies of the tokens by expert; `counted` as in `forward`."""
        logits = self.router(x)
        choice = self.choose_experts(logits, counted)
        load = choice.loads.sum(0)
        order = order_by_expert(choice.chosen.flatten(0, 1), load)
        weights = sorted_weights(choice.weights.flatten(0, 1), order)
        sorted_rows = to_groups(x.flatten(0, 1), order)
        loads = choice.loads
        if counted is not None:
            loads = counted.loads(choice.chosen, self.count)
            load = loads.sum(0)
        squares = choice.weights.new_zeros(())
        if self.z_loss:
            token_squares = logits.to(choice.weights.dtype).logsumexp(-1).square()
            squares = (token_squares if counted is None else token_squares * counted.mask).sum()
        loads = self.hooks.whole_sequence_loads(loads)
        if counted is not None:  # each token gets the loads of its sample
            loads = self.hooks.whole_sample_loads(loads, counted)[counted.sample.flatten().clamp_min(0)]
        balance = _balance(choice.probability_sums, loads, self.per_token, by_token=counted is not None)
        return RoutedTokens(sorted_rows, order, weights, balance, load, squares)

    def combine(self, sorted_rows: Tensor, order: ExpertOrder, x: Tensor) -> Tensor:
        """Return the layer's output for x: each token's weighted expert outputs added, plus the output of the shared expert."""
        return self.with_shared(sum_copies(sorted_rows, order).view_as(x), x)

    def with_shared(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the output of the shared expert for x, if there is one, to the output `y` of the routed experts."""
        shared = self.shared_output(x)
        return y if shared is None else y + shared

    def shared_output(self, x: Tensor) -> Tensor | None:
        """Return the output of the shared expert for x, multiplied by its gate if it has one; None without a shared expert."""
        if self.shared is None or self.shared_gate is None:
            return None if self.shared is None else self.shared(x)
        return torch.sigmoid(self.shared_gate(x)) * self.shared(x)

    def choose_experts(self, logits: Tensor, counted: CountedTokens | None = None) -> ExpertChoice:
        """Return the experts of each token, by a kernel if there is one for this router.

        Without `counted`, the `probability_sums` of the result are summed over each sequence. With `counted` they are not summed: they have
        each token's probabilities `(batch · seq, experts)`, which are 0 for tokens that do not count.
        """
        unsupported = self.groups_per_token != self.groups or self.replayed is not None or counted is not None
        if self.reference or unsupported or not has_kernel(logits, self.count):
            probabilities, weights, chosen = self._route(logits)
            sums = probabilities.sum(1) if counted is None else (probabilities * counted.mask[..., None]).flatten(0, 1)
            return ExpertChoice(weights, chosen, sums, _loads(chosen, self.count))
        return choose(
            logits,
            self.choice_bias,
            sigmoid=self.sigmoid,
            copies=self.per_token,
            normalised=self.normalised,
            scale=self.scale,
        )

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return probabilities `(batch, seq, experts)`, and the weights and indices of the chosen experts, from the router's logits.

        The scores of a sigmoid are not probabilities; the probability of an expert is its share in the sum of the token's scores
        (DeepSeek-V3, equation 18). If there is a `choice_bias`, it is added to the scores that choose experts; the weights do not contain
        it.
        """
        wide = accumulate_dtype(logits.dtype)
        if not self.sigmoid:
            probabilities = scores = torch.softmax(logits, dim=-1, dtype=wide)
        else:
            scores = torch.sigmoid(logits.to(wide))
            probabilities = scores / scores.sum(-1, keepdim=True)
        if self.replayed is not None:
            weights, chosen = self._replay(self.replayed, logits.to(wide), scores)
            return probabilities, weights * self.scale, chosen
        if self.choice_bias is None:
            weights, chosen = self._within_groups(scores).topk(self.per_token, dim=-1)
        else:
            chosen = self._within_groups(scores.detach() + self.choice_bias).topk(self.per_token, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if self.normalised:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if self.sigmoid or self.choice_bias is None else total.clamp_min(LEAST_SUM))
        return probabilities, weights if self.scale == 1 else weights * self.scale, chosen

    def _replay(self, replayed: Tensor, logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of the experts with the highest `replayed` scores.

        Normalised weights are computed as a softmax over the chosen experts. It is finite even if the router gives all of them the
        probability 0.
        """
        chosen = replayed.view_as(logits).topk(self.per_token, dim=-1).indices
        if not self.normalised:
            return scores.gather(-1, chosen), chosen
        logarithms = F.logsigmoid(logits) if self.sigmoid else logits
        return torch.softmax(logarithms.gather(-1, chosen), dim=-1), chosen

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Replace the scores `(…, experts)` outside a token's best groups of experts by minus infinity.

        The score of a group is the score of its best expert (DeepSeek-V2, §2.2); with a choice bias it is the sum of its two best experts
        (DeepSeek-V3).
        """
        if self.groups_per_token == self.groups:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.amax(-1) if self.choice_bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        chosen_groups = best.topk(self.groups_per_token, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen_groups, False)
        return grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)


class Experts(nn.Module):
    """The feed-forward networks of all routed experts. Their weights are stacked along dimension 0.

    With `reference` they use the kernels' reference implementations, which have PyTorch operators only.
    """

    gate_up: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    fp8: bool = False
    """Whether rows, and the gradients of rows, are multiplied in fp8 with one scale per row (`kernels.grouped_fp8`)."""

    @property
    def takes_few_rows(self) -> bool:
        """Whether `of_choices` can be called: its kernels exist only for these experts' activation and dtype, and without biases."""
        return self.activation == "swiglu" and not self.fp8 and not self.biased

    def of_choices(self, x: Tensor, choices: Choices) -> Tensor:
        """Return the weighted outputs `(tokens, copies, hidden)` of the chosen experts for x `(tokens, hidden)`, without gradients."""
        return expert_outputs(x, self.gate_up, self.down, choices)

    def __init__(self, spec: MoESpec, hidden: int, reference: bool) -> None:
        super().__init__()
        expert = spec.expert
        self.activation = expert.activation
        self.gated = expert.gated
        self.reference = reference
        self.biased = expert.bias
        self.adapter: ExpertAdapter | None = None
        for name, outputs, inputs in ((expert.first, expert.first_width, hidden), ("down", hidden, expert.width)):
            self.register_parameter(name, nn.Parameter(torch.empty(spec.experts, outputs, inputs)))
            if expert.bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(spec.experts, outputs)))

    def forward(self, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """Return the expert outputs for rows `(rows, hidden)` that are sorted by expert, multiplied by `weights` `(rows,)` if given.

        The weights multiply the activation between the two linear layers, not the output. The backward then does not need the experts'
        outputs (SonicMoE, Guo et al. 2025).
        """
        name = "gate_up" if self.gated else "up"
        linear = grouped_linear_fp8 if self.fp8 else grouped_linear
        projected = linear(sorted_rows, getattr(self, name), order.offsets, reference=self.reference)
        projected = self._adapted(name, sorted_rows, projected, order)
        projected = self._add_bias(projected, name, order)
        if self.activation == "clamped_swiglu":
            activation = clamped_activation(projected, weights)
        elif self.gated:
            activation = gated_activation(projected, weights, gelu=self.activation == "geglu", reference=self.reference)
        else:
            activation = F.gelu(projected, approximate="tanh")
            if weights is not None:
                activation = (activation * weights[:, None]).to(projected.dtype)
        outputs = linear(activation, self.down, order.offsets, reference=self.reference)
        outputs = self._adapted("down", activation, outputs, order)
        return self._add_bias(outputs, "down", order, weights)

    def _adapted(self, name: str, rows: Tensor, y: Tensor, order: ExpertOrder) -> Tensor:
        """Add what the experts' adapters compute to the output y of the layer `name`."""
        return y if self.adapter is None else self.adapter(name, rows, y, order.offsets, reference=self.reference)

    def _add_bias(self, rows: Tensor, name: str, order: ExpertOrder, weights: Tensor | None = None) -> Tensor:
        """Add the biases of the rows' experts to the output rows `(rows, out)` of a layer; `weights` `(rows,)` multiply the biases."""
        biases = getattr(self, f"{name}_bias") if self.biased else None
        if biases is None:  # there are none, or another tensor rank has them
            return rows
        if weights is not None:
            return add_weighted_rows(rows, biases, order.offsets, weights)
        return rows + group_rows(biases, order.offsets, len(rows))


def _loads(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each sequence chose each expert, `(batch, experts)`. `chosen` is `(batch, seq, copies)`.

    torch.compile fuses this comparison into one pass. A scatter would need atomics, and many tokens would update the same few counters.
    """
    expert_indices = torch.arange(experts, device=chosen.device)
    return (chosen.flatten(1)[..., None] == expert_indices).sum(1)


def _balance(probability_sums: Tensor, loads: Tensor, copies: int, *, by_token: bool) -> Tensor:
    """Return the balance loss: the sum over sequences of (number of experts) · Σₑ fₑ · pₑ.

    fₑ is the share of expert e in the loads of the sequence, and pₑ the mean probability of expert e. The loss of a sequence is 1 if all
    experts have equal loads. It is at most the number of experts, if one expert has all tokens. This is the loss of Switch (Fedus et al.
    2022, equations 4-6), computed per sequence as in DeepSeek-V2 (2024), so it does not depend on how a batch is divided.

    `loads` are those of whole sequences. If `probability_sums` has only a part of their tokens, the result is what these tokens add to the
    sum. With `by_token` the loss of each sample is multiplied by its counted tokens; both arguments then have a row for each token, and the
    row of `loads` has the loads of the token's sample.
    """
    choices = loads.sum(1, keepdim=True).clamp_min(1)  # 0 where no token counts
    share = loads.to(probability_sums.dtype) / choices
    mean = probability_sums
    if not by_token:
        mean = mean * copies / choices
    return loads.shape[1] * (share * mean).sum()
