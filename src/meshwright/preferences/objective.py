"""The objective of learning from preferences, and its figures for each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.preferences.losses import answer_losses, pair_losses, rewards, score_losses
from meshwright.spec.preference import PreferenceSpec

SUMS = (
    "good",
    "bad",
    "good_reward",
    "bad_reward",
    "good_tokens",
    "bad_tokens",
    "judged",
    "right",
    "likelier",
    "distance",
    "divergence",
)
"""Sums for each source of data:

good, bad                   number of good and of bad answers
good_reward, bad_reward     their rewards
good_tokens, bad_tokens     their tokens
judged, right               pairs (with kto answers), and those on which the rewards are right
likelier                    pairs whose good answer has the higher mean log-probability per token
distance                    |log-probability per token - the reference's|, over answers
divergence                  z of the step, once per answer
"""


BINS = 10
"""Number of equally wide bins for the probability, from 1/2 to 1, that a reward model's higher score is right."""
CALIBRATION = tuple(f"{what}_{number}" for what in ("judged", "right", "expected") for number in range(BINS))
"""More sums for each source, by bin, for a reward model's calibration: pairs, right pairs, and their probabilities."""
GRAIN = 2.0**-40
"""Log-probabilities of tokens are rounded to multiples of this number. Their sums down to −4,096 nat are exact in fp64."""


class JudgedCounts(NamedTuple):
    """What a step's figures are computed from.

    `judged` is the number of pairs (with kto of answers), and `tokens` the number of tokens of the answers.
    """

    judged: float
    tokens: float


class AnswerSums(NamedTuple):
    """The answers of a micro-batch, all `(batch, answers)` in fp64.

    `totals`: log-probabilities of the answers; for a reward model their scores. `tokens`: numbers of tokens. `signs`: 1 for
    a good answer, -1 for a bad one, 0 for none.
    """

    totals: Tensor
    tokens: Tensor
    signs: Tensor


def answers_of(log_probabilities: Tensor, batch: MicroBatch) -> AnswerSums:
    """Return the answers of a micro-batch with `DataSource.preference_columns`, from its log-probabilities `(batch, seq)`.

    Tokens of prompts and of padding add nothing. The terms of a sum are multiples of `GRAIN`, so that its bits do not depend
    on the order of the additions: they are equal in any packing, and on GPUs at every start of a run.
    """
    assert batch.documents is not None and batch.targets is not None
    signs = batch.columns["signs"].double()
    rows, count = signs.shape
    trained = batch.targets >= 0
    values = torch.where(trained, log_probabilities, 0.0).double()
    exact = (values.detach() / GRAIN).round() * GRAIN + (
        values - values.detach()
    )  # this difference is 0, but it has a gradient
    # The last document of a window may be padding. It is no answer, so its sum is dropped.
    totals, tokens = (
        signs.new_zeros(rows, count + 1).scatter_add(1, batch.documents, terms)[:, :count]
        for terms in (exact, trained.double())
    )
    return AnswerSums(totals, tokens, signs)


def scores_of(values: Tensor, batch: MicroBatch) -> AnswerSums:
    """Return the scores of the answers of a micro-batch with `DataSource.preference_columns`.

    `values` `(batch, seq)` has a score at each token. An answer's score is the one at the last token of its document.
    """
    assert batch.documents is not None and batch.targets is not None
    signs = batch.columns["signs"].double()
    rows, count = signs.shape
    trained = (batch.targets >= 0).double()
    tokens = signs.new_zeros(rows, count + 1).scatter_add(1, batch.documents, trained)[:, :count]
    place = torch.arange(values.shape[1], device=values.device).expand_as(values)
    last = place.new_zeros(rows, count + 1).scatter_reduce(1, batch.documents, place, "amax")[:, :count]
    return AnswerSums(values.double().gather(1, last), tokens, signs)


