"""Steps of the engine that are measured by shape."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.serve_costs import ServeCosts
from meshwright.serve.engine_profile import measure_engine
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import InstanceSpec
from meshwright.spec.engine import EngineOptions, EngineSettings
from meshwright.spec.serve_profile import Chunk
from tests.models.tiny import LLAMA

SPEC = replace(LLAMA, max_seq_len=64)


def test_shapes_are_those_asked_for_and_their_steps_price_an_instance() -> None:
    options = EngineOptions(step_tokens=32, sequences=4, tokens_per_block=4, cache_blocks=200)
    measured = measure_engine(SPEC, options, ClusterSpec(), seconds=60.0)
    alone = [(step.decodes, step.positions) for step in measured.steps if not step.chunks]
    # Texts of 16 and 32 tokens; of the decodes after them, the two first are left out. Where 32 tokens of a step are not all prompts,
    # the first texts have decoded before the last.
    steps = {(count, mean): max(1, count * (mean - 8) // 32) for count in (1, 2, 4) for mean in (24, 40)}
    assert alone == [(count, count * mean + count * (steps[count, mean] - 1) // 2) for count, mean in steps]
    prompts = [step.chunks for step in measured.steps if step.chunks]
    assert prompts == [(Chunk(start=0, count=count),) for count in (16, 32)] + [(Chunk(start=0, count=8),) * 4]
    assert all(step.seconds > 0 for step in measured.steps) and measured.item_bytes == 4
    costs = ServeCosts(SPEC, ClusterSpec(), settings=EngineSettings(sequences=4), profile=measured)
    assert costs.of(InstanceSpec()).times.constants is measured.constants
    factors = {factor.tokens: factor.factor for factor in measured.constants.decode_factors}
    assert not costs.overlap and set(factors) == {1, 2, 4}
