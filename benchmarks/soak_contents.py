"""A tiny model whose tokens are characters, and prompts with the texts of an engine that computes them alone. For the deployment soak."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 94
"""Tokens of the model: the printable characters of ASCII."""
CONTENTS = 160
"""Different prompts; texts are compared, so each is computed by one engine first."""
NEW_TOKENS = 24
LEAST_MARGIN = 1e-3
"""Least difference of log probabilities between a token and the next best one: rounding cannot change the text."""


@dataclass(frozen=True)
class Content:
    """A prompt, and the text that follows it."""

    prompt: tuple[int, ...]
    text: str


def write_model(folder: Path, seed: int) -> None:
    """A Hugging Face folder with a tiny random model whose tokens are characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from meshwright.checkpoint.models.hf import export_hf

    model = _model(seed)
    tokenizer: Any = Tokenizer(models.BPE({chr(33 + token): token for token in range(VOCAB)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    file = folder.with_suffix(".json")
    tokenizer.save(str(file))
    export_hf(folder, model.spec, iter(model.named_parameters()), tokenizer=file, run_note="", dtype="fp32")


def _model(seed: int) -> Any:
    import torch

    from meshwright.models.decoder import Decoder
    from meshwright.models.initial_values import initialise
    from meshwright.spec.model import ModelSpec

    spec = ModelSpec(
        family="llama",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn_hidden=64,
        vocab_size=VOCAB,
        max_seq_len=256,
        init_std=0.3,
    )
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(torch.float32).to_empty(device="cpu")
    initialise(model, spec, seed=seed)
    return model


def make_contents(seed: int, count: int = CONTENTS) -> list[Content]:
    """Prompts of 10 to 200 tokens, many behind common prefixes, with the texts of one engine that computes them alone."""
    from meshwright.serve.engine import Engine
    from meshwright.serve.sampling import SamplingOptions
    from meshwright.spec.engine import EngineOptions

    draw, engine = random.Random(seed), Engine(_model(seed), options=EngineOptions(sequences=16, context=256))
    prefixes = [[draw.randrange(VOCAB) for _ in range(draw.choice((40, 96)))] for _ in range(12)]
    prompts: dict[int, tuple[int, ...]] = {}
    for _ in range(count):
        prefix = list(draw.choice(prefixes)) if draw.random() < 0.6 else []
        prompt = tuple(prefix + [draw.randrange(VOCAB) for _ in range(draw.randint(10, 104))])
        greedy = SamplingOptions(temperature=0.0, logprobs=True, top_logprobs=2)
        prompts[engine.submit(prompt, new_tokens=NEW_TOKENS, sampling=greedy)] = prompt
    tokens: dict[int, list[int]] = {number: [] for number in prompts}
    margins = dict.fromkeys(prompts, float("inf"))
    for update in engine.run():
        tokens[update.number] += update.tokens
        for _, ((_, best), (_, second)) in update.logprobs:
            margins[update.number] = min(margins[update.number], best - second)
    return [
        Content(prompt, "".join(chr(33 + token) for token in tokens[number]))
        for number, prompt in prompts.items()
        if margins[number] > LEAST_MARGIN
    ]
