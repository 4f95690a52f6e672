"""The table of examples/README.md: what the planner predicts for each file. `python -m tests.docs.run_files` writes it anew.

Files name folders of models that a reader has (`hf:…`). Here these folders have a `config.json` only, which is all that planning reads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.docs.pages import ROOT

from meshwright.api import load_run, plan
from meshwright.config.deployment_file import load_deployment_spec
from meshwright.config.presets import MODEL_PRESETS
from meshwright.families.folder import to_hf_config
from meshwright.spec.deployment import DeploymentSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan_name import plan_name
from meshwright.spec.run import RunSpec

FOLDER = ROOT / "examples"
PAGE = "examples/README.md"
FILES = sorted(FOLDER.glob("*.yaml"))
CONTEXT = 131_072
"""Longest sequence of the folders of models."""


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a run: seconds of a step (None on a CPU), tokens per second and GPU, GB on the fullest rank."""

    layout: str
    seconds: float | None
    tokens_per_second: float | None
    gigabytes: float


def purpose(file: Path) -> str:
    """Returns the sentence with which a file begins."""
    return file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").rstrip(".")


@contextmanager
def in_a_copy() -> Iterator[None]:
    """Enters a copy of the examples beside folders of the models that they name."""
    model = replace(from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"]), max_seq_len=CONTEXT)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        names = {name for file in FILES for name in re.findall(r'"hf:([^"]+)"', file.read_text(encoding="utf-8"))}
        for name in names:
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(to_hf_config(model)))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def loaded(file: Path) -> RunSpec | DeploymentSpec:
    """Reads an example; inside of `in_a_copy`. Raises BadConfig with every mistake."""
    serves = re.search(r"^serve:", file.read_text(encoding="utf-8"), re.MULTILINE)
    return load_deployment_spec(Path(file.name), []) if serves else load_run(file.name)


def prediction(run: RunSpec) -> Prediction:
    """Plans a run."""
    chosen = plan(run)
    predicted = chosen.predicted
    assert predicted is not None
    return Prediction(
        plan_name(chosen),
        predicted.step_seconds,
        predicted.tokens_per_second_per_gpu,
        predicted.memory_peak_bytes / 1e9,
    )


def machine(run: RunSpec | DeploymentSpec) -> str:
    cluster = run.cluster
    return f"{cluster.nodes * cluster.gpus_per_node} × {cluster.gpu}"


def line(file: Path) -> str:
    """The row of a file."""
    run = loaded(file)
    cells = [f"[{file.name}]({file.name})", purpose(file), machine(run)]
    if isinstance(run, RunSpec):
        made = prediction(run)
        cells.append(made.layout)
        cells.append("–" if made.seconds is None else f"{made.seconds:.3g} s")
        cells.append("–" if made.tokens_per_second is None else f"{made.tokens_per_second:,.0f}")
        cells.append(f"{made.gigabytes:.3g}")
    else:
        cells += ["a deployment", "–", "–", "–"]
    return f"| {' | '.join(cells)} |"


HEAD = ("file", "what it does", "devices", "layout", "a step", "tokens/s a GPU", "GB on the fullest rank")


def with_table(text: str) -> str:
    """Returns the page's text with a new table in place of its only one."""
    with in_a_copy():
        table = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|---:|---:|---:|", *map(line, FILES)]
    before, _, rest = text.partition("\n| ")
    after = rest[rest.index("\n\n") :]
    return before + "\n" + "\n".join(table) + after


if __name__ == "__main__":
    page = ROOT / PAGE
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
