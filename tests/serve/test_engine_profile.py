"""Steps of the engine that are measured by shape."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.costs.serve_costs import ServeCosts
from meshwright.serve.engine_profile import (
    BETWEEN,
    SHARE,
    _Measurement,
    even_lengths,
    exponential_lengths,
    measure_engine,
)
from meshwright.serve.timed_engine import TimedEngine, TimedStep
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import InstanceSpec
from meshwright.spec.engine import EngineOptions, EngineSettings
from meshwright.spec.serve_profile import ProfiledChunk
from tests.models.tiny import LLAMA
from tests.serve.helpers import tiny

SPEC = replace(LLAMA, max_seq_len=64)
BOTH = exponential_lengths, even_lengths


def test_shapes_are_those_asked_for_and_their_steps_price_an_instance() -> None:
    options = EngineOptions(step_tokens=32, sequences=4, tokens_per_block=4, cache_blocks=200)
    measured = measure_engine(SPEC, options, ClusterSpec(), seconds=60.0)
    alone = [(step.decodes, step.positions, step.longest) for step in measured.steps if not step.chunks]
    texts = [[16] * count for count in (1, 2, 4)] + [make(count, 8) for make in BOTH for count in (1, 2, 4)]
    texts.sort(key=lambda lengths: sum(lengths) + 20 * len(lengths))
    # Of the decodes after the prompts, the two first are left out; texts whose prompts came first have a few more.
    assert [decodes for decodes, _, _ in alone] == [len(lengths) for lengths in texts]
    for (_, positions, longest), lengths in zip(alone, texts, strict=True):
        least, more = sum(lengths) + 8 * len(lengths), sum(lengths) > 32
        assert least <= positions <= least + 2 * more * len(lengths)
        assert max(lengths) + 8 <= longest <= max(lengths) + 8 + 2 * more
    prompts = [(step.decodes, step.chunks) for step in measured.steps if step.chunks]
    with_a_decode = [(1, (ProfiledChunk(start=0, count=count),)) for count in (15, 31)]
    assert len(prompts) == 3 and {*prompts} == {*with_a_decode, (0, (ProfiledChunk(start=0, count=8),) * 4)}
    assert all(step.seconds > 0 for step in measured.steps) and measured.item_bytes == 4
    costs = ServeCosts(SPEC, ClusterSpec(), settings=EngineSettings(sequences=4), profile=measured)
    assert costs.of(InstanceSpec()).times.constants is measured.constants
    factors = {factor.tokens: factor.factor for factor in measured.constants.decode_factors}
    assert not costs.overlap and set(factors) == {1, 2, 4}


def test_texts_of_different_lengths_have_their_mean_and_a_longest() -> None:
    for make, longest in ((exponential_lengths, 4.852), (even_lengths, 127 / 64)):
        lengths = make(64, 1000)
        assert lengths == sorted(lengths) and len(lengths) == 64
        assert sum(lengths) / 64 == pytest.approx(1000, rel=0.01)
        assert lengths[-1] == pytest.approx(1000 * longest, rel=0.001)


@pytest.mark.parametrize("step_tokens", [1, 3])
def test_engines_with_few_tokens_a_step_and_a_short_context_are_measured(step_tokens: int) -> None:
    options = EngineOptions(step_tokens=step_tokens, sequences=2, tokens_per_block=4, cache_blocks=40, context=24)
    measured = measure_engine(SPEC, options, ClusterSpec(), seconds=60.0)
    assert {step.decodes for step in measured.steps if not step.chunks} >= {1}
    prompts = {(step.decodes, step.chunks) for step in measured.steps if step.chunks}
    beside = int(step_tokens > 1)  # one of the step's tokens
    assert prompts == {(beside, (ProfiledChunk(start=0, count=step_tokens - beside),))}


def test_measured_prompts_take_a_share_of_the_time() -> None:
    """At the power limit, which prompts one behind another reach, a GPU is slower than under a load."""
    steps: list[TimedStep] = []

    class Kept(TimedEngine):
        def forget_steps(self) -> None:
            steps.extend(self.steps)
            super().forget_steps()

    options = EngineOptions(step_tokens=64, sequences=4, tokens_per_block=4, cache_blocks=400, context=800)
    engine = Kept(tiny(replace(SPEC, max_seq_len=800)), options, time.perf_counter)
    measured = _Measurement(engine, float("inf"))._prompt(63, 1)
    assert [(step.decodes, step.tokens) for step in measured] == [(1, 64)]
    begins = [index for index, step in enumerate(steps) if step.decodes and step.chunks]
    assert len(begins) == 12
    for begin, stop in pairwise(begins):
        prompt, last = steps[begin], steps[stop - 1]
        share = (prompt.device_end - prompt.device_begin) / (last.device_end - prompt.device_begin)
        assert share <= SHARE or stop - begin == 1 + BETWEEN
