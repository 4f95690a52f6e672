"""The files of a run's folder, of a cluster and of a mirror, with changed bytes, as commands and the next start read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from meshwright.checkpoint.format.inventory import FIRST_COMMIT, describe_continuation, take_inventory
from meshwright.checkpoint.format.manifest import step_name
from meshwright.checkpoint.mirror.copies import (
    COPIED,
    INDEX,
    describe_copies,
    fetch_newest,
    read_index,
    upload_checkpoint,
)
from meshwright.checkpoint.mirror.store import MirrorStore
from meshwright.cli.incidents import incident_lines
from meshwright.config.load import load_cluster, load_plan, load_resolved
from meshwright.data.text_format import recorded_text_format
from meshwright.launch.attempts import prepared_before
from meshwright.launch.corpus import skipped_samples
from meshwright.launch.incidents import FILE, FOLDER, JobSchedule, read_incidents
from meshwright.launch.progress_file import FILE as PROGRESS
from meshwright.launch.progress_file import JobProgress, RankSnapshot, _to_columns, read_progress
from meshwright.launch.run_figures import RunFigureReader
from meshwright.launch.state_file import STATE_FILE, read_state
from meshwright.observe.metrics import MetricsWriter, read_metrics
from meshwright.observe.runfolder import read_run
from meshwright.policies.restart import Incident
from meshwright.policies.supervision import State
from meshwright.spec.fields import to_plain, to_sealed_json
from meshwright.spec.run import Assignment, RunSpec
from tests.flips import PLACES, Case, assert_no_internal_error

ASSIGNMENT = "assignment.json"
INCIDENT = {
    "time": 1.5, "attempt": 1, "step": 3, "cause": "rank 0 died", "confidence": "certain", "rank": 0, "host": "a",
    "action": "forward", "reason": "code -9", "answer": "restart", "ranks": [],
}  # fmt: skip


def monitor(run: Path) -> None:
    """What `monitor`, `incidents` and `report` read."""
    RunFigureReader(run).read()
    read_state(run)
    read_progress(run)
    [incident_lines(record) for record in read_incidents(run)]
    read_run(run)


def start(run: Path) -> None:
    """What a start reads of the run before."""
    load_resolved(run / "config.yaml")
    recorded_text_format(run)
    take_inventory(run)
    describe_continuation(run)


def read_assignment(run: Path, job: RunSpec) -> None:
    """What a coordinator that is started again, incidents and the ranks' data read."""
    prepared_before(job, run, lambda text: None)
    JobSchedule.read(run / ASSIGNMENT)
    skipped_samples(run)


def next_metrics(run: Path) -> None:
    content = (run / "metrics.jsonl").read_bytes()
    read_run(run)
    RunFigureReader(run).read()
    MetricsWriter(run / "metrics.jsonl", 3).close()
    (run / "metrics.jsonl").write_bytes(content)
    read_metrics(run / "metrics.jsonl")


def files_of_a_run(run: Path) -> list[Case]:
    state = State(
        status="running",
        attempt=1,
        members=("a",),
        checkpoints=(3, 6),
        incidents=(Incident(5, "x", rank=0, host="a", step=3),),
    )
    (run / STATE_FILE).write_text(to_sealed_json({"time": 1.0, "term": 1, **to_plain(state)}) + "\n")
    snapshot = RankSnapshot(rank=0, host="a", phase="forward", step=3, action=1, seconds=0.5)
    (run / PROGRESS).write_text(json.dumps(_to_columns(JobProgress("job", 1, "running", (snapshot,)))))
    (run / FOLDER / "0001-3").mkdir(parents=True)
    (run / FOLDER / "0001-3" / FILE).write_text(json.dumps(INCIDENT))
    job = Assignment.read(run / ASSIGNMENT).run
    readers: dict[str, Callable[[Path], object]] = {
        "config.yaml": start, "text_format.json": start, FIRST_COMMIT: start,
        "plan.yaml": lambda run: (load_plan(run / "plan.yaml"), read_run(run)),
        "metrics.jsonl": next_metrics, "wall_time.jsonl": monitor, "summary.json": monitor, "environment.json": monitor,
        ASSIGNMENT: partial(read_assignment, job=job), STATE_FILE: monitor, PROGRESS: monitor, f"{FOLDER}/0001-3/{FILE}": monitor,
    }  # fmt: skip
    return [(run / name, lambda read=read: read(run)) for name, read in readers.items()]


def files_of_a_mirror(run: Path) -> list[Case]:
    mirror = f"file://{run.parent / 'mirror'}"
    store = MirrorStore(f"{mirror}/{run.name}", patience=0.0)
    upload_checkpoint(store, run / "checkpoints" / step_name(6), keep=2)

    def read() -> None:
        describe_copies(mirror, run)
        fetch_newest(mirror, run, lambda text: None, patience=0.0)
        read_index(store)

    return [(run / COPIED, read), (run.parent / "mirror" / run.name / INDEX, read)]


def cluster_file(run: Path) -> list[Case]:
    file = run.parent / "cluster.yaml"
    file.write_text("gpu: H200\nnodes: 2\ngpus_per_node: 8\nnetwork: {fabric: tcp, interface: eth1}\n")
    return [(file, lambda: load_cluster(file))]


MAKERS = {"run": files_of_a_run, "mirror": files_of_a_mirror, "cluster": cluster_file}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.timeout(900)
def test_a_changed_byte_is_no_internal_error(finished: Path, tmp_path: Path, make: str, places: int) -> None:
    shutil.copytree(finished, tmp_path / "tiny")
    assert_no_internal_error(MAKERS[make](tmp_path / "tiny"), places)
