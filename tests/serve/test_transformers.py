"""Random models of transformers, loaded from their folders: the engine's logits and greedy texts are theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.single_device import load_model
from tests.checkpoint.test_hf import their_config
from tests.serve.helpers import PROMPTS, engine_of, record_logits, texts


@pytest.mark.parametrize("model_name", ["gpt2", "llama3", "qwen3 sliding", "mixtral", "qwen3 moe"])
def test_logits_are_those_of_transformers(model_name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(their_config(model_name), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    engine = engine_of(load_model(tmp_path, torch.device("cpu"), torch.float32))
    seen = record_logits(engine)
    for number, (prompt, new) in enumerate(zip(PROMPTS, texts(engine), strict=True)):
        with torch.no_grad():
            whole = theirs(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        assert (torch.stack(seen[number]) - whole).abs().max() < 1e-4
        assert new == whole.argmax(1).tolist()
