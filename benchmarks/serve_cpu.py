"""Seconds of one request on a CPU: the engine, and the loop that computes the whole text again for each token.

    python benchmarks/serve_cpu.py [--model llama-nano] [--tokens 200] [--prompt 16] [--out FILE]

The model has random weights, and both give the same greedy text. Prints one JSON object with the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from meshwright.config.presets import MODEL_PRESETS
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.serve.engine import Engine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

VOCABULARY = 4096
"""Size of the quick start's tokenizer."""


def main() -> None:
    options = _arguments()
    model = _random_model(options.model)
    prompt = torch.randint(
        0, model.spec.vocab_size, (options.prompt,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    recomputed, slow = _timed(lambda: recompute(model, prompt, options.tokens), options.repeats)
    engine = Engine(
        model, options=EngineOptions(sequences=8, context=options.prompt + options.tokens, prefix_cache=False)
    )
    cached, fast = _timed(lambda: generate(engine, [prompt], options.tokens)[0], options.repeats)
    assert cached == recomputed, "both continue the prompt in the same way"
    prompts = [[(token + shift) % model.spec.vocab_size for token in prompt] for shift in range(8)]
    _, eight = _timed(lambda: generate(engine, prompts, options.tokens), options.repeats)
    result = {
        "benchmark": "serve_cpu",
        "model": {"preset": options.model, **asdict(model.spec)},
        "prompt_tokens": options.prompt,
        "new_tokens": options.tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "recompute_seconds": slow,
        "engine_seconds": fast,
        "ratio": statistics.median(slow) / statistics.median(fast),
        "engine_milliseconds_per_token": 1000 * statistics.median(fast) / options.tokens,
        "eight_requests_tokens_per_second": 8 * options.tokens / statistics.median(eight),
    }
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


@torch.no_grad()
def recompute(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation, each token by a forward pass over the whole text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The greedy continuations by the engine."""
    numbers = [engine.submit(prompt, new_tokens=count) for prompt in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    for update in engine.run():
        tokens[update.number] += update.tokens
    return list(tokens.values())


def _timed(call: Callable[[], Any], repeats: int) -> tuple[Any, list[float]]:
    """The result of a call and its seconds, without those of a first one."""
    result, seconds = call(), []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, seconds


def _random_model(preset: str) -> Decoder:
    spec = from_plain(
        ModelSpec, {**MODEL_PRESETS[preset], "vocab_size": MODEL_PRESETS[preset]["vocab_size"] or VOCABULARY}
    )
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(torch.float32).to_empty(device="cpu")
    initialise(model, spec, seed=0)
    return model


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODEL_PRESETS), default="llama-nano")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
