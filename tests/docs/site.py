"""Builds the documentation as a site: `python -m tests.docs.site` (`make docs-site`) writes build/site.

The pages are written for GitHub. They are copied to build/site-source, with the files that they link to and in the same folders, so that
links are the same in both. The home page is README.md. The navigation is what `docs/index.md` lists. mkdocs checks links and anchors; a
warning is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.docs.pages import PAGES, ROOT, links, prose, text_of

INDEX = "docs/index.md"
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
_PART = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
"""A fenced block."""


def linked(page: str) -> dict[str, Path]:
    """Returns the files (links of other sites left out) that a page links to, by link."""
    paths = {link: link.partition("#")[0] for link in links(page) if "://" not in link}
    return {link: ((ROOT / page).parent / path).resolve() for link, path in paths.items() if path}


def reachable(start: str = INDEX) -> set[str]:
    """Returns the pages that can be reached from `start` by links, as paths from the root."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        page = waiting.pop()
        if page in found:
            continue
        found.add(page)
        waiting += [
            str(file.relative_to(ROOT)) for file in linked(page).values() if file.suffix == ".md" and file.is_file()
        ]
    return found


def navigation() -> list[dict[str, Any]]:
    """Returns the sections of the index with their pages. A page that is listed twice stays in its first section."""
    sections: list[dict[str, Any]] = [{"Home": "README.md"}, {"All pages by task": INDEX}]
    listed: set[str] = set()
    for section in re.split(r"^## ", prose(INDEX), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages = []
        for name, link in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", text):
            path = str(((ROOT / INDEX).parent / link).resolve().relative_to(ROOT))
            if path not in listed:
                pages.append({name[0].upper() + name[1:]: path})
            listed.add(path)
        sections.append({title: pages})
    return sections


def for_mkdocs(text: str) -> str:
    """Returns a page's text in the Markdown that mkdocs reads: GitHub's differs in four places."""
    parts = _PART.split(text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = re.sub(r"\A```(\S*) .*$", r"```\1", part, count=1, flags=re.MULTILINE)  # options of a block
            continue
        part = re.sub(r"^  (?=[-*] )", "    ", part, flags=re.MULTILINE)  # a list in a list
        part = re.sub(
            r"^(?![-*|#>\d ])(.+\n)(?=([-*]|\d+\.) )", r"\1\n", part, flags=re.MULTILINE
        )  # a list after a paragraph
        parts[index] = re.sub(r"`[^`\n]*`", lambda code: code[0].replace(r"\|", "|"), part)  # a bar in code
    return "".join(parts)


def copy_source() -> None:
    """Writes the pages and what they link to into SOURCE, which is emptied first."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in sorted({*PAGES, *reachable("README.md"), *reachable()}):
        target = SOURCE / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_mkdocs(text_of(page)), encoding="utf-8")
        for file in linked(page).values():
            if file.is_file() and file.suffix != ".md":
                copy = SOURCE / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def build() -> int:
    """Builds the site and returns mkdocs's exit code."""
    copy_source()
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(SOURCE), "site_dir": str(SITE), "nav": navigation()}
    file = SOURCE.parent / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(file)]
    return subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(build())
