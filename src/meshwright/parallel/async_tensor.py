"""Products of tensor parallelism whose tokens travel beside them: the asynchronous twins of those in `products`.

A gathered product is made of pieces, the tokens of a few ranks each, beginning with this rank's own, while the others' arrive. A
scattered product is made in the opposite order, this rank's own tokens last, while the pieces before are on their way to the ranks that
add them up (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"; PyTorch's asynchronous tensor
parallelism). Where two products follow one exchange each, as in the backward of a gathered one, nothing need be cut: the gather travels
beside the first product, and its sum beside the second.

A rank's parts are added up in rank order, in fp32 or wider, and rounded once. Shapes and names are those of `products`; peers are
`peers.Peers`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.kernels.loss import compile_once
from meshwright.kernels.norm import accumulate_dtype
from meshwright.parallel.peers import Peers

PIECE_ROWS = 2048
"""Minimum rows of a piece of a product, so that its tiles fill a device.

A piece takes the tokens of several ranks if one rank has fewer.
"""


def gathered_products(peers: Peers, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """gathered(x) · weightᵀ + bias of each."""
    return _Tokens(peers, x).products([weight.t() for weight in weights], biases)


def gathered_gradients(
    peers: Peers, x: Tensor, weights: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of x and of the weights, of gathered products' output gradients."""
    tokens, sums = _Tokens(peers, x), _Sums(peers, x.shape, x)
    x_grads = sum_of_products(grads, weights)  # beside the gather
    for sequence, x_grad in enumerate(x_grads):
        sums.add(sequence, range(peers.ranks), x_grad)
    whole = tokens.whole()
    weight_grads = [weight_gradient(grad, whole) for grad in grads]  # beside the sum
    return sums.total(), weight_grads


