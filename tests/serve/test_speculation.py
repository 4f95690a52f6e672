"""Speculative decoding on a Markov chain: texts have the distribution of the model without a draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.kernels.token_draw import draw_tokens
from meshwright.serve.speculation import PromptLookup, accept_by_rejection, accept_equal, draft_tokens

VOCAB, TEXTS, DRAFTS, START = 4, 20_000, 3, 1
FAR_TAIL = 140.0
"""Chi-square of 63 degrees of freedom exceeds this with a probability of 1e-7."""
SEEDS, DRAWS = torch.arange(TEXTS), torch.ones(TEXTS, dtype=torch.bool)


def chain(seed: int) -> Tensor:
    """Scores of the next token, one row for each last token."""
    return 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


TARGET, DRAFT = chain(0), chain(1)


def after(table: Tensor, last: Tensor) -> Callable[[Tensor], Tensor]:
    """Scores after drafts that follow the tokens `last`."""
    return lambda drafts: table[torch.cat((last[:, None], drafts), 1)[:, -1]]


def texts_by_rejection(draft: Tensor, draws: Tensor, lengths: Tensor, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """The first `rounds` tokens of many texts, and the accepted drafts of the first round."""
    texts = torch.zeros(TEXTS, rounds * (DRAFTS + 1), dtype=torch.int64)
    ends, last, first = torch.zeros(TEXTS, dtype=torch.int64), torch.full((TEXTS,), START), None
    for _ in range(rounds):
        drafts = draft_tokens(after(draft, last), DRAFTS, draws, SEEDS, ends)
        scores = TARGET[torch.cat((last[:, None], drafts.tokens), 1)]
        checked = accept_by_rejection(drafts, lengths, scores, draws, SEEDS, ends)
        for index in range(DRAFTS + 1):
            texts.scatter_(1, (ends + index)[:, None], checked.tokens[:, index, None])
        ends = ends + checked.accepted + 1
        last = texts.gather(1, ends[:, None] - 1)[:, 0]
        first = checked.accepted if first is None else first
    assert first is not None
    return texts[:, :rounds], first


@pytest.mark.parametrize("draft", [DRAFT, TARGET, 4 * DRAFT], ids=["other", "same", "sharper"])
def test_texts_have_the_distribution_of_the_model(draft: Tensor) -> None:
    texts, accepted = texts_by_rejection(draft, DRAWS, torch.arange(TEXTS) % (DRAFTS + 1))
    counts = torch.bincount(texts @ torch.tensor([16, 4, 1]), minlength=64).double()
    p = TARGET.double().softmax(1)
    expected = (p[START][:, None, None] * p[:, :, None] * p[None]).flatten() * TEXTS
    assert ((counts - expected) ** 2 / expected).sum() < FAR_TAIL
    has_draft = torch.arange(TEXTS) % (DRAFTS + 1) > 0
    rate = (accepted[has_draft] > 0).double().mean()
    assert abs(rate - torch.minimum(p[START], draft[START].double().softmax(0)).sum()) < 0.02


def test_greedy_texts_are_those_without_a_draft() -> None:
    texts, _ = texts_by_rejection(DRAFT, ~DRAWS, torch.arange(TEXTS) % (DRAFTS + 1))
    last, expected = START, []
    for _ in range(3):
        last = int(TARGET[last].argmax())
        expected.append(last)
    assert (texts == torch.tensor(expected)).all()


def test_equal_draws_give_the_same_text_as_without_drafts() -> None:
    def drawn(last: Tensor, position: Tensor) -> Tensor:
        one = torch.ones(len(last))
        return draw_tokens(TARGET[last], one, 0 * one, SEEDS[: len(last)], position)

    count = 50
    alone = torch.full((count, 13), START)
    for position in range(12):
        alone[:, position + 1] = drawn(alone[:, position], torch.full((count,), position))
    text, total = torch.full((count, 1), START), 0
    while text.shape[1] < 13:
        position = text.shape[1] - 1
        drafts = torch.randint(VOCAB, (count, 2), generator=torch.Generator().manual_seed(position))
        inputs = torch.cat((text[:, -1:], drafts), 1)
        draws = torch.stack([drawn(inputs[:, i], torch.full((count,), position + i)) for i in range(3)], 1)
        checked = accept_equal(drafts, torch.tensor([2] * (count - 1) + [0]), draws)
        assert checked.accepted[-1] == 0
        for row, accepted in enumerate(checked.accepted.tolist()):
            width = min(accepted + 1, 12 - position)
            assert torch.equal(checked.tokens[row, :width], alone[row, position + 1 : position + 1 + width])
        total += int(checked.accepted.sum())
        text = alone[:, : text.shape[1] + 1]
    assert total > 0


@pytest.mark.parametrize(
    ("text", "count", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 9, 9, 1, 2, 4, 9, 1, 2], 2, [4, 9]),
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], 2, [3, 9]),
        ([5, 6, 5, 6], 5, [5, 6, 5, 6, 5]),
        ([8, 8, 8], 3, [8, 8, 8]),
        ([1, 2, 3, 2], 3, []),
        ([], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_prompt_lookup_proposes_what_followed_before(text: list[int], count: int, drafts: list[int]) -> None:
    assert PromptLookup(text).propose(count) == drafts
    stepwise = PromptLookup(text[:2])
    for token in text[2:]:
        stepwise.propose(2)
        stepwise.add([token])
    assert stepwise.propose(count) == drafts
