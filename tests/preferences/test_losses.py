"""Losses of preferences against the formulas of TRL 1.16 for single pairs; packing, fillers and micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid

from meshwright.data.loader import MicroBatch
from meshwright.preferences.losses import answer_losses, rewards
from meshwright.preferences.objective import PreferenceObjective
from meshwright.spec.preference import Loss, PreferenceSpec

SEQ = 32
LENGTHS = [(3, 5), (1, 2), (4, 1), (2, 2)]
"""Tokens of chosen and rejected answers."""
SPECS = {
    "dpo": PreferenceSpec(),
    "dpo, smoothed": PreferenceSpec(beta=0.3, label_smoothing=0.1),
    "dpo and sft": PreferenceSpec(sft=0.5),
    "ipo": PreferenceSpec(loss="ipo"),
    "simpo": PreferenceSpec(loss="simpo", margin=0.4),
    "orpo": PreferenceSpec(loss="orpo"),
    "kto": PreferenceSpec(loss="kto", desirable=1.5),
}


def drawn(seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The log-probabilities of the tokens of each pair's answers, and the reference's sums `(pairs, 2)`."""
    draw = torch.Generator().manual_seed(seed)
    answers = [tuple((-torch.rand(n, generator=draw) - 0.1).double() for n in pair) for pair in LENGTHS]
    return answers, -4 * torch.rand(len(LENGTHS), 2, generator=draw).double()  # type: ignore[return-value]


def row(
    pairs: list[tuple[Tensor, Tensor]], reference: Tensor, answers: int = 8, prompt: int = 1
) -> tuple[Tensor, MicroBatch]:
    """Pairs packed into one row with prompts before each answer, and fillers behind: its log-probabilities, and the micro-batch.

    Prompts and fillers have log-probabilities too, which must not count.
    """
    values, targets = torch.full((1, SEQ), -7.0).double(), torch.full((1, SEQ), -1)
    documents, at = torch.full((1, SEQ), 2 * len(pairs)), 0
    for number, answer in enumerate(each for pair in pairs for each in pair):
        stop = at + prompt + len(answer)
        documents[0, at:stop] = number
        values[0, at + prompt : stop], targets[0, at + prompt : stop] = answer, 1
        at = stop
    count = 2 * len(pairs)
    signs = torch.tensor([[1.0, -1.0] * len(pairs) + [0.0] * (answers - count)])
    columns = {
        "signs": signs,
        "reference": torch.cat([reference.flatten(), torch.zeros(answers - count).double()])[None],
        "sources": torch.zeros(1, dtype=torch.long),
    }
    tokens = torch.zeros(1, SEQ, dtype=torch.long)
    return values, MicroBatch(tokens, targets, tokens, documents, int((targets >= 0).sum()), columns=columns)


def joined(rows: list[tuple[Tensor, MicroBatch]]) -> tuple[Tensor, MicroBatch]:
    """Rows as one micro-batch."""
    values, batches = zip(*rows, strict=True)
    columns = {name: torch.cat([batch.columns[name] for batch in batches]) for name in batches[0].columns}
    parts = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name in ("tokens", "targets", "positions", "documents")
    }
    return torch.cat(values), MicroBatch(valid_tokens=sum(b.valid_tokens for b in batches), columns=columns, **parts)


def objective(spec: PreferenceSpec, sources: int = 1) -> PreferenceObjective:
    made = PreferenceObjective(spec, [f"source {n}" for n in range(sources)], torch.device("cpu"))
    made.shift = torch.tensor(0.02).double()
    return made


def measured(spec: PreferenceSpec, values: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, float]:
    """The loss, its gradient by log-probability, and the count."""
    of_batch, values = objective(spec), values.clone().requires_grad_()
    loss = of_batch.loss(values, batch)
    return loss.detach(), torch.autograd.grad(loss, values)[0], float(of_batch.count(batch))


def plain(spec: PreferenceSpec, chosen: Tensor, rejected: Tensor, reference: Tensor) -> Tensor:
    """The loss of one pair as TRL 1.16 computes it: `dpo_trainer` (sigmoid, ipo), `kto_trainer`, and its cpo (simpo) and orpo trainers."""
    sums, means, beta = (chosen.sum(), rejected.sum()), (chosen.mean(), rejected.mean()), spec.scale
    ratios = sums[0] - reference[0], sums[1] - reference[1]
    if spec.loss == "dpo":
        delta, smoothing = beta * (ratios[0] - ratios[1]), spec.label_smoothing
        return -logsigmoid(delta) * (1 - smoothing) - logsigmoid(-delta) * smoothing - spec.sft * means[0]
    if spec.loss == "ipo":
        return (ratios[0] / len(chosen) - ratios[1] / len(rejected) - 1 / (2 * beta)) ** 2
    if spec.loss == "simpo":
        return -logsigmoid(beta * (means[0] - means[1] - spec.ahead / beta))
    if spec.loss == "orpo":
        log_odds = (means[0] - means[1]) - (torch.log1p(-means[0].exp()) - torch.log1p(-means[1].exp()))
        return -means[0] - beta * logsigmoid(log_odds)
    kl = 0.02 / beta
    losses = 1 - torch.sigmoid(beta * (ratios[0] - kl)), 1 - torch.sigmoid(beta * (kl - ratios[1]))
    return spec.desirable * losses[0] + spec.undesirable * losses[1]


