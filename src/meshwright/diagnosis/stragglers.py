"""`diagnose`: the slowdown of recorded steps, its cause, and the rank or stage that causes it."""

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
"""Steps of a run that are analysed, the newest."""
FEWEST_STEPS = 12
"""Steps without which no cause of a run is named.

A steady excess has to be 4 standard errors (`cause.SIGNIFICANT`), themselves
estimated from the steps: by chance a rank has that in 0.5% of the cases with 6 steps, in 0.1% with 12.
"""


@dataclass(frozen=True)
class Diagnosis:
    """Result of the straggler analysis. Slowdowns are step times over ideal step times (`what_if`)."""

    slowdown: float
    cause: str | None
    """None with too few steps, or if no part of the durations explains `cause.FLAGGED_CONTRIBUTION` of the ideal step time."""
    rank: int | None
    stage: int | None
    contributions: dict[str, float]
    """By cause, the largest share of the ideal step time that it adds."""
    by_type: dict[str, float]
    by_rank: dict[int, float]
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    m_w: float
    """The paper's M_W: share of the excess that ideal durations on the slowest 3% of the workers remove."""
    m_s: float
    """The paper's M_S: share of the excess that ideal durations on the last stage remove."""
    launch_slowdown: float
    """Measured step time over the replay without launch delays: how much of the step the replay does not explain."""
    step_seconds: float
    replayed_seconds: float
    ideal_seconds: float
    steps: tuple[int, ...]
    skipped_steps: int
    """Steps that lack operations of some rank."""
    needed_steps: int
    """Steps without which no cause is named."""
    notes: tuple[str, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """JSON values; ranks and stages as keys are text."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("by_rank", "by_stage", "by_dp_rank"):
            plain[name] = {str(key): value for key, value in plain[name].items()}
        return plain | {"steps": list(self.steps), "notes": list(self.notes)}

    @property
    def sentence(self) -> str:
        """The result in words."""
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
    """Analyse the steps of `table`, whose operations depend on each other as in `graph`; of too few steps without a cause.

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
    contributions: dict[str, float] = {}
    for finding in findings:
        contributions[finding.cause] = max(finding.contribution, contributions.get(finding.cause, finding.contribution))
    return contributions


def diagnose_run(folder: Path, last_steps: int = LAST_STEPS) -> Diagnosis:
    """Analyse the last recorded steps of a run, also of one in progress. Raises BadInput if it has no spans of them."""
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
