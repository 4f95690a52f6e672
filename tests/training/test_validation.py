"""A validation counts trained tokens only; without any it is an event and no loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.training import evaluate, loop
from meshwright.training.evaluate import Evaluation


def measured(monkeypatch: pytest.MonkeyPatch, sums: list[list[float]]) -> tuple[Evaluation | None, list[Any]]:
    """The result of a run's validation with these sums of losses and trained tokens by source, and what it reports."""
    held_out = SimpleNamespace(
        indices_by_source=lambda: {str(number): None for number in range(len(sums))},
        source=SimpleNamespace(bytes_per_token=None),
    )
    result = evaluate._evaluation(held_out, torch.tensor(sums, dtype=torch.float64))  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: result)
    session: Any = SimpleNamespace(
        held_out=held_out, recorder=NullRecorder(), engine=None, mesh=None, step=3, world=SimpleNamespace(device=None),
        plan=SimpleNamespace(batch=SimpleNamespace(micro_batch=1), samples=None),
    )  # fmt: skip
    reported: list[Any] = []
    reporter: Any = SimpleNamespace(
        event=lambda step, text: reported.append(text), validation=lambda step, result: reported.append(result)
    )
    return loop._validate(session, reporter), reported


def test_a_source_without_trained_tokens_stays_out_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    result, reported = measured(monkeypatch, [[6.0, 3.0], [0.0, 0.0], [4.0, 1.0]])
    assert result is not None and reported == [result]
    assert (result.loss, result.tokens, result.by_source) == (2.5, 4, {"0": 2.0, "2": 4.0})
    assert result.perplexity == math.exp(2.5)


def test_without_any_trained_token_there_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    result, (event,) = measured(monkeypatch, [[0.0, 0.0]])
    assert result is None and "no validation loss" in event
