"""`diagnose`: how much slower recorded steps are than ideal ones, why, and which rank or stage is the cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.diagnosis.cause import TimeFinding, find_cause
from meshwright.diagnosis.operations import OperationTable
from meshwright.diagnosis.public_trace import read_job, read_trace
from meshwright.diagnosis.replay import measure_steps
from meshwright.diagnosis.run_folder import read_operations
from meshwright.diagnosis.run_graph import run_graph
from meshwright.diagnosis.step_graph import StepGraph
from meshwright.diagnosis.trace_graph import trace_graph
from meshwright.diagnosis.what_if import analyse

LAST_STEPS = 100
"""Number of newest steps of a run that are analysed."""
FEWEST_STEPS = 12
"""With fewer steps than this, no cause is named for a run.

A steady excess must be 4 standard errors (`cause.SIGNIFICANT`), which are themselves estimated from the steps. By chance, a rank exceeds
this in 0.5% of the cases with 6 steps, and in 0.1% with 12.
"""


@dataclass(frozen=True)
class Diagnosis:
    """Result of the straggler analysis. A slowdown is a step time divided by the ideal step time (`what_if`)."""

    slowdown: float
    cause: str | None
    """None if there are too few steps, or if no part of the durations contributes at least `cause.FLAGGED_CONTRIBUTION`."""
    rank: int | None
    stage: int | None
    contributions: dict[str, float]
    """For each cause, its contribution as a share of the ideal step time; of several findings, the largest."""
    by_type: dict[str, float]
    by_rank: dict[int, float]
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    m_w: float
    """The paper's M_W: the share of the lost time that would be saved if the slowest 3% of the workers had ideal durations."""
    m_s: float
    """The paper's M_S: the share of the lost time that would be saved if the last stage had ideal durations."""
    launch_slowdown: float
    """Measured step time divided by that of the replay without launch delays. It shows how much time the replay does not explain."""
    step_seconds: float
    replayed_seconds: float
    ideal_seconds: float
    steps: tuple[int, ...]
    skipped_steps: int
    """Number of steps left out because operations of some rank are missing."""
    needed_steps: int
    """With fewer steps than this, no cause is named."""
    notes: tuple[str, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """The result as JSON values. Ranks and stages as keys are text."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("by_rank", "by_stage", "by_dp_rank"):
            plain[name] = {str(key): value for key, value in plain[name].items()}
        return plain | {"steps": list(self.steps), "notes": list(self.notes)}

    @property
    def sentence(self) -> str:
        """The result as a sentence for people."""
        slower = f"steps take {self.slowdown - 1:.1%} longer than with ideal durations"
        if len(self.steps) < self.needed_steps:
            return f"too few steps: {len(self.steps)} of {self.needed_steps}; {slower}, and no cause is named"
        if self.cause is None:
            return f"no straggler: {slower}, and no single cause adds 2%"
        ranked = [
            f"{name} {index}" for name, index in (("rank", self.rank), ("stage", self.stage)) if index is not None
        ]
        subject = f" of {', '.join(ranked)}" if ranked else ""
        added = self.contributions[self.cause]
        return f"{slower}; cause: {self.cause.replace('_', ' ')}{subject}, which adds {added:.1%}"


def diagnose(table: OperationTable, graph: StepGraph, needed_steps: int = 1) -> Diagnosis:
    """Analyse the steps of `table`, whose operations depend on each other as in `graph`. With fewer than `needed_steps`, no cause is named.

    Raises BadInput if no step has the operations of every rank.
    """
    measured = measure_steps(table, graph)
    result = analyse(measured)
    flagged, findings = find_cause(measured, table.host_of_rank)
    flagged = flagged if len(measured.steps) >= needed_steps else None
    return Diagnosis(
        slowdown=result.slowdown,
        cause=flagged.cause if flagged else None,
        rank=flagged.rank if flagged else None,
        stage=flagged.stage if flagged else None,
        contributions=_largest(findings),
        by_type=result.by_type,
        by_rank=result.by_rank,
        by_stage=result.by_stage,
        by_dp_rank=result.by_dp,
        m_w=result.worst_rank_share,
        m_s=result.last_stage_share,
        launch_slowdown=result.launch_slowdown,
        step_seconds=float(measured.step_seconds.mean()),
        replayed_seconds=result.seconds,
        ideal_seconds=result.ideal_seconds,
        steps=tuple(measured.steps.tolist()),
        skipped_steps=measured.skipped_steps,
        needed_steps=needed_steps,
    )


def _largest(findings: list[TimeFinding]) -> dict[str, float]:
    """For each cause, its largest contribution."""
    contributions: dict[str, float] = {}
    for finding in findings:
        contributions[finding.cause] = max(finding.contribution, contributions.get(finding.cause, finding.contribution))
    return contributions


def diagnose_run(folder: Path, last_steps: int = LAST_STEPS) -> Diagnosis:
    """Analyse the last recorded steps of a run, which may be in progress. Raises BadInput if it has no spans of these steps."""
    table, notes = read_operations(folder, last_steps)
    return replace(diagnose(table, run_graph(table), FEWEST_STEPS), notes=tuple(notes))


def diagnose_trace(path: Path, job: Path) -> Diagnosis:
    """Analyse a public trace (`public_trace`), given the YAML file that describes its job."""
    sizes = read_job(job)
    table = read_trace(path, sizes)
    diagnosis = diagnose(table, trace_graph(table))
    if sizes.ranks_per_worker == 1:
        return diagnosis
    note = (
        f"a rank of this trace stands for the {sizes.ranks_per_worker} ranks of its tensor- and sequence-parallel group"
    )
    return replace(diagnosis, notes=(note,))
