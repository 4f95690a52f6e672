"""The loss of long sequences, computed in chunks over the paged KV cache.

This needs memory for the keys and values of one sequence and the activations of one chunk. A normal forward pass would
need the activations of a whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.blocks import add_and_norm, residual_stream
from meshwright.serve.cached_attention import use_cached_attention
from meshwright.serve.kv_cache import KVCache, layer_groups, most_blocks

CHUNK_TOKENS = 8192
"""Tokens that are computed together."""
TOKENS_PER_BLOCK = 16
"""Tokens in a block of the KV cache."""


class TextLosses:
    """Computes losses with one model, whose attention it replaces by attention over a KV cache.

    `context` is the length of the longest sequence in tokens; `chunk` is the number of tokens that are computed
    together.
    """

    def __init__(self, model: Decoder, *, context: int, chunk: int = CHUNK_TOKENS) -> None:
        weight = model.embed.weight
        self._model = model
        self._chunk = chunk
        blocks = most_blocks(context, 1, TOKENS_PER_BLOCK)
        self._groups = len(layer_groups(model.spec))
        cache = KVCache(
            model.spec,
            [blocks] * self._groups,
            tokens_per_block=TOKENS_PER_BLOCK,
            device=weight.device,
            dtype=weight.dtype,
        )
        self._step = use_cached_attention(model, cache, context)
        self._positions = torch.arange(context, dtype=torch.int32, device=weight.device)
        # Block 0 of the cache stays unused, so the slot of a token is its position plus the size of one block.
        self._table = torch.arange(1, blocks, dtype=torch.int32, device=weight.device)[None]

    @torch.no_grad()
    def sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of the sequences `tokens` `(batch, seq)`, as an fp64 scalar.

        `targets` `(batch, seq)` are the tokens to predict. Positions with a negative target are ignored.
        """
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for text, wanted in zip(tokens, targets, strict=True):
            for start in range(0, len(text), self._chunk):
                part = slice(start, start + self._chunk)
                total += self._chunk_loss(text[part], wanted[part], start)
        return total

    def _chunk_loss(self, tokens: Tensor, targets: Tensor, start: int) -> Tensor:
        """Return the summed loss of one chunk: `tokens` and `targets` `(count,)`, from position `start` of their
        sequence.

        The keys and values of the earlier chunks of the sequence are in the cache.
        """
        count = len(tokens)
        device = tokens.device
        positions = self._positions[start : start + count]
        table = self._table[:, : -(-(start + count) // TOKENS_PER_BLOCK)]
        inputs = StepInputs(
            tokens=tokens,
            positions=positions,
            slots=(positions + TOKENS_PER_BLOCK).expand(self._groups, count),
            block_tables=(table,) * self._groups,
            context_lengths=torch.tensor([start + count], dtype=torch.int32, device=device),
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            decodes=0,
            prompts=(count,) if start == 0 and device.type == "cpu" else (),
            sampled=None,
        )
        self._step.inputs = inputs
        _, normed = add_and_norm(*residual_stream(self._model, tokens, positions), self._model.norm)
        tied = self._model.embed.weight if self._model.spec.tied else None
        return self._model.head(normed, targets[None], tied).loss.double()
