import io
import itertools
import os
import pty
import re
import sys

import pytest

from meshwright.observe.run_progress import RunProgress
from meshwright.spec.batch_sizes import BatchSizes, BatchStage


class Time:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def record(step, **changes):
    base = {
        "kind": "step",
        "step": step,
        "loss": 3.25,
        "tokens": step * 64,
        "tokens_per_second": 25_300.0,
        "mfu": 0.413,
    }
    return {**base, "grad_norm": 0.82, "lr": 3e-4, "memory_peak_bytes": 2 << 30, "step_seconds": 1.0, **changes}


def plain(steps, seconds_each, **options):
    stream, time = io.StringIO(), Time()
    with RunProgress(steps, stream=stream, clock=time, **options) as progress:
        for step in range(1, steps + 1):
            time.now += seconds_each
            progress.update(record(step))
    return stream.getvalue().splitlines()


def steps_of(lines):
    return [int(line.split("/")[0].removeprefix("step")) for line in lines if line.startswith("step")]


def test_plain_lines_hold_every_known_figure():
    first, second = plain(2, 1.0, ranks=2)
    assert first == (
        "step 1/2 | loss 3.2500 | tok/s 25.3k | tok/s/rank 12.7k | MFU 41.3% | mem 2.15 GB | grad 0.82 | lr 3.00e-4"
    )
    assert second == first.replace("1/2", "2/2") + " | left 0:00"


def test_fast_steps_print_the_first_five_then_every_two_seconds_and_the_last():
    assert steps_of(plain(100, 0.125)) == [1, 2, 3, 4, 5, 21, 37, 53, 69, 85, 100]


def test_steps_without_a_line_are_counted():
    lines = plain(100, 0.125)
    assert lines[5].startswith("from here on not every step has a line: (+N)"), "said once, before the first gap"
    assert [line[:16] for line in (lines[4], lines[6], lines[7])] == [
        "step   5/100 | l",
        "step  21/100 (+1",
        "step  37/100 (+1",
    ]
    assert "(+16) | loss" in lines[6] and lines[-1].startswith("step 100/100 (+15) |")
    assert sum("(+N)" in line for line in lines) == 1 and "(+" not in "".join(plain(12, 3.0))


def test_a_loss_is_that_of_its_step_in_line_and_display():
    progress = RunProgress(9, stream=io.StringIO())
    for step, loss in enumerate((8.0, 6.0, 7.0), 1):
        progress.update(record(step, loss=loss))
    assert "loss 7.0000" in progress._figure_lines()[0].plain


def test_slow_steps_print_each():
    assert steps_of(plain(12, 3.0)) == list(range(1, 13))


def test_a_long_run_prints_at_most_every_thirty_seconds():
    lines = steps_of(plain(20_000, 1.0))
    assert lines[-2] - lines[-3] == 30 and len(lines) < 1000


def test_time_left_follows_the_pace_and_skips_the_first_step():
    stream, time = io.StringIO(), Time()
    progress = RunProgress(100, stream=stream, clock=time)
    time.now = 500.0  # compiling
    progress.update(record(1))
    time.now = 502.0
    progress.update(record(2))
    assert stream.getvalue().splitlines()[-1].endswith("left 3:16")


def test_time_left_counts_the_samples_of_a_ramp():
    stream, time = io.StringIO(), Time()
    sizes = BatchSizes(8, [BatchStage(until=4, batch=2)])
    progress = RunProgress(8, samples_before=sizes.samples_before, stream=stream, clock=time)
    for step in (1, 2, 3):
        time.now += 10.0
        progress.update(record(step))
    assert stream.getvalue().splitlines()[-1].endswith("left 2:50"), "34 samples of 5 s"


def test_unknown_figures_are_left_out():
    stream = io.StringIO()
    progress = RunProgress(9, stream=stream)
    progress.update(record(1, mfu=None, memory_peak_bytes=None, grad_norm=1.5))
    assert "MFU" not in stream.getvalue() and "mem" not in stream.getvalue() and "grad 1.5" in stream.getvalue()
    hidden = io.StringIO()
    RunProgress(9, stream=hidden, show_mfu=False).update(record(1))
    assert "MFU" not in hidden.getvalue()


def test_a_loss_that_is_not_finite_is_said():
    stream = io.StringIO()
    RunProgress(9, stream=stream).update(record(1, loss=None, grad_norm=float("nan")))
    assert "loss not finite" in stream.getvalue() and "grad not finite" in stream.getvalue()


def test_validation_prints_a_line_and_joins_the_next():
    stream = io.StringIO()
    progress = RunProgress(9, stream=stream)
    progress.update({"kind": "validation", "step": 1, "loss": 2.5})
    progress.update(record(2))
    lines = stream.getvalue().splitlines()
    progress.update({"kind": "validation", "step": 2, "loss": 2.5, "by_source": {"code": 2.0, "web": None}})
    assert stream.getvalue().endswith("step 2 | validation loss 2.5000 (code 2.0000, web not finite)\n")
    assert lines[0] == "step 1 | validation loss 2.5000" and "| val@1 2.5000 |" in lines[1]
    progress.update({"kind": "validation", "step": 2, "loss": 2.5, "bits_per_byte": 1.25, "tokens": 32_768})
    assert stream.getvalue().endswith("step 2 | validation loss 2.5000 | 1.2500 bits per byte | 32.8k tokens\n")


