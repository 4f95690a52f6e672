"""Lines during a slow operation."""

from __future__ import annotations

import threading

import pytest

from meshwright.events import waiting


def test_a_slow_operation_writes_lines_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "EVERY_SECONDS", 0.01)
    lines = list[str]()
    three = threading.Event()

    def note(text: str) -> None:
        lines.append(text)
        if len(lines) == 3:
            three.set()

    with pytest.raises(ValueError, match="the error of the block"), waiting.telling("searching for a plan", note):
        assert three.wait(60)
        raise ValueError("the error of the block")
    count = len(lines)
    assert set(lines[:3]) == {"still searching for a plan, 0 s so far"}
    assert not [thread for thread in threading.enumerate() if thread.name == "telling"] and len(lines) == count


def test_a_fast_operation_writes_nothing() -> None:
    lines = list[str]()
    with waiting.telling("searching for a plan", lines.append):
        pass
    assert not lines
