"""Measured figures of the pages come from raw files: `python -m tools.figures` names those that differ, `--write` puts the files' figures.

A comment before a paragraph or a table, which a reader of the page does not see, says where its figures come from:

    <!-- figures
    in 2026-11-22-tcp-8b-8xH200.json
    at layouts/pp2-zbv-64
    10,888 = tokens_per_second_per_gpu; 0.977 = tokens_per_second_per_gpu / /layouts/fsdp-64/tokens_per_second_per_gpu
    given 8,192
    no file 34.0
    -->

`in` names a file of benchmarks/results, `at` a place in it to which paths are relative; a path that begins with `/` begins at the file.
A step of a path is a key, an index, or `KEY=VALUE,…`, which takes the elements of a list that have these values; `*` takes all. Where
a path reaches several numbers, `median`, `mean`, `min`, `max` or `count` before it makes one of them. Terms between ` * `, ` / `, ` + ` and
` - ` are numbers or paths, computed from the left. The text says how a number is written: decimals, `%`, sign; with `~` in place of `=`,
zeros at its end are rounded places. Figures stand in the order of the text. `given` lists numbers that describe what was run or asked,
`no file` measured ones of which no raw file is kept. Lines may be divided after `;`.

A `.jsonl` file of benchmarks/dense.py is read as ROW/SIDE/KEY, with the figures of its table and the keys of the last run. `accuracy` has
the errors with which benchmarks/accuracy.py predicts the kept runs today.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.spec.errors import BadInput

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
sys.path.append(str(ROOT / "benchmarks"))  # its scripts import each other by name

PART = re.compile(r"<!-- figures\n(?P<comment>.*?)-->\n\n(?P<text>.*?)(?=\n\n|\Z)", re.DOTALL)
"""A comment with the paragraph or table behind it."""
_NUMBER = re.compile(r"(?<![\w.,/-])[+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-\d+)?%?(?!\w|,\d|\.\d)")
_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "count": len,
}


@dataclass(frozen=True)
class Figure:
    """A number of a page, its places in the page's text and comment, and the number that its source has."""

    text: str
    starts: tuple[int, int]
    value: float
    source: str
    rounded: bool
    """Whether zeros at the end of the text are rounded places."""

    @property
    def right(self) -> bool:
        """Whether the text is the value, rounded; a half may go either way."""
        mantissa, _, power = self.text.rstrip("%").partition("e")
        shown = float(mantissa.replace(",", "").replace("−", "-"))
        value = self.value * self._unit / 10.0 ** int(power or 0)
        return abs(value - shown) <= 0.5 * 10.0**-self._places * (1 + 1e-6)

    @property
    def corrected(self) -> str:
        """The value, written like the text."""
        sign = "+" if self.text[0] in "+−" else ""
        if "e" in self.text:
            mantissa, _, power = f"{self.value:{sign}.{self._places}e}".partition("e")
            return f"{mantissa}e{int(power)}".replace("-", "−", 1 if self.value < 0 else 0)
        number = round(self.value * self._unit, self._places)
        return f"{number:{sign},.{max(self._places, 0)}f}".replace("-", "−") + ("%" if self.text.endswith("%") else "")

    @property
    def _places(self) -> int:
        """Decimals of the text; below 0 where tens, hundreds, … are rounded."""
        digits = re.sub(r"[^\d.]", "", self.text.partition("e")[0])
        decimals = len(digits.partition(".")[2])
        return len(digits.rstrip("0")) - len(digits) if self.rounded and not decimals else decimals

    @property
    def _unit(self) -> float:
        return 100.0 if self.text.endswith("%") else 1.0


@dataclass(frozen=True)
class Part:
    """A paragraph or a table with a comment; its first words are the name."""

    name: str
    figures: tuple[Figure, ...]
    unsaid: tuple[str, ...]
    """Numbers with decimals, thousands or `%` of which the comment says nothing."""
    without_file: tuple[str, ...]
    """Measured numbers of which no raw file is kept."""


