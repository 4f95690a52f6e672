"""Tokens per second of one request and of several, without drafts and with drafts from each source, with random weights.

    python benchmarks/serve_speculation.py [--model llama3-1b] [--layers 1] [--drafts 4] [--temperature 0.6] [--out FILE]
    python benchmarks/serve_speculation.py --model tiny --prompt 24 --new 24     # seconds on a CPU

Prompts repeat 16 tokens. The draft models are the model cut to its first `--layers` layers, and the model itself, of which all greedy
drafts should be accepted. Drafts never pause, unless `--pause`. Prints one JSON object for each case; `first_difference` is the first
place at which a text differs from that without drafts.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from serve_offline import random_model

from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine
from meshwright.serve.sampling import SamplingOptions
from meshwright.spec.engine import EngineOptions, Speculation

PERIOD, BLOCK = 16, 16
"""Tokens that a prompt repeats; tokens of a block of the cache."""


def main() -> None:
    options = _arguments()
    model = random_model(options.model, options.prompt + options.new)
    sources: dict[str, tuple[bool, Decoder | None]] = {
        "none": (False, None),
        "lookup": (True, None),
        f"{options.layers} layers": (True, cut(model, options.layers)),
        "the model": (True, copy.deepcopy(model)),
    }
    lines, plain = [], {}
    for name, (drafted, draft_model) in sources.items():
        started = time.perf_counter()
        engine = engine_for(model, draft_model, drafted, options)
        seconds = time.perf_counter() - started
        for requests in sorted({1, options.requests}):
            result = measured(engine, requests, options)
            texts = result.pop("texts")
            plain.setdefault(requests, texts)
            lines.append(
                {
                    "benchmark": "serve_speculation",
                    "model": options.model,
                    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                    "temperature": options.temperature,
                    "drafts": name,
                    "requests": requests,
                    **result,
                    "first_difference": first_difference(texts, plain[requests]),
                    "engine_seconds": seconds,
                }
            )
            print(json.dumps(lines[-1]), flush=True)
        del engine
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def engine_for(model: Decoder, draft_model: Decoder | None, drafted: bool, options: argparse.Namespace) -> Engine:
    """An engine with room for the requests. It takes the model over from the engine before."""
    context = options.prompt + options.new
    speculation = Speculation(tokens=options.drafts, least=None if options.pause else 0.0) if drafted else None
    sizes = EngineOptions(
        sequences=options.requests,
        context=context,
        tokens_per_block=BLOCK,
        cache_blocks=1 + options.requests * (2 + context // BLOCK),
        prefix_cache=False,
        speculation=speculation,
    )
    return Engine(model, options=sizes, draft_model=draft_model)


def measured(engine: Engine, requests: int, options: argparse.Namespace) -> dict[str, Any]:
    """Texts and figures of the second of two equal runs."""
    vocab, before = engine.spec.vocab_size, (0, 0)
    seconds, texts, steps = 0.0, [], 0
    for _ in range(2):
        before, draws = engine.drafts, random.Random(requests)
        numbers = []
        for seed in range(requests):
            period = [draws.randrange(vocab) for _ in range(PERIOD)]
            prompt = (period * (1 + options.prompt // PERIOD))[: options.prompt]
            sampling = SamplingOptions(temperature=options.temperature, seed=seed)
            numbers.append(engine.submit(prompt, new_tokens=options.new, sampling=sampling))
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        start, steps = time.perf_counter(), 0
        while engine.unfinished:
            for update in engine.step():
                if update.error is not None:
                    raise RuntimeError(update.error)
                tokens[update.number] += update.tokens
            steps += 1
        seconds, texts = time.perf_counter() - start, list(tokens.values())
    proposed, accepted = (now - then for now, then in zip(engine.drafts, before, strict=True))
    return {
        "tokens_per_second": requests * options.new / seconds,
        "milliseconds_per_step": 1000 * seconds / steps,
        "steps": steps,
        "proposed": proposed,
        "accepted": accepted,
        "texts": texts,
    }


def first_difference(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int | None:
    """The first place at which two texts differ; None if none does."""
    places = (
        place
        for text, other in zip(texts, others, strict=True)
        for place, (ours, theirs) in enumerate(zip(text, other, strict=True))
        if ours != theirs
    )
    return min(places, default=None)


def cut(model: Decoder, layers: int) -> Decoder:
    """A copy of the model without the layers behind the first ones."""
    weight = model.embed.weight
    with torch.device("meta"):
        draft = Decoder(replace(model.spec, layers=layers))
    draft = draft.to(weight.dtype).to_empty(device=weight.device)
    with torch.no_grad():
        whole = dict(model.named_parameters())
        for name, parameter in draft.named_parameters():
            parameter.copy_(whole[name])
    return draft


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3-1b", help='a preset, or "tiny"')
    parser.add_argument("--layers", type=int, default=1, help="of the smaller draft model")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens of a request in a step")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pause", action="store_true", help="let drafts pause where they do not pay")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
