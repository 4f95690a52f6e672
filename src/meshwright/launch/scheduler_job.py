"""A run as a job of a scheduler: hosts, processes, seconds to stop, and the reaction to each exit code."""

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
"""Exit codes after which another start fails in the same way, or a person ended the run: the scheduler starts nothing."""
REQUEUE_CODES = (EXIT_PREEMPTED,)
"""Exit codes after which the scheduler starts the job again, without counting. It counts the starts after all others."""
AGENT_STARTS = 4
"""Starts of an agent that signals end, within one start of the job."""
STOP_MARGIN_SECONDS = 15
"""Seconds for the processes to end after the last checkpoint and the other ranks."""
UNKNOWN_STEP_SECONDS = 60.0
"""Step time where none is predicted."""
LONGEST_NOTICE = 65_535
"""Seconds before its time limit at which Slurm can send a signal at most."""
KEPT_FILES = "/etc/meshwright"
"""Folder of the run file and of the files that it names, in a container."""


@dataclass(frozen=True)
class SchedulerJob:
    """A run as a scheduler's job: one agent on each of `hosts` hosts."""

    run: RunSpec
    plan: Plan
    arguments: tuple[str, ...]
    """Run file and overrides as they were given."""
    runs: Path = field(default_factory=lambda: Path("runs"))

    @property
    def hosts(self) -> int:
        """Hosts to request, with the spare ones."""
        return self.run.cluster.nodes + self.run.supervision.spares

    @property
    def gpu_vendor(self) -> str | None:
        """Vendor of the devices as Kubernetes' resource names begin; None on a CPU."""
        if self.run.cluster.is_cpu:
            return None
        chip = CHIPS.get(self.run.cluster.gpu)
        return "amd.com" if chip is not None and chip.generation.startswith("cdna") else "nvidia.com"

    @property
    def survives_host_loss(self) -> bool:
        """Whether the run goes on without a replacement by the scheduler."""
        return self.run.supervision.spares > 0 or self.run.supervision.wait_seconds is not None

    @property
    def stop_seconds(self) -> int:
        """Seconds from a stop request until all processes have ended.

        The present step ends, the last checkpoint is written, and the ranks and their agent end.
        """
        predicted = self.plan.predicted.step_seconds if self.plan.predicted is not None else None
        step = predicted or UNKNOWN_STEP_SECONDS
        return ceil(step + self.run.checkpoint.grace_seconds + STOP_SECONDS + STOP_MARGIN_SECONDS)

    def agent_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Arguments of `meshwright` that start an agent; `arguments` are run file and overrides."""
        return ["train", *arguments, "--runs", str(self.runs), "--agent"]

    @property
    def summary(self) -> str:
        """The run's hosts and plan in a line."""
        spares = self.run.supervision.spares
        spare_text = f" and {spares} spare" if spares else ""
        cluster = self.run.cluster
        return (
            f"{self.run.name}: {cluster.nodes}{spare_text} host{'s' * (self.hosts > 1)} with {cluster.gpus_per_node} × "
            f"{cluster.gpu}; plan {plan_name(self.plan)}"
        )

    def files(self, folder: str = KEPT_FILES) -> dict[str, str]:
        """The run file with all values, and the plan and profile that it names, by file name.

        Their paths in the run file are those in `folder`. Raises BadInput for a file that cannot be read.
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
    """The job of a run. Raises BadInput for a run that a scheduler cannot start."""
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
    """Raise BadInput, naming the option, for text that is not UTF-8, which no file for a scheduler can have."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{name}: expected UTF-8, got {text!r}") from None


def comment(text: str) -> str:
    """A line of a comment in a shell script or in YAML; characters that end a line or do not print are escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"# {shown}"


def _text(path: str, key: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{key}: {path} cannot be read: {error}", key=key) from None
