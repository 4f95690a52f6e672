"""`meshwright rl`: trains a model on its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.check import report_all_mistakes
from meshwright.cli.options import Arguments, Runs, load
from meshwright.cli.train import train
from meshwright.spec.errors import BadInput


def rl(
    arguments: Arguments = None,
    runs: Runs = Path("runs"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run beside an earlier one of this name, as NAME-2, NAME-3, …")
    ] = False,
) -> None:
    """Train a model on its own answers, judged by a function: a run file with the section `rl`.

    It does what `meshwright train` does for such a file, and refuses one without the section. The same command continues a run that was
    stopped. The section needs a reward function in a Python file: `def reward(prompt, answer, record)`.

    Examples:

        meshwright rl rl.yaml

        meshwright rl rl.yaml rl.samples=16 rl.policy=dapo
    """
    with report_all_mistakes(arguments, runs, fresh=fresh):
        if load(arguments, runs).rl is None:
            raise BadInput(
                "rl: expected a section with reward: {file: FILE.py}, as `meshwright rl` learns from rewards", key="rl"
            )
    train(arguments, runs, fresh)