@cache
def source(name: str) -> Any:
    """Returns the content of a raw file. Raises BadInput if there is none."""
    if name == "accuracy":
        from accuracy import check, recorded_runs

        checks = [check(kept) for kept in recorded_runs()]
        return {"not fitted": [{"error": abs(one.error)} for one in checks if not one.fitted]}
    file = RESULTS / name
    if not file.is_file():
        raise BadInput(f"{name}: no such file in benchmarks/results")
    if file.suffix == ".json":
        return json.loads(file.read_text(encoding="utf-8"))
    from dense_table import side_of

    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    table: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "run" and "error" not in line:
            table.setdefault(line["row"], {})[line["side"]] = line | (side_of(lines, line["row"], line["side"]) or {})
    return table


def value_of(expression: str, file: str, place: str) -> float:
    """Computes an expression of paths into `file`, relative to `place`. Raises BadInput for a path that does not reach one number."""
    first, *rest = re.split(r" ([-+*/]) ", expression)
    result = _term(first, file, place)
    for operator, text in zip(rest[::2], rest[1::2], strict=True):
        operand = _term(text, file, place)
        if operator == "/":
            result /= operand
        elif operator == "*":
            result *= operand
        else:
            result += operand if operator == "+" else -operand
    return result


def _term(text: str, file: str, place: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", text):
        return float(text)
    name, _, rest = text.partition(" ")
    summary = _SUMMARIES.get(name)
    path = rest if summary else text
    path = path if path.startswith("/") else f"{place}/{path}"
    reached = [source(file)]
    for step in filter(None, path.split("/")):
        reached = [found for item in reached for found in _step(item, step)]
    numbers = [item for item in reached if isinstance(item, (int, float)) and not isinstance(item, bool)]
    if not numbers or len(numbers) != len(reached) or (len(numbers) > 1 and not summary):
        raise BadInput(
            f"{file}: {path} reaches {len(reached)} elements, {len(numbers)} of them numbers; expected one number"
        )
    return float(summary(numbers)) if summary else float(numbers[0])


def _step(item: Any, step: str) -> list[Any]:
    """Returns what one step of a path reaches from an element."""
    if step == "*":
        return list(item.values() if isinstance(item, dict) else item)
    if isinstance(item, dict):
        return [item[step]] if step in item else []
    if isinstance(item, list) and re.fullmatch(r"-?\d+", step):
        index = int(step)
        return [item[index]] if -len(item) <= index < len(item) else []
    if isinstance(item, list) and "=" in step:
        wanted = [condition.split("=", 1) for condition in re.split(r",(?=\w+=)", step)]
        return [element for element in item if all(str(element.get(key)) == text for key, text in wanted)]
    return []


def numbers_of(text: str) -> list[re.Match[str]]:
    """Returns the numbers of a text, those of code and of the targets of links left out."""
    readable = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda unread: " " * len(unread[0]), text)
    return list(_NUMBER.finditer(readable))


@dataclass(frozen=True)
class Entry:
    """NUMBER = SOURCE of a comment: the number, its place in the comment, `=` or `~`, and the source with its file and place."""

    shown: str
    start: int
    sign: str
    expression: str
    file: str
    place: str


@dataclass(frozen=True)
class Comment:
    """What a comment says; `given` and `without_file` are its numbers without a source."""

    entries: tuple[Entry, ...]
    given: tuple[str, ...]
    without_file: tuple[str, ...]


