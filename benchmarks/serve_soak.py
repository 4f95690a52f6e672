"""Many short requests through one engine on a CPU, with aborts, deadlines and failing steps. `make test-engine-soak`.

    python benchmarks/serve_soak.py [--requests 50000] [--seed 0] [--out FILE]

Requests arrive in chunks, with random lengths, priorities and sampling options; prompts share prefixes; some ask for several samples. Now
and then a step raises. The cache has too few blocks, so requests are preempted. The engine changes between overlapping and single steps.

Checked: each request ends exactly once, with a reason that its options, its abort, its deadline or its failing step explain; equal requests
get equal texts; at the end all blocks and table rows are free; resident memory at 100% of the requests is that at 20% within `--growth`.
Prints progress, then one JSON object. The model computes in fp64, so that no text depends on the rounding of another batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.policies.batch_request import EngineStep
from meshwright.serve.batch_inputs import PackedStep
from meshwright.serve.engine import Engine
from meshwright.serve.generation import Update
from meshwright.serve.sampling import GREEDY, SamplingOptions
from meshwright.spec.engine import EngineOptions
from meshwright.spec.model import ModelSpec

SPEC = ModelSpec(
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_hidden=64,
    vocab_size=96,
    max_seq_len=64,
    init_std=0.3,
)
OPTIONS = EngineOptions(sequences=24, step_tokens=96, tokens_per_block=4, cache_blocks=96)
"""At full length the requests of a batch would need about 170 blocks."""
WAITING = 120
"""Chunks of requests arrive while fewer have not ended."""
CONTENTS = 2000
"""Different prompts with their options."""
SAMPLING = (
    GREEDY,
    SamplingOptions(temperature=0.8, seed=1),
    SamplingOptions(temperature=1.2, top_k=20, top_p=0.9, seed=2),
    SamplingOptions(temperature=1.0, min_p=0.05, repetition_penalty=1.2, seed=3),
    SamplingOptions(temperature=0.0, frequency_penalty=0.5, logprobs=True, top_logprobs=2),
    SamplingOptions(temperature=1.0, presence_penalty=0.3, logit_bias={5: 2.0, 7: -100.0}, seed=4),
)
INJECTED = "this step raises on purpose"


class SoakError(Exception):
    """Something does not hold that must hold."""


@dataclass(frozen=True)
class Content:
    """Inputs that determine the text of a request."""

    prompt: tuple[int, ...]
    sampling: SamplingOptions
    stop_ids: tuple[int, ...]


@dataclass
class Expected:
    """A request that has not ended."""

    text: tuple[int, int]
    """Its content, and the number of its sample."""
    new_tokens: int
    deadline: float | None
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)


class Soak:
    """One engine and the requests that it gets. `failing` is the mean number of steps from one failing step to the next."""

    def __init__(self, requests: int, seed: int = 0, failing: int = 300) -> None:
        self._draw, self._requests, self._failing = random.Random(seed), requests, failing
        self._now = 0.0
        self.engine = Engine(_model(seed), options=OPTIONS, clock=lambda: self._now)
        self._contents = _contents(self._draw)
        self._expected: dict[int, Expected] = {}
        self._texts: dict[tuple[int, int], list[int]] = {}
        """The longest text so far of each sample of each content."""
        self._stops: dict[tuple[int, int], int] = {}
        """Tokens of those texts that ended with a stop."""
        self._step_numbers: set[int] = set()
        """Requests of the step that is computed."""
        self._failed_numbers: set[int] = set()
        """Requests of the failing step, until the engine has reported them."""
        self.submitted = self.steps = self.failures = self.new_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.memory: list[tuple[float, int]] = []
        """Share of the requests that had ended, and resident bytes."""
        self._inject_failures()

    def run(self, *, report: bool = False) -> None:
        """Compute all requests. Raises SoakError where something does not hold."""
        start, shown = time.perf_counter(), 0
        while len(self._expected) or self.submitted < self._requests:
            self._submit_chunk()
            self._abort_one()
            if self.steps % 100 == 0:
                # As requests with grammars do.
                self.engine._overlap = self._draw.random() < 0.5
            self._take(self.engine.step())
            self.steps, self._now = self.steps + 1, self._now + 1.0
            while sum(self.reasons.values()) >= (shown + 1) * self._requests / 20:
                shown += 1
                self.memory.append((shown / 20, resident_bytes()))
                if report:
                    self._report(time.perf_counter() - start)
        self._check_end()

    def growth(self) -> int:
        """Bytes by which resident memory at the end exceeds that at 20%."""
        at = {round(20 * share): size for share, size in self.memory}
        return at[20] - at[4]

    def _submit_chunk(self) -> None:
        left = self._requests - self.submitted
        if left <= 0 or len(self._expected) >= WAITING or self._draw.random() > 0.25:
            return
        for _ in range(min(self._draw.randint(1, 40), left)):
            if self.submitted < self._requests:
                self._submit()

    def _submit(self) -> None:
        draw, index = self._draw, self._draw.randrange(CONTENTS)
        content, new_tokens = self._contents[index], self._draw.randint(1, 16)
        seconds = float(draw.randint(1, 60)) if draw.random() < 0.05 else None
        options: dict[str, Any] = {
            "new_tokens": new_tokens,
            "sampling": content.sampling,
            "stop_ids": content.stop_ids,
            "priority": draw.choice((-1, 0, 0, 0, 1)),
            "seconds": seconds,
        }
        samples = min(draw.randint(2, 4), self._requests - self.submitted) if draw.random() < 0.05 else 1
        if samples > 1:
            numbers = self.engine.submit_samples(content.prompt, samples, **options)
        else:
            numbers = [self.engine.submit(content.prompt, **options)]
        deadline = None if seconds is None else self._now + seconds
        most = min(new_tokens, self.engine.context - len(content.prompt))
        for sample, number in enumerate(numbers):
            self._expected[number] = Expected((index, sample), most, deadline)
        self.submitted += len(numbers)

    def _abort_one(self) -> None:
        if self._draw.random() < 0.1:
            # The number of a request that has ended, or that never was, is no error.
            number = self.submitted - self._draw.randint(-1, WAITING)
            self.engine.abort(number)
            if number in self._expected:
                self._expected[number].aborted = True

    def _inject_failures(self) -> None:
        """Let some steps raise, while their tensors are made or when the model has computed them."""
        pack, compute = self.engine._inputs.pack, self.engine._runner.logits

        def fails() -> bool:
            if self._draw.random() * 2 * self._failing >= 1:
                return False
            self.failures += 1
            self._failed_numbers = set(self._step_numbers)
            return True

        def failing_pack(step: EngineStep, *inputs: Any, **options: Any) -> PackedStep:
            self._step_numbers = {part.request.number for part in step.parts}
            if fails():
                raise RuntimeError(INJECTED)
            return pack(step, *inputs, **options)

        def failing_compute(packed: PackedStep) -> Tensor:
            logits = compute(packed)
            if fails():
                raise RuntimeError(INJECTED)
            return logits

        self.engine._inputs.pack, self.engine._runner.logits = failing_pack, failing_compute

    def _take(self, updates: list[Update]) -> None:
        """Compare updates with what is expected of their requests."""
        ended = set()
        for update in updates:
            _check(update.number in self._expected, f"{update}: this request has ended before")
            expected = self._expected[update.number]
            expected.tokens += update.tokens
            if expected_logprobs := self._contents[expected.text[0]].sampling.logprobs:
                _check(len(update.logprobs) == len(update.tokens), f"{update}: a log probability for each token")
            _check(expected_logprobs or not update.logprobs, f"{update}: log probabilities that were not asked for")
            if update.reason is not None:
                self._check_reason(update, expected)
                self._check_text(update, expected)
                self.reasons[update.reason] += 1
                self.new_tokens += len(expected.tokens)
                del self._expected[update.number]
                ended.add(update.number)
        _check(self._failed_numbers <= ended, f"{self._failed_numbers - ended}: their step raised, and they go on")
        self._failed_numbers = set()

    def _check_reason(self, update: Update, expected: Expected) -> None:
        reason, count, late = update.reason, len(expected.tokens), expected.deadline
        holds = {
            "length": count == expected.new_tokens,
            "stop": count < expected.new_tokens and bool(self._contents[expected.text[0]].stop_ids),
            "abort": expected.aborted,
            "deadline": late is not None and late <= self._now,
            "failed": update.number in self._failed_numbers and update.error == f"RuntimeError: {INJECTED}",
        }
        _check(holds[str(reason)], f"{update}: {expected} does not explain the reason")
        _check(count <= expected.new_tokens, f"{update}: more than {expected.new_tokens} tokens")
        _check(late is None or self._now <= late, f"{update}: the deadline was {late}, it is {self._now}")

    def _check_text(self, update: Update, expected: Expected) -> None:
        """Texts of equal requests are equal as far as both go, and no text goes beyond the stop of another."""
        key, tokens = expected.text, expected.tokens
        _check(not set(self._contents[key[0]].stop_ids) & set(tokens), f"{update}: a stop token in the text")
        longest = self._texts.setdefault(key, tokens)
        common = min(len(longest), len(tokens))
        _check(longest[:common] == tokens[:common], f"{update}: {tokens}, and an equal request got {longest}")
        if len(tokens) > len(longest):
            self._texts[key] = tokens
        if update.reason == "stop":
            _check(self._stops.setdefault(key, len(tokens)) == len(tokens), f"{update}: another stopped elsewhere")
        if key in self._stops:
            _check(len(self._texts[key]) <= self._stops[key], f"{update}: an equal request stopped before")

    def _check_end(self) -> None:
        engine = self.engine
        _check(engine.unfinished == 0, f"{engine.unfinished} requests have not ended")
        _check(sum(self.reasons.values()) == self._requests, f"{self.reasons}: not {self._requests} ends")
        for pool in engine._policy.cache.pools:
            _check(pool.free == pool.blocks, f"{pool.blocks - pool.free} cache blocks are not free")
            _check(not any(pool.references), "a block has references")
        _check(not engine._table_rows.row_of, f"requests have table rows: {engine._table_rows.row_of}")

    def _report(self, seconds: float) -> None:
        ended, policy = sum(self.reasons.values()), self.engine._policy
        rates = f"{ended / seconds:,.0f} requests/s, {self.new_tokens / seconds:,.0f} new tokens/s"
        memory = f"{self.memory[-1][1] / 2**20:.1f} MiB"
        events = f"{policy.preemptions:,} preemptions, {self.failures} failing steps"
        print(f"{ended:,} of {self._requests:,} requests: {rates}, {memory}, {events}", file=sys.stderr, flush=True)


def main() -> int:
    options = _arguments()
    soak = Soak(options.requests, options.seed, options.failing)
    start = time.perf_counter()
    try:
        soak.run(report=True)
        _check(soak.growth() <= options.growth * 2**20, f"memory grew by {soak.growth() / 2**20:.1f} MiB since 20%")
        problem = None
    except SoakError as error:
        problem = str(error)
    seconds = time.perf_counter() - start
    policy = soak.engine._policy
    result = {
        "benchmark": "serve_soak",
        "requests": options.requests,
        "seed": options.seed,
        "problem": problem,
        "reasons": dict(soak.reasons),
        "steps": soak.steps,
        "failing_steps": soak.failures,
        "preemptions": policy.preemptions,
        "prefix_cache_tokens": policy.cached_tokens,
        "new_tokens": soak.new_tokens,
        "seconds": round(seconds, 1),
        "requests_per_second": round(options.requests / seconds, 1),
        "new_tokens_per_second": round(soak.new_tokens / seconds, 1),
        "resident_mib": [[share, round(size / 2**20, 1)] for share, size in soak.memory],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return int(problem is not None)


def resident_bytes() -> int:
    """Resident memory of this process, from Linux."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise SoakError(problem)


def _contents(draw: random.Random) -> list[Content]:
    """Prompts of 1 to 40 tokens, most of them behind one of a few prefixes; a third of the texts can stop early."""
    prefixes = [[draw.randrange(SPEC.vocab_size) for _ in range(draw.choice((8, 13, 24)))] for _ in range(10)]
    contents = []
    for _ in range(CONTENTS):
        prompt = list(draw.choice(prefixes)) if draw.random() < 0.7 else []
        prompt += [draw.randrange(SPEC.vocab_size) for _ in range(draw.randint(1, 16))]
        stops = draw.sample(range(SPEC.vocab_size), 6) if draw.random() < 1 / 3 else ()
        contents.append(Content(tuple(prompt), draw.choice(SAMPLING), tuple(stops)))
    return contents


def _model(seed: int) -> Decoder:
    with torch.device("meta"):
        model = Decoder(SPEC)
    model = model.to(torch.float64).to_empty(device="cpu")
    initialise(model, SPEC, seed=seed)
    return model


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failing", type=int, default=300, help="mean number of steps between failing ones")
    parser.add_argument("--growth", type=float, default=4.0, help="MiB by which memory may grow from 20%% to the end")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
