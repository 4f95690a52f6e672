"""Incidents of a run: the rank that caused a failure, what it was doing, which ranks waited for it, and what follows.

The coordinator writes `RUN/incidents/NNNN-STEP/incident.json` before it ends the ranks. Agents add `stacks/rank-R.txt`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.diagnosis.culprit import TRAINING, Culprit, RankStatus, find_culprit
from meshwright.durable.writes import write_durable
from meshwright.events.terminal import write_line
from meshwright.launch.outcome import RankState
from meshwright.policies.job_end import PEER_LOSS_CODES
from meshwright.policies.restart import Incident
from meshwright.schedules.plan_schedule import training_schedule
from meshwright.schedules.schedule import Schedule
from meshwright.spec.errors import EXIT_BAD_INPUT, Damaged
from meshwright.spec.fields import to_plain
from meshwright.spec.layout import Layout
from meshwright.spec.run import Assignment

FOLDER = "incidents"
"""Folder of all incidents in a run's folder."""
FILE = "incident.json"
"""File with the record of an incident, in the incident's own folder."""
KEPT = 50
"""Incidents that a run keeps. Older ones are removed."""
LISTED_RANKS = 1024
"""Most ranks, and most waiting ranks, in the record of an incident."""


@dataclass(frozen=True)
class JobSchedule:
    """Schedule and layout of an attempt. `hosts_wait`: whether collectives block the host thread, as they do on CPUs."""

    schedule: Schedule
    layout: Layout
    hosts_wait: bool

    @classmethod
    def read(cls, assignment: Path) -> JobSchedule | None:
        """Read the schedule and layout from an assignment file; None if it cannot be read."""
        try:
            job = Assignment.read(assignment)
            cluster = job.run.cluster
            schedule = training_schedule(job.plan, job.run.model.layers)
        except (OSError, Damaged, ValueError, TypeError, KeyError, AttributeError):
            return None
        return cls(schedule, Layout.of(job.plan, cluster.gpus_per_node), cluster.is_cpu)

    def label(self, state: RankState) -> str:
        """Return the label of the action that a rank last began. A rank that is not training has its phase as label."""
        progress = state.progress
        if progress is None or progress.phase not in TRAINING or state.rank >= self.layout.ranks:
            return progress.phase if progress else "start"
        schedule = self.schedule.in_turns() if progress.phase == "compile" else self.schedule
        actions = schedule.actions[self.layout.coordinates(state.rank).get("pipeline", 0)]
        return actions[min(progress.action, len(actions) - 1)].label


def statuses(ranks: Sequence[RankState], hosts: Mapping[int, str], seconds: Mapping[int, float]) -> list[RankStatus]:
    """Return the ranks that have begun, as input of `diagnosis.culprit`.

    `hosts` has the host of each rank, `seconds` the time since its last progress; 0 if unknown.
    """
    return [
        RankStatus(
            rank.rank,
            hosts[rank.rank],
            rank.progress.phase,
            rank.progress.step,
            max(0, rank.progress.action),
            seconds.get(rank.rank, 0.0),
            rank.stopped and rank.code is None,
            rank.failed,
            rank.pending,
        )
        for rank in ranks
        if rank.progress is not None
    ]


def culprit_of_hang(job: JobSchedule | None, ranks: Sequence[RankStatus]) -> Culprit | None:
    """Return the rank that holds up a hanging job; None if the attempt's schedule is unknown. `ranks` is from `statuses`."""
    return None if job is None else find_culprit(ranks, job.schedule, job.layout, hosts_wait=job.hosts_wait)


def is_recorded(incident: Incident, stop_codes: Sequence[int]) -> bool:
    """Whether a failure is recorded as an incident. Bad input and requested stops (`stop_codes`) are not."""
    return incident.code not in (EXIT_BAD_INPUT, *stop_codes)


def blamed(incident: Incident, ranks: Sequence[RankState], hosts: Mapping[int, str]) -> Incident:
    """Return the incident with the rank that caused it.

    If the ranks report only that they lost a peer, and exactly one rank has been stopped by a signal, that rank is the
    cause.
    """
    stopped = [rank.rank for rank in ranks if rank.stopped and rank.code is None and not rank.failed]
    if incident.hang or incident.corrupt or incident.code not in PEER_LOSS_CODES or len(stopped) != 1:
        return incident
    text = f"rank {stopped[0]} is stopped; {incident.cause}"
    return replace(incident, rank=stopped[0], host=hosts[stopped[0]], cause=text)


class IncidentWriter:
    """Writes the incidents of a run in a thread."""

    def __init__(self, run: Path) -> None:
        self._run = run.absolute()
        self._thread = ThreadPoolExecutor(1, "incidents")
        self._newest: tuple[Incident, Callable[[Incident], None]] | None = None

    def record(
        self,
        incident: Incident,
        attempt: int,
        answer: str,
        ranks: Sequence[RankState],
        hosts: Mapping[int, str],
        assignment: Path,
        culprit: Culprit | None,
    ) -> Path:
        """Start writing an incident, and return its folder.

        The arguments are those of `write_incident`, but `assignment` is the file of the attempt's assignment.
        """
        folder = new_folder(self._run, incident.step)

        def write(incident: Incident) -> None:
            try:
                write_incident(folder, incident, attempt, answer, ranks, hosts, JobSchedule.read(assignment), culprit)
            except OSError as error:
                write_line(f"meshwright: the incident is not recorded: {error.filename}: {error.strerror}")

        self._newest = incident, write
        self._thread.submit(write, incident)
        return folder

    def blame_host(self, host: str, reason: str) -> None:
        """Let the newest incident blame a host that is now known to be lost.

        The peers of a lost host fail before the loss of the host is noticed. So the incident may name a rank that only
        reported a lost peer.
        """
        if self._newest is None:
            return
        incident, write = self._newest
        by_itself = incident.hang or incident.corrupt or incident.code not in PEER_LOSS_CODES
        if not by_itself and incident.rank is not None and incident.host != host:
            incident = replace(incident, rank=None, host=host, cause=f"{reason}; {incident.cause}")
            self._newest = incident, write
            self._thread.submit(write, incident)

    def close(self) -> None:
        """Wait until all incidents are written."""
        self._thread.shutdown()