@pytest.mark.parametrize("name", SPECS)
def test_packed_pairs_equal_single_pairs_and_the_formulas(name: str) -> None:
    """Bit for bit in float64: the loss of a row is the sum of those of its pairs, for any packing; so is each gradient."""
    spec, (answers, reference) = SPECS[name], drawn()
    single = [measured(spec, *row([pair], reference[n : n + 1])) for n, pair in enumerate(answers)]
    written = [plain(spec, *pair, reference[n]) for n, pair in enumerate(answers)]
    for (loss, _, count), expected in zip(single, written, strict=True):
        torch.testing.assert_close(loss, expected)
        assert count == (1 if spec.paired else 2)
    loss, slopes, count = measured(spec, *row(answers, reference))
    assert count == sum(each[2] for each in single)
    torch.testing.assert_close(loss, torch.stack([each[0] for each in single]).sum(), rtol=1e-14, atol=0)
    packed = slopes[slopes != 0]
    assert torch.equal(packed, torch.cat([each[1][each[1] != 0] for each in single]))
    assert len(packed) == sum(map(sum, LENGTHS))


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "kto"])
def test_micro_batches_add_up(name: str) -> None:
    """Whatever is accumulated: the sums of losses and of counts over micro-batches are those of the whole step."""
    spec, (answers, reference) = SPECS[name], drawn(1)
    rows = [row(answers[n : n + 2], reference[n : n + 2], prompt=n) for n in (0, 2)]
    whole, parts = measured(spec, *joined(rows)), [measured(spec, *each) for each in rows]
    torch.testing.assert_close(whole[0], parts[0][0] + parts[1][0])
    assert torch.equal(whole[1], torch.cat([part[1] for part in parts]))
    assert whole[2] == sum(part[2] for part in parts)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_the_first_loss_and_margin(loss: Loss) -> None:
    """Where the model is the reference, fillers and empty places are no answers: ln 2 for dpo, margin 0."""
    spec, (answers, _) = PreferenceSpec(loss=loss), drawn()
    reference = torch.tensor([[each.sum() for each in pair] for pair in answers]).double()
    values, batch = row(answers, reference)
    of_batch = PreferenceObjective(spec, ["a"], torch.device("cpu"))
    mean = of_batch.loss(values, batch) / of_batch.count(batch)
    expected = {"dpo": math.log(2), "ipo": 1 / (2 * spec.scale) ** 2, "kto": 0.5}[loss]
    assert float(mean) == pytest.approx(expected, rel=1e-12)
    figures = of_batch.figures(of_batch.take().tolist())
    assert figures["margin"] == pytest.approx(0, abs=1e-12) and figures["accuracy"] == 0.5
    assert figures["reference_distance"] == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 1000), st.sampled_from(["dpo", "ipo", "simpo", "orpo"]))
def test_swapping_the_answers_negates_the_margin(seed: int, loss: Loss) -> None:
    (answers, reference), spec = drawn(seed), PreferenceSpec(loss=loss)
    figures = []
    for pairs, sums in ((answers, reference), ([(b, a) for a, b in answers], reference.flip(1))):
        of_batch = objective(spec)
        of_batch.loss(*row(pairs, sums))
        figures.append(of_batch.figures(of_batch.take().tolist()))
    assert figures[0]["margin"] == pytest.approx(-figures[1]["margin"])
    assert figures[0]["accuracy"] == pytest.approx(1 - figures[1]["accuracy"])


def test_figures_by_source() -> None:
    (answers, reference), spec = drawn(), PreferenceSpec()
    rows = [row(answers[:1], reference[:1]), row(answers[1:3], reference[1:3])]
    values, batch = joined(rows)
    of_batch = objective(spec, 2)
    of_batch.loss(values, replace(batch, columns={**batch.columns, "sources": torch.tensor([1, 0])}))
    figures: dict[str, Any] = of_batch.figures(of_batch.take().tolist())
    by_source = figures["preferences_by_source"]
    assert [by_source[f"source {n}"]["pairs"] for n in (0, 1)] == [2, 1] and figures["pairs"] == 3
    assert by_source["source 1"]["chosen_tokens"] == LENGTHS[0][0]
    assert figures["rejected_tokens"] == pytest.approx(sum(pair[1] for pair in LENGTHS[:3]) / 3)
    assert not of_batch.take().any()


def test_certain_answers_have_finite_odds() -> None:
    spec = PreferenceSpec(loss="orpo")
    certain = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    reward = rewards(spec, certain, torch.ones(1), None)
    assert reward.isfinite().all() and torch.autograd.grad(reward.sum(), certain)[0].isfinite().all()


def test_the_weights_of_kto_have_the_precision_of_the_rewards() -> None:
    spec = PreferenceSpec(loss="kto", desirable=1.1, undesirable=0.7)
    losses = answer_losses(spec, torch.zeros(2).double(), torch.tensor([1.0, -1.0]), torch.tensor(0.0).double())
    assert losses.tolist() == [0.55, 0.35]
