"""Shows the progress of a long read on stderr: as a bar on a terminal, otherwise as a line of text every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Report = Callable[[int, int, int], None]
"""Called with three totals: bytes of input read, documents written, tokens written."""
SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two lines if stderr is not a terminal."""
SECONDS_BETWEEN_UPDATES = 0.1
"""Shortest time between two updates of the bar. Without it, the text would be made again for each document."""


@contextmanager
def progress(title: str, total_bytes: int, shown: bool) -> Iterator[Report]:
    """A context that gives a `Report`, which may be called at any rate. If `shown` is false, it shows nothing."""
    if not shown:
        yield lambda done, documents, tokens: None
    elif sys.stderr.isatty():
        with _bar(title, total_bytes) as report:
            yield report
    else:
        yield _lines(title, total_bytes)


class _Meter:
    """Computes the figures to show. Totals include the work of earlier attempts; rates do not."""

    def __init__(self, total_bytes: int) -> None:
        self.total = max(total_bytes, 1)
        self._started: float | None = None
        self._first = (0, 0)

    @property
    def started(self) -> bool:
        """Whether the first call of `words` has set the point from which rates are counted."""
        return self._started is not None

    def words(self, done: int, documents: int, tokens: int) -> str:
        """Return a text with the totals of documents and tokens. If rates are known, they and the remaining time follow."""
        now = time.monotonic()
        if self._started is None:
            self._started = now
            self._first = (done, tokens)
        seconds = now - self._started
        sums = f"{documents:,} documents, {tokens / 1e6:.1f} M tokens"
        read_bytes = done - self._first[0]
        new_tokens = tokens - self._first[1]
        if seconds <= 0 or read_bytes <= 0:
            return sums
        rates = f"{read_bytes / seconds / 1e6:.1f} MB/s, {new_tokens / seconds:,.0f} tokens/s"
        return f"{sums}, {rates}, {timedelta(seconds=round((self.total - done) / read_bytes * seconds))} left"


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Report]:
    """A context that shows a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[words]}")
    meter = _Meter(total_bytes)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_bytes, words="")

        figures = (0, 0, 0)
        drawn = float("-inf")

        def report(done: int, documents: int, tokens: int) -> None:
            nonlocal figures, drawn
            figures = (done, documents, tokens)
            if (now := time.monotonic()) - drawn >= SECONDS_BETWEEN_UPDATES:
                drawn = now
                bar.update(task, completed=done, words=meter.words(*figures))

        yield report
        bar.update(task, completed=figures[0], words=meter.words(*figures))


def _lines(title: str, total_bytes: int) -> Report:
    """Return a report that writes a line of text every few seconds."""
    last = time.monotonic()
    meter = _Meter(total_bytes)

    def report(done: int, documents: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not meter.started:
            meter.words(done, documents, tokens)
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            sys.stderr.write(f"{title}: {done / meter.total:.0%}, {meter.words(done, documents, tokens)}\n")

    return report
