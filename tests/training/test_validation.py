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

WEIGHTS = {"0": 3.0, "1": 5.0, "2": 1.0}


def measured(monkeypatch: pytest.MonkeyPatch, sums: list[list[float]]) -> tuple[Evaluation | None, list[Any]]:
    """The result of a run's validation with these sums of losses and trained tokens by source, and what it reports."""
    names = [str(number) for number in range(len(sums))]
    held_out = SimpleNamespace(samples=dict.fromkeys(names), source=SimpleNamespace(weights=WEIGHTS))
    result = evaluate._evaluation(held_out, torch.tensor(sums, dtype=torch.float64))  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: result)
    session: Any = SimpleNamespace(
        held_out=held_out,
        recorder=NullRecorder(),
        engine=None,
        preferences=None,
        mesh=None,
        step=3,
        world=SimpleNamespace(device=None),
        plan=SimpleNamespace(batch=SimpleNamespace(micro_batch=1), samples=None),
    )
    reported: list[Any] = []
    reporter: Any = SimpleNamespace(
        event=lambda step, text: reported.append(text), validation=lambda step, result: reported.append(result)
    )
    return loop._validate(session, reporter), reported


def test_a_source_without_trained_tokens_stays_out_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    result, reported = measured(monkeypatch, [[6.0, 3.0, 12.0], [0.0, 0.0, 0.0], [4.0, 1.0, 2.0]])
    assert result is not None and reported == [result]
    assert (result.loss, result.tokens, result.by_source) == (2.5, 4, {"0": 2.0, "2": 4.0})
    assert result.perplexity == math.exp(2.5)


def test_sources_count_by_their_weights_and_not_by_the_size_of_their_held_out_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = measured(monkeypatch, [[6.0, 3.0, 12.0], [0.0, 0.0, 0.0], [4.0, 1.0, 2.0]])
    again, _ = measured(monkeypatch, [[600.0, 300.0, 1200.0], [0.0, 0.0, 0.0], [4.0, 1.0, 2.0]])
    assert result is not None and again is not None and again.loss == result.loss == (3 * 2.0 + 1 * 4.0) / 4
    bits = {name: loss / math.log(2) / text for name, loss, text in (("0", 2.0, 4.0), ("2", 4.0, 2.0))}
    assert result.bits_by_source == pytest.approx(bits)
    assert result.bits_per_byte == again.bits_per_byte == pytest.approx(2.5 / math.log(2) / ((3 * 4.0 + 2.0) / 4))


def test_bytes_that_are_not_known_give_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = measured(monkeypatch, [[6.0, 3.0, 0.0], [4.0, 1.0, 0.0]])
    assert result is not None and result.bits_per_byte is None and result.bits_by_source == {}


def test_without_any_trained_token_there_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    result, (event,) = measured(monkeypatch, [[0.0, 0.0, 0.0]])
    assert result is None and "no validation loss" in event
