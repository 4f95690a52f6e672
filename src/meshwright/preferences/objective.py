"""The objective of preferences, and the figures of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.preferences.losses import answer_losses, pair_losses, rewards
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
"""What is summed for each source: answers, their rewards and tokens; what was judged, how much of it right, and how often the good answer
is likelier per token; how far the answers' log-probabilities per token are from the reference's; and z of the step for each answer."""


GRAIN = 2.0**-40
"""Log-probabilities of tokens are rounded to multiples of this: sums of them down to −4,096 nat are exact in fp64."""


class JudgedCounts(NamedTuple):
    """What the figures of a step are of: pairs, with kto answers; and the tokens of the answers."""

    judged: float
    tokens: float


class AnswerSums(NamedTuple):
    """The answers of a micro-batch, all `(batch, answers)` fp64: log-probabilities, numbers of tokens, and 1, -1 or 0 for none."""

    totals: Tensor
    tokens: Tensor
    signs: Tensor


def answers_of(log_probabilities: Tensor, batch: MicroBatch) -> AnswerSums:
    """The sums over the answers of a micro-batch of `DataSource.preference_columns`; tokens of prompts and fillers add nothing.

    A sum has the same bits in any order, and so in any packing and at every start of a run on GPUs: its terms are multiples of `GRAIN`.
    """
    assert batch.documents is not None and batch.targets is not None
    signs = batch.columns["signs"].double()
    rows, count = signs.shape
    trained = batch.targets >= 0
    values = torch.where(trained, log_probabilities, 0.0).double()
    exact = (values.detach() / GRAIN).round() * GRAIN + (
        values - values.detach()
    )  # the difference is 0, with a gradient
    # A last document fills the window. It is no answer.
    totals, tokens = (
        signs.new_zeros(rows, count + 1).scatter_add(1, batch.documents, terms)[:, :count]
        for terms in (exact, trained.double())
    )
    return AnswerSums(totals, tokens, signs)


class PreferenceObjective:
    """The loss of `spec` over micro-batches of whole answers, divided by the number of pairs of the step, with kto by that of answers.

    `sums` `(sources, SUMS)` are those of all micro-batches since they were last taken.
    """

    by_sequence = True

    def __init__(self, spec: PreferenceSpec, sources: Sequence[str], device: torch.device) -> None:
        self._spec, self._sources = spec, tuple(sources)
        self.sums = torch.zeros(len(self._sources), len(SUMS), dtype=torch.float64, device=device)
        self.shift = torch.zeros((), dtype=torch.float64, device=device)
        """β·z of the step, for kto: z is the divergence from the reference, estimated with answers to other prompts."""

    def count(self, batch: MicroBatch) -> Tensor:
        """The pairs of a micro-batch, with kto its answers."""
        signs = batch.columns["signs"]
        return (signs > 0 if self._spec.paired else signs != 0).sum(dtype=torch.float64)

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch."""
        spec, (totals, tokens, signs) = self._spec, answers_of(log_probabilities, batch)
        present, lengths = signs != 0, tokens.clamp(min=1)
        reference = batch.columns["reference"] if spec.has_reference else None
        values = rewards(spec, totals, lengths, reference)
        if spec.paired:
            pairs, margins = present[:, ::2], values[:, ::2] - values[:, 1::2]
            losses = pair_losses(spec, margins, (totals / lengths)[:, ::2]).where(pairs, 0.0)
        else:
            losses = answer_losses(spec, values, signs, self.shift).where(present, 0.0)
        with torch.no_grad():
            self._add(values.detach(), totals.detach() / lengths, tokens, signs, reference, batch.columns["sources"])
        return losses.sum().to(log_probabilities.dtype)

    def _add(
        self, values: Tensor, means: Tensor, tokens: Tensor, signs: Tensor, reference: Tensor | None, sources: Tensor
    ) -> None:
        good, bad = ((signs == sign).double() for sign in (1, -1))
        if self._spec.paired:
            judged, likelier = good[:, ::2], _ahead(means[:, ::2] - means[:, 1::2])
            right = _ahead(values[:, ::2] - values[:, 1::2])
        else:
            judged, likelier = good + bad, torch.zeros_like(values)
            right = _ahead(signs * (values - self.shift))
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
        in_source = sources[None] == torch.arange(len(self._sources), device=sources.device)[:, None]
        self.sums += in_source.double() @ torch.stack([each.sum(1) for each in per_row], dim=1)

    def take(self) -> Tensor:
        """The sums `(sources · SUMS,)`, which begin anew."""
        taken = self.sums.flatten().clone()
        self.sums.zero_()
        return taken

    def figures(self, sums: Sequence[float]) -> dict[str, Any]:
        """The figures of sums over all ranks; with several sources also those of each."""
        width = len(SUMS)
        rows = {name: sums[width * i : width * (i + 1)] for i, name in enumerate(self._sources)}
        found: dict[str, Any] = dict(self._of([sum(column) for column in zip(*rows.values(), strict=True)]))
        if len(rows) > 1:
            found["preferences_by_source"] = {name: self._of(row) for name, row in rows.items() if row[0] + row[1]}
        return found

    def counts(self, sums: Sequence[float]) -> JudgedCounts:
        """The counts in sums over all ranks, of all sources together."""
        total = {name: sum(sums[i :: len(SUMS)]) for i, name in enumerate(SUMS)}
        return JudgedCounts(total["judged"], total["good_tokens"] + total["bad_tokens"])

    def _of(self, row: Sequence[float]) -> dict[str, float]:
        total = dict(zip(SUMS, row, strict=True))

        def mean(name: str, over: str) -> float:
            return total[name] / total[over] if total[over] else math.nan

        good, bad = mean("good_reward", "good"), mean("bad_reward", "bad")
        found = {
            "margin": good - bad,
            "accuracy": mean("right", "judged"),
            "chosen_reward": good,
            "rejected_reward": bad,
            "chosen_tokens": mean("good_tokens", "good"),
            "rejected_tokens": mean("bad_tokens", "bad"),
        }
        if self._spec.paired:
            found |= {"pairs": total["judged"], "likelier": mean("likelier", "judged")}
        else:
            found |= {"answers": total["judged"], "reference_kl": mean("divergence", "judged")}
        if self._spec.has_reference:
            found["reference_distance"] = total["distance"] / max(total["good"] + total["bad"], 1.0)
        return found


def _ahead(difference: Tensor) -> Tensor:
    """1 where the difference is positive, 1/2 where it is 0, else 0."""
    return (difference.sign() + 1) / 2
