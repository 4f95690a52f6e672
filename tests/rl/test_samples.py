"""Answers become advantages, rows and a divisor as the formulas of their papers say, however they are packed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.data.loader import MicroBatch
from meshwright.rl.advantages import advantages
from meshwright.rl.objectives import Agreement, PolicyObjective, kl_of_tokens
from meshwright.rl.samples import SampledAnswer, batch_of
from meshwright.spec.rl import Divisor, KlSpec, Policy, RewardSpec, RlSpec

RL = RlSpec(reward=RewardSpec(file="judge.py"), samples=3, new_tokens=8)
SEQ = 16


def answers(seed: int, prompts: int = 4) -> list[list[SampledAnswer]]:
    draw = np.random.default_rng(seed)
    groups = []
    for _ in range(prompts):
        prompt = draw.integers(0, 50, draw.integers(1, 6)).tolist()
        group = []
        for _ in range(RL.samples):
            size = int(draw.integers(1, 9))
            group.append(
                SampledAnswer(
                    prompt,
                    draw.integers(0, 50, size).tolist(),
                    (-draw.random(size)).tolist(),
                    truncated=bool(size == 8),
                    reward=float(draw.integers(0, 3)),
                    outcome="reward",
                )
            )
        groups.append(group)
    return groups


def plain_loss(groups: list[list[SampledAnswer]], rl: RlSpec, value_of: Any) -> Tensor:
    """The loss of a step by loops over answers and tokens."""
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for group in groups:
        rewards = [answer.reward for answer in group]
        if any(reward is None for reward in rewards):
            continue
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for answer in group:
            if answer.truncated and not rl.train_truncated:
                continue
            advantage = answer.reward - mean
            if rl.policy == "rloo":
                others = [each.reward for each in group if each is not answer]
                advantage = answer.reward - sum(others) / len(others)
            elif rl.policy != "dr_grpo":
                advantage /= deviation + 1e-6
            lengths = {"tokens": len(answer.tokens), "sequences": 1, "length": rl.new_tokens}
            divisor += lengths[rl.divisor or ("length" if rl.policy == "dr_grpo" else "tokens")]
            below, above = {"dapo": (0.2, 0.28), "rloo": (1.0, math.inf)}.get(rl.policy, (0.2, 0.2))
            losses = []
            for place, sampled in enumerate(answer.logprobs):
                value = value_of(answer, place)
                ratio = torch.exp(value - sampled)
                if rl.policy == "cispo":
                    losses.append(-float(min(ratio.item(), 5.0)) * advantage * value)
                else:
                    clipped = min(max(ratio, torch.tensor(1 - below)), torch.tensor(1 + above))
                    losses.append(-min(ratio * advantage, clipped * advantage))
            total = total + sum(losses) / (len(losses) if rl.divisor == "sequences" else 1)
    return total / divisor


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("divisor", [None, *get_args(Divisor)])
def test_the_loss_is_that_of_the_formula_for_any_rows_and_ranks(policy: Policy, divisor: Divisor | None) -> None:
    rl = replace(RL, policy=policy, divisor=divisor)
    for seed in range(4):
        groups = answers(seed)
        if seed == 1:
            groups[0][1].reward = None
        if seed == 2:
            for answer in groups[1]:
                answer.reward = 1.0
        values = {
            (id(a), n): torch.tensor(p + 0.4 * math.sin(7.0 * n + p), dtype=torch.float64, requires_grad=True)
            for g in groups
            for a in g
            for n, p in enumerate(a.logprobs)
        }
        plain = plain_loss(groups, replace(rl, train_truncated=seed != 3), lambda a, n, values=values: values[id(a), n])
        gradients = torch.autograd.grad(plain, list(values.values()), allow_unused=True)
        expected = {key: 0.0 if g is None else g.item() for key, g in zip(values, gradients, strict=True)}
        batch = batch_of(groups, replace(rl, train_truncated=seed != 3), SEQ)
        by_token = {(a.tokens[n], round(p, 9)): (id(a), n) for g in groups for a in g for n, p in enumerate(a.logprobs)}
        for size, ranks in ((1, 1), (2, 3)):
            objective = PolicyObjective(rl, Agreement(torch.device("cpu")))
            batches = [each for rank in range(ranks) for each in batch.micro_batches(size, rank, ranks)]
            count, loss = sum(float(objective.count(each)) for each in batches), 0.0
            seen: dict[Any, float] = {}
            for each in batches:
                loss += _add(objective, each, values, by_token, seen, count)
            assert loss == pytest.approx(plain.item(), rel=1e-6, abs=1e-7)
            for key, gradient in expected.items():
                assert seen.get(key, 0.0) == pytest.approx(gradient, rel=1e-5, abs=1e-8)


def _add(
    objective: PolicyObjective, batch: MicroBatch, values: Any, by_token: Any, seen: dict[Any, float], count: float
) -> float:
    """Add a micro-batch's gradients to `seen`; returns its part of the loss."""
    assert batch.targets is not None
    log_probabilities = torch.zeros(batch.targets.shape, dtype=torch.float64)
    places = (batch.targets >= 0).nonzero().tolist()
    keys = {}
    for row, column in places:
        sampled = batch.columns["sampled"][row, column].item()
        token = int(batch.targets[row, column])
        key = next(k for (t, p), k in by_token.items() if t == token and abs(p - sampled) < 1e-6)
        keys[row, column] = key
        log_probabilities[row, column] = values[key].detach()
    log_probabilities.requires_grad_()
    loss = objective.loss(log_probabilities, batch)
    gradient = (
        torch.autograd.grad(loss, log_probabilities)[0] if loss.requires_grad else torch.zeros_like(log_probabilities)
    )
    for place, key in keys.items():
        seen[key] = gradient[place].item() / count
    assert not gradient[batch.targets < 0].any()
    return float(loss.detach()) / count


