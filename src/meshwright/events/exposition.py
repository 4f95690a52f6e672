"""Metrics in the text format of Prometheus, version 0.0.4. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """A metric with samples. Each sample has labels and a value."""

    name: str
    type: Literal["gauge", "counter"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float | None]]


class Histogram:
    """Counts of observed values, by upper bounds, and the sum of the values."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value that was observed `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def lines(self, labels: Mapping[str, str]) -> list[str]:
        """The lines of the text format."""
        lines = _head(self.name, self.help, "histogram")
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            lines.append(f"{self.name}_bucket{_labels_text({**labels, 'le': _value_text(bound)})} {total}")
        text = _labels_text(labels)
        return [*lines, f"{self.name}_sum{text} {_value_text(self.sum)}", f"{self.name}_count{text} {total}"]


def exposition(metrics: Sequence[Metric]) -> str:
    """The text of several metrics. Samples whose value is None are left out, and so are metrics without samples."""
    lines: list[str] = []
    for metric in metrics:
        samples = [(labels, value) for labels, value in metric.samples if value is not None]
        if samples:
            lines += _head(metric.name, metric.help, metric.type)
            lines += [f"{metric.name}{_labels_text(labels)} {_value_text(value)}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


def _head(name: str, help: str, type: str) -> list[str]:
    text = help.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {text}", f"# TYPE {name} {type}"]


def _labels_text(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}" if labels else ""


def _value_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value) if isinstance(value, bool) else value)
