"""The runs in a folder: their states and figures, stopping a run, and deleting runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from meshwright.durable.lease import LEASE, owner_is_alive, read_lease
from meshwright.durable.lock import this_process
from meshwright.durable.writes import rename, sync_folder
from meshwright.launch.folder import folder_lock
from meshwright.launch.lease_store import lease_store
from meshwright.launch.run_figures import RunFigureReader, RunFigures
from meshwright.launch.state_file import STATE_FILE
from meshwright.observe.runfolder import read_plan
from meshwright.policies.coordinator_lease import CoordinatorLease
from meshwright.spec.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, BadInput
from meshwright.spec.plan_name import layout_name
from meshwright.spec.run import Lease

State = Literal["running", "waiting", "finished", "stopped", "failed"]
RUN_FILES = (LEASE, "metrics.jsonl", STATE_FILE)
"""Files that identify a run's folder: every such folder has at least one of them, and no other folder has any."""
POLL_SECONDS = 0.2
"""Seconds between two looks at a run whose end is awaited."""
DELETED = ".deleted-"
"""A folder that is being deleted gets a name that begins like this."""


@dataclass(frozen=True)
class ListedRun:
    """One run in a list of runs."""

    name: str
    folder: str
    state: State
    """The state of the run.

    `running`; `waiting` for hosts or for its first step; `finished` with all steps done; `stopped`, it can continue;
    `failed`, see `exit_code`.
    """
    exit_code: int | None
    """Exit code of the newest job, if known."""
    step: int
    steps: int | None
    loss: float | None
    """Loss of the last step, in nats per token."""
    validation_loss: float | None
    """The last validation loss, in nats per token."""
    tokens: float | None
    plan: str | None
    """The plan in one line."""
    changed_seconds: float
    """Seconds since the run last wrote metrics, or since its folder changed if it has none."""
    bytes: int
    """Bytes of all files in the run's folder."""


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in `folder` and one level below it, sorted by name. Runs of a sweep are one level below."""

    def below(parent: Path) -> Iterator[Path]:
        for child in sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")):
            if is_run(child):
                yield child
            elif parent == folder:
                yield from below(child)

    return list(below(folder))


def is_run(folder: Path) -> bool:
    """Whether a run has been started in this folder."""
    return any((folder / name).is_file() for name in RUN_FILES)


def list_run(folder: Path, base: Path | None = None) -> ListedRun:
    """Return the state and figures of one run. Its name is relative to the folder `base`, if that is given."""
    figures = RunFigureReader(folder).read()
    plan = read_plan(folder / "plan.yaml", [])
    return ListedRun(
        name=figures.name if base is None else folder.relative_to(base).as_posix(),
        folder=str(folder),
        state=run_state(folder, figures),
        exit_code=figures.exit_code,
        step=figures.step,
        steps=figures.steps,
        loss=figures.loss,
        validation_loss=figures.validation_loss,
        tokens=figures.tokens,
        plan=None if plan is None else layout_name(plan),
        changed_seconds=max(0.0, time.time() - _changed(folder)),
        bytes=_bytes(folder),
    )


def run_state(folder: Path, figures: RunFigures) -> State:
    """Return the state of a run, from its supervision and from the process that holds its lease."""
    if figures.exit_code is None and _runs(folder, figures):
        return "waiting" if figures.state in ("gathering", "preparing") or not figures.step else "running"
    if figures.exit_code == EXIT_DONE or _all_steps(figures):
        return "finished"
    return "stopped" if figures.exit_code in (None, EXIT_PREEMPTED, EXIT_INTERRUPTED) else "failed"


def request_stop(folder: Path) -> tuple[int, Lease]:
    """Ask the job that writes to a run's folder to save a checkpoint and end after the current step.

    Sends SIGTERM to the process that holds the lease, or to the present coordinator, and returns its process id and the
    lease. Raises BadInput if no job runs, or if it runs on another host.
    """
    lease = read_lease(folder)
    figures = RunFigureReader(folder).read()
    state = run_state(folder, figures)
    if state not in ("running", "waiting") or lease is None:
        raise BadInput(
            f"{folder} is not running: it is {state}{_at(figures)}; `meshwright runs` lists the running ones"
        )
    pid = lease.pid if owner_is_alive(lease) else _coordinator_here(folder)
    if pid is None:
        host = socket.gethostname()
        coordinator = _coordinator_lease(folder)
        where = f"process {lease.pid} on {lease.host}" if lease.host != host else "a process that is not visible here"
        if coordinator is not None:
            where = coordinator.process
        raise BadInput(f"{folder} is written by {where}, and this host is {host}; run `meshwright runs stop` there")
    os.kill(pid, signal.SIGTERM)
    return pid, lease


def _coordinator_here(folder: Path) -> int | None:
    """Return the process id of the run's present coordinator, if it is on this host. Coordination moves when a host is lost."""
    lease = _coordinator_lease(folder)
    if lease is None or lease.process != this_process(lease.pid) or not Path(f"/proc/{lease.pid}").exists():
        return None
    return lease.pid