class PreferenceObjective:
    """The loss of `spec` over micro-batches of whole answers.

    The trainer divides it by the number of pairs of the step, with kto by the number of answers. `sums` `(sources, names)`
    are the sums over all micro-batches since the last `take`. With `calibrates` the figures include the calibration of a
    reward model, which needs the pairs of a whole validation.
    """

    by_sequence = True

    def __init__(
        self, spec: PreferenceSpec, sources: Sequence[str], device: torch.device, *, calibrates: bool = False
    ) -> None:
        self._spec = spec
        self._sources = tuple(sources)
        self._calibrates = calibrates and spec.scores
        self._names = (*SUMS, *(CALIBRATION if self._calibrates else ()))
        self.sums = torch.zeros(len(self._sources), len(self._names), dtype=torch.float64, device=device)
        self.shift = torch.zeros((), dtype=torch.float64, device=device)
        """β·z of the step, for kto. z is the divergence from the reference, estimated with answers to other prompts."""

    def count(self, batch: MicroBatch) -> Tensor:
        """Return the number of pairs in a micro-batch, with kto the number of answers."""
        signs = batch.columns["signs"]
        return (signs > 0 if self._spec.paired else signs != 0).sum(dtype=torch.float64)

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        """Return the summed loss of a micro-batch, and add to `sums`.

        `log_probabilities` `(batch, seq)` are those of the targets; for a reward model they are the tokens' scores.
        """
        spec = self._spec
        read = scores_of if self._spec.scores else answers_of
        totals, tokens, signs = read(log_probabilities, batch)
        present = signs != 0
        lengths = tokens.clamp(min=1)
        reference = batch.columns["reference"] if spec.has_reference else None
        values = rewards(spec, totals, lengths, reference)
        if spec.scores:
            losses = score_losses(spec, values[:, ::2], values[:, 1::2], self._margins_of_data(batch))
            losses = losses.where(present[:, ::2], 0.0)
        elif spec.paired:
            pairs = present[:, ::2]
            margins = values[:, ::2] - values[:, 1::2]
            losses = pair_losses(spec, margins, (totals / lengths)[:, ::2]).where(pairs, 0.0)
        else:
            losses = answer_losses(spec, values, signs, self.shift).where(present, 0.0)
        with torch.no_grad():
            self._add(values.detach(), totals.detach() / lengths, tokens, signs, reference, batch.columns["sources"])
        return losses.sum().to(log_probabilities.dtype)

    def _margins_of_data(self, batch: MicroBatch) -> Tensor | float:
        """Return by how much each chosen answer's score should be higher, computed from the scores in the data."""
        if not self._spec.score_margin:
            return 0.0
        given = batch.columns["scores"].double()
        return self._spec.score_margin * (given[:, ::2] - given[:, 1::2])

    def _add(
        self, values: Tensor, means: Tensor, tokens: Tensor, signs: Tensor, reference: Tensor | None, sources: Tensor
    ) -> None:
        """Add the answers of a micro-batch to `sums`. All tensors but `sources` are `(batch, answers)`."""
        good, bad = ((signs == sign).double() for sign in (1, -1))
        if self._spec.paired:
            margins = values[:, ::2] - values[:, 1::2]
            judged = good[:, ::2]
            likelier = _ahead(means[:, ::2] - means[:, 1::2])
        else:
            # kto: an answer is judged right if its reward is above β·z for a good one, below it for a bad one.
            margins = signs * (values - self.shift)
            judged = good + bad
            likelier = torch.zeros_like(values)
        right = _ahead(margins)
        distance = torch.zeros_like(means) if reference is None else (means - reference / tokens.clamp(min=1)).abs()
        per_row = [
            good,
            bad,
            good * values,
            bad * values,
            good * tokens,
            bad * tokens,
            judged,
            judged * right,
            judged * likelier,
            (good + bad) * distance,
            (good + bad) * (self.shift / self._spec.scale),
        ]
        if self._calibrates:
            per_row += _by_bin(judged, right, torch.sigmoid(margins.abs()))
        # (sources, batch): whether a sequence is of a source. Multiplied by the sums of each sequence, (batch, names).
        in_source = sources[None] == torch.arange(len(self._sources), device=sources.device)[:, None]
        self.sums += in_source.double() @ torch.stack([each.sum(1) for each in per_row], dim=1)

    def take(self) -> Tensor:
        """Return the sums flattened, `(sources · names,)`, and start new ones."""
        taken = self.sums.flatten().clone()
        self.sums.zero_()
        return taken

    def figures(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the figures from sums over all ranks. With several sources the figures of each source are included."""
        width = len(self._names)
        rows = {name: sums[width * i : width * (i + 1)] for i, name in enumerate(self._sources)}
        found: dict[str, Any] = dict(self._of([sum(column) for column in zip(*rows.values(), strict=True)]))
        if len(rows) > 1:
            found["preferences_by_source"] = {name: self._of(row) for name, row in rows.items() if row[0] + row[1]}
        return found

    def counts(self, sums: Sequence[float]) -> JudgedCounts:
        """Return the counts from sums over all ranks, over all sources."""
        total = {name: sum(sums[i :: len(self._names)]) for i, name in enumerate(self._names)}
        return JudgedCounts(total["judged"], total["good_tokens"] + total["bad_tokens"])

    def _of(self, row: Sequence[float]) -> dict[str, float]:
        """Return the figures of one row of sums."""
        total = dict(zip(self._names, row, strict=True))

        def mean(name: str, over: str) -> float:
            return total[name] / total[over] if total[over] else math.nan

        good = mean("good_reward", "good")
        bad = mean("bad_reward", "bad")
        found = {
            "margin": good - bad,
            "accuracy": mean("right", "judged"),
            "chosen_reward": good,
            "rejected_reward": bad,
            "chosen_tokens": mean("good_tokens", "good"),
            "rejected_tokens": mean("bad_tokens", "bad"),
        }
        if self._spec.scores:
            found["pairs"] = total["judged"]
        elif self._spec.paired:
            found |= {"pairs": total["judged"], "likelier": mean("likelier", "judged")}
        else:
            found |= {"answers": total["judged"], "reference_kl": mean("divergence", "judged")}
        if self._spec.has_reference:
            found["reference_distance"] = total["distance"] / max(total["good"] + total["bad"], 1.0)
        if self._calibrates:
            gaps = (abs(total[f"right_{bin}"] - total[f"expected_{bin}"]) for bin in range(BINS))
            found["calibration_error"] = sum(gaps) / max(total["judged"], 1.0)
        return found


def _by_bin(judged: Tensor, right: Tensor, expected: Tensor) -> list[Tensor]:
    """Return the terms of `CALIBRATION`. `expected` is the probability that the judgement of a pair is right."""
    # `expected` is from 1/2 to 1, so 2 · expected - 1 is from 0 to 1.
    place = ((2 * expected - 1) * BINS).long().clamp(max=BINS - 1)
    inside = [judged * (place == number) for number in range(BINS)]
    return [each * terms for terms in (torch.ones_like(judged), right, expected) for each in inside]


def _ahead(difference: Tensor) -> Tensor:
    """Return 1 where the difference is positive, 1/2 where it is 0, otherwise 0."""
    return (difference.sign() + 1) / 2
