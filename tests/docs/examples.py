"""Writes the examples of the planner's output on the pages, by running the commands above them.

A ```console output block holds what the nearest bash block above it prints on stdout, or on stderr where the command refuses.
`python -m tests.docs.examples [PAGE…]` writes those of all pages or of some; figures change whenever constants are fitted.

Options behind `output` shorten the block. Empty lines separate sections. A section is named by the beginning of its title, with dashes for
spaces; `head` is the first. `only=head,mesh` omits the others. `cut=runner-ups:2,where-the-numbers:2+1` keeps the first two entries of one
section, and the first two and the last of the other. `…` stands for omitted entries.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, Block, blocks, text_of

MARK = "output"
WIDTH = 104
"""Columns of the terminal."""
REFUSAL_WIDTH = 138
"""Columns at which the line of a refusal is folded."""
SECONDS = 300


def examples() -> Iterator[tuple[Block, Block]]:
    """Yields (commands, block that shows their output), page by page."""
    for page in PAGES:
        command: Block | None = None
        for block in blocks(page):
            if block.language == "bash":
                command = block
            elif block.language == "console" and MARK in block.options:
                assert command is not None, f"{block.location}: no bash block above"
                yield command, block


def printed(command: Block) -> str:
    """Runs the commands of a block and returns their output."""
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder) / "bin" / "meshwright"
        tool.parent.mkdir()
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m meshwright "$@"\n')
        tool.chmod(0o755)
        path = os.pathsep.join((str(tool.parent), os.environ["PATH"]))
        environment = {
            **os.environ,
            "PATH": path,
            "COLUMNS": str(WIDTH),
            "TERM": "dumb",
            "PYTHONPATH": str(ROOT / "src"),
        }
        environment["OMP_NUM_THREADS"] = "1"
        completed = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert completed.returncode == 0, f"{command.location}: code {completed.returncode}\n{completed.stderr}"
    return completed.stdout if completed.stdout.strip() else refusal(completed.stderr)


def refusal(text: str) -> str:
    """Returns the error message alone, folded."""
    lines = text[text.index("meshwright: ") :].splitlines()
    return "\n".join(textwrap.fill(line, REFUSAL_WIDTH, break_on_hyphens=False) for line in lines)


def shorten(text: str, only: Sequence[str], cut: Mapping[str, tuple[int, int]]) -> str:
    """Returns `text` with the sections of `only` (all if empty), and the first and last entries of the sections of `cut`.

    Raises ValueError for a name without a section.
    """
    sections = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).split("\n\n")
    titles = ["head", *(section.splitlines()[0].replace(" ", "-") for section in sections[1:])]
    for name in (*only, *cut):
        if not any(title.startswith(name) for title in titles):
            raise ValueError(f"no section {name}; there are {', '.join(titles)}")
    shown = []
    for title, section in zip(titles, sections, strict=True):
        if only and not any(title.startswith(name) for name in only):
            continue
        ends = next((ends for name, ends in cut.items() if title.startswith(name)), None)
        shown.append(section if ends is None else _cut(section, *ends))
    return "\n\n".join(shown) + "\n"


def _cut(section: str, first: int, last: int) -> str:
    """Returns a section's title with its first and last entries; an entry begins at the smallest indent."""
    title, *lines = section.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    starts = [at for at, line in enumerate(lines) if len(line) - len(line.lstrip()) == indent]
    if len(starts) <= first + last:
        return section
    tail = lines[starts[-last] :] if last else []
    return "\n".join([title, *lines[: starts[first]], " " * indent + "…", *tail])


def options(block: Block) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Returns the block's options: sections to show, and the entries to keep at the beginning and end of a section."""
    only = (block.option("only") or "").split(",")
    cut = {}
    for part in filter(None, (block.option("cut") or "").split(",")):
        name, _, counts = part.partition(":")
        first, _, last = counts.partition("+")
        cut[name] = (int(first), int(last or 0))
    return [name for name in only if name], cut


def rewritten(text: str, contents: Mapping[Block, str]) -> str:
    """Returns a page's text with new contents in these blocks."""
    lines = text.splitlines(keepends=True)
    for block in sorted(contents, key=lambda block: -block.line):
        lines[block.line : block.line + block.text.count("\n")] = [contents[block]]
    return "".join(lines)


if __name__ == "__main__":
    outputs: dict[str, str] = {}
    pages: dict[str, dict[Block, str]] = {}
    for command, block in examples():
        if sys.argv[1:] and block.page not in sys.argv[1:]:
            continue
        if command.location not in outputs:
            print(command.location, flush=True)
            outputs[command.location] = printed(command)
        pages.setdefault(block.page, {})[block] = shorten(outputs[command.location], *options(block))
    for page, contents in pages.items():
        (ROOT / page).write_text(rewritten(text_of(page), contents), encoding="utf-8")