def new_folder(run: Path, step: int | None) -> Path:
    """Create and return the folder of the next incident. Its number follows the newest one; the oldest folders are removed."""
    existing: list[Path] = []
    with suppress(OSError):  # an error is reported when the incident is written
        existing = [path for path in _folders(run) if path.is_dir()]
    for path in existing[: max(0, len(existing) + 1 - KEPT)]:
        shutil.rmtree(path, ignore_errors=True)
    number = _number(existing[-1]) + 1 if existing else 1
    folder = run / FOLDER / f"{number:04d}-{step or 0}"
    with suppress(OSError):
        folder.parent.mkdir(exist_ok=True)  # without parents: if the run's folder was deleted, it must not reappear
        folder.mkdir()  # at once, so that an incident at the same time gets the next number
    return folder


def _folders(run: Path) -> list[Path]:
    """Return the folders of a run's incidents, the oldest first. Their numbers have four digits or more."""
    return sorted((path for path in (run / FOLDER).glob("*-*") if path.name.partition("-")[0].isdecimal()), key=_number)


def _number(folder: Path) -> int:
    """Return the number of an incident's folder."""
    return int(folder.name.partition("-")[0])


def write_incident(
    folder: Path,
    incident: Incident,
    attempt: int,
    answer: str,
    ranks: Sequence[RankState],
    hosts: Mapping[int, str],
    job: JobSchedule | None,
    culprit: Culprit | None,
) -> None:
    """Write `incident.json` into `folder`.

    `attempt` is the number of the failed attempt, and `answer` says what follows. `ranks` are the states of all ranks,
    and `hosts` their hosts. For a hang, `culprit` is the rank that holds up the job.
    """
    incident = blamed(incident, ranks, hosts)
    state = next((rank for rank in ranks if rank.rank == incident.rank), None)
    record = {
        "time": time.time(),
        "step": incident.step,
        "attempt": attempt,
        "cause": _cause_of(incident),
        "code": incident.code,
        "rank": incident.rank,
        "host": incident.host,
        "phase": incident.phase,
        "action": _action_of(incident, state, job, culprit),
        "reason": culprit.reason if culprit else incident.cause,
        "confidence": culprit.confidence if culprit else "certain",
        "answer": answer,
        "waiting": [to_plain(wait) for wait in culprit.waiting[:LISTED_RANKS]] if culprit else [],
        "ranks": [_rank_record(rank, hosts, job) for rank in ranks[:LISTED_RANKS]],
    }
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    write_durable(folder / FILE, json.dumps(record, indent=1) + "\n")


def _cause_of(incident: Incident) -> str:
    """Return the kind of an incident: hang, corruption, killed (by a signal) or failure."""
    if incident.hang:
        return "hang"
    if incident.corrupt:
        return "corruption"
    return "killed" if incident.code < 0 else "failure"


def _action_of(incident: Incident, state: RankState | None, job: JobSchedule | None, culprit: Culprit | None) -> str:
    """Return what the rank of an incident was doing."""
    if incident.corrupt:
        return "check of its state"
    if culprit is not None:
        return culprit.action
    return job.label(state) if job and state else incident.phase


def _rank_record(state: RankState, hosts: Mapping[int, str], job: JobSchedule | None) -> dict[str, Any]:
    """Return what an incident records about one rank."""
    progress = state.progress
    action = str(progress.action) if progress else ""
    return {
        "rank": state.rank,
        "host": hosts.get(state.rank, ""),
        "code": state.code,
        "stopped": state.stopped,
        "step": progress.step if progress else None,
        "phase": progress.phase if progress else "start",
        "action": job.label(state) if job else action,
        "pending": to_plain(state.pending) if state.pending else None,
        "failure": state.failure.message if state.failure else None,
    }


_SHOWN = {"time", "step", "attempt", "cause", "rank", "host", "action", "reason", "confidence", "answer"}
"""Keys that a record must have for its readers."""


def read_incidents(run: Path) -> list[dict[str, Any]]:
    """Return the incidents of a run, the oldest first. Damaged records are left out.

    Each is its record, with its folder as `evidence` and the names of its `stacks`.
    """
    found = []
    for path in (folder / FILE for folder in _folders(run)):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(record, dict) or not record.keys() >= _SHOWN or not isinstance(record["time"], float):
            continue
        stacks = sorted((path.parent / "stacks").glob("rank-*.txt"))
        found.append({**record, "evidence": str(path.parent), "stacks": [stack.name for stack in stacks]})
    return found
