"""A preparation shows how far it is and how fast: live on a terminal, as lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from meshwright.data import prepare as prepare_module
from meshwright.data import progress as progress_module
from meshwright.data.prepare import prepare
from meshwright.data.progress import progress


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, to be set."""
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    return clock


def test_lines_have_documents_rates_and_the_time_left(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress("preparing", 400_000_000, shown=True) as report:
        report(0, 10, 1_000_000)
        for _ in range(3):
            seconds[0] += 2
            report(int(seconds[0] - 100) * 5_000_000, 1_234_567, 1_000_000 + int(seconds[0] - 100) * 2_000_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "preparing: 8%, 1,234,567 documents, 13.0 M tokens, 5.0 MB/s, 2,000,000 tokens/s, 0:01:14 left"


def test_a_terminal_gets_a_live_bar_with_the_same_figures(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    with progress("preparing", 400_000_000, shown=True) as report:
        report(0, 0, 0)
        seconds[0] += 10
        report(100_000_000, 77, 5_000_000)
    for text in ("100.0/400.0 MB", "77 documents", "5.0 M tokens", "10.0 MB/s", "500,000 tokens/s", "0:00:30 left"):
        assert text in terminal.getvalue()


def test_prepare_reports_documents_and_tokens(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[tuple[int, int, int]] = []

    class Recorded:
        def __enter__(self):
            return lambda *figures: reports.append(figures)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(prepare_module, "progress", lambda title, total, shown: Recorded())
    result = prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", held_out=0.1, shard_tokens=2000)
    assert [documents for _, documents, _ in reports] == list(range(1, 121))
    size = sum(file.stat().st_size for file in corpus.iterdir())
    assert reports[-1] == (size, 120, sum(manifest.tokens for manifest in result.manifests.values()))
