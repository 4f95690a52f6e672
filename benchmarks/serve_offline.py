"""Tokens per second of the engine for many requests at once, and milliseconds of a decode step, with random weights.

    python benchmarks/serve_offline.py --model llama3-8b [--requests 256] [--decode 1 8 32 128 256] [--out FILE]

    torchrun --nproc-per-node 2 benchmarks/serve_offline.py --model llama3-8b --repeats 0 --decode 1 32 128

The second form divides the model over tensor ranks, or with `--share-experts` its experts over ranks with requests of their own, whose
sizes are those of each. The requests are those of nano-vllm's script: seed 0, prompts and outputs of 100 to
1024 tokens, temperature 0.6. Prints one JSON object per measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.checkpoint.models.single_device import device_and_dtype
from meshwright.config.presets import MODEL_PRESETS
from meshwright.kernels.expert_decode import Choices
from meshwright.kernels.linear import Linear
from meshwright.launch.machine import found_cluster
from meshwright.models import moe
from meshwright.models.decoder import Decoder
from meshwright.models.moe import MoELayer
from meshwright.parallel.world import World, join
from meshwright.serve import engine_profile
from meshwright.serve.engine import Engine
from meshwright.serve.expert_group import ExpertEngine
from meshwright.serve.rank_group import RankModel
from meshwright.serve.sampling import GREEDY, SamplingOptions
from meshwright.serve.tensor_group import TensorEngine
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.engine import EngineOptions, ExpertRanks
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.spec.rank_environment import RankEnvironment, started_by_launcher

LARGEST_TOKEN = 10_000
EMBEDDING_STD = 30.0
"""Of an embedding beside which what the layers add, about 1 in each channel, does not change the choice of experts."""
CONSTANT = 10.0
"""Root mean square of an embedding with a constant channel, those of the other channels being 1."""
TINY: Mapping[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 64,
    "vocab_size": 96,
    "max_seq_len": 64,
}


def main() -> None:
    options = _arguments()
    started = time.perf_counter()
    world = join_launched() if started_by_launcher() else None
    model = random_model(options.model) if world is None else random_part(options, world)
    if options.routing != "shared" and isinstance(model, Decoder):
        ROUTINGS[options.routing](model)
    loaded = time.perf_counter()
    sizes = EngineOptions(
        sequences=options.sequences,
        step_tokens=options.step_tokens,
        tokens_per_block=options.block,
        context=options.context,
        prefix_cache=False,
        graphs=None if not options.eager else False,
        weights=options.weights,
        kv_cache=options.kv_cache,
    )
    if world is None or isinstance(model, Decoder):
        measure(Engine(model, options=sizes), options, started, loaded)
        return
    if options.share_experts:
        engine = ExpertEngine(model, world, options=sizes, micro_batches=options.micro_batches)
    else:
        engine = TensorEngine(model, world, options=sizes)
    if world.leads:
        measure(engine, options, started, loaded, ranks=world.ranks)
        engine.close()
    else:
        engine.follow()
    world.leave()


def measure(engine: Engine, options: argparse.Namespace, started: float, loaded: float, *, ranks: int = 1) -> None:
    """Run all measurements and print them; the model was `loaded` at this time after the process had `started`."""
    ready = time.perf_counter()
    finish(engine, [([1] * 8, 4)], GREEDY)
    times = {
        "model_seconds": loaded - started,
        "engine_seconds": ready - loaded,
        "first_seconds": time.perf_counter() - ready,
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    common = {
        "benchmark": "serve_offline",
        "model": options.model,
        "device": device,
        "ranks": ranks,
        "shared_experts": options.share_experts,
        "dispatch": options.dispatch,
        "micro_batches": options.micro_batches,
        "routing": options.routing,
        "weights": options.weights,
        "kv_cache": options.kv_cache,
        "torch": torch.__version__,
        **times,
    }
    results = [{**common, "sequences": options.sequences, "step_tokens": options.step_tokens, "block": options.block}]
    for batch in options.decode:
        counts: list[int] = []
        with chosen_experts(batch, counts) if options.count_experts else nullcontext():
            figures = decode(engine, batch, options.decode_prompt)
        if counts:
            figures["distinct_experts"] = statistics.mean(counts)
        results.append({**common, "batch": batch, **figures})
    requests = nano_vllm_requests(options.requests, engine.spec.vocab_size)
    results += [{**common, "repeat": repeat, **offline(engine, requests)} for repeat in range(options.repeats)]
    text = "".join(json.dumps(result) + "\n" for result in results)
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")


def nano_vllm_requests(count: int, vocab: int) -> list[tuple[list[int], int]]:
    """Prompts and numbers of new tokens, drawn in the order of that script."""
    draws = random.Random(0)
    largest = min(LARGEST_TOKEN, vocab - 1)
    prompts = [[draws.randint(0, largest) for _ in range(draws.randint(100, 1024))] for _ in range(count)]
    return [(prompt, draws.randint(100, 1024)) for prompt in prompts]


def offline(engine: Engine, requests: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
    """All requests at once."""
    steps, seconds = finish(engine, requests, SamplingOptions(temperature=0.6))
    new, given = sum(count for _, count in requests), sum(len(prompt) for prompt, _ in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": given,
        "new_tokens": new,
        "seconds": seconds,
        "new_tokens_per_second": new / seconds,
        "tokens_per_second": (new + given) / seconds,
        "steps": steps,
    }


def decode(engine: Engine, batch: int, prompt: int, new_tokens: int = 192) -> dict[str, Any]:
    """The median step of `batch` requests after prompts of `prompt` tokens; null where the cache does not hold so many at once."""
    draws = random.Random(batch)
    for number in range(batch):
        engine.submit(
            [draws.randint(0, 100) for _ in range(prompt)],
            new_tokens=new_tokens,
            # With one seed all texts would draw alike, and a batch would have few distinct experts.
            sampling=SamplingOptions(temperature=0.6, seed=number),
        )
    times: list[float] = []
    begun: set[int] = set()
    while engine.unfinished == batch:
        start = time.perf_counter()
        updates = engine.step()
        if len(begun) == batch:
            times.append(time.perf_counter() - start)
        begun.update(update.number for update in updates if update.tokens)
    while engine.unfinished:
        engine.step()
    return {"decode_milliseconds": 1000 * statistics.median(times) if times else None, "steps": len(times)}


@contextmanager
def chosen_experts(batch: int, counts: list[int]) -> Iterator[None]:
    """Append the number of distinct experts of each layer to `counts`, in each eager step of `batch` tokens in this context."""
    pick, route = MoELayer._pick, moe.route

    def count(chosen: Tensor) -> None:
        if chosen.numel() // chosen.shape[-1] == batch:
            counts.append(len(chosen.unique()))

    def counted_pick(moe: MoELayer, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = pick(moe, logits)
        count(chosen)
        return weights, chosen

    def counted_route(*arguments: Any) -> Choices:
        choices = route(*arguments)
        count(choices.chosen)
        return choices

    with patch.object(MoELayer, "_pick", counted_pick), patch.object(moe, "route", counted_route):
        yield


def finish(engine: Engine, requests: Sequence[tuple[list[int], int]], sampling: SamplingOptions) -> tuple[int, float]:
    """Steps and seconds until all requests have ended."""
    start, steps = time.perf_counter(), 0
    for number, (prompt, count) in enumerate(requests):
        draws = SamplingOptions(temperature=sampling.temperature, seed=number)
        engine.submit(prompt, new_tokens=count, sampling=draws)
    while engine.unfinished:
        for update in engine.step():
            if update.error is not None:
                raise RuntimeError(update.error)
        steps += 1
    return steps, time.perf_counter() - start


def random_model(preset: str, context: int = 0, *, predictions: int = 0) -> Decoder:
    """A preset's model, or a "tiny" one, with normal weights, made on the device.

    It has a context of at least `context` tokens, and so many `predictions` modules.
    """
    values = TINY if preset == "tiny" else MODEL_PRESETS[preset]
    spec = from_plain(ModelSpec, {**values, "vocab_size": values["vocab_size"] or 4096})
    spec = replace(spec, max_seq_len=max(spec.max_seq_len, context), prediction_depth=predictions)
    return engine_profile.random_model(spec, *device_and_dtype())


@torch.no_grad()
def route_evenly(model: Decoder) -> None:
    """Let each token choose its experts by itself: the embedding is much larger than what the layers add to it.

    Tokens share what attention adds, as their contexts are alike. With an embedding of variance 1 a layer of 128 experts, 8 for a token,
    had 41.9 distinct ones for 8 tokens and 82.0 for 32; independent choices have 51.6 and 111.8 (`--count-experts`).
    """
    model.embed.weight.normal_(std=EMBEDDING_STD)


@torch.no_grad()
def route_unevenly(model: Decoder) -> None:
    """Load experts by Zipf's law: the expert of rank r has the odds 1 / r.

    The first channel of the embedding is so large that it is 1 times the square root of the width after every norm, in each layer: what a
    router reads there is a bias. The other channels, a tenth as large as without it, give each token a choice of its own, of variance 1.
    """
    constant = _with_constant_channel(model)
    for router in _routers(model):
        experts = router.weight.shape[0]
        order = torch.randperm(experts, device=router.weight.device) + 1
        router.weight.normal_(std=CONSTANT / constant)
        router.weight[:, 0] = -order.log() / constant


@torch.no_grad()
def route_to_the_same(model: Decoder) -> None:
    """Send all tokens of a layer to the same experts, as few as a token has."""
    constant = _with_constant_channel(model)
    for router in _routers(model):
        router.weight.zero_()
        router.weight[:, 0] = torch.randperm(router.weight.shape[0], device=router.weight.device) / constant


def _with_constant_channel(model: Decoder) -> float:
    """Make the first channel of the embedding large; returns its value after a norm."""
    weight = model.embed.weight
    weight.normal_()
    weight[:, 0] = CONSTANT * weight.shape[1] ** 0.5
    return weight.shape[1] ** 0.5


def _routers(model: Decoder) -> Iterator[Linear]:
    return (module.router for module in model.modules() if isinstance(module, MoELayer))


ROUTINGS = {"even": route_evenly, "uneven": route_unevenly, "same": route_to_the_same}


def random_part(options: argparse.Namespace, world: World) -> RankModel:
    """A rank's part of `random_model`, with other values."""
    values = MODEL_PRESETS[options.model]
    spec = from_plain(ModelSpec, {**values, "vocab_size": values["vocab_size"] or 4096})
    dtype = device_and_dtype()[1]
    count = world.ranks if options.share_experts else 1
    part = RankModel.empty(spec, world, dtype, ExpertRanks(count=count, dispatch=options.dispatch))
    engine_profile.fill_at_random(part.model)
    return part


