"""A run with all its values, which is stored in the folder of the run and sent to its ranks as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import Damaged
from meshwright.spec.fields import Bound, from_plain, from_sealed_json
from meshwright.spec.job import (
    CheckpointSpec,
    ComparedSpec,
    DataSpec,
    ObjectiveSpec,
    ObserveSpec,
    SupervisionSpec,
    TrainSpec,
)
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.preference import PreferenceSpec
from meshwright.spec.rl import RlSpec


@dataclass(frozen=True, kw_only=True)
class ModelSection(ModelSpec):
    """The model, where its dimensions come from, and its initial weights."""

    preset: str | None = None
    """Public model whose dimensions are used. Other keys of the section replace single dimensions."""
    init: str = "scratch"
    """Initial weights: `scratch`, `hf:DIR` (a Hugging Face folder) or `checkpoint:DIR` (only the weights; the optimizer
    starts anew).
    """

    __hash__ = ModelSpec.__hash__


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run with all its settings."""

    name: str
    """Folder of the run under `runs/`; left out, the name of the file without its extension."""
    seed: Annotated[int, Bound(at_least=0, less_than=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    model: ModelSection
    """The model to train."""
    data: DataSpec = field(default_factory=DataSpec)
    """The data to read."""
    train: TrainSpec
    """Batch, optimizer and training schedule."""
    rl: RlSpec | None = None
    """Reinforcement learning: the model answers the questions of `data.mix`, and its better answers become likelier."""
    preference: PreferenceSpec | None = None
    """Learning from preferences: good answers of `data.mix` become likelier than bad ones to the same prompt."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    """The devices; `auto`, also when it is left out, uses the devices of this machine."""
    plan: PlanKeys | str = "auto"
    """The parallel layout: `auto`, a plan file, or a section with the keys that are fixed (pins)."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """When checkpoints are written, and how many are kept."""
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    """What is measured, and where the measurements go."""
    supervision: SupervisionSpec = field(default_factory=SupervisionSpec)
    """Restarts after a failure, for a run whose ranks `meshwright train` starts."""

    def __post_init__(self) -> None:
        """Give `train` the class that follows from the kind of loss, because the cost model reads `train` and not the
        sections `rl` and `preference`.
        """
        kind = ObjectiveSpec if self.rl or self.preference else TrainSpec
        if self.preference and not self.preference.paired:
            kind = ComparedSpec
        if type(self.train) is not kind:
            object.__setattr__(self, "train", kind(**vars(self.train)))


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The start of a run that owns the folder of the run, and the process that took the lease (`durable.lease`)."""

    run_id: str
    """Random name of the run, drawn at its first start and kept."""
    epoch: int
    """1 at the run's first start, and 1 more at each later start."""
    host: str
    """Name of the host of the process."""
    boot_id: str
    """The kernel's boot id, which changes when the host restarts."""
    pid: int
    """Number of the process."""
    process_start: int
    """Start time of the process in kernel ticks since boot.

    0 after the job has ended, or if the system does not report it.
    """


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What every rank of a run gets: the run, the plan, the folder, the lease, and the steps to trace."""

    run: RunSpec
    plan: Plan
    folder: str
    """Folder of the run."""
    lease: Lease
    """The start of the run to which these ranks belong. They commit checkpoints as long as it owns the folder."""
    profile: tuple[int, int] | None = None
    """First and last step whose profiler trace is written, both included."""
    timeline: tuple[int, int] | None = None
    """First and last step whose timeline is written, both included."""
    attempt: int = 1
    """Number of this start of the ranks in the job, counted from 1."""
    resume_at_most: int | None = None
    """Resume from the newest good checkpoint whose step is at most this; none is the newest of all."""
    replay_routing: str | None = None
    """File of recorded loads that replace the choices of the routers."""
    skip_samples: tuple[tuple[int, int], ...] = ()
    """Samples that the run leaves out, as (first, one after the last) of their global indexes, ascending
    (`policies.skipped_samples`).
    """

    @classmethod
    def read(cls, path: Path) -> Assignment:
        """Return the assignment in a file.

        Raises Damaged if it is not an assignment, and OSError if it cannot be read.
        """
        try:
            return from_plain(cls, from_sealed_json(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: damaged ({error}); remove it and start the same command again, which writes it anew"
            ) from error
