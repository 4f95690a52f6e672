"""Decodes on a CPU agree with the plain reference of paged attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.tiny import GEMMA2, GPT_OSS, LLAMA, MIXTRAL, QWEN3, SLIDING, built
from tests.serve.helpers import PROMPTS, engine_of, record_logits, texts


@pytest.mark.parametrize("spec", [LLAMA, QWEN3, SLIDING, MIXTRAL, GPT_OSS, GEMMA2, replace(LLAMA, kv_heads=1)], ids=str)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["several", "one"])
def test_logits_are_those_of_the_plain_reference(spec, prompts) -> None:
    logits = []
    for reference in (False, True):
        engine = engine_of(built(spec, reference=reference, dtype=torch.float32))
        seen = record_logits(engine)
        texts(engine, prompts)
        logits.append(torch.cat([torch.stack(seen[number]) for number in range(len(prompts))]))
    assert (logits[0] - logits[1]).abs().max() < 1e-5
