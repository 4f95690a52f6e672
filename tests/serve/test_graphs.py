"""Captures of CUDA graphs, as far as they need no device."""

from __future__ import annotations

import gc

import pytest

from meshwright.serve.drafts import Drafter
from meshwright.serve.graphs import without_garbage_collection
from meshwright.serve.model_runner import ModelRunner
from tests.models.tiny import LLAMA
from tests.serve.helpers import engine_of, tiny


def test_an_engine_collects_garbage_once_for_all_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes longer than the capture of a graph."""
    collected: list[str] = []

    def capture(self: object) -> None:
        for _ in range(3):
            with without_garbage_collection():
                assert not gc.isenabled()
                collected.append("captured")
        assert not gc.isenabled()  # the context around all captures goes on

    def count(phase: str, details: dict[str, int]) -> None:
        if phase == "start" and details["generation"] == 2:
            collected.append("collected")

    monkeypatch.setattr(ModelRunner, "capture_graphs", capture)
    monkeypatch.setattr(Drafter, "capture_graphs", capture)
    model = tiny(LLAMA)
    gc.callbacks.append(count)
    try:
        engine_of(model, graphs=True)
    finally:
        gc.callbacks.remove(count)
    assert collected[collected.index("captured") - 1 :] == ["collected", *["captured"] * 6]
    assert gc.isenabled()
