"""Runs scenarios on a shortened version of a user's run. An undisturbed run is the reference for their losses.

The reference is run once for each set of overrides.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from meshwright.chaos.hosts import Links
from meshwright.chaos.job import NotReached
from meshwright.chaos.scenario import Losses, PromiseVerdict, Scenario, Stage, Template, run_scenario
from meshwright.chaos.scenarios import SCENARIOS
from meshwright.spec.errors import BadInput, CommunicationFailure, nearest
from meshwright.spec.run import RunSpec

CHECKPOINTS = 6
"""Number of checkpoints in a disturbed run."""


def undo_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that the processes, mounts and namespaces of a scenario are removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Suite:
    """Scenarios on one run. Each scenario has a folder with its name in `folder`."""

    def __init__(
        self,
        run: RunSpec,
        arguments: list[str],
        folder: Path,
        steps: int,
        patience: float = 1.0,
        show: Callable[[str], object] = lambda text: None,
        links: Links = Links(),
    ) -> None:
        """`arguments` describe `run` on the command line. The run is shortened to `steps` steps with a few checkpoints.

        Keys about checkpoints in `arguments` are kept. Limits in seconds are multiplied by `patience`, for machines
        that do other work at the same time. `show` receives lines of progress. `links` connect the hosts.
        """
        keys_given = {override.partition("=")[0] for override in arguments}
        every = max(1, steps // CHECKPOINTS)
        if "checkpoint.every" in keys_given and isinstance(run.checkpoint.every, int) and run.checkpoint.every:
            every = run.checkpoint.every
        shortened = {"train.steps": steps, "checkpoint.every": every}
        shortened |= {} if "checkpoint.keep" in keys_given else {"checkpoint.keep": CHECKPOINTS + 4}
        arguments = [*arguments, *(f"{key}={value}" for key, value in shortened.items())]
        self._template = Template(
            tuple(arguments), run.name, steps, run.cluster.ranks, every, gpu=not run.cluster.is_cpu
        )
        self._folder = folder
        self._patience = patience
        self._show = show
        self._links = links
        self._undisturbed: dict[tuple[tuple[str, ...], int], Losses] = {}

    def run(self, scenario: Scenario) -> PromiseVerdict:
        """Run a scenario. If this machine cannot run it, the verdict is not ok and says why."""
        reason = scenario.unavailable()
        if reason is not None:
            return PromiseVerdict(scenario.name, scenario.promise, f"not run: {reason}", False)
        try:
            return run_scenario(
                scenario,
                self._template,
                self._folder / scenario.name,
                lambda: self.undisturbed(_without_supervision(scenario.overrides), min(scenario.hosts, 2)),
                self._patience,
                self._show,
                self._links,
            )
        except NotReached as error:
            return PromiseVerdict(scenario.name, scenario.promise, f"BROKEN: {error}", False)

    def undisturbed(self, overrides: tuple[str, ...], hosts: int) -> Losses:
        """Return the losses of an undisturbed run with `overrides` on `hosts` hosts. The run is made at the first call."""
        key = overrides, hosts
        if key not in self._undisturbed:
            folder = self._folder / "undisturbed"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._show("the undisturbed run begins")
            stage = Stage(self._template, folder, overrides, hosts, self._show, self._links)
            try:
                code = stage.start().wait(24 * 3600)
            finally:
                stage.close()
            if code:
                raise CommunicationFailure(f"the undisturbed run ended with code {code}:\n{stage.job.output[-2000:]}")
            self._undisturbed[key] = stage.losses()
        return self._undisturbed[key]


def _without_supervision(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return `overrides` without keys of the section `supervision`, because none of those changes a loss."""
    return tuple(override for override in overrides if not override.startswith("supervision."))


def scenario_named(name: str) -> Scenario:
    """Return the scenario with this name. Raises BadInput, which names the nearest one, if there is none."""
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    if name not in scenarios:
        nearest_name = nearest(name, scenarios)
        raise BadInput(
            f"--scenario {name}: there is no such scenario"
            + (f"; nearest: {nearest_name}" if nearest_name else "; --list names all")
        )
    return scenarios[name]
