"""What a run on preferences says at its start, in its lines, report and comparison, and which references it refuses."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from meshwright.cli.compare import compared_runs
from meshwright.data.source import open_data
from meshwright.launch.fine_tuning import fine_tuning_lines
from meshwright.launch.prepare import check_init, open_run_data
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.observe.comparison import comparison_sheet, table_rows
from meshwright.observe.metrics import STEP_KEYS, MetricsWriter
from meshwright.observe.report import write_report
from meshwright.observe.report_charts import sheet
from meshwright.observe.run_progress import RunProgress
from meshwright.observe.runfolder import read_run
from meshwright.preferences.reference import (
    place_of,
    read_reference,
    reference_key,
    weights_identity,
    write_reference,
)
from meshwright.spec.errors import BadInput, Damaged
from meshwright.training.evaluate import HeldOut
from meshwright.training.preferences import PAIRS, evaluate_pairs
from tests.launch.test_corpus import other_tokenizer
from tests.observe.test_report import config, plan
from tests.preferences.corpus import make_preferences
from tests.training.tiny import tiny_run

JUDGED = {
    "reference_distance": 0.01,
    "chosen_tokens": 5.0,
    "rejected_tokens": 7.0,
    "margin": 0.5,
    "accuracy": 0.75,
    "likelier": 0.6,
    "chosen_reward": 0.2,
    "rejected_reward": -0.3,
    "pairs": 8.0,
}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preferences(tmp_path_factory.getbasetemp() / "preferences")


def test_a_start_says_what_a_step_has(pairs: Path) -> None:
    run = tiny_run(pairs, "train.validate_every=2")
    packed, step, reference, rate, validation = fine_tuning_lines(run, open_run_data(run))
    assert packed.startswith("preference: ") and " pairs fill " in packed and packed.endswith("% (best fit)")
    assert step.startswith("preference: a step has 8 sequences with about ") and step.endswith("pairs; dpo, beta 0.1")
    assert reference.endswith(
        "the model at the start are computed once, before the first step, and kept beside the corpus"
    )
    assert rate.startswith("preference: learning rate grows for 1 steps")
    assert validation == (
        "preference: accuracy and margin of held-out answers before the first step, and every 2 steps and at the end"
    )
    simpo = tiny_run(pairs, "preference.loss=simpo", "preference.sft=0.5")
    lines = fine_tuning_lines(simpo, open_run_data(simpo))
    assert len(lines) == 4 and lines[1].endswith(
        "simpo, beta 2, margin 0.5, and 0.5 of the loss per token of chosen answers"
    )


def test_lines_have_accuracy_and_margin() -> None:
    stream = io.StringIO()
    step = {**dict.fromkeys(STEP_KEYS, 1.0), "kind": "step", "step": 1, **JUDGED}
    with RunProgress(2, stream=stream) as progress:
        progress.update({"kind": "validation", "step": 0, "loss": 0.69, "tokens": 80, **JUDGED})
        progress.update(step)
    first, second = stream.getvalue().splitlines()[:2]
    assert first == "step 0 | validation loss 0.6900 | accuracy 0.750 | margin 0.500 | likelier 0.600 | 80.0 tokens"
    assert second.startswith("step 1/2 | loss 1.0000 | accuracy 0.750 | margin 0.500 | val@0 0.6900")


def finished(folder: Path, accuracy: float, **more: Any) -> Path:
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, 5):
            writer.write_step({**dict.fromkeys(STEP_KEYS, 1.0), "step": step, "tokens": step, **JUDGED})
        for step, value in ((0, 0.5), (4, accuracy)):
            writer.write_validation(step, 0.5, **JUDGED | {"accuracy": value} | more)
    (folder / "config.yaml").write_text(yaml.safe_dump(config()))
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan()))
    os.utime(folder / "metrics.jsonl", (0, 0))
    return folder


def test_report_and_comparison(tmp_path: Path) -> None:
    runs = [finished(tmp_path / "a", 0.9), finished(tmp_path / "b", 0.8)]
    page = write_report(runs[0]).read_text()
    assert "Held-out accuracy" in page and "90.0%" in page and "50.0% after step 0" in page
    charts: dict[str, Any] = {chart.key: chart for chart in sheet(read_run(runs[0])).charts}
    assert {"accuracy", "margin", "answer_reward", "answer_tokens", "reference_distance"} <= charts.keys()
    assert [series.label for series in charts["accuracy"].series] == ["each step", "trend", "held out"]
    assert [series.label for series in charts["answer_tokens"].series] == ["chosen", "rejected"]
    compared = compared_runs(runs)
    assert dict(table_rows(compared))["held-out accuracy, last"] == ["90.0%", "80.0%"]
    drawn = {chart.key for chart in comparison_sheet(compared).charts}
    assert {"accuracy", "margin", "reference_distance", "chosen_tokens", "rejected_tokens"} <= drawn


def test_held_out_answers_of_each_source_are_drawn(tmp_path: Path) -> None:
    by_source = {name: {"accuracy": value, "margin": value} for name, value in (("first", 0.7), ("second", 0.8))}
    runs = [finished(tmp_path / name, 0.9, preferences_by_source=by_source) for name in ("a", "b")]
    charts: dict[str, Any] = {chart.key: chart for chart in sheet(read_run(runs[0])).charts}
    held_out = {series.label: series.values for series in charts["accuracy"].series[2:]}
    assert held_out == {"held out": [0.5, 0.9], "held out, first": [0.7, 0.7], "held out, second": [0.8, 0.8]}
    titles = {chart.title: chart for chart in comparison_sheet(compared_runs(runs)).charts}
    assert [series.values for series in titles["Held-out accuracy, second"].series] == [[0.8, 0.8]] * 2


def test_the_calibration_of_a_reward_model_is_shown(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, 0.9, calibration_error=error) for name, error in (("a", 0.0625), ("b", 0.125))]
    assert "calibration error 0.062" in write_report(runs[0]).read_text()
    assert dict(table_rows(compared_runs(runs)))["held-out calibration error, last"] == ["0.062", "0.125"]
    stream = io.StringIO()
    with RunProgress(2, stream=stream) as progress:
        progress.update({"kind": "validation", "step": 2, "loss": 0.5, "tokens": 80, "calibration_error": 0.0625})
    assert "calibration error 0.062" in stream.getvalue()


def test_a_reference_of_another_tokenizer_is_refused(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.checkpoint.models.initial.check_initial", lambda model, init, key: None)
    folder, notes = tmp_path / "other", list[str]()
    folder.mkdir()
    shutil.copy(next((pairs.parent / "data").rglob("tokenizer.json")), folder)
    run = tiny_run(pairs)
    assert run.preference is not None
    run = replace(
        run,
        model=replace(run.model, init=f"hf:{folder}"),
        preference=replace(run.preference, reference=f"hf:{folder}"),
    )
    check_init(run, notes.append)
    other = tmp_path / "third"
    shutil.copytree(folder, other)
    other_tokenizer(other / "tokenizer.json")
    assert run.preference is not None
    with pytest.raises(BadInput, match=r"preference.reference hf:.*third: tokenizer .* differ: token 100 is"):
        check_init(replace(run, preference=replace(run.preference, reference=f"hf:{other}")), notes.append)


def test_stored_log_probabilities(pairs: Path, tmp_path: Path) -> None:
    path, values = tmp_path / "reference-1", np.array([-1.5, np.nan, -3.25])
    assert read_reference(path, 3) is None
    write_reference(path, values)
    read = read_reference(path, 3)
    assert read is not None
    np.testing.assert_array_equal(read, values)
    with pytest.raises(Damaged, match="not the 4 log-probabilities that were written"):
        read_reference(path, 4)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="not the 3 log-probabilities that were written; remove it"):
        read_reference(path, 3)
    assert place_of(tmp_path, pairs) == tmp_path


def test_keys_follow_from_weights_corpus_and_dtype(pairs: Path) -> None:
    from meshwright.launch.prepare import plan_for

    run = tiny_run(pairs)
    chosen, _ = plan_for(run)
    first = weights_identity(run)
    keys = {
        reference_key(run, chosen, first, "corpus"),
        reference_key(run, chosen, first, "another corpus"),
        reference_key(run, chosen, weights_identity(tiny_run(pairs, "seed=1")), "corpus"),
        reference_key(run, chosen, first, "corpus", "mismatched 48"),
        reference_key(run, replace(chosen, precision=replace(chosen.precision, compute="bf16")), first, "corpus"),
    }
    assert len(keys) == 5
    assert reference_key(tiny_run(pairs, "preference.beta=1"), chosen, first, "corpus") in keys


def test_packed_pairs_have_the_log_probabilities_of_single_ones(pairs: Path) -> None:
    """Of a model, through `meshwright eval`'s comparison: each answer by itself, from position 0, with all logits."""
    run = tiny_run(pairs)
    model = Decoder(run.model).requires_grad_(False)
    initialise(model, run.model, seed=3)
    source = open_data(run.data, seq_len=48, seed=0, split="validation", preference=PAIRS)
    figures = evaluate_pairs(model, HeldOut.of(source, None), micro_batch=3, device=torch.device("cpu")).preferences
    (stream,) = (each.stream for each in source.sources.values())
    means = []
    for start, length in zip(*(each.tolist() for each in stream.document_ranges()), strict=True):
        tokens = torch.from_numpy(stream.read(start, start + length))
        trained = torch.from_numpy(stream.read_weights(start, start + length) != 0)[1:]
        values = model(tokens[None, :-1])[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        means.append(values[trained].mean().item())
    chosen, rejected = np.array(means[::2]), np.array(means[1::2])
    assert figures["pairs"] == len(chosen) > 5 and figures["likelier"] == np.mean(chosen > rejected)
    assert figures["chosen_logprob"] == pytest.approx(chosen.mean(), rel=1e-5)
    assert figures["rejected_logprob"] == pytest.approx(rejected.mean(), rel=1e-5)
