"""What supervision reads is damaged or cannot be read: a fallback where there is one, else a code and the file's name."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.spec.test_fields import PLAN, RUN

from meshwright.durable.lock import LOCK
from meshwright.launch import attempts, hosts, prepare
from meshwright.launch.attempts import RunFinished, prepared_before, write_attempt
from meshwright.launch.control import ControlClient
from meshwright.launch.prepare import PreparedRun
from meshwright.launch.reports import Directive, Report
from meshwright.launch.state_file import STATE_FILE, StateFile, read_state
from meshwright.policies.supervision import State
from meshwright.spec.errors import EXIT_BAD_INPUT, EXIT_DAMAGED, EXIT_DONE, BadInput, Damaged, MeshwrightError
from meshwright.spec.fields import to_sealed_json
from meshwright.spec.run import Assignment, Lease

LEASE = Lease(run_id="5f2c", epoch=1, host="node0", boot_id="b", pid=7, process_start=99)
RUNNING = State("running", attempt=2, job="job", members=("a/1", "b/1"), checkpoints=(10, 20))


def assignment(folder: Path) -> Assignment:
    return Assignment(run=RUN, plan=PLAN, folder=str(folder), lease=LEASE, attempt=2)


def write_both(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "assignment.json").write_text(to_sealed_json(assignment(folder)))
    assert StateFile(folder).append(RUNNING, 0.0)


def flip(text: bytes) -> bytes:
    return text.replace(b'"attempt": 2', b'"attempt": 3')


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut off": lambda text: text[: len(text) // 2] + b"\n",
    "binary": lambda text: b"\x00\xff\xfe" * 100 + b"\n",
    "a list": lambda text: b"[1, 2]\n",
    "brackets": lambda text: b"[" * 100_000 + b"\n",
    "another number": flip,
    "other types": lambda text: b'{"status": 1, "attempt": "two", "members": {}, "run": 5, "plan": []}\n',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_assignment_is_prepared_anew_for_the_next_attempt_only(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_both(tmp_path)
    file, notes, calls = tmp_path / "assignment.json", list[str](), list[int]()
    assert prepared_before(RUN, tmp_path, notes.append) == PreparedRun(assignment(tmp_path), tmp_path, resumes=True)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(Damaged, match=f"{file}: damaged"):
        Assignment.read(file)
    assert prepared_before(RUN, tmp_path, notes.append) is None
    assert len(notes) == 1 and str(file) in notes[0]

    def again() -> PreparedRun:
        calls.append(1)
        return PreparedRun(assignment(tmp_path), tmp_path, resumes=True)

    monkeypatch.setattr(attempts, "take_over", lambda folder: LEASE)
    prepare_attempt = partial(write_attempt, again)
    assert not calls
    assert prepare_attempt(State("preparing", attempt=3, members=("a/1",) * RUN.cluster.nodes)) == file
    assert Assignment.read(file).attempt == 3
    with pytest.raises(RunFinished) as caught:
        write_attempt(lambda: None, RUNNING)
    assert caught.value.exit_code == EXIT_DONE


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_record_before_a_damaged_one_counts(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = StateFile(tmp_path)
    assert file.append(State("preparing", attempt=1), 0.0) and file.append(RUNNING, 1.0)
    path = tmp_path / STATE_FILE
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + DAMAGE[damage](last) + first)
    assert read_state(tmp_path) == State("preparing", attempt=1)
    assert not capsys.readouterr().err
    path.write_bytes(first + DAMAGE[damage](last))
    assert read_state(tmp_path) == State("preparing", attempt=1)
    said = capsys.readouterr().err
    assert f"{path}:2: this record is damaged; an earlier record counts" in said or damage == "empty"
    path.write_bytes(first + last[: len(last) // 2])  # a crash while it was written
    assert read_state(tmp_path) == State("preparing", attempt=1)
    assert not capsys.readouterr().err


def test_a_record_that_an_earlier_coordinator_writes_late_does_not_count(tmp_path: Path) -> None:
    first, second = StateFile(tmp_path), StateFile(tmp_path)
    assert first.append(State("preparing", attempt=1), 0.0)
    assert second.append(RUNNING, 0.0)
    assert first.append(State("preparing", attempt=2), 1.0)
    assert read_state(tmp_path) == RUNNING
    third = StateFile(tmp_path)
    assert third.append(State("preparing", attempt=3), 0.0) and second.append(RUNNING, 1.0)
    assert read_state(tmp_path) == State("preparing", attempt=3)


def test_a_record_without_a_digest_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for state in (State("preparing", attempt=1), RUNNING):
        assert StateFile(tmp_path).append(state, 0.0)
    first, last = (tmp_path / STATE_FILE).read_text().splitlines()
    record = json.loads(last)
    del record["digest"]
    (tmp_path / STATE_FILE).write_text(f"{first}\n{json.dumps(record)}\n")
    assert read_state(tmp_path) == State("preparing", attempt=1)
    assert f"{STATE_FILE}:2: this record is damaged" in capsys.readouterr().err


def replace_journal_by_a_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / STATE_FILE).mkdir(parents=True)


def replace_lock_by_a_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / LOCK).mkdir(parents=True)


def fail_preparation(error: Exception, folder: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*values: object, **settings: object) -> None:
        raise error

    patch.setattr(prepare, "prepare_run", fail)


@pytest.mark.parametrize(
    ("disturb", "code", "text"),
    [
        (replace_journal_by_a_folder, EXIT_BAD_INPUT, STATE_FILE),
        (replace_lock_by_a_folder, EXIT_BAD_INPUT, LOCK),
        (partial(fail_preparation, Damaged("manifest.json: not JSON")), EXIT_DAMAGED, "manifest.json"),
        (partial(fail_preparation, BadInput("data.mix: no such corpus")), EXIT_BAD_INPUT, "data.mix"),
    ],
)
def test_agents_end_with_the_error_of_a_coordinator_that_cannot_begin(
    disturb: Callable[[Path, pytest.MonkeyPatch], None],
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token, failures = "a token of sixteen", list[BaseException]()
    monkeypatch.setattr(hosts, "job_token", lambda: token)
    monkeypatch.setattr(hosts, "FAREWELL_SECONDS", 0.5)
    monkeypatch.setattr(hosts, "LOCK_SECONDS", 0.0)
    disturb(tmp_path / RUN.name, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    listening = threading.Event()
    listen_at = hosts.listen_at
    monkeypatch.setattr(hosts, "listen_at", lambda *values: (listen_at(*values), listening.set())[0])

    def coordinate() -> None:
        try:
            hosts.run_coordinator(RUN, tmp_path, address, lambda text: None, lambda prepared: None)
        except (MeshwrightError, OSError) as error:
            failures.append(error)

    thread = threading.Thread(target=coordinate)
    thread.start()
    assert listening.wait(10)
    answers: list[Directive] = []
    for host in ("a/1", "b/1"):
        with closing(ControlClient(address, token, RUN.name)) as client:
            while (answer := client.report(Report(host))).order == "wait":
                time.sleep(0.05)
            answers.append(answer)
    thread.join(10)
    assert len(failures) == 1
    assert [(answer.order, answer.code) for answer in answers] == [("exit", code)] * 2
    assert all(text in answer.cause for answer in answers)
