"""Measures the engine's steps by shape on this machine, with random weights, for the cost model of deployments.

Requests are made so that a few steps of each wanted shape follow one another. A step's time runs from the end of the step before it, or
from its own launch if that was later. On a GPU it is measured by events on the device.

If a GPU computes prompts without a pause, it reaches its power limit and lowers its clock. On an H200 such prompts of Llama-3-8B took up to
14% longer than under a load of 40% of the capacity, and 5% longer than at 110%. Prompts for a third of the time took 2 to 5% less than
under these loads, because decodes of one sequence take little power. So prompts get six tenths of the time here, and decodes or waiting get
the rest.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product

import torch

from meshwright.checkpoint.models.single_device import device_and_dtype
from meshwright.costs.device_rates import Machine
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.serve_constants import usual_constants
from meshwright.costs.serve_fit import fit_constants
from meshwright.costs.serve_work import device_work
from meshwright.models.decoder import Decoder
from meshwright.serve.sampling import SamplingOptions
from meshwright.serve.timed_engine import TimedEngine, TimedStep
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.engine import EngineOptions
from meshwright.spec.model import ModelSpec
from meshwright.spec.serve_profile import EngineProfile, StepTime

DECODES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of decodes of the measured steps, up to the engine's batch size."""
PROMPTS = 16, 64, *(size << doublings for doublings in range(13) for size in (256, 384))
"""Tokens of the measured prompts, up to the most tokens of a step: 16, 64, 256, 384, 512, 768, and so on."""
BESIDE = (16, 64)
"""Numbers of decodes in steps that also have a prompt."""
BETWEEN = 24
"""Maximum number of steps of decodes after each prompt."""
SHARE = 0.6
"""Share of the time that prompts take."""
BESIDE_TOKENS = 256
"""Tokens of the sequences of these decodes."""
SHORT = 32
"""Tokens of each sequence where all have the same length."""
MEAN = 1024
"""Mean tokens of a sequence where lengths differ."""
MOST_EVEN = 64
"""Maximum number of decodes of a batch that is measured twice, with exponential and with even lengths.

Both have the same mean and different longest sequences, so the fit can separate the cost of the longest one from the cost of all positions.
"""
PIECES = 4
"""Number of prompts in steps with several prompts."""
CACHE_SHARE = 0.8
"""Largest share of the cache that the sequences of one measurement take."""
REPEATS = 10
"""Counted steps of one shape. Two steps before them are not counted, because earlier work delays their launch."""
LEAST_REPEATS = 3
"""Fewest steps of one shape whose median counts."""


def measure_engine(
    spec: ModelSpec,
    options: EngineOptions,
    cluster: ClusterSpec,
    seconds: float,
    note: Callable[[str], None] = lambda text: None,
    timer: Callable[[], float] = time.perf_counter,
) -> EngineProfile:
    """Measure for about `seconds`, after the engine has started; shapes that do not fit into this time are left out.

    `cluster` has this device; `timer` gives the seconds of steps. Raises BadInput for a model or formats that the device does not support.
    """
    device, dtype = device_and_dtype()
    sizes = replace(options, prefix_cache=False, texts=False)
    engine = TimedEngine(random_model(spec, device, dtype), sizes, timer)
    outside_bytes = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside_bytes = max(0, total - free - torch.cuda.memory_reserved(device))
    note("measuring the engine's steps")
    steps = _Measurement(engine, time.perf_counter() + seconds).steps()
    work = device_work(
        spec, weights=options.weights, item=dtype.itemsize, cache_item=1 if options.kv_cache else dtype.itemsize
    )
    start = replace(
        usual_constants(_machine(cluster, options), options.weights, kv_cache=options.kv_cache),
        whole_tokens=engine.whole_tokens,
        prompt_sizes=engine.prompt_sizes,
        decode_programs=engine.decode_programs,
    )
    fit = fit_constants(work, start, steps)
    return EngineProfile(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        model=spec,
        weights=options.weights,
        kv_cache=options.kv_cache,
        item_bytes=dtype.itemsize,
        overlap=engine.overlaps,
        other_bytes=outside_bytes,
        constants=fit.constants,
        steps=tuple(steps),
        median_error=fit.median_error,
    )


