"""Tests of log-likelihoods of continuations: against the whole text's log-probabilities, for any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.models.decoder import Decoder
from meshwright.serve import scoring
from meshwright.serve.scoring import score
from tests.models.tiny import LLAMA
from tests.serve.helpers import tiny


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny(replace(LLAMA, max_seq_len=16))


def alone(model: Decoder, context: list[int], continuation: list[int]) -> tuple[float, list[int]]:
    """The log-likelihood by the model's logits for this text alone, and the likeliest tokens."""
    text = [*context, *continuation][-(model.spec.max_seq_len + 1) :]
    with torch.inference_mode():
        logprobs = model(torch.tensor([text[:-1]]))[0].double().log_softmax(-1)[-len(continuation) :]
    return float(logprobs.gather(1, torch.tensor(continuation)[:, None]).sum()), logprobs.argmax(-1).tolist()


def test_scores_are_those_of_each_text_alone(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [
        ([1], [2]),
        ([1, 2, 3], [4, 5]),
        ([7, 8, 9, 10, 11, 12], [3]),
        (list(range(1, 30)), [5, 6, 7]),
        ([3], [2] * 16),
    ]
    together = score(model, pairs)
    for (context, continuation), found in zip(pairs, together, strict=True):
        expected, likeliest = alone(model, context, continuation)
        assert found.loglikelihood == pytest.approx(expected, abs=1e-4)
        assert found.greedy == (likeliest == continuation)
    monkeypatch.setattr(scoring, "MOST_LOGITS", 1)
    singly = score(model, pairs)
    assert [found.loglikelihood for found in singly] == pytest.approx(
        [found.loglikelihood for found in together], abs=1e-4
    )


def test_the_likeliest_token_is_greedy(model: Decoder) -> None:
    _, likeliest = alone(model, [1, 2, 3], [0])
    assert score(model, [([1, 2, 3], likeliest), ([1, 2, 3], [likeliest[0] - 1])])[0].greedy
    assert not score(model, [([1, 2, 3], [(likeliest[0] + 1) % model.spec.vocab_size])])[0].greedy


def test_texts_that_cannot_be_scored_are_refused(model: Decoder) -> None:
    for pair in (([], [1]), ([1], [2] * 17)):
        with pytest.raises(ValueError, match="within the model's context"):
            score(model, [pair])
