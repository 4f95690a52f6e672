"""The Triton kernels of an MoE layer's router and of the sorting of token copies by expert; imported only with a CUDA device.

torch's top-k takes 0.23 ms for 32,768 tokens and 128 experts on an H200, though the logits are only 8 MB, and torch sorts by radix. Here
one kernel for the forward and one for the backward compute scores, choice, weights, sums of probabilities and loads. Three kernels sort:
one counts copies per block of tokens, one adds the counts up, and one computes the positions.

A program has a tile of tokens by experts in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.spec.blocks.moe import LEAST_SUM

TILE = 2048
"""Elements of a tile, unless one token has more.

With twice as many, counting takes 254 registers of a thread on sm_90 instead of 74.
"""
SCAN_BLOCK = 1024
"""Counts of blocks of tokens that one program reads at a time when it adds them up."""
LEAST = tl.constexpr(LEAST_SUM)


def choose(
    logits: Tensor, bias: Tensor | None, sigmoid: bool, copies: int, normalised: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of a `router.ExpertChoice`; see `router.choose`."""
    batch, seq, experts = logits.shape
    parts = triton.cdiv(seq, _tile(experts)[0])
    sums = torch.empty(batch, parts, experts, dtype=torch.float32, device=logits.device)
    counts = torch.empty(batch, parts, experts, dtype=torch.int32, device=logits.device)
    weights, chosen = pick(logits, bias, sigmoid, copies, normalised, scale, sums, counts)
    return weights, chosen, sums.sum(1), counts.sum(1)


