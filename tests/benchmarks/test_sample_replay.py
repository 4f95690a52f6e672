"""The simulated step of unequal samples beside the published one, and the stored results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.sample_replay import PUBLISHED_SECONDS, PUBLISHED_SPEED, replay

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_stored_replay_has_the_published_order() -> None:
    """All steps are within 15%."""
    stored = json.loads((RESULTS / "2026-11-26-sample-replay.json").read_text(encoding="utf-8"))
    assert (stored["published_seconds"], stored["published_speed"]) == (PUBLISHED_SECONDS, PUBLISHED_SPEED)
    figures = stored["simulated"]["H800"]
    seconds, speed = figures["seconds"], figures["speed"]
    assert seconds["static"] > seconds["arrival"] > seconds["arrival_offload"] > seconds["balanced"]
    for name in PUBLISHED_SECONDS:
        assert seconds[name] == pytest.approx(PUBLISHED_SECONDS[name], rel=0.15)
    for name in PUBLISHED_SPEED:
        assert speed[name] == pytest.approx(PUBLISHED_SPEED[name], rel=0.15)


@pytest.mark.slow
def test_the_replay_is_as_stored() -> None:
    stored = json.loads((RESULTS / "2026-11-26-sample-replay.json").read_text(encoding="utf-8"))
    assert replay("H800", 64) == stored["simulated"]["H800"]


def test_the_stored_imbalance_is_within_its_bounds() -> None:
    stored = json.loads((RESULTS / "2026-11-26-sample-balance.json").read_text(encoding="utf-8"))
    bounds = {8: 1.10, 64: 1.10, 1024: 1.15}
    assert {(figures["mix"], figures["ranks"]) for figures in stored["imbalance"]} == {
        (mix, ranks) for mix in ("public", "long") for ranks in bounds
    }
    for figures in stored["imbalance"]:
        assert figures["batches"] == 1000 and figures["imbalance"]["largest"] <= bounds[figures["ranks"]]
