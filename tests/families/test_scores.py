"""Reward models in Hugging Face folders of every family, both ways, with transformers' sequence classification as the judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils import logging

from meshwright.checkpoint.models.hf import export_hf, import_hf
from meshwright.families.folder import to_hf_config
from meshwright.families.registry import FAMILIES
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.model import SCORE, ModelSpec, parameter_count, parameters, with_score
from tests.families.specimens import SPECIMENS
from tests.models.tiny import LLAMA, built
from tests.slow import quick_first

SCORED = [name for name, family in FAMILIES.items() if family.scorer is not None and name in SPECIMENS]
SEQ = 40
LENGTHS = (SEQ, 11, 1)
"""Tokens of the texts of a batch; those behind are padding."""
PAD = 0


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def written(folder: Path, spec: ModelSpec) -> Decoder:
    model = built(spec)
    weights = dict(model.named_parameters())
    export_hf(folder, spec, weights.__getitem__, tokenizer=None, run_note="", dtype="fp32")
    return model


def texts(spec: ModelSpec) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, spec.vocab_size, (length,), generator=draw).tolist() for length in LENGTHS]


@torch.no_grad()
def ours(model: Decoder, text: list[int]) -> torch.Tensor:
    hidden = model.hidden(torch.tensor([text]))
    return model.head.log_probabilities(hidden, torch.zeros(1, len(text), dtype=torch.long))[0, -1]


@torch.no_grad()
def theirs(folder: Path, given: list[list[int]], pad: int | None = PAD) -> list[float]:
    judge: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert judge.num_labels == 1
    judge.config.pad_token_id = pad
    rows = torch.tensor([[*text, *[PAD] * (max(map(len, given)) - len(text))] for text in given])
    return judge(input_ids=rows, attention_mask=torch.ones_like(rows)).logits[:, 0].tolist()


def test_classes_are_those_of_transformers() -> None:
    expected = {name: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name) for name in FAMILIES}
    assert {name: family.scorer for name, family in FAMILIES.items()} == expected
    assert len(SCORED) > 20


@pytest.mark.parametrize("name", quick_first(4, sorted(SCORED, key=lambda name: name != "llama")))
def test_scores_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    spec = replace(with_score(SPECIMENS[name]), prediction_depth=0)
    model, given = written(tmp_path / "folder", spec), texts(spec)
    seen = theirs(tmp_path / "folder", given)
    assert seen == pytest.approx([float(ours(model, text)) for text in given], rel=1e-4, abs=1e-5)
    assert len({round(each, 3) for each in seen}) > 1
    read, reader = import_hf(tmp_path / "folder")
    assert read.head == "score" and not read.tied and parameter_count(read) == parameter_count(spec)
    for parameter in parameters(read):
        assert torch.equal(reader.read(parameter), model.get_parameter(parameter.name).float()), parameter.name


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    model = written(tmp_path / "ours", with_score(LLAMA))
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    judge.save_pretrained(tmp_path / "theirs")
    spec, reader = import_hf(tmp_path / "theirs")
    assert spec.head == "score"
    for parameter in parameters(spec):
        assert torch.equal(reader.read(parameter), model.get_parameter(parameter.name).float()), parameter.name
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "text-classification" in card


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "ours", with_score(LLAMA))
    file = tmp_path / "ours" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(BadInput, match=r"config.json: id2label: expected one label: a reward model gives one score"):
        import_hf(tmp_path / "ours")
    file.write_text(json.dumps(config | {"architectures": ["LlamaForTokenClassification"]}))
    with pytest.raises(BadInput, match=r"expected \['LlamaForCausalLM'\] or \['LlamaForSequenceClassification'\]"):
        import_hf(tmp_path / "ours")
    olmoe = replace(with_score(SPECIMENS["olmoe"]))
    with pytest.raises(BadInput, match=r"transformers has no olmoe model with a score, got .score.; Meshwright"):
        to_hf_config(olmoe)
    with pytest.raises(BadInput, match=r"tied is true: expected false with head: score"):
        Decoder(replace(LLAMA, head="score", tied=True))
    assert SCORE in dict(Decoder(with_score(LLAMA)).named_parameters())
