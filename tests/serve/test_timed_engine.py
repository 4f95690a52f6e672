"""An engine that notes its steps."""

from __future__ import annotations

from itertools import count, pairwise

import torch

from meshwright.serve.timed_engine import TimedEngine
from meshwright.spec.engine import EngineOptions
from meshwright.spec.serve_profile import ProfiledChunk
from tests.models.tiny import LLAMA, built


def test_steps_have_their_shapes_and_times_in_order() -> None:
    clock = count(1)
    options = EngineOptions(step_tokens=8, sequences=4, tokens_per_block=4, cache_blocks=50, texts=False)
    engine = TimedEngine(built(LLAMA, dtype=torch.float32), options, lambda: float(next(clock)))
    engine.submit([1] * 10, new_tokens=3)
    assert len(list(engine.run())) == 3
    shapes = [(step.decodes, step.positions, step.chunks) for step in engine.steps]
    chunks = [(ProfiledChunk(start=0, count=8),), (ProfiledChunk(start=8, count=2),)]
    assert shapes == [(0, 0, chunks[0]), (0, 0, chunks[1]), (1, 11, ()), (1, 12, ())]
    for step in engine.steps:
        assert step.launch_begin < step.launch_end < step.end
        assert (step.device_begin, step.device_end) == (step.launch_begin, step.end)  # a CPU computes as it launches
    assert all(first.end < second.launch_begin for first, second in pairwise(engine.steps))
    assert not engine.times_device
    engine.forget_steps()
    assert not engine.steps
