"""The reference of a KL penalty: log-probabilities of the model that `model.init` names, after temperature and within documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.data.loader import MicroBatch
from meshwright.rl.reference import ReferenceModel
from meshwright.spec.errors import BadInput
from tests.models.tiny import GPT2, LLAMA
from tests.serve.helpers import newer, save_run


@pytest.mark.parametrize("spec", [LLAMA, replace(GPT2, logit_factor=0.5)], ids=["llama", "tied, scaled"])
def test_the_column_is_that_of_the_initial_model(tmp_path: Path, spec: object) -> None:
    model, draw = newer(spec), torch.Generator().manual_seed(0)
    save_run(tmp_path / "run", model)
    reference = ReferenceModel(model.spec, f"checkpoint:{tmp_path / 'run'}", torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, model.spec.vocab_size, (2, 12), generator=draw)
    targets = torch.randint(-1, model.spec.vocab_size, (2, 12), generator=draw)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    batch = reference.add_to(MicroBatch(tokens, targets, positions, documents, 0), 0.7)
    with torch.no_grad():
        logits = model(tokens, positions=positions, documents=documents) / 0.7
    expected = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0].masked_fill(targets < 0, 0.0)
    torch.testing.assert_close(batch.columns["reference"], expected, rtol=1e-5, atol=1e-5)


def test_a_run_from_scratch_has_no_reference() -> None:
    with pytest.raises(BadInput, match="rl.kl.weight: expected 0, as model.init is scratch"):
        ReferenceModel(LLAMA, "scratch", torch.device("cpu"), torch.float32)
