"""Reads the requests of a serving workload from a CSV file, or makes them if the workload has no file."""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from collections.abc import Iterator
from pathlib import Path

from meshwright.spec.deployment import PREFIX_BLOCK, TimedRequest, Workload
from meshwright.spec.errors import BadConfig, Mistake, nearest, nearest_file
from meshwright.spec.fields import LARGEST_COUNT

REQUIRED = ("arrival_seconds", "input_tokens", "output_tokens")
"""Columns that a trace must have."""
PREFIXES = "prefix_blocks_of_512"
"""Optional column: the ids of the prompt's blocks of 512 tokens. Requests with the same ids begin with the same tokens."""
MOST_BYTES = 256 << 20
"""Maximum number of bytes of a trace, uncompressed."""
SYNTHETIC_REQUESTS = 3000
"""Number of requests of a workload without a trace."""


def workload_requests(workload: Workload, seed: int = 0) -> tuple[TimedRequest, ...]:
    """Return the requests of a workload, ordered by time of arrival. Raises BadConfig if its trace has a mistake."""
    return read_trace(Path(workload.trace)) if workload.trace is not None else _equal_requests(workload, seed)


def read_trace(path: Path, shown: str | None = None) -> tuple[TimedRequest, ...]:
    """Read the requests in a CSV file, which may be compressed (`.gz`).

    Times are shifted so that the first request arrives at 0 s.

    Raises BadConfig for the first line that has a mistake. Messages name the file as `shown`.
    """
    reader = _TraceReader(shown or str(path))
    text = reader.text(path)
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        requests = tuple(reader.requests(lines))
    except csv.Error as error:
        raise reader.mistake(lines.line_num, 1, "trace", "CSV", str(error)) from None
    if not requests:
        raise reader.mistake(2, 1, "trace", "at least one request", "none")
    first = requests[0].arrival_seconds
    return tuple(request._replace(arrival_seconds=request.arrival_seconds - first) for request in requests)


class _TraceReader:
    """Reads a trace, and raises the first mistake with its position. `shown` is the name of the file in messages."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def text(self, path: Path) -> str:
        """Return the content of the file, decompressed."""
        expected = f"a CSV file of at most {MOST_BYTES >> 20} MiB with columns {', '.join(REQUIRED)}"
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                raw = stream.read(MOST_BYTES + 1)
            if len(raw) > MOST_BYTES:
                raise self.mistake(None, None, "trace", expected, "a larger one")
            return raw.decode("utf-8-sig")
        # gzip raises EOFError, and decoding raises UnicodeDecodeError, a ValueError.
        except (OSError, EOFError, ValueError) as error:
            close = None
            if not path.exists():
                close = nearest_file(path.name, [near.name for near in path.parent.glob("*.csv*")])
            got = (getattr(error, "strerror", None) or str(error)).lower()
            raise self.mistake(None, None, "trace", expected, got, close) from None

    def mistake(
        self, line: int | None, column: int | None, key: str, expected: str, got: str, close: str | None = None
    ) -> BadConfig:
        """Return a BadConfig with one mistake. `line` and `column` count from 1."""
        return BadConfig([Mistake(self._shown, line, column, key, expected, got, close)])

    def requests(self, lines: Iterator[list[str]]) -> Iterator[TimedRequest]:
        """Yield the requests of the file's lines, in order."""
        columns = self._columns(next(lines, []))
        before = -math.inf
        for number, cells in enumerate(lines, 2):
            if not cells:
                continue
            if len(cells) != len(columns):
                raise self.mistake(number, 1, "trace", f"{len(columns)} values", f"{len(cells)}")
            values = dict(zip(columns, cells, strict=True))
            starts = {name: sum(len(cell) + 1 for cell in cells[:index]) + 1 for index, name in enumerate(columns)}
            arrival = self._seconds(values["arrival_seconds"], before, number, starts["arrival_seconds"])
            counts = [self._count(values[name], name, number, starts[name]) for name in REQUIRED[1:]]
            blocks = self._blocks(values.get(PREFIXES, ""), counts[0], number, starts.get(PREFIXES, 1))
            yield TimedRequest(arrival, counts[0], counts[1], blocks)
            before = arrival

    def _columns(self, header: list[str]) -> list[str]:
        """Return the names of the columns in the first line. Raises BadConfig for an unknown, repeated or missing column."""
        names = [name.strip() for name in header]
        expected = f"the columns {','.join(REQUIRED)}[,{PREFIXES}]"
        for index, name in enumerate(names):
            if name not in (*REQUIRED, PREFIXES) or name in names[:index]:
                column = sum(len(other) + 1 for other in header[:index]) + 1
                close = nearest(name, [other for other in (*REQUIRED, PREFIXES) if other not in names])
                raise self.mistake(1, column, "trace", expected, f"'{name[:60]}'", close)
        if missing := [name for name in REQUIRED if name not in names]:
            raise self.mistake(1, 1, "trace", expected, f"no {missing[0]}")
        return names

    def _seconds(self, text: str, before: float, line: int, column: int) -> float:
        """Return the arrival time in a cell. Raises BadConfig if it is no number, or is less than `before`, the arrival before it."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or abs(value) > 1e12:
            raise self.mistake(line, column, "arrival_seconds", "a number of seconds", f"'{text[:60]}'")
        if value < before:
            expected = f"at least {before:g}, the arrival before it"
            raise self.mistake(line, column, "arrival_seconds", expected, f"{value:g}")
        return value

    def _count(self, text: str, name: str, line: int, column: int) -> int:
        """Return the number of tokens in a cell. Raises BadConfig if it is no positive integer."""
        digits = text.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and 1 <= int(digits) <= LARGEST_COUNT):
            raise self.mistake(line, column, name, "an integer (≥ 1)", f"'{text[:60]}'")
        return int(digits)

    def _blocks(self, text: str, tokens: int, line: int, column: int) -> tuple[int, ...]:
        """Return the ids of a prompt's blocks in a cell.

        Raises BadConfig if there are more ids than the prompt's `tokens` have blocks.
        """
        ids = text.split()
        most = -(-tokens // PREFIX_BLOCK)
        if any(not (each.isascii() and each.isdigit() and len(each) <= 18) for each in ids) or len(ids) > most:
            expected = f"at most {most} integers with spaces between, one for each {PREFIX_BLOCK} tokens"
            raise self.mistake(line, column, PREFIXES, expected, f"'{text[:60]}'")
        return tuple(map(int, ids))


def _equal_requests(workload: Workload, seed: int) -> tuple[TimedRequest, ...]:
    """Make requests of equal size with Poisson arrivals.

    The shared prefix has the same block ids in all of them; a partial block counts as not shared.
    """
    draw = random.Random(seed)
    time = 0.0
    tokens = workload.input_tokens or 1
    new_tokens = workload.output_tokens or 1
    shared = int(workload.prefix_sharing * tokens) // PREFIX_BLOCK
    requests = []
    for _ in range(SYNTHETIC_REQUESTS):
        requests.append(TimedRequest(time, tokens, new_tokens, tuple(range(shared))))
        time += draw.expovariate(workload.rate or 1.0)
    return tuple(requests)