def _coordinator_lease(folder: Path) -> CoordinatorLease | None:
    """Return the lease of the run's coordinator; None if no process holds it or it cannot be read."""
    config = _configuration(folder)
    supervision = config.get("supervision") or {}
    with suppress(OSError, BadInput):
        lease = lease_store(supervision.get("lease"), str(config.get("name", folder.name)), folder).read()
        return None if lease is None or lease.released else lease
    return None


def await_end(folder: Path, lease: Lease) -> RunFigures:
    """Wait until the job with this lease has ended or another start has replaced it. Return the last figures."""
    reader = RunFigureReader(folder)
    while True:
        alive = (owner_is_alive(lease) and read_lease(folder) == lease) or _coordinator_here(folder) is not None
        figures = reader.read()
        if figures.exit_code is not None or not alive:
            return figures
        time.sleep(POLL_SECONDS)


def check_deletable(folder: Path, others: Collection[Path]) -> None:
    """Raise BadInput unless `folder` is a run's folder that may be deleted.

    It may not be deleted if the run is running, if the folder contains other runs or a git repository, or if a run in
    `others` needs it: if that run's configuration names this folder, or a part of it, as initial weights, data or plan.
    """
    if folder.is_symlink():
        raise BadInput(f"{folder} is a link to {folder.resolve()}; name that folder")
    if not folder.is_dir() or not is_run(folder):
        raise BadInput(f"{folder} is not a run's folder (it has none of {', '.join(RUN_FILES)}); nothing is deleted")
    real = folder.resolve()
    if Path.cwd().is_relative_to(real):
        raise BadInput(f"{folder} is the current folder or contains it; nothing is deleted")
    if foreign := [
        child.name for child in folder.iterdir() if child.name == ".git" or (child.is_dir() and is_run(child))
    ]:
        raise BadInput(
            f"{folder} holds {', '.join(sorted(foreign))} besides a run; nothing is deleted, move it away first"
        )
    figures = RunFigureReader(folder).read()
    if (state := run_state(folder, figures)) in ("running", "waiting"):
        raise BadInput(f"{folder} is {state}{_at(figures)}; stop it first: meshwright runs stop {folder}")
    for other in others:
        if other.resolve() != real and (key := _key_that_names(other, real)):
            raise BadInput(
                f"{folder} is needed by {other}, whose {key} names it; delete both in one command, or that one first"
            )


def delete_run(folder: Path) -> None:
    """Delete the folder of a run that `check_deletable` has accepted.

    The folder is renamed first, so that an interrupted deletion does not leave a part of it under the run's name.
    Raises BadInput if a job has begun in the folder.
    """
    gone = folder.with_name(f"{DELETED}{folder.name}-{os.getpid()}")
    with folder_lock(folder):
        rename(folder, gone)
    sync_folder(gone.parent)
    shutil.rmtree(gone)


def _all_steps(figures: RunFigures) -> bool:
    return bool(figures.step) and figures.steps is not None and figures.step >= figures.steps


def _runs(folder: Path, figures: RunFigures) -> bool:
    """Whether a job without an exit code is running.

    If its process is on this host, the process decides; otherwise the age of the job's files.
    """
    lease = read_lease(folder)
    supervised = figures.attempt > 0
    if lease is None or lease.host != socket.gethostname():
        return figures.running
    # A process that trains without supervision, for example a rank of torchrun, may still exist after its last step.
    return owner_is_alive(lease) and (supervised or not _all_steps(figures))


def _at(figures: RunFigures) -> str:
    return f" at step {figures.step:,}" if figures.step else ""


def _configuration(run: Path) -> Mapping[str, Any]:
    """Return the resolved configuration in a run's folder; empty if it cannot be read."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        return config if isinstance(config, Mapping) else {}
    return {}


def _key_that_names(run: Path, folder: Path) -> str | None:
    """Return the key of a run's configuration whose value is a path in `folder`; None if there is none."""
    for key, value in _texts(_configuration(run), ""):
        path = value.partition(":")[2] if value.startswith(("checkpoint:", "hf:")) else value
        if path and any(place.resolve().is_relative_to(folder) for place in (Path(path), run.parent / path)):
            return key
    return None


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every text of a configuration, with its key. The keys of `data.mix` are paths, so they are yielded too."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if key == "data.mix":
                yield key, str(name)
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str) and key != "name":
        yield key, value


def _changed(folder: Path) -> float:
    """Return the Unix time at which metrics were last written, or else the folder last changed."""
    file = folder / "metrics.jsonl"
    return (file if file.exists() else folder).stat().st_mtime


def _bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder and below. Files that disappear meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
