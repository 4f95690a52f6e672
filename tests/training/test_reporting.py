"""Reports of steps: every step goes to the launcher, a few to the log of the rank."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from meshwright.events.messages import Checkpoint, MessageChannel, RankMessageReader, StepMessage
from meshwright.observe.metrics import STEP_KEYS, MetricsWriter
from meshwright.training.reporting import Reporter

RECORD = dict.fromkeys(STEP_KEYS, 1.0) | {"tokens": 8, "data_wait_seconds": 0.0}


def steps(reporter: Reporter, count: int) -> None:
    for step in range(1, count + 1):
        reporter.step(RECORD | {"step": step})


def test_a_log_does_not_grow_with_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("meshwright")
    propagate, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.DEBUG, logger="meshwright"):
            steps(Reporter(None, None, None), 1000)
    finally:
        logger.propagate = propagate
    assert [record.getMessage() for record in caplog.records] == ["step 1, loss 1.0, 1 s"]


@pytest.mark.parametrize("first", [True, False])
def test_the_launcher_gets_every_step_and_the_first_rank_adds_figures(first: bool, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", resume_from=0) if first else None
    reporter = Reporter(metrics, None, None, channel=MessageChannel(writing))
    steps(reporter, 3)
    reporter.checkpoint(3, tmp_path / "step-00000003", "checkpoint step-00000003: 1 MB in 0.1 s")
    messages = list(RankMessageReader(reading).read())
    assert [message.step for message in messages if isinstance(message, StepMessage)] == [1, 2, 3]
    figures = [dict(message.figures) for message in messages if isinstance(message, StepMessage)]
    assert all(set(rank_figures) == (set(STEP_KEYS) - {"step"} if first else set()) for rank_figures in figures)
    assert (Checkpoint(3, str(tmp_path / "step-00000003")) in messages) is first
