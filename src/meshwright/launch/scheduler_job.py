"""A run as a job of a scheduler: hosts, arguments, the time to stop, and which exit codes lead to another start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from meshwright.config.load import resolved_yaml
from meshwright.policies.job_end import STOP_SECONDS
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import (
    EXIT_BAD_INPUT,
    EXIT_DAMAGED,
    EXIT_INTERRUPTED,
    EXIT_NO_RESOURCES,
    EXIT_NUMERICAL,
    EXIT_PREEMPTED,
    EXIT_REPEATED,
    BadInput,
)
from meshwright.spec.plan import Plan
from meshwright.spec.plan_name import plan_name
from meshwright.spec.run import RunSpec

STOP_CODES = (EXIT_BAD_INPUT, EXIT_NO_RESOURCES, EXIT_DAMAGED, EXIT_NUMERICAL, EXIT_REPEATED, EXIT_INTERRUPTED)
"""Exit codes after which the scheduler starts nothing: another start would fail in the same way, or a person ended the run."""
REQUEUE_CODES = (EXIT_PREEMPTED,)
"""Exit codes after which the scheduler always starts the job again. After other codes, the number of starts is limited."""
AGENT_STARTS = 4
"""How often an agent is started within one start of the job, if signals end it."""
STOP_MARGIN_SECONDS = 15
"""Seconds for the processes to end, after the last checkpoint has been written and the ranks have stopped."""
UNKNOWN_STEP_SECONDS = 60.0
"""Seconds of a step that are assumed if none are predicted."""
LONGEST_NOTICE = 65_535
"""Slurm can send a signal at most this many seconds before the time limit of a job."""
KEPT_FILES = "/etc/meshwright"
"""Folder in a container that has the run file, and the plan and profile that it names."""


@dataclass(frozen=True)
class SchedulerJob:
    """A run as a scheduler's job, with one agent on each of `hosts` hosts."""

    run: RunSpec
    plan: Plan
    arguments: tuple[str, ...]
    """The run file and overrides, as the user gave them."""
    runs: Path = field(default_factory=lambda: Path("runs"))
    """Folder of all runs."""

    @property
    def hosts(self) -> int:
        """Number of hosts to request, including spare hosts."""
        return self.run.cluster.nodes + self.run.supervision.spares

    @property
    def gpu_vendor(self) -> str | None:
        """The vendor in Kubernetes' name of the GPU resource, `nvidia.com` or `amd.com`; None for CPUs."""
        if self.run.cluster.is_cpu:
            return None
        chip = CHIPS.get(self.run.cluster.gpu)
        return "amd.com" if chip is not None and chip.generation.startswith("cdna") else "nvidia.com"

    @property
    def survives_host_loss(self) -> bool:
        """Whether the run continues after the loss of a host, even if the scheduler does not replace it."""
        return self.run.supervision.spares > 0 or self.run.supervision.wait_seconds is not None

    @property
    def stop_seconds(self) -> int:
        """Seconds from a stop request until all processes have ended.

        In this time the current step ends, the last checkpoint is written, and the ranks and their agent end.
        """
        predicted = self.plan.predicted.step_seconds if self.plan.predicted is not None else None
        step = predicted or UNKNOWN_STEP_SECONDS
        return ceil(step + self.run.checkpoint.grace_seconds + STOP_SECONDS + STOP_MARGIN_SECONDS)

    def agent_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of the command `meshwright` that start an agent. `arguments` are the run file and overrides."""
        return ["train", *arguments, "--runs", str(self.runs), "--agent"]

    @property
    def summary(self) -> str:
        """The run's hosts and plan in one line."""
        spares = self.run.supervision.spares
        spare_text = f" and {spares} spare" if spares else ""
        cluster = self.run.cluster
        return (
            f"{self.run.name}: {cluster.nodes}{spare_text} host{'s' * (self.hosts > 1)} with {cluster.gpus_per_node} × "
            f"{cluster.gpu}; plan {plan_name(self.plan)}"
        )

    def files(self, folder: str = KEPT_FILES) -> dict[str, str]:
        """Return the contents of the run file with all values, and of the plan and profile that it names, by file name.

        In the run file their paths are in `folder`. Raises BadInput for a file that cannot be read.
        """
        run = self.run
        contents = {}
        if isinstance(run.plan, str) and run.plan != "auto":
            contents["plan.yaml"] = _text(run.plan, "plan")
            run = replace(run, plan=f"{folder}/plan.yaml")
        if run.cluster.profile is not None:
            contents["profile.yaml"] = _text(run.cluster.profile, "cluster.profile")
            run = replace(run, cluster=replace(run.cluster, profile=f"{folder}/profile.yaml"))
        return {"run.yaml": resolved_yaml(run), **contents}


def scheduler_job(run: RunSpec, plan: Plan, arguments: Sequence[str], runs: Path) -> SchedulerJob:
    """Return the job of a run. Raises BadInput for a run that a scheduler cannot start."""
    if run.cluster.emulate_nodes > 1:
        raise BadInput(
            f"cluster.emulate_nodes is {run.cluster.emulate_nodes}: a scheduler starts real hosts; use cluster.nodes="
            f"{run.cluster.emulate_nodes} cluster.emulate_nodes=1",
            key="cluster.emulate_nodes",
        )
    for word in (*arguments, str(runs)):
        check_text(word, "arguments")
    return SchedulerJob(run, plan, tuple(arguments), runs)


def check_text(text: str, name: str) -> None:
    """Raise BadInput if `text` is not UTF-8, because a scheduler's file could not contain it.

    `name` is the option in the error.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{name}: expected UTF-8, got {text!r}") from None


def comment(text: str) -> str:
    """Return a comment line for a shell script or YAML. Line breaks and other characters that do not print are escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"# {shown}"


def _text(path: str, key: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{key}: {path} cannot be read: {error}", key=key) from None
