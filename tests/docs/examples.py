"""Examples of the planner's output on the pages, made again by running the commands above them.

A block that begins with ```console output holds what the nearest bash block above it prints: on stdout, or where it refuses on stderr.
`python -m tests.docs.examples` writes all of them anew; figures move whenever constants are fitted.

Words behind `output` shorten it. Sections stand between empty lines and are named by the beginning of their title, with dashes for spaces;
`head` is the first one. `only=head,mesh` leaves out the others. `cut=runner-ups:2,where-the-numbers:2+1` keeps the first two entries of one
section, and of the other the first two and the last; `…` stands for what is left out.
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
"""Columns of the terminal that examples are printed on."""
FOLDED = 138
"""Columns at which the one line of a refusal is folded."""
SECONDS = 300


def examples() -> Iterator[tuple[Block, Block]]:
    """(the commands, the block that shows what they print), page by page."""
    for page in PAGES:
        command: Block | None = None
        for block in blocks(page):
            if block.language == "bash":
                command = block
            elif block.language == "console" and MARK in block.words:
                assert command is not None, f"{block.where}: no bash block stands above it"
                yield command, block


def printed(command: Block) -> str:
    """What the commands of a block print."""
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
        answer = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert answer.returncode == 0, f"{command.where}: code {answer.returncode}\n{answer.stderr}"
    return answer.stdout if answer.stdout.strip() else refusal(answer.stderr)


def refusal(text: str) -> str:
    """An error message without what is said before it, folded."""
    lines = text[text.index("meshwright: ") :].splitlines()
    return "\n".join(textwrap.fill(line, FOLDED, break_on_hyphens=False) for line in lines)


def shorten(text: str, only: Sequence[str], cut: Mapping[str, tuple[int, int]]) -> str:
    """`text` without the sections that `only` does not name, where it names any, and with few entries of those that `cut` names.

    Raises ValueError for a name that no section has.
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
    """A section's title with its first and last entries; an entry begins where a line is indented as its first line is."""
    title, *lines = section.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    starts = [at for at, line in enumerate(lines) if len(line) - len(line.lstrip()) == indent]
    if len(starts) <= first + last:
        return section
    tail = lines[starts[-last] :] if last else []
    return "\n".join([title, *lines[: starts[first]], " " * indent + "…", *tail])


def options(block: Block) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """What the block's words say is shown: sections, and entries at the beginning and the end of some."""
    only = (block.option("only") or "").split(",")
    cut = {}
    for part in filter(None, (block.option("cut") or "").split(",")):
        name, _, counts = part.partition(":")
        first, _, last = counts.partition("+")
        cut[name] = (int(first), int(last or 0))
    return [name for name in only if name], cut


def rewritten(text: str, made: Mapping[Block, str]) -> str:
    """A page's text with each of these blocks of it holding what was made for it."""
    lines = text.splitlines(keepends=True)
    for block in sorted(made, key=lambda block: -block.line):
        lines[block.line : block.line + block.text.count("\n")] = [made[block]]
    return "".join(lines)


if __name__ == "__main__":
    outputs: dict[str, str] = {}
    pages: dict[str, dict[Block, str]] = {}
    for command, block in examples():
        if command.where not in outputs:
            print(command.where, flush=True)
            outputs[command.where] = printed(command)
        pages.setdefault(block.page, {})[block] = shorten(outputs[command.where], *options(block))
    for page, made in pages.items():
        (ROOT / page).write_text(rewritten(text_of(page), made), encoding="utf-8")
