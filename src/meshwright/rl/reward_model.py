"""Rewards from a reward model, which is on the same device as the rank's engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from meshwright.data.text_format import TextFormat
from meshwright.rl.samples import SampledAnswer
from meshwright.serve.reward_scorer import open_scorer
from meshwright.spec.errors import BadInput
from meshwright.spec.run import RunSpec

AT_ONCE = 64
"""Answers that are judged between two reports of progress."""


class RewardModel:
    """The reward model of a run. Raises BadInput if its tokenizer is not that of the data, or if its context is shorter than the texts."""

    def __init__(self, run: RunSpec, text: TextFormat, device: torch.device, dtype: torch.dtype) -> None:
        assert run.rl is not None and run.rl.reward.model is not None
        folder = Path(run.rl.reward.model)
        self._scorer = open_scorer(folder, device, dtype)
        spec = self._scorer.spec
        digest = self._scorer.tokenizer_digest
        if digest not in (None, text.tokenizer) or spec.vocab_size != run.model.vocab_size:
            raise BadInput(
                f"rl.reward.model: expected a model with the tokenizer of the data, whose answers it reads; {folder} has another",
                key="rl.reward.model",
            )
        needed = run.train.seq_len + 1 + len(self._scorer.after_answer)
        if spec.max_seq_len < needed:
            raise BadInput(
                f"rl.reward.model: expected a context of {needed} tokens, train.seq_len and what follows an answer; "
                f"{folder} has {spec.max_seq_len}",
                key="rl.reward.model",
            )

    def judge(self, answers: Sequence[SampledAnswer], on_progress: Callable[[], None]) -> None:
        """Set the rewards of answers. If a score is not finite, the outcome is an error. An answer without tokens gets no verdict."""
        judged = [answer for answer in answers if answer.tokens]
        for first in range(0, len(judged), AT_ONCE):
            self._judge(judged[first : first + AT_ONCE])
            on_progress()

    def _judge(self, judged: Sequence[SampledAnswer]) -> None:
        # The model was trained to score after the text that the template writes after an answer. A truncated answer does not have this
        # text.
        ends = [() if answer.truncated else self._scorer.after_answer for answer in judged]
        texts = [[*answer.prompt, *answer.tokens, *end] for answer, end in zip(judged, ends, strict=True)]
        for answer, score in zip(judged, self._scorer.score(texts), strict=True):
            if math.isfinite(score):
                answer.outcome = "reward"
                answer.reward = score
            else:
                answer.outcome = "error"