def random_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A model of these dimensions with normal weights, made on the device."""
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    fill_at_random(model)
    return model


def fill_at_random(model: Decoder) -> None:
    """Set normal weights; norms and biases are 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)


def _machine(cluster: ClusterSpec, options: EngineOptions) -> Machine:
    return machine_of(cluster, "bf16" if cluster.is_cpu else options.weights or "bf16")


def exponential_lengths(count: int, mean: int) -> list[int]:
    """Lengths of `count` sequences at equal quantiles of an exponential distribution: a few are several times the mean."""
    return [max(1, round(-mean * math.log(1 - (index + 0.5) / count))) for index in range(count)]


def even_lengths(count: int, mean: int) -> list[int]:
    """Lengths of `count` sequences at equal steps up to twice the mean."""
    return [max(1, round(mean * (2 * index + 1) / count)) for index in range(count)]


class _Measurement:
    """Runs requests until each wanted shape was seen."""

    def __init__(self, engine: TimedEngine, deadline: float) -> None:
        self._engine = engine
        self._deadline = deadline
        self._draw = random.Random(0)
        sizes = engine.options
        pool = engine._policy.cache.pools[0]
        self._cache_tokens = int(CACHE_SHARE * pool.blocks) * sizes.tokens_per_block
        self._budget = min(sizes.step_tokens, engine.context - 2)

    def steps(self) -> list[StepTime]:
        """The median steps of all shapes for which there was time."""
        self._warm()
        steps: list[StepTime] = []
        for measure in self._plan():
            late = time.perf_counter() > self._deadline
            if late and any(step.chunks for step in steps) and any(not step.chunks for step in steps):
                break
            steps += measure()
        return steps

    def _plan(self) -> list[Callable[[], list[StepTime]]]:
        """Measurements, those with the fewest tokens first: a slow machine leaves out the largest shapes."""
        most = self._engine.options.sequences
        context = self._engine.context
        counts = [*(count for count in DECODES if count < most), most]
        short = min(SHORT, context // 4)
        mean = min(MEAN, context // 8)
        sizes = [*(size for size in PROMPTS if size < self._budget), self._budget]
        exact = sorted({*sizes, *(size for size in self._engine.prompt_sizes if size < self._budget)})
        prompts = [(size, beside) for size, beside in product(sizes, BESIDE) if beside < most]
        alone = [[size] for size in exact if size == 1 or most == 1]
        prompts += [(size - 1, 1) for size in exact if [size] not in alone]
        if min(self._budget, most) >= PIECES:
            alone.append([self._budget // PIECES] * PIECES)
        texts = [[short] * count for count in counts] + [exponential_lengths(count, mean) for count in counts]
        texts += [even_lengths(count, mean) for count in counts if count <= MOST_EVEN]
        decodes = [
            (sum(lengths) + len(lengths) * self._decoded(lengths), partial(self._decode, lengths))
            for lengths in texts
            if max(lengths) + self._decoded(lengths) < context
        ]
        planned = [(tokens, measure) for tokens, measure in decodes if tokens <= self._cache_tokens]
        planned += [
            (size * REPEATS + self._tokens_beside(beside), partial(self._prompt, size, beside))
            for size, beside in prompts
            if size + self._tokens_beside(beside) <= self._cache_tokens
        ]
        planned += [(sum(lengths) * REPEATS, partial(self._alone, lengths)) for lengths in alone]
        return [measure for _, measure in sorted(planned, key=lambda entry: entry[0])]

    def _warm(self) -> None:
        """Run some decodes and prompts whose times do not count."""
        self._decode([min(SHORT, self._engine.context // 4)] * min(4, self._engine.options.sequences))
        self._alone([max(1, self._budget // 8)])

    def _decode(self, lengths: Sequence[int]) -> list[StepTime]:
        """Steps of decodes of sequences with so many tokens and more."""
        self._submit(lengths, self._decoded(lengths))
        return self._finish(lambda step: step.decodes == len(lengths) and not step.chunks)

    def _decoded(self, lengths: Sequence[int]) -> int:
        """New tokens of each of these sequences: the first ones decode while the prompts of others are computed."""
        return REPEATS + 3 + -(-sum(lengths) // self._budget)

    def _prompt(self, size: int, beside: int) -> list[StepTime]:
        """Measure steps with a whole prompt of `size` tokens and `beside` decodes. Between two prompts the decodes go on alone."""
        engine = self._engine
        length, new_tokens = self._text_beside(beside)
        numbers = self._submit([length] * beside, new_tokens)
        while engine.unfinished and not any(step.decodes == beside for step in engine.steps[-1:]):
            engine.step()
        for _ in range(REPEATS + 2):
            self._submit([size], 1)
            self._step()
            self._decode_until_cool(min(BETWEEN, new_tokens // (REPEATS + 2) - 1))
        for number in numbers:
            engine.abort(number)
        return self._finish(lambda step: step.decodes == beside and [chunk.count for chunk in step.chunks] == [size])

    def _decode_until_cool(self, most: int) -> None:
        """Launch steps of decodes, at least one and at most `most`, until the newest prompt has taken no more than `SHARE` of the time."""
        steps = self._engine.steps
        for _ in range(max(1, most)):
            self._step()
            newest = next((step for step in reversed(steps) if step.chunks), None)
            if newest and newest is not steps[-1]:
                since = steps[-1].device_end - newest.device_begin
                if newest.device_end - newest.device_begin <= SHARE * since:
                    return

    def _text_beside(self, beside: int) -> tuple[int, int]:
        """Prompt and new tokens of each of so many sequences that decode beside prompts until these were measured."""
        context = self._engine.context
        length = min(BESIDE_TOKENS, context // 4)
        new = (1 + BETWEEN) * (REPEATS + 2) + -(-beside * length // self._budget)
        return length, min(context - length - 1, new)

    def _tokens_beside(self, beside: int) -> int:
        """Tokens of these sequences in the cache."""
        return beside * sum(self._text_beside(beside))

    def _alone(self, lengths: Sequence[int]) -> list[StepTime]:
        """Steps with prompts of these lengths and nothing beside them; the engine waits in between."""
        for _ in range(REPEATS + 2):
            begin = time.perf_counter()
            self._submit(lengths, 1)
            while self._engine.unfinished:
                self._engine.step()
            time.sleep((1 / SHARE - 1) * (time.perf_counter() - begin))
        return self._finish(lambda step: [chunk.count for chunk in step.chunks] == lengths and not step.decodes)

    def _step(self) -> None:
        """Launch a step; a call of the engine's may only read tokens."""
        launched = self._engine.launched
        while self._engine.unfinished and self._engine.launched == launched:
            self._engine.step()

    def _submit(self, lengths: Sequence[int], new_tokens: int) -> list[int]:
        vocab = self._engine.spec.vocab_size
        return [
            self._engine.submit(
                [self._draw.randrange(vocab) for _ in range(length)],
                new_tokens=new_tokens,
                sampling=SamplingOptions(temperature=0.6, seed=index),
            )
            for index, length in enumerate(lengths)
        ]

    def _finish(self, wanted: Callable[[TimedStep], bool]) -> list[StepTime]:
        """Run until nothing is left; the median of the wanted steps, all of one shape, without the first two, if there are enough."""
        engine = self._engine
        while engine.unfinished:
            engine.step()
        engine.step()  # with overlap, the step in flight
        found = [step for step in engine.steps if wanted(step)][2:]
        engine.forget_steps()
        return [_median(found, engine.times_device)] if len(found) >= LEAST_REPEATS else []


def _median(steps: Sequence[TimedStep], on_device: bool) -> StepTime:
    """The median times of steps with equal decodes and chunks; of their positions the mean.

    `on_device`: a device runs the steps, so the host's launches take time apart from theirs.
    """
    launch = exposed = 0.0
    if on_device:
        launch = statistics.median(step.launch_end - step.launch_begin for step in steps)
        exposed = statistics.median(max(0.0, step.launch_end - step.device_begin) for step in steps)
    return StepTime(
        decodes=steps[0].decodes,
        positions=round(statistics.mean(step.positions for step in steps)),
        longest=round(statistics.mean(step.longest for step in steps)),
        chunks=steps[0].chunks,
        seconds=statistics.median(step.device_end - step.device_begin for step in steps),
        launch_seconds=launch,
        exposed_seconds=exposed,
    )
