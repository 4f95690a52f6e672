"""Progress of a long read on stderr: a bar on a terminal, a plain line at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Report = Callable[[int, int, int], None]
"""Called with the bytes of input read, the documents written and the tokens written until now."""
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES = 0.1
"""Of a bar: words are made so often, not for each document."""


@contextmanager
def progress(title: str, total_bytes: int, shown: bool) -> Iterator[Report]:
    """A `Report` to be called at any rate; with `shown` false it does nothing."""
    if not shown:
        yield lambda done, documents, tokens: None
    elif sys.stderr.isatty():
        with _bar(title, total_bytes) as report:
            yield report
    else:
        yield _lines(title, total_bytes)


class _Meter:
    """Figures of a running preparation. Work of earlier attempts counts in the sums, not in the rates."""

    def __init__(self, total_bytes: int) -> None:
        self.total = max(total_bytes, 1)
        self._started: float | None = None
        self._first = (0, 0)

    @property
    def started(self) -> bool:
        """Whether there are figures from which rates are counted."""
        return self._started is not None

    def words(self, done: int, documents: int, tokens: int) -> str:
        """Documents, tokens and their rates, and the remaining time if there is a rate."""
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
