"""Following metrics.jsonl while it grows, is cut by a rollback, or ends in a torn line."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.observe.metrics import STEP_KEYS, MetricsWriter
from meshwright.observe.metrics_tail import LineTail, MetricsTail


def record(step: int, seconds: float = 2.0, **others: object) -> dict[str, object]:
    return {**dict.fromkeys(STEP_KEYS, 1.0), "step": step, "step_seconds": seconds, **others}


def test_figures_follow_the_file_through_a_rollback(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.update()
    assert not tail.newest and tail.recent_step_seconds is None
    writer = MetricsWriter(path)
    for step in (1, 2, 3, 4):
        writer.write_step(record(step))
        tail.update()
    writer.write_validation(4, 1.25)
    tail.update()
    assert tail.recent_step_seconds == 2.0 and tail.newest["step"] == 4 and tail.validation_loss == 1.25
    writer.rewind(3)
    writer.write_step(record(4, seconds=6.0, loss=float("nan")))
    tail.update()
    assert tail.recent_step_seconds == 3.0
    assert tail.number("loss") is None and tail.number("mfu") == 1.0
    writer.close()


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = LineTail(path)
    assert tail.read() == ([], False)
    path.write_text(json.dumps({"a": 1}) + "\n[1]\nnot JSON\n" + '{"b"')
    assert tail.read() == ([{"a": 1}], True)
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.read() == ([{"b": 2}], False)
