"""A full disk costs a rank's log lines, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from meshwright.train.log_file import LogFile


def test_a_full_disk_is_said_once_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("full")
    log.addHandler(LogFile("/dev/full"))
    for number in range(3):
        log.warning("line %d", number)
    said = capsys.readouterr().err
    assert said == "meshwright: /dev/full: No space left on device; this log is incomplete from here on\n"


def test_a_defect_in_a_message_is_still_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("wrong")
    log.addHandler(LogFile(tmp_path / "log"))
    log.warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err