def test_advantages_of_the_example() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert advantages(rewards, "rloo")[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages(rewards, "dr_grpo")[0] == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert advantages(rewards, "grpo")[0] == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)
    assert not advantages(rewards, "grpo")[1].any()
    assert not advantages(np.full((1, 3), 0.1), "grpo").any()


def test_on_policy_gradients_are_those_of_the_policy_gradient() -> None:
    """At a ratio of 1 every policy has the gradient −advantage, whatever its clip."""
    for policy in get_args(Policy):
        values = torch.full((1, 4), -1.25, dtype=torch.float64, requires_grad=True)
        columns = {name: torch.ones(1, 4) for name in ("factors", "counts")}
        columns |= {"sampled": torch.full((1, 4), -1.25), "advantages": torch.tensor([[2.0, -1.0, 0.5, 3.0]])}
        batch = MicroBatch(torch.zeros(1, 4), torch.tensor([[1, 1, 1, -1]]), None, None, 3, columns=columns)
        agreement = Agreement(torch.device("cpu"))
        PolicyObjective(replace(RL, policy=policy), agreement).loss(values, batch).backward()
        assert values.grad is not None and values.grad.tolist() == [[-2.0, 1.0, -0.5, 0.0]]
        assert agreement.take()[:3] == [3.0, 0.0, 0.0]


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.3), ("k2", 0.045), ("k3", math.exp(-0.3) - 1 + 0.3)])
def test_kl_estimators(estimator: Any, expected: float) -> None:
    assert kl_of_tokens(torch.tensor(-0.7), torch.tensor(-1.0), estimator).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("policy", "clipped"), [("grpo", 2), ("dapo", 1), ("cispo", 0), ("rloo", 0)])
def test_clipped_tokens_are_those_whose_gradient_a_clip_changes(policy: Policy, clipped: int) -> None:
    """Ratios 1.25 and 1.25 with advantages of both signs, and 0.5 of both signs: a clip removes what goes on in its own direction."""
    ratios = torch.tensor([[1.25, 1.25, 0.5, 0.5]], dtype=torch.float64)
    columns = {name: torch.ones(1, 4) for name in ("factors", "counts")}
    columns |= {"sampled": torch.zeros(1, 4), "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]])}
    batch = MicroBatch(torch.zeros(1, 4), torch.ones(1, 4), None, None, 4, columns=columns)
    agreement, values = Agreement(torch.device("cpu")), ratios.log().requires_grad_()
    PolicyObjective(replace(RL, policy=policy), agreement).loss(values, batch).backward()
    assert agreement.take()[4] == clipped
    assert values.grad is not None and int((values.grad == 0).sum()) == clipped


def test_a_penalty_and_corrections_multiply_what_they_say() -> None:
    columns = {name: torch.ones(1, 2) for name in ("factors", "counts", "advantages")}
    columns |= {"sampled": torch.tensor([[-3.0, -1.0]]), "reference": torch.tensor([[-1.0, -2.0]])}
    batch = MicroBatch(torch.zeros(1, 2), torch.tensor([[1, 1]]), None, None, 2, columns=columns)

    def gradient(**keys: Any) -> list[float]:
        values = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
        PolicyObjective(replace(RL, **keys), Agreement(torch.device("cpu"))).loss(values, batch).backward()
        assert values.grad is not None
        return values.grad[0].tolist()

    assert gradient() == pytest.approx([0.0, -1.0])  # the first token's ratio of e² is clipped
    assert gradient(correction="truncate") == pytest.approx([-2.0, -1.0])
    assert gradient(correction="mask") == pytest.approx([0.0, -1.0])
    assert gradient(kl=KlSpec(weight=0.5)) == pytest.approx([0.0, -1.0 + 0.5 * (1 - math.exp(-1.0))])


def test_a_step_whose_answers_are_all_alike_has_no_rows_and_one_empty_micro_batch() -> None:
    groups = answers(0)
    for group in groups:
        for answer in group:
            answer.reward = 0.0
    batch = batch_of(groups, RL, SEQ)
    (micro_batch,) = batch.micro_batches(2, 0, 1)
    assert micro_batch.valid_tokens == 0 and batch.figures["equal_prompts"] == 1.0
