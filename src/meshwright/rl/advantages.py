"""Advantages of answers: how much better than the other answers to its prompt each is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.spec.rl import Policy

LEAST_DEVIATION = 1e-6
"""Added to the deviation of a group's rewards."""


def advantages(rewards: np.ndarray, policy: Policy) -> np.ndarray:
    """Advantages `(prompts, samples)` of rewards `(prompts, samples)`; 0 for a prompt whose answers all have the same reward.

    Example: rewards 1, 0, 0, 0 are for `rloo` 1, −1/3, −1/3, −1/3, for `dr_grpo` 3/4, −1/4, −1/4, −1/4, and for `grpo` and others these
    divided by their deviation 0.433 (that of the samples, not an estimate): 1.73, −0.58, −0.58, −0.58.
    """
    # The mean of equal numbers may differ from them in its last bit.
    centred = np.where(alike(rewards)[:, None], 0.0, rewards - rewards.mean(1, keepdims=True))
    if policy == "dr_grpo":
        return centred
    if policy == "rloo":
        samples = rewards.shape[1]
        return centred * (samples / (samples - 1))
    return centred / (rewards.std(1, keepdims=True) + LEAST_DEVIATION)


def alike(rewards: np.ndarray) -> np.ndarray:
    """Which prompts' answers all have the same reward, `(prompts,)`."""
    return np.ptp(rewards, axis=1) == 0


def without_verdict(rewards: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Which prompts have an answer without reward, `(prompts,)`: none of their answers is compared, as the others would be biased."""
    return np.array([any(reward is None for reward in group) for group in rewards], dtype=bool)
