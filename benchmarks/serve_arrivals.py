"""Latency of the engine: requests that arrive at random times, lone prompts, and the start of a process; random weights.

    python benchmarks/serve_arrivals.py --model llama3-8b --prompt 512 --rates 31 44 --requests 1500 [--out FILE]
    python benchmarks/serve_arrivals.py --model llama3-8b --alone 128 1024 8192 --start 2 [--out FILE]
    python benchmarks/serve_arrivals.py --model llama3-8b --alone 8192 --reuse 0.5 0.9 [--out FILE]

Arrivals are a Poisson process with its prompts from one seed for each prompt length and rate; `inf` is all requests at once. They are those
of any other script that draws them in this order: seed "<prompt length><rate>", all prompts, then the gaps. Times count from a request's
due time: TTFT to its first token; TPOT is the mean time from one token to the next after that.

`--start` measures from the start of a process, imports included, to its first token: first with empty compile caches, then with those of
the run before. Prints one JSON object and rewrites FILE after each part. A part that cannot end within `--budget` seconds is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

PERCENTILES = (0.5, 0.9, 0.99)
RESERVED = 300
"""Token ids at the end of a large vocabulary that prompts leave out."""
FIRST_TOKEN = "first token"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass
class Arrivals:
    """Requests of equal lengths, and the seconds after the beginning at which each is due."""

    prompts: list[list[int]]
    dues: list[float]
    new_tokens: int


@dataclass
class Times:
    """Seconds at which the tokens of one request came, after the beginning."""

    due: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.due

    @property
    def each(self) -> float:
        """Time per output token after the first."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


def arrivals(prompt_tokens: int, new_tokens: int, rate: float, count: int, vocab: int) -> Arrivals:
    """`count` requests, `rate` of them a second; all at 0 if it is infinite."""
    finite = rate != float("inf")
    draws = random.Random(f"{prompt_tokens}{rate if finite else None}")
    prompts = [random_prompt(draws, prompt_tokens, vocab) for _ in range(count)]
    dues, now = [], 0.0
    for _ in range(count):
        now += draws.expovariate(rate) if finite else 0.0
        dues.append(now)
    return Arrivals(prompts, dues, new_tokens)


def random_prompt(draws: random.Random, tokens: int, vocab: int) -> list[int]:
    """Token ids drawn one by one."""
    ids = vocab - RESERVED if vocab > 2 * RESERVED else vocab
    return [draws.randrange(ids) for _ in range(tokens)]


def serve(
    engine: Any,
    requests: Arrivals,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Times]:
    """Submit each request when it is due, compute steps in between; the times of all. Raises RuntimeError if one fails."""
    from meshwright.serve.sampling import SamplingOptions

    times = [Times(due) for due in requests.dues]
    index_of: dict[int, int] = {}
    start, sent = clock(), 0
    while sent < len(times) or engine.unfinished:
        now = clock() - start
        while sent < len(times) and requests.dues[sent] <= now:
            sampling = SamplingOptions(temperature=0.6, seed=sent)
            number = engine.submit(requests.prompts[sent], new_tokens=requests.new_tokens, sampling=sampling)
            index_of[number], sent = sent, sent + 1
        if not engine.unfinished:
            sleep(requests.dues[sent] - now)
            continue
        updates = engine.step()
        now = clock() - start
        for update in updates:
            if update.error is not None:
                raise RuntimeError(update.error)
            times[index_of[update.number]].tokens += [now] * len(update.tokens)
    for each in times:
        assert len(each.tokens) == requests.new_tokens
    return times


