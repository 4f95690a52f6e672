"""Measures which share of the steps' time is spent waiting for data, on the device's clock. Data that are read in time cost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


class DataWait:
    """Adds up the waiting of a start's steps. Steps up to `cold`, the last warm-up step, are left out."""

    def __init__(self, cold: int) -> None:
        self._cold = cold
        self._waited = self._stepped = 0.0

    def step(self, record: Mapping[str, Any]) -> None:
        """Add a finished step. A step without timed phases is ignored."""
        if record["step"] > self._cold and record["phases"]:
            self._waited += record["phases"].get("data", 0.0)
            self._stepped += record["step_seconds"]

    def line(self, control: dist.ProcessGroup) -> str | None:
        """Return a line about the rank that waited most; None if no steps were timed. Collective over `control`."""
        share = torch.tensor([self._waited / self._stepped if self._stepped else -1.0], dtype=torch.float64)
        dist.all_reduce(share, dist.ReduceOp.MAX, group=control)
        return f"waiting for data: {share.item():.2%} of the steps' time" if share.item() >= 0 else None
