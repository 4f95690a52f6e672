"""A whole run, resolved: every value known, ready to be written beside the run and sent to its ranks as plain JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import Bound, from_plain
from meshwright.spec.job import CheckpointSpec, DataSpec, ObserveSpec, TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan, PlanPins


@dataclass(frozen=True, kw_only=True)
class ModelSection(ModelSpec):
    """The model, where its dimensions come from and where its weights start."""

    preset: str | None = None
    """Public model whose dimensions are taken; other keys beside it change single ones."""
    init: str = "scratch"
    """Initial weights: `scratch`, `hf:DIR` (a Hugging Face folder) or `checkpoint:DIR` (weights only, optimizer fresh)."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything one run is."""

    name: str
    """Folder of the run under `runs/`; the file's stem when left out."""
    seed: Annotated[int, Bound(at_least=0, less_than=2**63)] = 0
    """Initial weights and data order follow from it."""
    model: ModelSection
    """What is trained."""
    data: DataSpec = field(default_factory=DataSpec)
    """What it reads."""
    train: TrainSpec
    """How it learns."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    """What it runs on; `auto`, also when it is left out, takes what is found."""
    plan: PlanPins | str = "auto"
    """How it is laid out: `auto`, a plan file, or pins."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """What must survive."""
    observe: ObserveSpec = field(default_factory=ObserveSpec)
    """Where figures go."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Which start of a run owns the run's folder, and the process that took it (`durable.lease`)."""

    run_id: str
    """Random name that the run got at its first start and keeps."""
    epoch: int
    """1 at the run's first start, and one more at each later one."""
    host: str
    boot_id: str
    """Changes when the host is started again."""
    pid: int
    process_start: int
    """When the process started, in the kernel's ticks since boot; 0 once the job has ended or where the system does not say it."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What every rank of a run is handed: the run, its plan, its folder, its lease, and what to trace."""

    run: RunSpec
    plan: Plan
    folder: str
    lease: Lease
    """The start of the run that these ranks belong to; they commit checkpoints while it owns the folder."""
    profile: tuple[int, int] | None = None
    """First and last step whose trace is written, both included."""
    timeline: tuple[int, int] | None = None
    """First and last step whose timeline is written, both included."""

    @classmethod
    def read(cls, path: Path) -> Assignment:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(cls, data)
