"""All scenarios, in the order in which `meshwright chaos --list` and `make test-faults` show them."""

from __future__ import annotations

import signal
from collections.abc import Callable

from meshwright.chaos.scenario import Scenario, Stage

KILLED = "training continues by itself from the newest checkpoint, with the losses of an undisturbed run, and no process is left behind"


def middle(stage: Stage) -> int:
    """A step in the middle of the run, half way between two checkpoints."""
    template = stage.template
    return template.steps // 2 // template.every * template.every + (template.every + 1) // 2


def kill(rank: int, number: int = signal.SIGKILL) -> Callable[[Stage], None]:
    """Play: a signal to `rank` (from the end if negative) in the middle of the run."""

    def play(stage: Stage) -> None:
        job = stage.start()
        job.until_step(middle(stage))
        stage.signal(job.ranks()[rank % stage.template.ranks], number)
        job.wait()

    return play


SCENARIOS = (
    Scenario(
        name="kill-rank",
        promise=f"After SIGKILL of a rank {KILLED}.",
        play=kill(-1),
        detect_within=1.0,
        recover_within=15.0,
    ),
    Scenario(
        name="kill-rank0",
        promise=f"After SIGKILL of rank 0, which holds the store, {KILLED}.",
        play=kill(0),
        detect_within=1.0,
        recover_within=15.0,
    ),
)
