"""Where the engine samples from other probabilities than the trainer's, a correction finds the best answer, and no correction does not.

A policy of four independent tokens learns by the objectives of a run. The engine adds fixed numbers to its logits, as other kernels might,
so it draws the best token of each place a third to half as often as the trainer would.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from meshwright.rl.objectives import Agreement, PolicyObjective
from meshwright.rl.samples import SampledAnswer, batch_of
from meshwright.spec.rl import Correction, RewardSpec, RlSpec

PLACES, TOKENS, STEPS = 4, 6, 120
RL = RlSpec(reward=RewardSpec(file="judge.py"), samples=8, new_tokens=PLACES, correction_most=4.0, correction_least=0.2)


@cache
def learned(correction: Correction, difference: float) -> tuple[float, float]:
    """Mean probability of the best tokens under the trainer after training, and the share of clipped tokens of the first step.

    Token k has a reward of k / 5; the engine's logits of the best tokens are lower by `difference`.
    """
    draw = torch.Generator().manual_seed(1)
    table = torch.zeros(PLACES, TOKENS, dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(PLACES, TOKENS, dtype=torch.float64)
    shift[:, -1] -= difference
    rl = replace(RL, correction=correction)
    objective, clipped = PolicyObjective(rl, Agreement(torch.device("cpu"))), []
    for _ in range(STEPS):
        engine = (table.detach() + shift).log_softmax(-1)
        tokens = torch.multinomial(engine.exp(), 8 * RL.samples, replacement=True, generator=draw).T
        groups = [
            [
                SampledAnswer(
                    [0],
                    (row + 1).tolist(),
                    engine[range(PLACES), row].tolist(),
                    truncated=False,
                    reward=float(row.sum()) / (TOKENS - 1) / PLACES,
                    outcome="reward",
                )
                for row in group
            ]
            for group in tokens.split(RL.samples)
        ]
        (batch,) = batch_of(groups, rl, 8 * PLACES).micro_batches(64, 0, 1)
        assert batch.targets is not None and batch.positions is not None
        trained = batch.targets >= 0
        values = table.log_softmax(-1)[batch.positions.clamp(max=PLACES - 1), (batch.targets - 1).clamp(min=0)].where(
            trained, 0.0
        )
        (gradient,) = torch.autograd.grad(objective.loss(values, batch) / objective.count(batch), table)
        clipped.append(Agreement.figures([objective.agreement.take()])["clipped"])
        with torch.no_grad():
            table -= 4.0 * gradient
    return table.detach().softmax(-1)[:, -1].mean().item(), clipped[0]


def test_without_a_difference_every_form_finds_the_best_answer() -> None:
    for correction in ("none", "truncate", "mask"):
        best, clipped = learned(correction, 0.0)
        assert best > 0.9 and clipped == 0


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_correction_keeps_a_run_from_drifting_where_the_engine_differs(correction: Correction) -> None:
    """Without one the best tokens, whose ratio is above the clip before any update, never get likelier: the run turns to others."""
    drifted, clipped = learned("none", 1.0)
    corrected, _ = learned(correction, 1.0)
    assert clipped > 0.02 and drifted < 0.2 and corrected > 0.85
