"""Rules of preferences: each broken one is reported at its key, and a valid run passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.test_key_rules import mistakes

from meshwright.config.load import load_run

RUN = """\
model: {family: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn_hidden: 96, vocab_size: 512, max_seq_len: 64}
train: {steps: 10, global_batch: 8, seq_len: 64}
preference: {loss: dpo, sft: 0.1}
cluster: {gpu: cpu, gpus_per_node: 2}
"""


@pytest.mark.parametrize(
    ("overrides", "key", "expected", "nearest"),
    [
        (["data.packing=none"], "data.packing", "stream, as preference packs whole pairs", "stream"),
        (["data.document_mask=false"], "data.document_mask", "true, as answers of a sequence must not see", "true"),
        (["model.prediction_depth=1"], "model.prediction_depth", "0, as preference trains no modules", "0"),
        (["rl={reward: {file: judge.py}}"], "preference", "none, as rl has a loss of its own", "none"),
        (["preference.margin=1"], "preference.margin", "no such key, as preference.loss dpo does not read it", "none"),
        (
            ["preference.loss=orpo"],
            "preference.sft",
            "no such key, as preference.loss orpo does not read it",
            "none",
        ),
        (
            ["preference.loss=simpo", "preference.reference=hf:base"],
            "preference.reference",
            "no such key, as preference.loss simpo does not read it",
            "none",
        ),
        (["preference.undesirable=2"], "preference.undesirable", "no such key, as preference.loss dpo", "none"),
        (["preference.reference=base"], "preference.reference", "start, hf:DIR or checkpoint:DIR", "start"),
        (["preference.reference=hf:base"], "preference.reference", "start, as model.init is scratch", "start"),
        (["preference.loss=dppo"], "preference.loss", "dpo | ipo | kto | simpo | orpo", "dpo"),
        (["preference.label_smoothing=0.5"], "preference.label_smoothing", "number (≥ 0, < 0.5)", None),
    ],
)
def test_broken_rules_are_named(
    tmp_path: Path, overrides: list[str], key: str, expected: str, nearest: str | None
) -> None:
    found = {mistake.key: mistake for mistake in mistakes(tmp_path, *overrides, text=RUN)}
    assert key in found and found[key].expected.startswith(expected) and found[key].nearest == nearest


def test_a_valid_run_passes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    preference = load_run(file).preference
    assert preference is not None and preference.scale == 0.1 and preference.has_reference
    simpo = load_run(file, ["preference.loss=simpo", "preference.beta=none"]).preference
    assert simpo is not None and (simpo.scale, simpo.ahead, simpo.has_reference) == (2.0, 0.5, False)
    kto = load_run(file, ["preference.loss=kto", "preference.sft=0", "preference.undesirable=0.5"]).preference
    assert kto is not None and not kto.paired
