"""How far a long read has come: a bar on a terminal, a plain line now and then elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]
"""Called with bytes of input read so far and tokens made so far."""
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(title: str, total_bytes: int, shown: bool) -> Iterator[Report]:
    """A `Report` to call as often as one likes; with `shown` false it does nothing."""
    if not shown:
        yield lambda done, tokens: None
    elif sys.stderr.isatty():
        with _bar(title, total_bytes) as report:
            yield report
    else:
        yield _lines(title, total_bytes)


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_bytes, tokens="")

        def report(done: int, tokens: int) -> None:
            bar.update(task, completed=done, tokens=f"{tokens / 1e6:.1f} M tokens")

        yield report


def _lines(title: str, total_bytes: int) -> Report:
    started = last = time.monotonic()

    def report(done: int, tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            share = done / max(total_bytes, 1)
            sys.stderr.write(f"{title}: {share:.0%}, {tokens / 1e6:.1f} M tokens, {now - started:.0f} s\n")

    return report
