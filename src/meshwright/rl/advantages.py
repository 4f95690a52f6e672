"""Advantages of answers: how much better each answer is than the other answers to its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.spec.rl import Policy

LEAST_DEVIATION = 1e-6
"""Added to the standard deviation of a group's rewards, so that it is never 0."""


def advantages(rewards: np.ndarray, policy: Policy) -> np.ndarray:
    """Advantages of rewards, both `(prompts, samples)`. If all answers to a prompt have the same reward, their advantages are 0.

    Example: the rewards 1, 0, 0, 0 have the mean 1/4 and the standard deviation 0.433 (of the population, divided by 4).

    | policy | advantages |
    |---|---|
    | `dr_grpo`: difference from the mean | 3/4, −1/4, −1/4, −1/4 |
    | `rloo`: difference from the mean of the other answers | 1, −1/3, −1/3, −1/3 |
    | all others: difference from the mean / deviation | 1.73, −0.58, −0.58, −0.58 |
    """
    # In floating point, the mean of equal numbers may differ from them in the last bit.
    centred = np.where(alike(rewards)[:, None], 0.0, rewards - rewards.mean(1, keepdims=True))
    if policy == "dr_grpo":
        return centred
    if policy == "rloo":
        samples = rewards.shape[1]
        return centred * (samples / (samples - 1))
    return centred / (rewards.std(1, keepdims=True) + LEAST_DEVIATION)


def alike(rewards: np.ndarray) -> np.ndarray:
    """For each prompt, whether all its answers have the same reward, `(prompts,)` bool."""
    return np.ptp(rewards, axis=1) == 0


def without_verdict(rewards: Sequence[Sequence[float | None]]) -> np.ndarray:
    """For each prompt, whether any of its answers has no reward, `(prompts,)` bool. Such prompts are left out."""
    return np.array([any(reward is None for reward in group) for group in rewards], dtype=bool)
