"""Reward models end to end: training, adapters, margins of the data, folders, scores and figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from meshwright.checkpoint.models.convert import export_adapter, export_checkpoint, import_checkpoint, merge_adapter
from meshwright.checkpoint.models.single_device import load_model
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.source import open_data
from meshwright.launch.fine_tuning import fine_tuning_lines
from meshwright.launch.prepare import open_run_data
from meshwright.preferences.objective import BINS, PreferenceObjective
from meshwright.serve.reward_scorer import open_scorer
from meshwright.spec.errors import BadInput
from meshwright.spec.model import SCORE
from meshwright.spec.preference import PreferenceSpec
from meshwright.training.evaluate import HeldOut
from meshwright.training.preferences import SCORED_PAIRS, evaluate_pairs
from tests.distributed.pool import Pool
from tests.distributed.test_preferences import LORA, figures, judged
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.preferences.corpus import make_preferences, question, write_records
from tests.slow import quick_first
from tests.training.tiny import ranks, staged, tiny_run

REWARD = ["preference.loss=reward"]
CPU, FP32 = torch.device("cpu"), torch.float32
PLANS = {
    "tensor": ["cluster.gpus_per_node=2", "plan.tensor=2"],
    "pipeline": staged(2, "zbv"),
    "fsdp": ranks(2),
    "ring": ["cluster.gpus_per_node=2", "plan.context_ring=2"],
    "offloaded optimizer, bf16": [*ranks(2), "plan.offload=optimizer", "plan.compute=bf16"],
}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preferences(tmp_path_factory.getbasetemp() / "preferences")


@pytest.fixture(scope="module")
def rewarded(pool: Pool, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained reward model."""
    runs = tmp_path_factory.mktemp("rewarded")
    trained(pool, pairs, runs, *ranks(1), *REWARD)
    return runs / "tiny"


def held_out_texts(pairs: Path) -> list[list[int]]:
    """All held-out answers with their prompts, good and bad in turn."""
    data = open_data(tiny_run(pairs).data, seq_len=48, seed=0, split="validation", preference=SCORED_PAIRS)
    (source,) = data.sources.values()
    return [
        source.stream.read(start, start + length).tolist()
        for start, length in zip(*(each.tolist() for each in source.stream.document_ranges()), strict=True)
    ]


@pytest.mark.parametrize("name", quick_first(2, PLANS))
def test_layouts_learn_the_same(pool: Pool, pairs: Path, tmp_path: Path, name: str) -> None:
    layers = [each for each in PLANS[name] if each.startswith("model.")]
    seen = []
    for part, plan in (("one", [*ranks(1), *layers]), ("several", PLANS[name])):
        results = trained(pool, pairs, tmp_path / part, *plan, *REWARD)
        seen.append([figures(results, figure) for figure in ("loss", "margin", "accuracy", "pairs", "chosen_tokens")])
        (before, first), (after, last) = judged(results)
        assert (before, after) == (0, 4) and last.preferences["accuracy"] > 0.9 and last.loss < first.loss
        assert 0 < last.preferences["calibration_error"] < 0.5 and "likelier" not in last.preferences
        assert all("calibration_error" not in step for step in results[0].steps)
    rounding = 0.2 if "bf16" in name else 1e-3
    for one, several in zip(*seen, strict=True):
        assert several == pytest.approx(one, rel=rounding, abs=rounding if "bf16" in name else 1e-5)


