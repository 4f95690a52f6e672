"""Tiny models behind an engine, and what the trainer's forward says about the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine, EngineOptions
from tests.models.tiny import built

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6) * 5, (20,), (7, 7, 7), (11, 2) * 15, (3, 1, 4, 1, 5, 9, 2, 6) * 4 + (8,))
"""Lengths below and above a block; the first and the last share a prefix of several blocks."""
TOKENS = 12


def tiny(spec: Any) -> Decoder:
    return built(spec, dtype=torch.float32)


def engine_of(
    model: Decoder, *, tokenizer: Tokenizer | None = None, draft_model: Decoder | None = None, **options: Any
) -> Engine:
    """An engine with small blocks and steps; it gets copies of the models."""
    sizes = {"sequences": 4, "step_tokens": 16, "tokens_per_block": 4, "cache_blocks": 128, "context": 64}
    chosen = EngineOptions(**{**sizes, **options})
    return Engine(copy.deepcopy(model), tokenizer, chosen, draft_model=copy.deepcopy(draft_model))


def texts(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, **request: Any) -> list[list[int]]:
    """The new tokens after each prompt."""
    numbers = [engine.submit(prompt, **{"new_tokens": TOKENS, **request}) for prompt in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    for update in engine.run():
        assert update.error is None, update.error
        tokens[update.number] += update.tokens
    return [tokens[number] for number in numbers]


@torch.no_grad()
def greedy(model: Decoder, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = TOKENS) -> list[list[int]]:
    """The likeliest continuation of each prompt, by the trainer's forward over the whole text."""
    continued = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        continued.append(tokens[len(prompt) :])
    return continued


def assert_all_free(engine: Engine) -> None:
    for pool in engine._policy.cache.pools:
        assert pool.free == pool.blocks
    assert not engine._table_rows.row_of


def record_logits(engine: Engine) -> dict[int, list[Tensor]]:
    """Copies of all logits from which tokens are drawn, by request number."""
    seen: dict[int, list[Tensor]] = {}
    compute = engine._runner.logits

    def logits(packed: Any) -> Tensor:
        out = compute(packed)
        for part, row in zip(packed.sampled_parts, out, strict=True):
            seen.setdefault(part.request.number, []).append(row.clone())
        return out

    engine._runner.logits = logits
    return seen
