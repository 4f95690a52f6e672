"""Losses in chunks over the cache are those of the trainer's forward."""

from __future__ import annotations

import pytest
import torch

from meshwright.serve.text_losses import TextLosses
from tests.models.tiny import ALL, DENSE, built, some_tokens

MODELS = {**ALL, "granite": DENSE["granite"]}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_in_chunks_is_that_of_whole_texts(name: str) -> None:
    """Texts of 40 tokens in chunks of 16, 16 and 8; some targets are left out."""
    model, tokens = built(MODELS[name], dtype=torch.float64), some_tokens(MODELS[name])
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[0, 5] = -1
    with torch.no_grad():
        whole = model(tokens, targets=targets)
    in_chunks = TextLosses(model, context=50, chunk=16)
    assert float(in_chunks.sum(tokens, targets)) == pytest.approx(float(whole), rel=1e-12)
    assert float(in_chunks.sum(tokens[1:], targets[1:])) < float(whole)
