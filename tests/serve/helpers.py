"""Tiny models behind an engine, and what the trainer's forward says about the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.checkpoint.store import CheckpointStore
from meshwright.config.load import resolved_yaml
from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.run import ModelSection, RunSpec
from tests.models.tiny import built

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6) * 5, (20,), (7, 7, 7), (11, 2) * 15, (3, 1, 4, 1, 5, 9, 2, 6) * 4 + (8,))
"""Lengths below and above a block; the first and the last share a prefix of several blocks."""
TOKENS = 12


def tiny(spec: Any) -> Decoder:
    return built(spec, dtype=torch.float32)


def newer(spec: Any) -> Decoder:
    """Another model than `tiny(spec)`, of the same dimensions."""
    model = tiny(spec)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def save_run(folder: Path, model: Decoder) -> Path:
    """A run folder with one checkpoint of the model, which also has another tensor."""
    section = from_plain(ModelSection, to_plain(model.spec))
    config = resolved_yaml(RunSpec(name="tiny", model=section, train=TrainSpec(steps=2, global_batch=1, seq_len=16)))
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state = {"step": 1, "tokens": 16}
    folder.mkdir(exist_ok=True)
    CheckpointStore(folder / "checkpoints").save(
        1, weights | {"optimizer.x": torch.ones(3)}, state, {"config.yaml": config}
    )
    return folder


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


def continued_texts(
    sender: Engine,
    receiver: Engine,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    new_tokens: int = TOKENS,
    **request: Any,
) -> list[list[int]]:
    """The new tokens after each prompt: the first from one engine, the others from one that gets its blocks."""
    moved, ours, theirs = [], sender.prefix_blocks(), receiver.prefix_blocks()
    cached = receiver.figures().cached_tokens
    for prompt in prompts:
        digests = ours.digests(prompt, "", tail=True)
        unsent = ours.unsent(digests, 0)
        first = texts(sender, [prompt], new_tokens=1, continued_elsewhere=True, **request)[0]
        unsent.extend()
        content = memoryview(bytearray(len(digests) * ours.block_bytes))
        ours.read(unsent.take(len(digests)), content)
        unsent.release()
        moved.append((prompt, digests, content, first))
    numbers = []
    for prompt, digests, content, first in moved:
        reserved = theirs.reserve(digests, 0)
        assert reserved is not None
        for index in range(reserved.first, len(digests)):
            table = reserved.blocks(index)
            assert table is not None
            theirs.write([table], content[index * ours.block_bytes : (index + 1) * ours.block_bytes])
            reserved.enter(index)
        reserved.release()
        numbers.append(receiver.submit(prompt, new_tokens=new_tokens, given=first, **request))
    tokens = {number: list(first) for number, (_, _, _, first) in zip(numbers, moved, strict=True)}
    for update in receiver.run():
        assert update.error is None, update.error
        tokens[update.number] += update.tokens
    assert receiver.figures().cached_tokens - cached == sum(len(prompt) for prompt in prompts)
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