def pick(
    logits: Tensor,
    bias: Tensor | None,
    sigmoid: bool,
    copies: int,
    normalised: bool,
    scale: float,
    sums: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`weights` and `chosen` of a `router.ExpertChoice`; fills sums and counts `(batch, parts, experts)` of tiles of tokens, if given."""
    logits = logits.contiguous()
    batch, seq, experts = logits.shape
    tokens, block = _tile(experts)
    weights = torch.empty(batch, seq, copies, dtype=torch.float32, device=logits.device)
    chosen = torch.empty_like(weights, dtype=torch.int64)
    if weights.numel():
        _choose[(triton.cdiv(seq, tokens), batch)](
            logits,
            bias,
            weights,
            chosen,
            sums,
            counts,
            seq,
            experts,
            scale,
            copies,
            triton.next_power_of_2(copies),
            sigmoid,
            normalised,
            tokens,
            block,
            num_warps=4,
        )
    return weights, chosen


def choice_gradient(
    weights_grad: Tensor,
    sums_grad: Tensor,
    logits: Tensor,
    chosen: Tensor,
    sigmoid: bool,
    biased: bool,
    normalised: bool,
    scale: float,
) -> Tensor:
    """The gradient of `logits` from those of the weights and of the sums of probabilities."""
    logits = logits.contiguous()
    batch, seq, experts = logits.shape
    tokens, block = _tile(experts)
    out = torch.empty_like(logits)
    if out.numel():
        _choose_backward[(triton.cdiv(seq, tokens), batch)](
            weights_grad.contiguous(),
            sums_grad.contiguous(),
            logits,
            chosen,
            out,
            seq,
            experts,
            scale,
            chosen.shape[2],
            sigmoid,
            biased,
            normalised,
            tokens,
            block,
            num_warps=4,
        )
    return out


@torch.library.custom_op("meshwright::sort_by_expert", mutates_args=())
def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of a `grouped.ExpertOrder`; the experts `chosen` `(tokens, copies)` of one token differ."""
    chosen = chosen.contiguous()
    count, copies = chosen.shape
    tokens, block = _tile(experts)
    parts = triton.cdiv(count, tokens)
    counts, before = (torch.empty(parts, experts, dtype=torch.int32, device=chosen.device) for _ in range(2))
    totals = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    order, positions, offsets = _empty_order(chosen, experts)
    if not parts:
        return order, positions, offsets.zero_()
    _count[(parts,)](chosen, counts, count, experts, copies, tokens, block, num_warps=8)
    _scan[(experts,)](counts, before, totals, parts, experts, SCAN_BLOCK, num_warps=4)
    _order[(parts,)](
        chosen, before, totals, order, positions, offsets, count, experts, copies, tokens, block, num_warps=8
    )
    return order, positions, offsets


def _tile(experts: int) -> tuple[int, int]:
    """Tokens and experts of a tile."""
    block = triton.next_power_of_2(experts)
    return max(1, TILE // block), block


def _empty_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order = chosen.new_empty(chosen.numel(), dtype=torch.int64)
    positions = torch.empty_like(chosen, dtype=torch.int64)
    return order, positions, chosen.new_empty(experts, dtype=torch.int32)


@sort_by_expert.register_fake
def _(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_order(chosen, experts)


@triton.jit
def _choose(
    logits,
    bias,
    weights,
    chosen,
    sums,
    counts,
    seq,
    experts,
    scale,
    copies: tl.constexpr,
    slots: tl.constexpr,
    sigmoid: tl.constexpr,
    normalised: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    sequence = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    token = part * tokens + tl.arange(0, tokens)
    expert = tl.arange(0, block)
    slot = tl.arange(0, slots)
    exists = (token < seq)[:, None]
    is_expert = (expert < experts)[None, :]
    index = sequence * seq + token
    x = tl.load(logits + index[:, None] * experts + expert[None, :], mask=exists & is_expert, other=0.0)
    scores, probabilities, _ = scores_of(x, is_expert, sigmoid)
    keys = keys_of(x, scores, bias, expert, experts)
    picked, numbers, places = pick_copies(keys, scores, is_expert & (index >= 0)[:, None], copies, slots, tokens, block)
    if normalised:
        picked /= divisor_of(tl.sum(picked, 1), sigmoid, bias is not None)[:, None]
    target = index[:, None] * copies + slot[None, :]
    stored = exists & (slot < copies)[None, :]
    tl.store(weights + target, picked * scale, mask=stored)
    tl.store(chosen + target, numbers.to(tl.int64), mask=stored)
    partial = (sequence * tl.num_programs(0) + part) * experts + expert
    if sums is not None:
        tl.store(sums + partial, tl.sum(tl.where(exists, probabilities, 0.0), 0), mask=expert < experts)
    if counts is not None:
        load = tl.sum((exists & (places >= 0)).to(tl.int32), 0)
        tl.store(counts + partial, load, mask=expert < experts)


@triton.jit
def _choose_backward(
    weights_grad,
    sums_grad,
    logits,
    chosen,
    out,
    seq,
    experts,
    scale,
    copies: tl.constexpr,
    sigmoid: tl.constexpr,
    biased: tl.constexpr,
    normalised: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    sequence = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    expert = tl.arange(0, block)
    exists = token < seq
    is_expert = (expert < experts)[None, :]
    inside = exists[:, None] & is_expert
    index = sequence * seq + token
    x = tl.load(logits + index[:, None] * experts + expert[None, :], mask=inside, other=0.0)
    scores, probabilities, score_sum = scores_of(x, is_expert, sigmoid)
    total = tl.full((tokens,), 1.0, tl.float32)
    mean = tl.zeros((tokens,), tl.float32)
    if normalised:
        # With weights w = s / S of scores s, the gradient of a score is (g - Σ w·g) / S.
        total -= 1.0
        for copy in tl.static_range(copies):
            number = tl.load(chosen + index * copies + copy, mask=exists, other=0).to(tl.int32)
            score = tl.sum(tl.where(expert[None, :] == number[:, None], scores, 0.0), 1)
            total += score
            mean += score * tl.load(weights_grad + index * copies + copy, mask=exists, other=0.0)
        divisor = divisor_of(total, sigmoid, biased)
        mean = tl.where(divisor == total, mean / divisor, 0.0)  # a constant divisor has no gradient
        total = divisor
    score_grads = tl.zeros((tokens, block), tl.float32)
    for copy in tl.static_range(copies):
        number = tl.load(chosen + index * copies + copy, mask=exists, other=0).to(tl.int32)
        grad_out = (tl.load(weights_grad + index * copies + copy, mask=exists, other=0.0) - mean) / total * scale
        score_grads = tl.where(expert[None, :] == number[:, None], grad_out[:, None], score_grads)
    shares = tl.load(sums_grad + sequence * experts + expert, mask=expert < experts, other=0.0)[None, :]
    if sigmoid:
        score_grads += (shares - tl.sum(probabilities * shares, 1)[:, None]) / score_sum
        grad = score_grads * scores * (1.0 - scores)
    else:
        score_grads += shares
        grad = probabilities * (score_grads - tl.sum(probabilities * score_grads, 1)[:, None])
    tl.store(out + index[:, None] * experts + expert[None, :], grad.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scores_of(x, is_expert, sigmoid: tl.constexpr) -> tl.tuple:
    """Scores and probabilities of logits `x` `(tokens, experts)`, and sums of scores `(tokens, 1)`; 0 where no expert is."""
    x = x.to(tl.float32)
    if sigmoid:
        scores = tl.where(is_expert, 1.0 / (1.0 + tl.exp(-x)), 0.0)
        total = tl.sum(scores, 1)[:, None]
        probabilities = scores / total
    else:
        x = tl.where(is_expert, x, float("-inf"))
        powers = tl.exp(x - tl.max(x, 1)[:, None])
        total = tl.sum(powers, 1)[:, None]
        probabilities = powers / total
        scores = probabilities
    return scores, probabilities, total


@triton.jit
def divisor_of(total, sigmoid: tl.constexpr, biased: tl.constexpr) -> tl.tensor:
    """The number by which the scores of chosen experts are divided, from their sum: not 0, as a bias may choose experts of softmax 0."""
    if biased and not sigmoid:
        total = tl.maximum(total, LEAST)
    return total


@triton.jit
def keys_of(x, scores, bias, expert, experts) -> tl.tensor:
    """The keys by which experts are chosen, `(tokens, experts)`, of logits `x`: scores with a `bias`, if there is one.

    A softmax keeps the order of its logits. A key that is not a number comes last, so that every choice is an expert.
    """
    keys = x.to(tl.float32)
    if bias is not None:
        keys = scores + tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
    return tl.where(keys == keys, keys, float("-inf"))


@triton.jit
def pick_copies(
    keys, scores, free, copies: tl.constexpr, slots: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr
) -> tl.tuple:
    """Choose the `copies` experts with the highest keys among those that are `free` `(tokens, block)`; of equal keys the first.

    Returns their scores and numbers `(tokens, slots)`, and for each expert the copy that it computes `(tokens, block)`, −1 if none.
    """
    expert = tl.arange(0, block)
    slot = tl.arange(0, slots)
    picked = tl.zeros((tokens, slots), tl.float32)
    numbers = tl.zeros((tokens, slots), tl.int32)
    places = tl.full((tokens, block), -1, tl.int32)
    for copy in tl.static_range(copies):
        best = tl.max(tl.where(free, keys, float("-inf")), 1)
        number = tl.min(tl.where(free & (keys == best[:, None]), expert[None, :], block), 1)
        taken = expert[None, :] == number[:, None]
        here = slot[None, :] == copy
        picked = tl.where(here, tl.sum(tl.where(taken, scores, 0.0), 1)[:, None], picked)
        numbers = tl.where(here, number[:, None], numbers)
        places = tl.where(taken, copy, places)
        free = free & (taken == 0)
    return picked, numbers, places


@triton.jit
def _count(chosen, counts, count, experts, copies: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr) -> None:
    part = tl.program_id(0)
    expert = tl.arange(0, block)
    load = tl.sum(_choices(chosen, part, count, copies, tokens, block), 0)
    tl.store(counts + part.to(tl.int64) * experts + expert, load, mask=expert < experts)


@triton.jit
def _scan(counts, before, totals, parts, experts, block: tl.constexpr) -> None:
    """For one expert: the number of its copies before each block of tokens, and of all its copies."""
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for start in range(0, parts, block):
        part = start + tl.arange(0, block)
        position = part.to(tl.int64) * experts + expert
        load = tl.load(counts + position, mask=part < parts, other=0)
        tl.store(before + position, total + tl.cumsum(load, 0) - load, mask=part < parts)
        total += tl.sum(load, 0)
    tl.store(totals + expert, total)


@triton.jit
def _order(
    chosen,
    before,
    totals,
    order,
    positions,
    offsets,
    count,
    experts,
    copies: tl.constexpr,
    tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    expert = tl.arange(0, block)
    total = tl.load(totals + expert, mask=expert < experts, other=0)
    end = tl.cumsum(total, 0)
    if part == 0:
        tl.store(offsets + expert, end, mask=expert < experts)
    first = end - total
    first += tl.load(before + part.to(tl.int64) * experts + expert, mask=expert < experts, other=0)
    choices = _choices(chosen, part, count, copies, tokens, block)
    ranks = first[None, :] + tl.cumsum(choices, 0) - choices
    token = part.to(tl.int64) * tokens + tl.arange(0, tokens)
    for copy in tl.static_range(copies):
        index = token * copies + copy
        number = tl.load(chosen + index, mask=token < count, other=-1).to(tl.int32)
        position = tl.sum(tl.where(expert[None, :] == number[:, None], ranks, 0), 1).to(tl.int64)
        tl.store(positions + index, position, mask=token < count)
        tl.store(order + position, index, mask=token < count)


@triton.jit
def _choices(chosen, part, count, copies: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """1 where a token of the block chose an expert, `(tokens, experts)`."""
    token = part.to(tl.int64) * tokens + tl.arange(0, tokens)
    expert = tl.arange(0, block)
    choices = tl.zeros((tokens, block), tl.int32)
    for copy in tl.static_range(copies):
        number = tl.load(chosen + token * copies + copy, mask=token < count, other=-1).to(tl.int32)
        choices += (expert[None, :] == number[:, None]).to(tl.int32)
    return choices
