"""Asynchronous variants of the operators in `linear_exchanges`: matmuls that overlap with the transfer of their tokens.

An all-gather followed by a matmul is divided into pieces; a piece has the tokens of one or a few ranks. The matmul of this rank's own
tokens comes first, while the tokens of other ranks are copied. A matmul followed by a reduce-scatter runs in the opposite order: this
rank's own tokens come last, while finished pieces are copied to the ranks that add them (Wang et al. 2023, "Overlap Communication with
Dependent Computation via Decomposition"; PyTorch's asynchronous tensor parallelism). The backward of an all-gather followed by a matmul
needs no pieces: the all-gather overlaps with the matmul for the input gradient, and the reduce-scatter of this gradient overlaps with the
matmul for the weight gradient.

The parts of the ranks are added in rank order, in fp32 or wider, and rounded once. Shapes and names are those of `linear_exchanges`.
`Peers` (`parallel.peers`) copy the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.kernels.compile_once import compile_once
from meshwright.kernels.norm import accumulate_dtype
from meshwright.parallel.peers import Peers

PIECE_ROWS = 2048
"""Minimum rows in the matmul of a piece, so that its tiles fill a device. If one rank has fewer tokens, a piece has several ranks."""


def all_gather_matmul(peers: Peers, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Return all-gather(x) · weightᵀ + bias for each weight."""
    return _TokenGather(peers, x).matmuls([weight.t() for weight in weights], biases)