def summary(requests: Arrivals, times: Sequence[Times]) -> dict[str, Any]:
    """Percentiles in milliseconds, and rates."""
    count, dues = len(times), requests.dues
    seconds = max(each.tokens[-1] for each in times)
    new = count * requests.new_tokens
    spread = dues[-1] - dues[0]
    return {
        "requests": count,
        "prompt_tokens": len(requests.prompts[0]),
        "new_tokens": requests.new_tokens,
        "offered_requests_per_second": (count - 1) / spread if spread else None,
        "seconds": seconds,
        "requests_per_second": count / seconds,
        "new_tokens_per_second": new / seconds,
        "tokens_per_second": (new + sum(map(len, requests.prompts))) / seconds,
        "ttft_milliseconds": percentiles([1000 * each.first for each in times]),
        "tpot_milliseconds": percentiles([1000 * each.each for each in times]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; a percentile is the value behind that share of all, in order."""
    ordered = sorted(values)
    named = {f"p{round(100 * q)}": ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in PERCENTILES}
    return {"mean": statistics.mean(ordered), **named}


def alone(engine: Any, prompt_tokens: int, vocab: int, reuse: float = 0.0, repeats: int = 9) -> dict[str, Any]:
    """Time to first token of prompts that are computed one by one; of each the share `reuse` is in the prefix cache."""
    seconds = []
    for index in range(repeats):
        prompt = random_prompt(random.Random(f"{prompt_tokens}/{reuse}/{index}"), prompt_tokens, vocab)
        if reuse:
            serve(engine, Arrivals([prompt[: round(reuse * prompt_tokens)]], [0.0], 1))
        seconds.append(serve(engine, Arrivals([prompt], [0.0], 1))[0].first)
    milliseconds = [1000 * each for each in seconds]
    return {
        "prompt_tokens": prompt_tokens,
        "reused_share": reuse,
        "ttft_milliseconds_median": statistics.median(milliseconds),
        "ttft_milliseconds_range": [min(milliseconds), max(milliseconds)],
    }


def start_to_first_token(options: argparse.Namespace) -> list[float]:
    """Seconds from the start of each of `options.start` processes to its first token; they share compile caches, empty at first."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: str(Path(folder, name)) for name in CACHES}
        command = [sys.executable, __file__, *sys.argv[1:], "--print-first-token"]
        for _ in range(options.start):
            begin = time.perf_counter()
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                found = any(line.strip() == FIRST_TOKEN for line in process.stdout)
                seconds.append(time.perf_counter() - begin)
            if not found or process.returncode:
                raise RuntimeError(f"{' '.join(command)}: no first token, exit status {process.returncode}")
    return seconds


def build_engine(options: argparse.Namespace) -> Any:
    """An engine with a preset's model, or a tiny one."""
    from serve_offline import random_model

    from meshwright.serve.engine import Engine
    from meshwright.spec.engine import EngineOptions

    sizes = EngineOptions(
        sequences=options.sequences,
        step_tokens=options.step_tokens,
        context=options.context,
        prefix_cache=bool(options.reuse),
    )
    return Engine(random_model("tiny" if options.tiny else options.model, context=options.context), options=sizes)


def main() -> None:
    begin, options = time.perf_counter(), _arguments()
    if options.print_first_token:
        engine = build_engine(options)
        serve(engine, Arrivals([random_prompt(random.Random(1), 16, engine.spec.vocab_size)], [0.0], 1))
        print(FIRST_TOKEN, flush=True)
        return
    result: dict[str, Any] = {"benchmark": "serve_arrivals", "left_out": []}

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    if options.start:
        result["start_to_first_token_seconds"] = start_to_first_token(options)
        save()
    if options.rates or options.alone:
        engine = build_engine(options)
        result |= {"engine": asdict(engine.options), **_machine()}
        vocab = engine.spec.vocab_size
        _warm(engine, options, vocab)
        for tokens, reuse in product(options.alone, [0.0, *options.reuse]):
            result.setdefault("alone", []).append(alone(engine, tokens, vocab, reuse))
            save()
        for rate in options.rates:
            if time.perf_counter() - begin + options.requests / rate > options.budget:
                result["left_out"].append(rate)
                continue
            requests = arrivals(options.prompt, options.new, rate, options.requests, vocab)
            # The benchmark's own lists are not the engine's to collect.
            gc.collect()
            gc.freeze()
            row = {"rate": str(rate), **summary(requests, serve(engine, requests))}
            result.setdefault("arrivals", []).append(row)
            save()
    result |= {"model": "tiny" if options.tiny else options.model, "seconds": time.perf_counter() - begin}
    save()
    print(json.dumps(result))


def _warm(engine: Any, options: argparse.Namespace, vocab: int) -> None:
    """Steps of several sizes, and the longest prompt of the parts."""
    serve(engine, arrivals(min(600, options.context - 16), 16, float("inf"), 40, vocab))
    longest = max([*options.alone, *([options.prompt] if options.rates else [])])
    serve(engine, arrivals(min(longest, options.context - 4), 4, float("inf"), 2, vocab))


def _machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__}


def _arguments() -> argparse.Namespace:
    from meshwright.config.presets import MODEL_PRESETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODEL_PRESETS), default="llama3-8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt of the arrivals")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each request of the arrivals")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="arrivals a second; inf: all at once")
    parser.add_argument("--requests", type=int, default=1500, help="requests at each rate")
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="lengths of lone prompts")
    parser.add_argument(
        "--reuse", type=float, nargs="*", default=[], help="shares of lone prompts that are in the prefix cache"
    )
    parser.add_argument("--start", type=int, default=0, help="processes to start")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--print-first-token", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
