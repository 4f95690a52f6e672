from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from meshwright.launch.local import RUN_VARIABLE
from meshwright.launch.orphans import end_orphans, orphans

SLEEPS = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)", "meshwright.training.rank"]


def started(run: Path, parent: int | None) -> subprocess.Popen[bytes]:
    """A process that looks like a rank of the run whose agent has the process id `parent`, if it names one."""
    env = {**os.environ, RUN_VARIABLE: str(run)}
    env.pop("MESHWRIGHT_PARENT", None)
    if parent is not None:
        env["MESHWRIGHT_PARENT"] = str(parent)
    process = subprocess.Popen(SLEEPS, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_only_ranks_of_the_run_whose_agent_is_dead_are_ended(tmp_path: Path) -> None:
    orphan, child = started(tmp_path / "run", 1), started(tmp_path / "run", os.getpid())
    rank_of_other_run, without_agent = started(tmp_path / "other", 1), started(tmp_path / "run", None)
    try:
        assert list(orphans(tmp_path / "run")) == [orphan.pid]
        assert end_orphans(tmp_path / "run") == [orphan.pid]
        assert orphan.wait(60) == -9 and child.poll() is None and rank_of_other_run.poll() is None
        deadline = time.monotonic() + 5
        while list(orphans(tmp_path / "run")) and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        assert end_orphans(tmp_path / "run") == []
    finally:
        for process in (orphan, child, rank_of_other_run, without_agent):
            process.kill()
            process.wait()
