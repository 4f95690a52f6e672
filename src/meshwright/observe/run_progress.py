"""Shows the progress of a run on stdout: plain lines and, on a terminal, a live display below them.

Unknown figures are left out: for an unknown chip no MFU is shown, rather than a wrong one. If the terminal closes, the
display ends and the run continues. Warnings and errors go to stderr.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.events.terminal import wrapped
from meshwright.observe import number_text

FIRST_LINES = 5
"""Number of steps, at the start of a run, that each print a line."""
REMEMBERED_STEPS = 50
"""The mean duration of this many newest steps predicts the remaining time."""
JUDGED = (
    ("accuracy", "accuracy"),
    ("margin", "margin"),
    ("likelier", "likelier"),
    ("calibration_error", "calibration error"),
)
"""(key, name on screen) of the figures of a preference run."""
DROPPED_FIRST = ("tok/s/rank", "mem", "lr", "MFU", "grad", "val", "tok/s")
"""Figures that a step line leaves out, in this order, until the line fits on the terminal.

The live display still shows them.
"""
RARER_LINES = (
    "from here on not every step has a line: (+N) counts the steps since the line before; metrics.jsonl has them all"
)
"""Printed once, when not every step prints a line any more."""


class RunProgress:
    """Shows step lines as they arrive (`observe.metrics.STEP_KEYS`). It is also a context manager.

    `total_steps` is the number of steps of the run, and `start_step` the number of steps that are already done. `ranks`
    is the number of ranks, for the throughput of each. `samples_before(n)` gives the samples of the first n steps; by
    default each step has one. `show_mfu`: whether MFU is shown. `title` is shown before the progress bar. `stream` and
    `clock` are for tests, and default to stdout and the monotonic clock. `began` is the time on that clock at which the
    command began; by default it is now.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        ranks: int = 1,
        *,
        samples_before: Callable[[int], int] = int,
        show_mfu: bool = True,
        title: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self._total = total_steps
        self._step = start_step
        self._ranks = ranks
        self._title = title
        self._show_mfu = show_mfu
        self._samples_before = samples_before
        self._clock = clock
        self._began = clock() if began is None else began
        self._printed_at = clock()
        self._lines_printed = 0
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._step_printed = start_step
        self._dropped = 0
        """How many of `DROPPED_FIRST` step lines leave out. It never decreases, so that later lines have the same figures."""
        self._validation: tuple[int, float | None] | None = None
        """Step and loss of the last validation; None before the first."""
        self._record: Mapping[str, Any] = {}
        """The newest step line."""
        self._console = Console(file=cast(TextIO, _Terminal(stream or sys.stdout)), highlight=False)
        self._live = self._open_live()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one line of the metrics: a step or a validation."""
        if record.get("kind") == "validation":
            self._validation = record["step"], record.get("loss")
            by_source = [f"{name} {_number(loss, '.4f')}" for name, loss in record.get("by_source", {}).items()]
            sources = f" ({', '.join(by_source)})" if by_source else ""
            bits = record.get("bits_per_byte")
            tokens = record.get("tokens")
            more = f" | {bits:.4f} bits per byte" if bits else ""
            more += "".join(f" | {name} {_number(record[key], '.3f')}" for key, name in JUDGED if key in record)
            more += f" | {number_text.short(tokens)} tokens" if tokens else ""
            self.note(f"step {record['step']:,} | validation loss {_number(record.get('loss'), '.4f')}{sources}{more}")
        else:
            self._show_step(record)

    def note(self, text: str) -> None:
        """Print a line. On a terminal it appears above the live display."""
        shown = wrapped(text, self._console.width) if self._console.is_terminal else text
        self._console.print(Text(shown), soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen, and release the terminal. It may be called twice."""
        live = self._live
        self._live = None
        if live:
            live.stop()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_live(self) -> Live | None:
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return None
        live = Live(
            console=self._console,
            get_renderable=self._display,
            refresh_per_second=4,
            # If stderr is redirected to a file, warnings must still go to that file, not to the terminal.
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        live.start()
        return live

    def _show_step(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._step = record["step"]
        self._arrivals.append((self._clock(), self._step))
        if self._line_is_due():
            self._lines_printed += 1
            self._printed_at = self._clock()
            self.note(self._plain_line())
            self._step_printed = self._step
        elif self._lines_printed == FIRST_LINES and self._step == self._step_printed + 1:
            self.note(RARER_LINES)

    def _line_is_due(self) -> bool:
        """Whether to print a line: for the first steps and the last one, otherwise every 2 to 30 s.

        The time between lines is 1/100 of the run's time so far: after 10 minutes, a line is printed every 6 s.
        """
        if self._lines_printed < FIRST_LINES or self._step >= self._total:
            return True
        now = self._clock()
        return now - self._printed_at >= min(30.0, max(2.0, (now - self._began) / 100))

    def _plain_line(self) -> str:
        """Return the line of a step with its figures; on a terminal only as many figures as fit."""
        since = self._step - self._step_printed
        step = f"step {self._step:>{len(str(self._total))}}/{self._total}{f' (+{since})' if since > 1 else ''}"
        figures = self._figures()
        seconds_left = self._seconds_left()
        if seconds_left is not None:
            figures.append(("left", number_text.clock(seconds_left)))

        def line() -> str:
            return " | ".join([step, *(f"{name} {value}" for name, value in figures)])

        if not self._console.is_terminal:
            return line()
        everything = figures
        for dropped in range(self._dropped, len(DROPPED_FIRST) + 1):
            figures = [
                (name, value) for name, value in everything if name.partition("@")[0] not in DROPPED_FIRST[:dropped]
            ]
            self._dropped = dropped
            if len(line()) <= self._console.width:
                break
        return line()

    def _display(self) -> Group:
        return Group(self._bar_line(), *self._figure_lines())

    def _bar_line(self) -> Table:
        seconds_left = self._seconds_left()
        cells: list[Any] = [Text(self._title, style="bold")] if self._title else []
        cells += [
            Text(f"{self._step:,}/{self._total:,}"),
            ProgressBar(self._total, self._step, width=None, complete_style="blue", finished_style="blue"),
            Text(f"{100 * self._step / max(1, self._total):.0f}%"),
            Text(f"{number_text.clock(self._clock() - self._began)} elapsed", style="dim"),
            Text(self._state(seconds_left), style="dim"),
        ]
        grid = Table.grid(padding=(0, 2), expand=True)
        for cell in cells:
            grid.add_column(ratio=1 if isinstance(cell, ProgressBar) else None, no_wrap=True)
        grid.add_row(*cells)
        return grid

    def _state(self, seconds_left: float | None) -> str:
        """Return the last word of the progress bar. After the last step, a run is still "finishing": it validates and saves."""
        if self._step >= self._total:
            return "finishing"
        return "starting" if seconds_left is None else f"{number_text.clock(seconds_left)} left"

    def _figure_lines(self) -> list[Text]:
        """Return every figure, on as many lines as the width of the terminal needs."""
        lines = [Text()]
        for name, value in self._figures():
            cell = Text.assemble((f"{name} ", "dim"), (value, "bold" if name == "loss" else ""))
            if len(lines[-1]) + len(cell) + 3 > self._console.width:
                lines.append(Text())
            lines[-1].append("   " if len(lines[-1]) else "").append_text(cell)
        return lines

    def _figures(self) -> list[tuple[str, str]]:
        """Return (label, text) of every known figure of the newest step, the most important first.

        The label of the last validation contains its step, for example "val@500".
        """
        record = self._record
        if not record:
            return []
        speed = record.get("tokens_per_second")
        figures: list[tuple[str, str | None]] = [
            ("reward", _text_or_none(record.get("reward"), "{:.3f}".format)),
            ("loss", _number(record.get("loss"), ".4f")),
            *((name, _text_or_none(record.get(key), "{:.3f}".format)) for key, name in JUDGED[:2]),
            ("tokens/answer", _text_or_none(record.get("answer_tokens"), "{:.1f}".format)),
            *([(f"val@{self._validation[0]}", _number(self._validation[1], ".4f"))] if self._validation else []),
            ("tok/s", number_text.short(speed) if speed else None),
            ("tok/s/rank", number_text.short(speed / self._ranks) if speed and self._ranks > 1 else None),
            ("MFU", _text_or_none(record.get("mfu") if self._show_mfu else None, number_text.percent)),
            ("mem", _text_or_none(record.get("memory_peak_bytes"), number_text.size)),
            ("grad", _number(record.get("grad_norm"), ".3g")),
            ("lr", _text_or_none(record.get("lr"), number_text.scientific)),
        ]
        return [(name, text) for name, text in figures if text is not None]

    def _seconds_left(self) -> float | None:
        """Return the seconds for the remaining steps at the recent speed; None if unknown.

        The speed is in samples per second, and includes the time of validations and checkpoints.
        """
        if self._step >= self._total:
            return 0.0
        if len(self._arrivals) < 2:
            return None
        (first, first_step), (last, last_step) = self._arrivals[0], self._arrivals[-1]
        done = self._samples_before(self._step)
        total = self._samples_before(self._total)
        return (
            (total - done) * (last - first) / max(1, self._samples_before(last_step) - self._samples_before(first_step))
        )


class _Terminal:
    """A text stream that ignores all output after its terminal has closed. metrics.jsonl still has every figure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._closed = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self._closed and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._call_if_open(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._call_if_open(self._stream.flush)

    def _call_if_open(self, call: Callable[[], object]) -> None:
        if self._closed:
            return
        try:
            call()
        except (OSError, ValueError):  # OSError: the pipe or terminal is closed; ValueError: the Python file is
            self._closed = True


def _number(value: float | None, form: str) -> str:
    """Format a figure that every step has. None means "not finite": a metrics line has null for such a number."""
    return "not finite" if value is None or value != value else format(value, form)


def _text_or_none(value: float | None, text: Callable[[float], str]) -> str | None:
    return None if value is None else text(value)
