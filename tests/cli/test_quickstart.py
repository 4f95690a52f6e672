"""What the quick start prints last."""

import json
import shlex
from pathlib import Path

from meshwright.cli.main import COMMANDS
from meshwright.cli.quickstart import NEXT, _closing


def test_the_last_lines_fit_80_columns_and_tell_the_times_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/quickstart")
    folder.mkdir(parents=True)
    summary = {"wall_seconds": 65.2, "goodput": 0.852}
    (folder / "summary.json").write_text(json.dumps(summary))
    _closing(folder, 74.4)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1:3] == [
        "the run took 65 s of wall time, 85% of it productive",
        "the command took 74 s, with samples, Hugging Face folder and report",
    ]
    assert "  report               runs/quickstart/report.html" in lines


def test_the_next_commands_exist():
    assert {shlex.split(command)[0] for command in NEXT} <= set(COMMANDS)