def all_gather_matmul_backward(
    peers: Peers, x: Tensor, weights: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of x and of the weights of `all_gather_matmul`, given the gradients of its outputs."""
    tokens = _TokenGather(peers, x)
    sums = _TokenSums(peers, x.shape, x)
    x_grads = sum_of_outputs(grads, weights)  # overlaps with the gather
    for sequence, x_grad in enumerate(x_grads):
        sums.send(sequence, range(peers.ranks), x_grad)
    whole = tokens.whole()
    weight_grads = [weight_gradient(grad, whole) for grad in grads]  # overlap with the sum
    return sums.total(), weight_grads


def all_gather_matmul_input_backward(
    peers: Peers, x: Tensor, weights: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input x of `all_gather_matmul`, and the gathered tokens, which later give the weight gradients."""
    tokens = _TokenGather(peers, x)
    return matmul_reduce_scatter(peers, grads, weights), tokens.whole()


def matmul_reduce_scatter_input_backward(
    peers: Peers, grad: Tensor, weights: list[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the inputs of `matmul_reduce_scatter`, and the gathered output gradient for the weight gradients."""
    tokens = _TokenGather(peers, grad)
    return tokens.matmuls(weights, [None] * len(weights)), tokens.whole()


def matmul_reduce_scatter(peers: Peers, xs: list[Tensor], factors: list[Tensor]) -> Tensor:
    """Return this rank's tokens `(batch, seq / ranks, out)` of Σ x · factor, over all xs and all ranks; factors are `(in, out)`."""
    batch = xs[0].shape[0]
    part = xs[0].shape[1] // peers.ranks
    sums = _TokenSums(peers, torch.Size((batch, part, factors[0].shape[1])), xs[0])
    own, *others = pieces(peers, part)
    for ranks in (*others, own):
        for sequence in range(batch):
            tokens = [x[sequence, ranks.start * part : ranks.stop * part] for x in xs]
            sums.send(sequence, ranks, sum_of_outputs(tokens, factors, out=sums.output_buffer(sequence, ranks)))
    return sums.total()


def sum_of_outputs(xs: list[Tensor], factors: list[Tensor], out: Tensor | None = None) -> Tensor:
    """Return Σ x · factor for each x `(…, in)` with its factor `(in, out)`."""
    total = torch.matmul(xs[0], factors[0], out=out)
    for x, factor in zip(xs[1:], factors[1:], strict=True):
        total.view(-1, total.shape[-1]).addmm_(x.flatten(0, -2), factor)
    return total


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the weight gradient gradᵀ · x, summed over all tokens."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def pieces(peers: Peers, rank_tokens: int) -> list[range]:
    """Return the pieces of a matmul: ranges of ranks whose tokens are multiplied together. This rank's range comes first.

    Each rank has `rank_tokens` tokens. All ranges have the same size, the smallest divisor of the number of ranks that gives at least
    `PIECE_ROWS` rows. There are at least two pieces, so that one can be transferred while another is multiplied. Example: rank 2 of 4, with
    1024 tokens per rank, has the pieces [2, 3] and [0, 1].
    """
    sizes = [size for size in range(1, peers.ranks) if peers.ranks % size == 0]
    size = next((size for size in sizes if size * rank_tokens >= PIECE_ROWS), sizes[-1])
    first = peers.rank // size * size
    starts = ((first + step) % peers.ranks for step in range(0, peers.ranks, size))
    return [range(start, start + size) for start in starts]


def peers_in_turn(peers: Peers, ranks: range) -> Iterator[int]:
    """Yield the peers among `ranks` in cyclic order. Each rank starts at another peer, so that not all ranks copy from one peer at once."""
    for step in range(len(ranks)):
        peer = ranks[(peers.rank + step) % len(ranks)]
        if peer != peers.rank:
            yield peer


class _TokenGather:
    """An all-gather of tokens x `(batch, part, width)` that overlaps with the matmuls of these tokens."""

    def __init__(self, peers: Peers, x: Tensor) -> None:
        self._peers = peers
        self._x = x.contiguous()
        batch, self._part, width = x.shape
        self._pieces = pieces(peers, self._part)
        self._whole = x.new_empty((batch, peers.ranks * self._part, width))
        order = [peer for ranks in self._pieces for peer in peers_in_turn(peers, ranks)]
        self._gather = peers.start_gather(self._x, self._whole, order)
        self._own_copied = False

    def matmuls(self, factors: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
        """Return tokens · factor + bias for each factor `(width, out)`, computed piece by piece as the tokens arrive."""
        outputs = [self._x.new_empty((*self._whole.shape[:2], factor.shape[1])) for factor in factors]
        for ranks in self._pieces:
            for peer in peers_in_turn(self._peers, ranks):
                self._gather.wait(peer)
            for sequence in range(len(self._x)):
                tokens = self._gathered_tokens(sequence, ranks)
                for output, factor, bias in zip(outputs, factors, biases, strict=True):
                    out = output[sequence, self._slice_of(ranks)]
                    torch.mm(tokens, factor, out=out) if bias is None else torch.addmm(bias, tokens, factor, out=out)
        return outputs

    def whole(self) -> Tensor:
        """Return all tokens `(batch, ranks × part, width)` in sequence order; the current stream waits for them."""
        for peer in range(self._peers.ranks):
            if peer != self._peers.rank:
                self._gather.wait(peer)
        self._copy_own_part()
        return self._whole

    def _gathered_tokens(self, sequence: int, ranks: range) -> Tensor:
        if len(ranks) == 1 and self._peers.rank in ranks:
            return self._x[sequence]
        if self._peers.rank in ranks:
            self._copy_own_part()
        return self._whole[sequence, self._slice_of(ranks)]

    def _copy_own_part(self) -> None:
        if not self._own_copied:
            self._whole[:, self._slice_of(range(self._peers.rank, self._peers.rank + 1))].copy_(self._x)
            self._own_copied = True

    def _slice_of(self, ranks: range) -> slice:
        return slice(ranks.start * self._part, ranks.stop * self._part)


class _TokenSums:
    """A reduce-scatter whose parts are sent as they are computed. The result is this rank's part of the sum, `(batch, part, width)`."""

    def __init__(self, peers: Peers, shape: torch.Size, like: Tensor) -> None:
        self._peers = peers
        self._part = shape[1]
        self._own = like.new_empty(shape)
        self._sum = peers.start_sum(shape, like)

    def output_buffer(self, sequence: int, ranks: range) -> Tensor:
        """Return a buffer for the matmul of the tokens of `ranks`. If these are only this rank's own tokens, it is their final memory."""
        if len(ranks) == 1 and self._peers.rank in ranks:
            return self._own[sequence]
        return self._own.new_empty((len(ranks) * self._part, self._own.shape[2]))

    def send(self, sequence: int, ranks: range, output: Tensor) -> None:
        """Start to send the peers among `ranks` their parts of `output` `(ranks × part, width)`, the matmul of one sequence."""
        parts = dict(zip(ranks, output.split(self._part), strict=True))
        self._sum.send({peer: parts[peer] for peer in peers_in_turn(self._peers, ranks)}, sequence)
        own = parts.get(self._peers.rank)
        if own is not None and own.data_ptr() != self._own[sequence].data_ptr():
            self._own[sequence].copy_(own)

    def total(self) -> Tensor:
        """Return this rank's part of the sum over all ranks, `(batch, part, width)`. Call it after every part was sent."""
        self._sum.wait()
        add = compile_once(_sum_in_rank_order) if self._own.is_cuda else _sum_in_rank_order
        return add(self._sum.received, self._own, self._peers.rank)


def _sum_in_rank_order(received: Tensor, own: Tensor, rank: int) -> Tensor:
    """Add the parts `(ranks, …)` of all ranks in rank order; `own` replaces this rank's entry of `received`."""
    parts = [(own if peer == rank else part).to(accumulate_dtype(own.dtype)) for peer, part in enumerate(received)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(own.dtype)
