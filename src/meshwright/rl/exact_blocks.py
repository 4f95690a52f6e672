"""Blocks of a trainer whose forward has the bits of an invariant engine on a GPU.

The forward of a block is that of the engine (`serve.blocks`): matmuls in a fixed order, the engine's fused norms, and
the attention of single tokens over a paged cache, which here has the keys and values of one layer and one micro-batch.
The weights are the trainer's. The backward computes the block again by the trainer's operators, from the same input,
and differentiates that. So it costs what full recompute costs, and gradients differ from those of the exact forward by
the rounding of one block.

The final norm is torch's operator on both sides, whether gradients are wanted or not. The head has its matmuls in a
fixed order and a kernel for each row of logits (`kernels.loss`).
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
"""Tokens in a block of the cache, which has no influence on the bits."""

Run = Callable[..., Any]


def use_exact_blocks(model: Decoder, dtype: torch.dtype, context: int) -> None:
    """Give the blocks and the head of a trainer's dense model the forward of an invariant engine.

    `dtype` is that of activations, `context` the longest text of the engine. The blocks must not recompute by themselves.
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
    """`BlockHooks.run` of the block of a layer; `run` is the trainer's, which the backward differentiates."""

    def __init__(self, passes: _Passes, layer: int, run: Run) -> None:
        self._passes = passes
        self._layer = layer
        self._run = run

    def __call__(self, block: Block, x: Tensor, *inputs: Any) -> Tensor:
        """The block's output, shaped like x `(batch, seq, hidden)`; `inputs` are the others of `Block.forward`."""
        return _ExactBlock.apply(x, self, block, inputs)

    def forward(self, block: Block, x: Tensor, mask: AttentionMask | None) -> Tensor:
        """The block's output as the engine computes it, without gradients."""
        step, cache = self._passes.step(x, mask)
        rows = x.reshape(1, -1, x.shape[-1])
        # The engine's first block has no branch to add before its norm.
        branch = self._passes.zeros(rows) if self._layer else None
        with _attending(block, CachedAttention.of(cast("Attention", block.attention), step, cache, self._layer)):
            rows, delta = block_forward(block, rows, branch)
        return (rows + cast("Tensor", delta)).view_as(x)

    def differentiable(self, block: Block, x: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        """The block's output as the trainer computes it."""
        return self._run(block, x, *inputs)


class _ExactBlock(torch.autograd.Function):
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
        # Gradients of weights are added where those of any block are.
        torch.autograd.backward(y, grad_out)
        return x.grad, None, None, None


@contextmanager
def _attending(block: Block, attend: CachedAttention) -> Iterator[None]:
    """Let a block's attention be `attend` meanwhile, and its feed-forward network one without tiles."""
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
    """What the blocks of a forward share: the step of the engine, the cache of one layer, and zeros.

    They are made when the first block gets a micro-batch; its other blocks get the same mask.
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
        """The engine's step of the tokens of x `(batch, seq, hidden)`, whose documents are those of the mask; without one, its rows."""
        rows = x.shape[:2]
        documents = None if mask is None else mask.documents
        if self._rows is None or self._rows[0] != rows or self._rows[1] is not documents:
            lengths = [rows[1]] * rows[0] if documents is None else _document_lengths(documents)
            self._step = self._made(torch.tensor(lengths), x.device)
            self._rows = (rows, documents)
        return self._step

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros shaped like a tensor, which nothing may write to."""
        if self._zeros.shape != like.shape or self._zeros.dtype != like.dtype or self._zeros.device != like.device:
            self._zeros = torch.zeros_like(like)
        return self._zeros

    def _made(self, lengths: Tensor, device: torch.device) -> tuple[CurrentStep, KVCache]:
        """The step of documents of these lengths, one behind the other, each with blocks of its own."""
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
        # Columns behind a document's last block are not read.
        table = (firsts[:, None] + torch.arange(int(blocks.max()))).clamp(max=count - 1)
        tensors = (positions, slots, table, lengths, torch.cat((zero, ends)))
        positions, slots, table, lengths, starts = (tensor.to(device, torch.int32) for tensor in tensors)
        step = CurrentStep(self._tables, cache, invariant=True)
        step.inputs = StepInputs(
            tokens=positions,  # of which only the number is read
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
    """The tokens of each document of all rows; neighbouring tokens of a row with equal numbers are of one document."""
    return [len(list(equal)) for row in documents.tolist() for _, equal in groupby(row)]
