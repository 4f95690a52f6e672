"""Time, memory and accuracy of the engine's formats beside the model's dtype, and of decodes that do not attend to latents.

    python benchmarks/serve_formats.py [--model llama3-8b|deepseek-v2-lite] [--tiny] [--formats NAME…] [--out FILE]

Times are those of the model with random weights (on one 80 GB GPU, about a minute a format); so are differences of logits, which are those
of prompts. Losses are those of a small dense model that is trained here on Python's standard library and then reads files that it has not
seen. "expanded" computes decodes of latent attention with keys and values of each head, without CUDA graphs, so "no graphs" is beside it.
`--tiny` runs all of it with tiny models on a CPU. Prints one JSON object per format.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from serve_offline import decode, finish
from torch import Tensor

from meshwright.checkpoint.models.single_device import device_and_dtype
from meshwright.config.presets import MODEL_PRESETS
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.serve.engine import Engine
from meshwright.serve.engine_profile import random_model
from meshwright.serve.sampling import GREEDY
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

FORMATS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8 weights": {"weights": "fp8"},
    "int8 weights": {"weights": "int8"},
    "fp8 weights and cache": {"weights": "fp8", "kv_cache": "fp8"},
    "invariant": {"invariant": True},
    "invariant, fp8 weights and cache": {"weights": "fp8", "kv_cache": "fp8", "invariant": True},
    "no graphs": {"graphs": False},
    "expanded": {"absorb": False},
}
TINY: dict[str, dict[str, Any]] = {
    "llama3-8b": MODEL_PRESETS["llama-nano"] | {"vocab_size": 4096},
    "deepseek-v2-lite": MODEL_PRESETS["deepseek-v2-lite"]
    | {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 24,
        "ffn_hidden": 96,
        "vocab_size": 1024,
        "max_seq_len": 512,
        "kv_rank": 32,
        "rope_head_dim": 8,
        "value_head_dim": 16,
        "experts": 8,
        "expert_hidden": 48,
        "shared_expert_hidden": 96,
        "yarn": None,
    },
}
"""Models in the place of the large ones with `--tiny`."""
USUAL: dict[str, tuple[str, ...]] = {
    "llama3-8b": ("fp8 weights", "int8 weights", "fp8 weights and cache", "invariant"),
    "deepseek-v2-lite": ("fp8 weights", "int8 weights", "no graphs", "expanded"),
}
"""Rows of each model without `--formats`."""
PROMPTS_UNCHANGED = ("no graphs", "expanded")
"""Rows whose prompts compute the same numbers."""
BYTES = 256
"""Vocabulary of the trained model."""
HELD_OUT = 5
"""Every fifth file is for the held-out loss."""


class Sizes:
    """Sizes of the measurements, on a GPU or with `--tiny`."""

    def __init__(self, model: str, tiny: bool) -> None:
        dimensions = TINY[model] if tiny else MODEL_PRESETS[model]
        self.name, self.model = model, from_plain(ModelSpec, dimensions)
        self.batches = (1, 4) if tiny else (1, 8, 32, 128)
        self.prompt, self.new_tokens, self.context = (20, 16, 256) if tiny else (960, 192, 1280)
        self.prefill, self.prompts = (64, 2) if tiny else (1024, 32)
        self.text, self.texts = (24, 1) if tiny else (512, 2)
        width, layers = (64, 2) if tiny else (512, 8)
        self.spec = ModelSpec(
            family="llama",
            layers=layers,
            hidden=width,
            heads=width // 32,
            kv_heads=width // 64,
            head_dim=32,
            ffn_hidden=3 * width,
            vocab_size=BYTES,
            max_seq_len=1024,
        )
        self.steps, self.batch, self.seq = (200, 8, 64) if tiny else (400, 32, 512)
        self.held_out = 4 if tiny else 64
        """Texts of `seq` bytes."""


def main() -> None:
    options = _arguments()
    sizes = Sizes(options.model, options.tiny)
    trained, texts = trained_model(sizes)
    random = [[(7 * index * index + row) % 1000 for index in range(sizes.text)] for row in range(sizes.texts)]
    base_logits, base_loss, base_times = None, math.nan, {}
    lines = []
    device = device_and_dtype()
    for name in dict.fromkeys(("none", *(options.formats or USUAL[options.model]))):
        started = time.perf_counter()
        model = random_model(sizes.model, *device)
        times = measure_times(model, sizes, FORMATS[name])
        logits = torch.cat([text_logits(times["engine"], text) for text in random])
        del model, times["engine"]
        gc.collect()
        torch.cuda.empty_cache()
        base_logits = logits if base_logits is None else base_logits
        loss = base_loss if name in PROMPTS_UNCHANGED else held_out_loss(trained, texts, FORMATS[name])
        base_loss, base_times = (loss, times) if name == "none" else (base_loss, base_times)
        line = {
            "benchmark": "serve_formats",
            "format": name,
            "model": sizes.name,
            "tiny": options.tiny,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            **times,
            "new_tokens_per_second": {
                batch: 1000 * batch / milliseconds for batch, milliseconds in times["decode_milliseconds"].items()
            },
            "decode_over_none": {
                batch: value / base_times["decode_milliseconds"][batch]
                for batch, value in times["decode_milliseconds"].items()
            },
            "logit_deviation": float(base_logits.std()),
            "logit_difference_mean": float((logits - base_logits).abs().mean()),
            "logit_difference_max": float((logits - base_logits).abs().max()),
            "held_out_loss": loss,
            "held_out_loss_difference": loss - base_loss,
            "seconds": time.perf_counter() - started,
        }
        print(json.dumps(line), flush=True)
        lines.append(line)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def measure_times(model: Decoder, sizes: Sizes, formats: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a decode step by batch, tokens per second of prompts, bytes of weights, and the engine itself."""
    started = time.perf_counter()
    engine = engine_of(model, sizes, **formats)
    ready = time.perf_counter() - started
    finish(engine, [([1] * 8, 4)], GREEDY)
    prompts = [([(index + row) % 1000 for index in range(sizes.prefill)], 1) for row in range(sizes.prompts)]
    finish(engine, prompts, GREEDY)
    _, seconds = finish(engine, prompts, GREEDY)
    return {
        "engine": engine,
        "engine_seconds": ready,
        "weight_gib": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 2**30,
        "cache_tokens": engine._runner._step._cache.tensors[0].shape[0] * engine.options.tokens_per_block,
        "decode_milliseconds": {
            batch: decode(engine, batch, sizes.prompt, sizes.new_tokens)["decode_milliseconds"]
            for batch in sizes.batches
        },
        "prompt_tokens_per_second": sizes.prompts * sizes.prefill / seconds,
    }


