"""Blocks of a trainer whose forward is bitwise equal to that of an invariant engine on a GPU.

The forward runs the engine's code (`serve.blocks`): matmuls in a fixed order, the engine's fused norms, and attention of single tokens over
a paged cache. Here this cache has the keys and values of one layer and one micro-batch. The weights are the trainer's.

The backward computes the block again with the trainer's operators, from the same input, and differentiates that. It costs as much as full
recompute. Its gradients differ from those of the exact forward by the rounding of one block.

The final norm is torch's operator in trainer and engine, whether gradients are needed or not. The head uses matmuls in a fixed order, and a
kernel for each row of logits (`kernels.loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.linear import Linear
from meshwright.kernels.rope import RotaryTables
from meshwright.models.attention import Attention
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.blocks import block_forward
from meshwright.serve.cached_attention import CachedAttention, CurrentStep, leave_to, whole_tables
from meshwright.serve.kv_cache import KVCache
from meshwright.spec.model import ModelSpec
from meshwright.workload.cache_size import layer_groups

TOKENS_PER_BLOCK = 16
"""Tokens in a block of the cache. This number has no influence on the bits."""

Run = Callable[..., Any]


def use_exact_blocks(model: Decoder, dtype: torch.dtype, context: int) -> None:
    """Give the blocks and the head of a trainer's dense model the forward of an invariant engine.

    `dtype` is the type of activations. `context` is the longest text of the engine. The blocks must not use recompute of their own.
    """
    model.head.fixed_order = True
    model.norm.kernel = False
    passes = _Passes(model.spec, dtype, context)
    for name, block in model.layers.items():
        assert isinstance(block, Block) and not block.routed
        for module in block.modules():
            if isinstance(module, Linear):
                module.fixed_order = True
        block.hooks.run = ExactRun(passes, int(name), block.hooks.run)


class ExactRun:
    """The `BlockHooks.run` of one layer's block. `run` is the trainer's original hook, which the backward differentiates."""

    def __init__(self, passes: _Passes, layer: int, run: Run) -> None:
        self._passes = passes
        self._layer = layer
        self._run = run

    def __call__(self, block: Block, x: Tensor, *inputs: Any) -> Tensor:
        """The block's output, of the same shape as x `(batch, seq, hidden)`. `inputs` are the other arguments of `Block.forward`."""
        return _ExactBlock.apply(x, self, block, inputs)

    def forward(self, block: Block, x: Tensor, mask: AttentionMask | None) -> Tensor:
        """The block's output as the engine computes it, without a graph for gradients."""
        step, cache = self._passes.step(x, mask)
        rows = x.reshape(1, -1, x.shape[-1])
        # In the engine, the first block has no pending branch to add before its norm.
        branch = self._passes.zeros(rows) if self._layer else None
        with _attending(block, CachedAttention.of(cast("Attention", block.attention), step, cache, self._layer)):
            rows, delta = block_forward(block, rows, branch)
        return (rows + cast("Tensor", delta)).view_as(x)

    def differentiable(self, block: Block, x: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        """The block's output as the trainer computes it, with a graph for gradients."""
        return self._run(block, x, *inputs)


class _ExactBlock(torch.autograd.Function):
    """Forward by the engine's operators, backward by the trainer's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: ExactRun, block: Block, inputs: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.exact_run = run
        ctx.block = block
        ctx.inputs = inputs
        return run.forward(block, x, inputs[1])

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's own signature is (ctx, *grad_outputs)
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.exact_run.differentiable(ctx.block, x, ctx.inputs)
        # This adds the gradients of weights to the same place as in any block.
        torch.autograd.backward(y, grad_out)
        return x.grad, None, None, None


@contextmanager
def _attending(block: Block, attend: CachedAttention) -> Iterator[None]:
    """Within a `with` block, use `attend` as the block's attention, and its feed-forward network without tiles."""
    attention = cast("Attention", block.attention)
    before = block.hooks.attend, attention.qk_norm, attention.query_factor, block.mlp.tile
    block.hooks.attend = attend
    block.mlp.tile = 0
    leave_to(attend, attention)
    try:
        yield
    finally:
        block.hooks.attend, attention.qk_norm, attention.query_factor, block.mlp.tile = before


class _Passes:
    """What all blocks share in a forward: the engine's step, the cache of one layer, and a tensor of zeros.

    They are made when the first block gets a micro-batch. The other blocks recognise the same micro-batch by its mask.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, context: int) -> None:
        self._spec = spec
        self._dtype = dtype
        self._context = context
        self._rows: tuple[torch.Size, Tensor | None] | None = None
        self._step: tuple[CurrentStep, KVCache]
        self._tables: list[RotaryTables | None] | None = None
        self._zeros = torch.empty(0)

    def step(self, x: Tensor, mask: AttentionMask | None) -> tuple[CurrentStep, KVCache]:
        """The engine's step for the tokens of x `(batch, seq, hidden)`. Documents are those of the mask, or rows without one."""
        rows = x.shape[:2]
        documents = None if mask is None else mask.documents
        if self._rows is None or self._rows[0] != rows or self._rows[1] is not documents:
            lengths = [rows[1]] * rows[0] if documents is None else _document_lengths(documents)
            self._step = self._made(torch.tensor(lengths), x.device)
            self._rows = (rows, documents)
        return self._step

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros of the same shape, type and device as `like`. Callers must not write to them."""
        if self._zeros.shape != like.shape or self._zeros.dtype != like.dtype or self._zeros.device != like.device:
            self._zeros = torch.zeros_like(like)
        return self._zeros

    def _made(self, lengths: Tensor, device: torch.device) -> tuple[CurrentStep, KVCache]:
        """A step of documents of these lengths, one after another, where each document has cache blocks of its own."""
        blocks = -(-lengths // TOKENS_PER_BLOCK)
        firsts = blocks.cumsum(0) - blocks
        count = int(blocks.sum())
        zero = lengths.new_zeros(1)
        groups = len(layer_groups(self._spec))
        sizes = {"tokens_per_block": TOKENS_PER_BLOCK, "device": device, "dtype": self._dtype}
        cache = KVCache(self._spec, [count] * groups, **sizes, one_layer=True)
        if self._tables is None:
            self._tables = whole_tables(cache, self._context, self._dtype)
        ends = lengths.cumsum(0)
        positions = torch.arange(int(ends[-1])) - (ends - lengths).repeat_interleave(lengths)
        slots = (firsts * TOKENS_PER_BLOCK).repeat_interleave(lengths) + positions
        # Entries after a document's last block are never read.
        table = (firsts[:, None] + torch.arange(int(blocks.max()))).clamp(max=count - 1)
        tensors = (positions, slots, table, lengths, torch.cat((zero, ends)))
        positions, slots, table, lengths, starts = (tensor.to(device, torch.int32) for tensor in tensors)
        step = CurrentStep(self._tables, cache, invariant=True)
        step.inputs = StepInputs(
            tokens=positions,  # only their number matters
            positions=positions,
            slots=slots.expand(groups, -1),
            block_tables=(table,) * groups,
            context_lengths=lengths,
            query_starts=starts,
            decodes=0,
            prompts=(),
            sampled=None,
        )
        return step, cache


def _document_lengths(documents: Tensor) -> list[int]:
    """The number of tokens of each document, over all rows. Neighbouring tokens of a row with equal numbers belong to one document."""
    return [len(list(equal)) for row in documents.tolist() for _, equal in groupby(row)]
