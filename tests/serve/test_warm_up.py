"""The steps before the first request: they run, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from meshwright.policies.batch_request import CacheGroup
from meshwright.serve.engine import Engine
from meshwright.serve.kv_cache import layer_groups
from meshwright.serve.sampling import SamplingOptions
from meshwright.serve.warm_up import warm_up
from tests.models.tiny import LLAMA, SLIDING
from tests.serve.helpers import engine_of, texts, tiny


def warmed(engine: Engine) -> int:
    """Number of steps that the warm-up computed."""
    steps: list[Any] = []
    runner, pools = engine._runner, engine._policy.cache.pools
    forward = runner.logits
    runner.logits = lambda packed: steps.append(packed) or forward(packed)  # pyrefly: ignore
    layers = layer_groups(engine.spec)
    groups = [CacheGroup(pool.blocks + 1, group.window) for pool, group in zip(pools, layers, strict=True)]
    warm_up(runner, engine._inputs, engine._sampler, groups, engine.context)
    runner.logits = forward
    return len(steps)


@pytest.mark.parametrize("spec", [LLAMA, SLIDING], ids=["llama", "sliding"])
def test_later_texts_are_those_without_a_warm_up(spec: Any) -> None:
    engine, model = engine_of(tiny(spec)), tiny(spec)
    assert warmed(engine) == 3
    assert engine._sampler.greedy
    for sampling in (SamplingOptions(), SamplingOptions(temperature=0.8, top_p=0.7, seed=3)):
        assert texts(engine, sampling=sampling) == texts(engine_of(model), sampling=sampling)


def test_prompts_of_padding_write_nothing() -> None:
    engine = engine_of(tiny(LLAMA))
    engine._inputs.prompt_unit = 8
    lengths: list[int] = []
    warm_prompt = engine._runner.warm_prompt
    engine._runner.warm_prompt = lambda tokens: lengths.append(tokens) or warm_prompt(tokens)  # pyrefly: ignore
    assert warmed(engine) == 3
    assert lengths == [8, 16]
    assert texts(engine) == texts(engine_of(tiny(LLAMA)))


@pytest.mark.parametrize("options", [{"context": 3}, {"cache_blocks": 1}, {"sequences": 1}], ids=str)
def test_small_engines_compute_what_fits(options: dict[str, int]) -> None:
    assert warmed(engine_of(tiny(LLAMA), **options)) == (2 if "sequences" in options else 0)


@pytest.mark.slow
def test_the_engine_is_imported_without_what_only_training_needs() -> None:
    """These packages take seconds of a process's start."""
    code = """
import sys, meshwright.serve.engine, meshwright.checkpoint.models.single_device
heavy = {"sympy", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