def engine_of(model: Decoder, sizes: Sizes, **options: Any) -> Engine:
    common = {"sequences": max(sizes.batches), "context": sizes.context, "prefix_cache": False}
    return Engine(model, options=EngineOptions(**common, **options))


def text_logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """Logits `(tokens, vocab)` in fp32 on the host after each token of a text that one step computes."""
    runner, seen = engine._runner, []
    forward = runner.forward

    def forward_all(inputs: Any) -> Tensor:
        logits = forward(inputs._replace(sampled=None))
        seen.append(logits.float().cpu())
        return logits if inputs.sampled is None else logits[inputs.sampled.long()]

    runner.forward = forward_all
    try:
        finish(engine, [(list(tokens), 1)], GREEDY)
    finally:
        del runner.forward
    return seen[0]


def held_out_loss(model: Decoder, texts: Sequence[list[int]], formats: dict[str, Any]) -> float:
    """Mean loss per byte of texts that the engine reads as prompts."""
    tokens = len(texts[0])
    options = EngineOptions(sequences=1, step_tokens=tokens, context=tokens + 1, graphs=False, **formats)
    engine = Engine(copy.deepcopy(model), options=options)
    losses = [F.cross_entropy(text_logits(engine, text)[:-1], torch.tensor(text[1:])) for text in texts]
    return float(torch.stack(losses).mean())


def trained_model(sizes: Sizes) -> tuple[Decoder, list[list[int]]]:
    """A model trained on bytes of the standard library, in the device's dtype, and held-out texts."""
    device, dtype = device_and_dtype()
    torch.set_float32_matmul_precision("high")
    train, held_out = corpus()
    with torch.device("meta"):
        model = Decoder(sizes.spec)
    model = model.to(torch.float32).to_empty(device=device)
    initialise(model, sizes.spec, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for number, batch in enumerate(batches(train.to(device), sizes)):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (number + 1) / 20, 1.05 - number / sizes.steps)
        loss = model(batch[:, :-1], targets=batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    starts = torch.linspace(0, len(held_out) - sizes.seq - 1, sizes.held_out).long()
    return model.to(dtype).requires_grad_(False), [
        held_out[start : start + sizes.seq].tolist() for start in starts.tolist()
    ]


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes for training and held-out bytes, of the modules of Python's standard library in alphabetical order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [b"".join(path.read_bytes() for path in group) for group in _divided(files)]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)


def batches(data: Tensor, sizes: Sizes) -> Iterator[Tensor]:
    """`(batch, seq + 1)` for each step, at random places."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(sizes.steps):
        starts = torch.randint(len(data) - sizes.seq - 1, (sizes.batch, 1), generator=draw)
        yield data[(starts + torch.arange(sizes.seq + 1)).to(data.device)]


def _divided(files: list[Path]) -> tuple[list[Path], list[Path]]:
    return [file for index, file in enumerate(files) if index % HELD_OUT], files[::HELD_OUT]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(TINY), default="llama3-8b")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), help="rows beside the model's dtype")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