def read_comment(comment: str) -> Comment:
    """Reads the lines of a comment. Raises BadInput for a line of another form."""
    file, place = "", ""
    entries: list[Entry] = []
    given: list[str] = []
    without_file: list[str] = []
    for line in re.finditer(r"[^;\n]+", comment):
        words = line[0].strip()
        kind, _, rest = words.partition(" ")
        if kind == "in":
            file, place = rest, ""
        elif kind == "at":
            place = rest
        elif kind == "given":
            given += rest.split()
        elif words.startswith("no file "):
            without_file += words.removeprefix("no file ").split()
        elif found := re.fullmatch(r"(\S+) ([=~]) (.+)", words):
            start = line.start() + line[0].index(found[1])
            entries.append(Entry(found[1], start, found[2], found[3], file, place))
        elif words:
            raise BadInput(f"`{words}`: expected in FILE, at PLACE, given NUMBERS, no file NUMBERS or NUMBER = SOURCE")
    return Comment(tuple(entries), tuple(given), tuple(without_file))


def parts(page: str) -> Iterator[Part]:
    """Yields the parts of a page's text that have a comment.

    Raises BadInput for a comment that cannot be read or has no text behind it, a figure that the text does not have, or a source that is
    not there.
    """
    matches = list(PART.finditer(page))
    if len(matches) != page.count("<!-- figures"):
        raise BadInput("a comment with figures has no end, or no blank line and text behind it")
    for match in matches:
        comment = read_comment(match["comment"])
        waiting = numbers_of(match["text"])
        figures: list[Figure] = []
        unsaid: list[str] = []
        for entry in comment.entries:
            while waiting and waiting[0][0] != entry.shown:
                unsaid.append(waiting.pop(0)[0])
            if not waiting:
                words = f"{entry.shown} {entry.sign} {entry.expression}"
                raise BadInput(f"`{words}`: the text has no {entry.shown} behind the figure before it")
            starts = (match.start("text") + waiting.pop(0).start(), match.start("comment") + entry.start)
            value = value_of(entry.expression, entry.file, entry.place)
            name = f"{entry.file}: {entry.place} {entry.expression}"
            figures.append(Figure(entry.shown, starts, value, name, entry.sign == "~"))
        unsaid += [number[0] for number in waiting]
        listed = {*comment.given, *comment.without_file}
        unsaid = [number for number in unsaid if re.search(r"[.,%]", number) and number not in listed]
        name = match["text"].partition("\n")[0][:60]
        yield Part(name, tuple(figures), tuple(unsaid), comment.without_file)


def mistakes(page: str) -> list[str]:
    """Returns what is wrong with the figures of a page's text, one line each."""
    found: list[str] = []
    for part in parts(page):
        wrong = [figure for figure in part.figures if not figure.right]
        found += [f"{part.name}…: {figure.text}, but {figure.corrected} by {figure.source}" for figure in wrong]
        found += [f"{part.name}…: {number} has neither a source nor `given` or `no file`" for number in part.unsaid]
    return found


def corrected(page: str) -> str:
    """Returns a page's text with the figures of their sources."""
    wrong = [figure for part in parts(page) for figure in part.figures if not figure.right]
    places = [(start, figure) for figure in wrong for start in figure.starts]
    for start, figure in sorted(places, key=lambda place: place[0], reverse=True):
        page = page[:start] + figure.corrected + page[start + len(figure.text) :]
    return page


def main() -> int:
    """Checks or writes all pages; returns 1 if a mistake stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the figures of the files into the pages")
    parser.add_argument(
        "--without-file", action="store_true", help="name the measured numbers of which no raw file is kept"
    )
    options = parser.parse_args()
    found: list[str] = []
    for name in PAGES:
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        try:
            if options.write and corrected(text) != text:
                text = corrected(text)
                file.write_text(text, encoding="utf-8")
            found += [f"{name}: {mistake}" for mistake in mistakes(text)]
        except BadInput as error:
            found.append(f"{name}: {error}")
            continue
        if options.without_file:
            kept_nowhere = [part for part in parts(text) if part.without_file]
            sys.stdout.writelines(f"{name}: {part.name}…: {' '.join(part.without_file)}\n" for part in kept_nowhere)
    sys.stderr.writelines(f"{line}\n" for line in found)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
