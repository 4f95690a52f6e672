"""Steps with one prompt, in pieces of CUDA graphs and without: time to the first token, and times of the host and the device.

    python benchmarks/serve_prompts.py [--model llama3-8b] [--tiny] [--out FILE]

Each form has an engine of its own with the same random weights. A prompt is given once the engine is idle; the median of `REPEATS` counts.
Then prompts are given beside `BESIDE` decodes. `--tiny` runs a tiny model on a CPU, which has no graphs. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.models.single_device import device_and_dtype
from meshwright.config.presets import MODEL_PRESETS
from meshwright.serve.engine_profile import random_model
from meshwright.serve.prompt_graphs import prompt_graph_sizes
from meshwright.serve.timed_engine import TimedEngine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

BUDGET = 2048
PROMPTS, TINY_PROMPTS = (16, 100, 400, 700, *prompt_graph_sizes(BUDGET)), (5, 12)
PROMPTS_BESIDE = 16, 100, 256, 400, 700, 1024, 1500, 2048
BESIDE, REPEATS = 16, 12


def main() -> None:
    options = _arguments()
    preset = MODEL_PRESETS["llama-nano"] | {"vocab_size": 512} if options.tiny else MODEL_PRESETS[options.model]
    spec, prompts = from_plain(ModelSpec, preset), TINY_PROMPTS if options.tiny else PROMPTS
    device, dtype = device_and_dtype()
    result: dict[str, Any] = {
        "benchmark": "serve_prompts",
        "model": "llama-nano" if options.tiny else options.model,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "forms": {},
    }
    for name, graphs in (("graphs", True), ("eager", False)):
        begin, model = time.perf_counter(), random_model(spec, device, dtype)
        loaded = time.perf_counter()
        sizes = EngineOptions(
            sequences=64,
            step_tokens=BUDGET,
            context=min(4096, spec.max_seq_len),
            prefix_cache=False,
            texts=False,
            prompt_graphs=graphs,
        )
        engine = TimedEngine(model, sizes, time.perf_counter)
        result["forms"][name] = {
            "model_seconds": loaded - begin,
            "engine_seconds": time.perf_counter() - loaded,
            "free_bytes": torch.cuda.mem_get_info()[0] if device.type == "cuda" else None,
            "blocks": engine._policy.cache.pools[0].blocks,
            "alone": [measured(engine, size) for size in prompts],
            "beside": [measured(engine, size, BESIDE) for size in (prompts if options.tiny else PROMPTS_BESIDE)],
        }
        del model, engine
        gc.collect()
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measured(engine: TimedEngine, size: int, beside: int = 0) -> dict[str, Any]:
    """Milliseconds of a prompt of `size` tokens: to its first token, of its launch, on the device, and from its launch to its end."""
    draw, first = random.Random(size), []
    others = [engine.submit([1] * 8, new_tokens=30 * REPEATS) for _ in range(beside)]
    for _ in range(4 * bool(beside)):
        engine.step()
    engine.forget_steps()
    for _ in range(REPEATS):
        prompt = [draw.randrange(engine.spec.vocab_size) for _ in range(size)]
        begin = time.perf_counter()
        number = engine.submit(prompt, new_tokens=1)
        while not any(update.number == number for update in engine.step()):
            pass
        first.append(time.perf_counter() - begin)
    steps = [step for step in engine.steps if step.chunks][2:]
    for number in others:
        engine.abort(number)
    while engine.unfinished:
        engine.step()
    return {
        "tokens": size,
        "beside": beside,
        "first_token": 1000 * statistics.median(first[2:]),
        "launch": _median(step.launch_end - step.launch_begin for step in steps),
        "device": _median(step.device_end - step.device_begin for step in steps),
        "step": _median(step.end - step.launch_begin for step in steps),
    }


def _median(seconds: Any) -> float:
    return 1000 * statistics.median(seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama3-8b", choices=sorted(MODEL_PRESETS), help="preset (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
