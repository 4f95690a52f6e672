"""A resolved run: every value is known; it is written beside the run and sent to its ranks as JSON."""

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
    """The model, the source of its dimensions and its initial weights."""

    preset: str | None = None
    """Public model whose dimensions are used; other keys of the section replace single values."""
    init: str = "scratch"
    """Initial weights: `scratch`, `hf:DIR` (a Hugging Face folder) or `checkpoint:DIR` (weights only, optimizer fresh)."""

    __hash__ = ModelSpec.__hash__


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run with all its settings."""

    name: str
    """Folder of the run under `runs/`; the file's stem when left out."""
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
    """The parallel layout: `auto`, a plan file, or pins."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """Times of checkpoints, and the number that is kept."""
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    """Measurements and their destinations."""
    supervision: SupervisionSpec = field(default_factory=SupervisionSpec)
    """Restarts after a failure, for a run whose ranks `meshwright train` starts."""

    def __post_init__(self) -> None:
        """Give `train` what follows from the kind of loss: prices read `train`, and not the sections `rl` and `preference`."""
        kind = ObjectiveSpec if self.rl or self.preference else TrainSpec
        if self.preference and not self.preference.paired:
            kind = ComparedSpec
        if type(self.train) is not kind:
            object.__setattr__(self, "train", kind(**vars(self.train)))


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The start of a run that owns the run's folder, and the process that took the lease (`durable.lease`)."""

    run_id: str
    """Random name of the run, drawn at its first start and kept."""
    epoch: int
    """1 at the run's first start, plus 1 at each later one."""
    host: str
    boot_id: str
    """The kernel's boot id, which changes when the host restarts."""
    pid: int
    process_start: int
    """Start time of the process in the kernel's ticks since boot.
    0 once the job has ended, or where the system does not report it."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The input of every rank of a run: run, plan, folder, lease, and the steps to trace."""

    run: RunSpec
    plan: Plan
    folder: str
    lease: Lease
    """The start of the run that these ranks belong to; they commit checkpoints while it owns the folder."""
    profile: tuple[int, int] | None = None
    """First and last step whose profiler trace is written, both included."""
    timeline: tuple[int, int] | None = None
    """First and last step whose timeline is written, both included."""
    attempt: int = 1
    """Number of this start of the ranks within the job, from 1."""
    resume_at_most: int | None = None
    """Resume from the newest good checkpoint of at most this step; none takes the newest."""
    replay_routing: str | None = None
    """File of recorded loads that replace the routers' choices."""
    skip_samples: tuple[tuple[int, int], ...] = ()
    """Global sample indexes that the run leaves out, ascending: first, and one after the last (`policies.skipped_samples`)."""

    @classmethod
    def read(cls, path: Path) -> Assignment:
        """The assignment in a file. Raises Damaged if it is not one, and OSError."""
        try:
            return from_plain(cls, from_sealed_json(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: damaged ({error}); remove it and start the same command again, which writes it anew"
            ) from error