def gathered_input_gradient(
    peers: Peers, x: Tensor, weights: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and the gathered tokens that the weights' will need."""
    tokens = _Tokens(peers, x)
    return scattered_products(peers, grads, weights), tokens.whole()


def scattered_input_gradients(peers: Peers, grad: Tensor, weights: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The gradients of scattered products' inputs, and the gathered output gradient that the weights' will need."""
    tokens = _Tokens(peers, grad)
    return tokens.products(weights, [None] * len(weights)), tokens.whole()


def scattered_products(peers: Peers, xs: list[Tensor], by: list[Tensor]) -> Tensor:
    """This rank's tokens of the ranks' sum of every x · by."""
    batch, part = xs[0].shape[0], xs[0].shape[1] // peers.ranks
    sums = _Sums(peers, torch.Size((batch, part, by[0].shape[1])), xs[0])
    own, *others = pieces(peers, part)
    for ranks in (*others, own):
        for sequence in range(batch):
            rows = [x[sequence, ranks.start * part : ranks.stop * part] for x in xs]
            sums.add(sequence, ranks, sum_of_products(rows, by, out=sums.room(sequence, ranks)))
    return sums.total()


def sum_of_products(xs: list[Tensor], by: list[Tensor], out: Tensor | None = None) -> Tensor:
    """Σ x · by, of x `(…, in)` and by `(in, out)`."""
    total = torch.matmul(xs[0], by[0], out=out)
    for x, other in zip(xs[1:], by[1:], strict=True):
        total.view(-1, total.shape[-1]).addmm_(x.flatten(0, -2), other)
    return total


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dYᵀ · X over all tokens."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def pieces(peers: Peers, rank_tokens: int) -> list[range]:
    """Groups of ranks whose tokens are multiplied together, beginning with this rank's own piece; a rank has `rank_tokens`.

    The smallest number of ranks that divides them and has enough rows; at least two pieces, so that one can be transferred
    while another is multiplied.
    """
    sizes = [size for size in range(1, peers.ranks) if peers.ranks % size == 0]
    size = next((size for size in sizes if size * rank_tokens >= PIECE_ROWS), sizes[-1])
    first = peers.rank // size * size
    starts = ((first + step) % peers.ranks for step in range(0, peers.ranks, size))
    return [range(start, start + size) for start in starts]


def in_turn(peers: Peers, ranks: range) -> Iterator[int]:
    """The peers among `ranks` in cyclic order from this rank's position, so that every rank serves one peer at a time."""
    for step in range(len(ranks)):
        peer = ranks[(peers.rank + step) % len(ranks)]
        if peer != peers.rank:
            yield peer


class _Tokens:
    """All tokens, on their way from the ranks that have them."""

    def __init__(self, peers: Peers, x: Tensor) -> None:
        self._peers, self._x = peers, x.contiguous()
        batch, self._part, width = x.shape
        self._pieces = pieces(peers, self._part)
        self._whole = x.new_empty((batch, peers.ranks * self._part, width))
        order = [peer for ranks in self._pieces for peer in in_turn(peers, ranks)]
        self._arriving = peers.fetch(self._x, self._whole, order)
        self._own_placed = False

    def products(self, by: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
        """Times every `by` `(width, out)`, piece by piece as they arrive."""
        made = [self._x.new_empty((*self._whole.shape[:2], one.shape[1])) for one in by]
        for ranks in self._pieces:
            for peer in in_turn(self._peers, ranks):
                self._arriving.wait(peer)
            for sequence in range(len(self._x)):
                rows = self._gathered_tokens(sequence, ranks)
                for y, one, bias in zip(made, by, biases, strict=True):
                    out = y[sequence, self._slice_of(ranks)]
                    torch.mm(rows, one, out=out) if bias is None else torch.addmm(bias, rows, one, out=out)
        return made

    def whole(self) -> Tensor:
        """All of them, in order."""
        for peer in range(self._peers.ranks):
            if peer != self._peers.rank:
                self._arriving.wait(peer)
        self._place_own()
        return self._whole

    def _gathered_tokens(self, sequence: int, ranks: range) -> Tensor:
        if len(ranks) == 1 and self._peers.rank in ranks:
            return self._x[sequence]
        if self._peers.rank in ranks:
            self._place_own()
        return self._whole[sequence, self._slice_of(ranks)]

    def _place_own(self) -> None:
        if not self._own_placed:
            self._whole[:, self._slice_of(range(self._peers.rank, self._peers.rank + 1))].copy_(self._x)
            self._own_placed = True

    def _slice_of(self, ranks: range) -> slice:
        return slice(ranks.start * self._part, ranks.stop * self._part)


class _Sums:
    """Sums over ranks, each rank's part of the sequence on it: parts `(batch, part, width)`."""

    def __init__(self, peers: Peers, shape: torch.Size, like: Tensor) -> None:
        self._peers, self._part = peers, shape[1]
        self._own = like.new_empty(shape)
        self._collecting = peers.collect(shape, like)

    def room(self, sequence: int, ranks: range) -> Tensor:
        """Where a product for these ranks may be made: what is for this rank alone need not be moved."""
        if len(ranks) == 1 and self._peers.rank in ranks:
            return self._own[sequence]
        return self._own.new_empty((len(ranks) * self._part, self._own.shape[2]))

    def add(self, sequence: int, ranks: range, product: Tensor) -> None:
        """This rank's summand of a sequence, `(ranks × part, width)` for the tokens of `ranks`; starts the copies to peers."""
        parts = dict(zip(ranks, product.split(self._part), strict=True))
        self._collecting.send({peer: parts[peer] for peer in in_turn(self._peers, ranks)}, sequence)
        own = parts.get(self._peers.rank)
        if own is not None and own.data_ptr() != self._own[sequence].data_ptr():
            self._own[sequence].copy_(own)

    def total(self) -> Tensor:
        """The sum over all ranks, when every part is on its way."""
        self._collecting.wait()
        add = compile_once(_in_rank_order) if self._own.is_cuda else _in_rank_order
        return add(self._collecting.landing, self._own, self._peers.rank)


def _in_rank_order(landing: Tensor, own: Tensor, rank: int) -> Tensor:
    """Sum over ranks of what landed `(ranks, …)`, this rank's being `own`."""
    parts = [(own if peer == rank else landed).to(accumulate_dtype(own.dtype)) for peer, landed in enumerate(landing)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(own.dtype)
