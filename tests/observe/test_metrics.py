import errno
import json
import math
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe import metrics
from meshwright.observe.metrics import STEP_KEYS, MetricsWriter, read_metrics, scan_metrics, to_line
from meshwright.spec.errors import Damaged, OutOfResources


def step_record(step, **changes):
    return {**dict.fromkeys(STEP_KEYS, 1.0), "step": step, **changes}


def write_steps(path, steps, resume_from=0, loss=1.0):
    with MetricsWriter(path, resume_from) as writer:
        for step in steps:
            writer.write_step(step_record(step, loss=loss))


def test_lines_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write_step(step_record(1, phases={"forward": 0.5}))
        writer.write_validation(1, 2.5, tokens=64)
        writer.write_event(1, "checkpoint written")
        writer.write_start(0, {"imports": 1.5, "first step": 0.5}, {"compiled": 2})
    step, validation, event, start = read_metrics(path)
    assert step == {"kind": "step", **step_record(1, phases={"forward": 0.5})}
    assert validation == {"kind": "validation", "step": 1, "loss": 2.5, "tokens": 64}
    assert event == {"kind": "event", "step": 1, "text": "checkpoint written"}
    phases = {"imports": 1.5, "first step": 0.5}
    assert start == {"kind": "start", "step": 0, "seconds": 2.0, "phases": phases, "compiler": {"compiled": 2}}


def test_a_line_is_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write_step(step_record(1))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_a_step_line_without_its_keys_is_refused(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(ValueError, match="loss, tokens"):
        writer.write_step({"step": 1})


def test_not_finite_numbers_are_null_and_named():
    line = to_line({"loss": math.nan, "grad_norm": -math.inf, "phases": {"forward": math.inf}, "list": [1.0, math.nan]})
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None and record["phases"]["forward"] is None and record["list"] == [1.0, None]
    names = {"loss": "nan", "grad_norm": "-inf", "phases.forward": "inf", "list.1": "nan"}
    assert record["nonfinite"] == names


@given(st.dictionaries(st.text(max_size=5), st.floats() | st.text(max_size=8) | st.none() | st.integers()))
def test_any_record_is_one_line_of_valid_json(record):
    line = to_line(record)
    assert line.count("\n") == 1 and line.endswith("\n")
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_left_out(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["step"] for record in read_metrics(path)][:2] == [1, 2]
    assert len(read_metrics(path)) == (3 if cut == 1 else 2)


def test_a_line_torn_inside_a_character_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xc3')
    assert read_metrics(path) == [{"step": 1}]


def test_damage_in_the_middle_is_named_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n[4]\n')
    with pytest.raises(Damaged, match=r"metrics\.jsonl:2"):
        read_metrics(path)
    records, damaged = scan_metrics(path)
    assert [record["step"] for record in records] == [1, 3] and damaged == [2, 4]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3, 4):
            writer.write_step(step_record(step, loss=9.0))
            writer.write_validation(step, 9.0)
    path.write_bytes(path.read_bytes()[:-5])
    write_steps(path, [3, 4, 5], resume_from=2)
    records = read_metrics(path)
    curve = [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
    assert curve == [(1, 9.0), (2, 9.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert [record["step"] for record in records if record["kind"] == "validation"] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_starting_over_begins_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    write_steps(path, [1])
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_a_kept_line_stays_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3], loss=math.nan)
    first = path.read_text().splitlines()[0]
    MetricsWriter(path, resume_from=1).close()
    assert path.read_text() == first + "\n"


class Full:
    """A file on a disk that has room for `room` more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def fileno(self):
        return self.file.fileno()

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN])
def test_a_file_whose_server_went_away_is_gone(tmp_path, monkeypatch, number):
    def stat(path):
        raise OSError(number, "away", str(path))

    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        monkeypatch.setattr(type(tmp_path), "stat", stat)
        with pytest.raises(OutOfResources, match="no longer exists"):
            writer.write_event(1, "x")


@pytest.mark.parametrize("room", [0, 10, 100])
def test_lines_that_a_full_disk_does_not_take_are_kept_and_written_once_there_is_space(tmp_path, room, caplog):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write_event(1, "before")
        file = writer._file
        writer._file = Full(file, room)
        for step in range(2, 100):
            writer.write_event(step, "while it is full")
        assert all(line.endswith(b"}\n") for line in path.read_bytes().splitlines(keepends=True))
        assert [record.message for record in caplog.records] == [
            f"{path}: No space left on device; lines are kept in memory until it can be written"
        ]
        writer._file = file
        writer.write_event(100, "after")
        assert len(caplog.records) == 2 and "lines that were kept" in caplog.records[1].message
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 101))


def test_kept_lines_have_a_bound_and_an_end_without_space_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "KEPT_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer._file = Full(writer._file, 0)
    with pytest.raises(OutOfResources, match=r"metrics.jsonl: No space left"):
        for step in range(1, 100):
            writer.write_event(step, "x" * 50)
    assert 10 < step < 20
    writer._file.close = lambda: None
    writer.close()
    assert caplog.records[-1].message == f"{path}: the last {step} lines could not be written"


def test_a_rollback_drops_kept_lines_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write_event(1, "x")
        file = writer._file
        writer._file = Full(file, 0)
        for step in range(2, 9):
            writer.write_event(step, "x")
        writer._file = file
        writer.rewind(4)
        writer.write_event(5, "again")
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_deleted_or_replaced_is_out_of_resources(tmp_path, replaced):
    """The descriptor of a deleted file still accepts lines, which nobody can read. `replaced`: a new file has its name."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write_event(1, "x")
        path.unlink()
        if replaced:
            path.touch()
        with pytest.raises(OutOfResources, match="metrics.jsonl no longer exists: it was deleted or moved"):
            writer.write_event(2, "y")


@pytest.mark.parametrize("tail", [b"\0" * 50, b"\0" * 20 + b"\n" + b"\0" * 20, b'{"ste\0\0\0\n', b"\0\n\0\n"])
def test_a_tail_that_a_power_cut_damaged_is_skipped_with_one_line(tmp_path, caplog, tail):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    (line,) = [record.message for record in caplog.records]
    assert "damaged from line 3 on" in line
    write_steps(path, [3], resume_from=2)
    assert path.read_bytes().startswith(whole) and b"\0" not in path.read_bytes()
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_sync_flushes_what_was_written(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        metrics, "sync_open_file", lambda descriptor, path: flushed.append(os.fstat(descriptor).st_size)
    )
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write_step(step_record(1))
        writer.sync()
        for thread in threading.enumerate():
            if thread.name == "metrics":
                thread.join()
    assert flushed == [path.stat().st_size]
