"""The emulated group of slow ranks: its blocks take the requested multiple of their time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.slow_group import ROUNDS, HostClock, Spin
from torch import nn


class Clock(HostClock):
    """A fake clock that only blocks and spins advance; spins are `late` times as long as requested."""

    def __init__(self, spin_ratio: float) -> None:
        self.now, self.late = 0.0, spin_ratio

    def stamp(self) -> float:
        return self.now / 1e3

    def spin(self, milliseconds: float) -> None:
        self.now += milliseconds * self.late


class Block(nn.Module):
    """Takes `times` ms forward and backward; less while its rank spins, like a chip below its power limit."""

    def __init__(self, clock: Clock, times: tuple[float, float], spin: Spin) -> None:
        super().__init__()
        self.clock, self.times, self.of = clock, times, spin

    def passes(self, direction: int) -> None:
        spins = self.of.amount["forward"] > 0
        self.clock.now += self.times[direction] * (0.8 if spins else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes(0)
        y = x * 2
        y.register_hook(lambda gradient: self.passes(1))
        return y


@pytest.mark.parametrize("like", [None, {"forward": 4.0, "backward": 10.0}])
def test_blocks_reach_the_times_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, like: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    spin = Spin({"slower": 1.5, "warm": 4, "round": 4}, True, tmp_path / "slowed.json", like)
    clock = spin.clock = Clock(0.25)
    block = Block(clock, (4.0, 10.0), spin)
    spin.surround(block)
    for _ in range(4 * (ROUNDS + 1)):
        block(torch.ones(2, requires_grad=True)).sum().backward()
    summary = json.loads((tmp_path / "slowed.json").read_text())
    assert summary["rank"] == 3 and summary["own_ms"] == pytest.approx({"forward": 3.2, "backward": 8.0})
    assert summary["reached"] == pytest.approx({"forward": 1.5, "backward": 1.5})
    block_and_spin_ms = {
        direction: summary["own_ms"][direction] + summary["spun_ms"][direction] for direction in summary["own_ms"]
    }
    assert block_and_spin_ms == pytest.approx(
        {"forward": 6.0, "backward": 15.0} if like else {"forward": 4.8, "backward": 12.0}
    )
