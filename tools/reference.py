"""Writes the pages and files of the docs that are made from the code: `python -m tools.reference [NAME…]`, all of them without a name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tools import cluster_file, commands, dashboards, run_file, server

from meshwright.spec.errors import BadInput

ROOT = Path(__file__).parents[1]


def _features() -> str:
    from tools import features  # imports the tests of distributed training

    return features.page()


def _families() -> str:
    from tools import families  # as above

    return families.page()


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "run-file": ("docs/reference/run-file.md", run_file.page),
    "serve": ("docs/reference/serve.md", server.page),
    "cli": ("docs/reference/cli.md", commands.page),
    "cluster-file": ("docs/reference/cluster-file.md", cluster_file.page),
    "features": ("docs/reference/features.md", _features),
    "families": ("docs/reference/families.md", _families),
    **{name: (f"docs/grafana/{name}", partial(dashboards.text, name)) for name in dashboards.DASHBOARDS},
}
"""By name the file, relative to the repository, and what makes its text."""


def main(names: Sequence[str]) -> None:
    """Write the files of `names`, or all. Raises BadInput for a name that is none."""
    for name in names or GENERATED:
        if name not in GENERATED:
            raise BadInput(f"{name}: no generated page; expected {', '.join(GENERATED)}")
        file, text = GENERATED[name]
        (ROOT / file).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as error:
        sys.exit(str(error))
