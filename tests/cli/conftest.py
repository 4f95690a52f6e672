"""A tiny run, trained once by the command itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import plan_answer
from meshwright.planner import devices, fixes, objectives, what_if
from tests.cli.command import train_here
from tests.training.tiny import make_tiny

ONE_RANK = "cluster.gpus_per_node=1"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with checkpoints of steps 3 and 6."""
    runs = tmp_path_factory.mktemp("finished")
    answer = train_here(tiny, ONE_RANK, "checkpoint.every=3", "--runs", runs)
    assert answer.code == 0, answer.err
    assert answer.err == "", "nothing went wrong"
    return runs / "tiny"


@pytest.fixture(scope="module")
def repeated_searches() -> Iterator[None]:
    """Commands of a file that ask the same, in text, as JSON or as a page, share one search and its changes.

    Both depend on their arguments alone.
    """
    answers: dict[str, Any] = {}

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: object, **options: object) -> Any:
            key = repr((function.__name__, arguments, sorted(options.items())))
            if key not in answers:
                answers[key] = function(*arguments, **options)
            return answers[key]

        return answer

    with pytest.MonkeyPatch.context() as patch:
        for module in (devices, fixes, objectives, what_if):
            patch.setattr(module, "search", once(module.search))
        patch.setattr(plan_answer, "what_if", once(plan_answer.what_if))
        yield