def test_a_stopped_run_goes_on_with_the_same_bits(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    whole = trained(pool, pairs, tmp_path / "whole", *ranks(2), *REWARD, LORA)
    first = trained(pool, pairs, tmp_path / "parts", *ranks(2), *REWARD, LORA, stop_at=2)
    second = trained(pool, pairs, tmp_path / "parts", *ranks(2), *REWARD, LORA)
    assert [result.began for result in second] == [2, 2]
    tensors = merge_tensors(second)
    assert any(SCORE in name for name in tensors) and same_bits(tensors, merge_tensors(whole))
    for figure in ("loss", "margin"):
        assert figures(first, figure) + figures(second, figure) == figures(whole, figure)


def test_the_first_scores_have_the_deviation_of_the_norm(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """Weights of 1/√(hidden + 1): scores of normed states have a deviation of about 1, and margins one of about √2."""
    trained(
        pool, pairs, tmp_path, *ranks(1), *REWARD, "train.steps=1", "train.warmup_steps=0", "train.learning_rate=1e-9"
    )
    scorer = open_scorer(tmp_path / "tiny", CPU, FP32)
    draw = torch.Generator().manual_seed(0)
    found = scorer.score(torch.randint(304, (400, 12), generator=draw).tolist())
    assert 0.6 < np.std(found) < 1.6


def test_scores_of_a_run_its_folder_and_transformers_are_equal(rewarded: Path, pairs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    texts = held_out_texts(pairs)
    export_checkpoint(rewarded, tmp_path / "folder", dtype="fp32")
    scores = open_scorer(rewarded, CPU, FP32).score(texts)
    assert open_scorer(tmp_path / "folder", CPU, FP32).score(texts) == pytest.approx(scores, rel=1e-6)
    judge: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder", dtype=FP32).eval()
    with torch.no_grad():
        theirs = [judge(input_ids=torch.tensor([text])).logits[0, 0].item() for text in texts]
    assert theirs == pytest.approx(scores, rel=1e-4, abs=1e-5)
    assert np.mean([good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True)]) > 0.9
    assert judge.config.pad_token_id is None  # the template ends answers with the only special token
    import_checkpoint(tmp_path / "folder", tmp_path / "imported")
    assert open_scorer(tmp_path / "imported", CPU, FP32).score(texts[:2]) == pytest.approx(scores[:2], rel=1e-6)


def test_padding_and_batches_change_no_score(rewarded: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, texts = open_scorer(rewarded, CPU, FP32), held_out_texts(pairs)
    alone = [scorer.score([text])[0] for text in texts]
    assert scorer.score(texts) == pytest.approx(alone, rel=1e-5)
    monkeypatch.setattr("meshwright.serve.reward_scorer.SCORED_TOKENS", 50)
    assert scorer.score(texts) == pytest.approx(alone, rel=1e-5)
    scorer.pad = 7
    assert scorer.score([[*texts[0], 7, 7]]) == pytest.approx(alone[:1], rel=1e-5)
    assert scorer.after_answer == () and scorer.tokenizer_digest is not None
    for wrong, said in (
        ([[]], "text 0 has 0 tokens"),
        ([[1], [1] * 65], "text 1 has 65 tokens"),
        ([[304]], "token 304"),
    ):
        with pytest.raises(ValueError, match=said):
            scorer.score(wrong)


def test_what_a_template_writes_behind_answers(rewarded: Path, tmp_path: Path) -> None:
    """The score is trained behind it, so that those who score tokens of an answer append it."""
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(rewarded, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("{%endgeneration%}", "{%endgeneration%}{{'!a'}}"))
    scorer = open_scorer(folder, CPU, FP32)
    from meshwright.data.tokenizer_file import open_tokenizer

    assert open_tokenizer(folder / "tokenizer.json").decode(list(scorer.after_answer)) == "!a"


def test_adapters_beside_a_language_model(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """The head is new and trained whole; the base has none. A folder of peft has it too."""
    import peft
    from transformers import AutoModelForSequenceClassification

    trained(
        pool, pairs, tmp_path, *ranks(1), "train.steps=1", "train.warmup_steps=0", "name=base", "preference.loss=simpo"
    )
    export_checkpoint(tmp_path / "base", tmp_path / "language", dtype="fp32")
    more = [*REWARD, LORA, f"model.init=hf:{tmp_path / 'language'}", "train.learning_rate=3e-2", "name=adapted"]
    results = trained(pool, pairs, tmp_path, *ranks(2), *more)
    assert judged(results)[-1][1].preferences["accuracy"] > 0.9
    texts = held_out_texts(pairs)
    scores = open_scorer(tmp_path / "adapted", CPU, FP32).score(texts)
    merge_adapter(tmp_path / "language", tmp_path / "adapted", tmp_path / "merged", dtype="fp32")
    assert open_scorer(tmp_path / "merged", CPU, FP32).score(texts) == pytest.approx(scores, rel=1e-4)
    export_adapter(tmp_path / "adapted", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language", num_labels=1, dtype=FP32)
    judge: Any = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    judge.config.pad_token_id = None
    with torch.no_grad():
        theirs = [judge(input_ids=torch.tensor([text])).logits[0, 0].item() for text in texts]
    assert theirs == pytest.approx(scores, rel=1e-3, abs=1e-4)
    merge_adapter(tmp_path / "language", tmp_path / "peft", tmp_path / "merged again", dtype="fp32")
    assert open_scorer(tmp_path / "merged again", CPU, FP32).score(texts) == pytest.approx(scores, rel=1e-4)
    again = LORA.replace("}", f", init: {tmp_path / 'adapted'}}}")
    second = [*more[:1], again, more[2], "train.steps=1", "train.warmup_steps=0", "name=second"]
    before = judged(trained(pool, pairs, tmp_path, *ranks(1), *second))[0][1]
    assert before.preferences["accuracy"] > 0.9  # it goes on from adapters and head


def test_held_out_accuracy_and_calibration_equal_the_formulas(rewarded: Path, pairs: Path) -> None:
    model = load_model(rewarded, CPU, FP32, scores=True)
    data = open_data(tiny_run(pairs).data, seq_len=48, seed=0, split="validation", preference=SCORED_PAIRS)
    found = evaluate_pairs(model, HeldOut.of(data, None), micro_batch=3, device=CPU)
    scores = np.array(open_scorer(rewarded, CPU, FP32).score(held_out_texts(pairs)))
    margins = scores[::2] - scores[1::2]
    assert found.loss == pytest.approx(float(-logsigmoid(torch.tensor(margins)).mean()), rel=1e-5)
    assert found.preferences["accuracy"] == np.mean(margins > 0) and found.preferences["pairs"] == len(margins)
    assert found.preferences["margin"] == pytest.approx(margins.mean(), rel=1e-5)
    assert found.preferences["calibration_error"] == pytest.approx(expected_error(margins), abs=1e-5)


def expected_error(margins: np.ndarray) -> float:
    """Expected calibration error over bins of the probability, between 1/2 and 1, of the answer with the higher score."""
    sure, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    error = 0.0
    for low, high in pairwise(np.linspace(0.5, 1, BINS + 1)):
        inside = (sure >= low) & ((sure < high) | (high == 1))
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    return error


@pytest.mark.parametrize(
    ("margin", "expected"), [(3.0, 1 - 1 / (1 + math.exp(-3))), (-3.0, 1 / (1 + math.exp(-3))), (0.0, 0.0)]
)
def test_calibration_of_equal_margins(margin: float, expected: float) -> None:
    """Always right at 95% is 5 points too modest; always wrong is 95 points off; equal scores are right half the time."""
    from tests.preferences.test_losses import row

    objective = PreferenceObjective(PreferenceSpec(loss="reward"), ["a"], CPU, calibrates=True)
    answers = [(torch.ones(1).double(), torch.ones(1).double()) for _ in range(4)]
    _, batch = row(answers, torch.zeros(4, 2))
    assert batch.documents is not None
    values = torch.where(batch.documents % 2 == 0, margin, 0.0).double()
    objective.loss(values, batch)
    found = objective.figures(objective.take().tolist())
    assert found["calibration_error"] == pytest.approx(expected) and found["margin"] == margin


def scored_corpus(pairs: Path, folder: Path, scores: bool) -> Path:
    records = [
        question(number) | ({"score_chosen": 2 + number % 3, "score_rejected": 1.5} if scores else {})
        for number in range(40)
    ]
    source = write_records(folder / "scored.jsonl", records)
    prepare(
        [str(source)], str(pairs.parent / "base"), folder / "scored", chat=ChatRequest(preferences=True), held_out=0.2
    )
    return folder / "scored"


def test_margins_of_the_data(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """The loss asks for the difference of the scores in the data; figures are without it."""
    data = f'data.mix={{"{scored_corpus(pairs, tmp_path, True)}": 1}}'
    short = [*REWARD, data, "train.steps=1", "train.warmup_steps=0"]
    losses = {
        factor: trained(pool, pairs, tmp_path / str(factor), *ranks(1), *short, f"preference.score_margin={factor}")[0]
        for factor in (0, 2)
    }
    run = tiny_run(pairs, *short, "preference.score_margin=2")
    samples = open_run_data(run)
    (source,) = samples.sources.values()
    assert source.scores is not None and {*source.scores[::2].tolist()} == {2.0, 3.0, 4.0}
    assert {*source.scores[1::2].tolist()} == {1.5}
    zero, two = (losses[factor].steps[0] for factor in (0, 2))
    assert zero["margin"] == two["margin"] and two["loss"] > zero["loss"] + 1
    assert (
        "score_margin 2" in fine_tuning_lines(run, samples)[1] and "reward model" in fine_tuning_lines(run, samples)[1]
    )
    (tmp_path / "plain").mkdir()
    plain = f'data.mix={{"{scored_corpus(pairs, tmp_path / "plain", False)}": 1}}'
    with pytest.raises(BadInput, match=r"no pair has scores, whose difference preference.score_margin reads"):
        open_run_data(tiny_run(pairs, *REWARD, plain, "preference.score_margin=2"))


def test_an_answers_last_token_is_an_input(pairs: Path) -> None:
    """A pair of exactly seq_len tokens fits and one of seq_len + 1 does not; of other losses the last token is only predicted."""
    run = tiny_run(pairs, *REWARD)
    source = next(iter(open_run_data(run).sources.values()))
    longest = int(source.stream.document_ranges()[1].reshape(-1, 2).sum(1).max())
    exact = open_run_data(tiny_run(pairs, *REWARD, f"train.seq_len={longest}"))
    batch = exact.samples(np.arange(exact.windows))
    for row, signs in enumerate(batch.columns["signs"]):
        assert batch.documents[row].max() >= (signs != 0).sum() - 1
    with pytest.raises(BadInput, match=rf"a pair of {longest} tokens, .* train.seq_len is {longest - 1}"):
        open_run_data(tiny_run(pairs, *REWARD, f"train.seq_len={longest - 1}"))
    assert open_run_data(tiny_run(pairs, "preference.loss=simpo", f"train.seq_len={longest - 1}")).windows


def test_language_and_reward_models_are_told_apart(rewarded: Path, pairs: Path, tmp_path: Path) -> None:
    from meshwright.serve.load import load_for_engine
    from meshwright.spec.engine import EngineOptions

    with pytest.raises(BadInput, match=r"is a reward model, which gives texts scores and writes none"):
        load_for_engine(rewarded, CPU, FP32, EngineOptions())
    with pytest.raises(BadInput, match=r"is a reward model"):
        load_model(rewarded, CPU, FP32)
    run = tiny_run(pairs, *REWARD)
    assert run.model.head == "score" and not run.model.tied
    assert tiny_run(pairs).model.head == "vocabulary"
    from meshwright.checkpoint.models.initial import check_initial

    with pytest.raises(BadInput, match=r"head.weight is missing there"):
        check_initial(replace(run.model, head="vocabulary"), f"checkpoint:{rewarded}")