def test_notes_are_plain_text():
    stream = io.StringIO()
    RunProgress(9, stream=stream).note("[bold]checkpoint[/] written to /a/very/long/path" + "x" * 200)
    assert stream.getvalue() == "[bold]checkpoint[/] written to /a/very/long/path" + "x" * 200 + "\n"


def test_a_closed_stream_ends_the_display_and_not_the_run():
    stream = io.StringIO()
    progress = RunProgress(9, stream=stream)
    stream.close()
    progress.update(record(1))
    progress.note("still running")
    progress.close()


def test_a_broken_pipe_ends_the_display_and_not_the_run():
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", buffering=1)
    progress = RunProgress(9, stream=stream)
    os.close(reader)
    progress.update(record(1))
    progress.update(record(2))
    progress.close()


def on_terminal(monkeypatch, scene, columns=80, **options):
    """Run `scene(progress)` on a pseudo-terminal of so many columns and return what it showed."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    with RunProgress(100, stream=stream, title="quick", ranks=2, **options) as progress:
        scene(progress)
    stream.close()
    return drained(ours)


def drained(terminal):
    """All that is left in a pseudo-terminal whose other end is closed: Linux ends it with an error."""
    text = b""
    try:
        while part := os.read(terminal, 1 << 16):
            text += part
    except OSError:
        pass
    os.close(terminal)
    return text.decode()


def test_a_terminal_shows_the_bar_figures_and_notes(monkeypatch):
    def scene(progress):
        progress.update(record(50))
        progress.note("checkpoint written")

    text = on_terminal(monkeypatch, scene)
    assert "quick" in text and "50/100" in text and "━" in text and "checkpoint written" in text
    assert "3.2500" in text and "41.3%" in text and "elapsed" in text


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_a_step_line_fits_a_terminal(monkeypatch, columns):
    time = Time()
    full = {"tokens_per_second": 1_234_567.0, "memory_peak_bytes": 628_000_000}

    def scene(progress):
        progress.update({"kind": "validation", "step": 12, "loss": 6.0929})
        for step in range(20, 60):
            time.now += 1.5
            progress.update(record(step, **full))

    text = on_terminal(monkeypatch, scene, clock=time, columns=columns)
    lines = re.findall(r"step +\d+/100[^\r\n\x1b]*", text)
    assert len(lines) > 10 and all(len(line) <= columns and "loss 3.2500" in line for line in lines)
    assert all("left" in line for line in lines[1:])
    assert ("val@12 6.0929" in lines[-1]) == (columns > 60) and ("tok/s/rank" in lines[-1]) == (columns == 160)


def test_a_terminal_keeps_a_step_line_every_few_seconds_above_the_display(monkeypatch):
    time = Time()

    def scene(progress):
        for step in range(1, 61):
            time.now += 0.5
            progress.update(record(step))
        progress.update({"kind": "validation", "step": 60, "loss": 2.5})

    text = on_terminal(monkeypatch, scene, clock=time)
    lines = [int(step) for step in re.findall(r"step +(\d+)/100", text)]
    assert lines == [1, 2, 3, 4, 5, *range(9, 61, 4)]
    assert "step 60 | validation loss 2.5000" in text


def test_a_shorter_number_makes_room_for_no_figure_that_the_lines_before_leave_out(monkeypatch):
    for columns in range(60, 110, 4):
        time = Time()

        def scene(progress, time=time):
            for step, norm in enumerate((0.8123, 0.8123, 1.0, 12.0, 0.8123), 20):
                time.now += 40.0
                progress.update(record(step, grad_norm=norm))

        text = on_terminal(monkeypatch, scene, clock=time, columns=columns)
        lines = re.findall(r"step +\d+/100[^\r\n\x1b]*", text)
        names = [{part.split()[0] for part in line.split(" | ")} for line in lines]
        assert all(later - {"left"} <= earlier for earlier, later in itertools.pairwise(names)), lines


def test_a_note_is_broken_between_words_on_a_terminal(monkeypatch):
    text = on_terminal(monkeypatch, lambda progress: progress.note("many words " * 20))
    assert all(len(line) <= 80 for line in re.findall("[ many words]{9,}", text)) and "many words many" in text


def test_after_the_last_step_the_bar_says_that_the_run_finishes(monkeypatch):
    text = on_terminal(monkeypatch, lambda progress: progress.update(record(100)))
    assert "finishing" in text and "0:00 left" not in text


def test_elapsed_time_counts_from_the_command(monkeypatch):
    time = Time()
    time.now = 100.0
    text = on_terminal(monkeypatch, lambda progress: progress.update(record(50)), clock=time, began=35.0)
    assert "1:05 elapsed" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_goes_to_stdout_and_never_to_stderr(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm" if terminal else "dumb")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as out, io.StringIO() as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        with RunProgress(9) as progress:
            progress.update(record(1))
            print("a warning", file=sys.stderr)
        shown = err.getvalue()
    assert shown == "a warning\n" and "step 1/9" in drained(ours)


def test_a_terminal_that_goes_away_does_not_end_the_run(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    progress = RunProgress(100, stream=stream)
    os.close(ours)
    progress.update(record(1))
    progress.note("still running")
    progress.close()
    progress.close()