def join_launched() -> World:
    """Join the ranks that torchrun has started."""
    return join(RankEnvironment.from_environment(), from_plain(ClusterSpec, found_cluster()), timeout_seconds=600)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODEL_PRESETS), default="llama-nano")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--decode", type=int, nargs="*", default=[])
    parser.add_argument("--decode-prompt", type=int, default=960)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--block", type=int, default=16, help="tokens in a block of the cache")
    parser.add_argument("--context", type=int, default=2304)
    parser.add_argument("--weights", choices=["fp8", "int8"], help="format of the linear layers' weights")
    parser.add_argument("--kv-cache", choices=["fp8"], help="format of cached keys and values")
    parser.add_argument(
        "--share-experts", action="store_true", help="ranks with requests of their own share the experts"
    )
    parser.add_argument("--dispatch", choices=["int8"], help="format of tokens on their way to shared experts")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a step's decodes with shared experts")
    parser.add_argument(
        "--routing",
        choices=["shared", *ROUTINGS],
        default="shared",
        help="tokens choose experts as random weights let them (many alike), each by itself, by Zipf's law, or all the same ones",
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--count-experts",
        action="store_true",
        help="the mean number of distinct experts of a layer's decode step; takes --eager",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.count_experts and not options.eager:
        parser.error("--count-experts takes --eager: CUDA graphs replay a step without calling what chooses")
    return options


if __name__ == "__main__":
    main()
