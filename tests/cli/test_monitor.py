"""`meshwright monitor`: pictures that fit the terminal for any run, one JSON object, and a clean end."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from meshwright.cli.monitor_frame import frame
from meshwright.diagnosis.culprit import Culprit, Waiting
from meshwright.launch.rank_view import RankActivity
from meshwright.launch.run_figures import RunFigureReader
from meshwright.launch.run_snapshot import RunSnapshot
from tests.cli.command import meshwright
from tests.launch.test_metrics_endpoint import parse

INCIDENT = {
    "time": 0.0,
    "step": 12,
    "attempt": 1,
    "cause": "hang",
    "rank": 3,
    "host": "node-0",
    "action": "backward 0.1",
    "confidence": "certain",
    "reason": "a long reason " * 20,
    "answer": "restart 1 of 3",
    "evidence": "runs/x/incidents/0001-12",
}


def picture(snapshot: RunSnapshot, width: int, height: int, **options: object) -> list[str]:
    console = Console(width=width, height=height, highlight=False, **options)
    with console.capture() as capture:
        console.print(frame(snapshot, console), soft_wrap=True)
    return capture.get().removesuffix("\n").split("\n")


def snapshot(folder: Path, ranks: int, steps: int, *, slow: int) -> RunSnapshot:
    """A job of which rank `slow` computes 1.5 times as long as the others and holds them up."""
    seconds = np.ones((ranks, steps), dtype=np.float32)
    seconds[slow] = 1.5
    activities = [
        RankActivity(rank, f"node-{rank // 8}", 40 + rank % 3, "train", f"forward 0.{rank % 7}", 9.0)
        for rank in range(ranks)
    ]
    waiting = tuple(Waiting(rank, slow, "gradient norm") for rank in range(ranks) if rank != slow)
    culprit = Culprit(slow, "node-0", 40, "forward 0.1", 9.0, f"rank {slow} is in forward", "certain", waiting)
    return RunSnapshot(
        RunFigureReader(folder).read(), activities, 1.0, culprit, [INCIDENT] * 9, np.arange(100, 100 + steps), seconds
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (60, 20)])
@pytest.mark.parametrize(("ranks", "steps"), [(2, 3), (64, 70), (4096, 1000)])
def test_a_picture_fits_the_terminal_and_shows_the_slow_rank(
    tmp_path: Path, width: int, height: int, ranks: int, steps: int
) -> None:
    slow = ranks // 2
    lines = picture(snapshot(tmp_path, ranks, steps, slow=slow), width, height, no_color=True)
    assert len(lines) < height and all(len(line) <= width for line in lines)
    rows = [line for line in lines if line.startswith("rank ")]
    assert len(rows) == min(ranks, len(rows)) >= min(ranks, 3)
    hot = [line for line in rows if "#" in line]
    (row,) = hot
    first, _, last = row.split()[1].partition("-")
    assert int(first) <= slow <= int(last or first)
    assert row.count("#") > width // 3 or row.count("#") == steps
    assert "waiting" in lines and f"  certain: rank {slow} is in forward" in lines
    assert "incidents" in lines


def test_a_picture_in_a_small_terminal_is_cut(tmp_path: Path) -> None:
    for width, height in ((40, 12), (20, 5), (1, 1)):
        lines = picture(snapshot(tmp_path, 64, 70, slow=1), width, height, no_color=True)
        assert len(lines) <= max(1, height - 1) and all(len(line) <= width for line in lines)


def test_colours_take_the_place_of_characters(tmp_path: Path) -> None:
    colour = "\n".join(picture(snapshot(tmp_path, 4, 10, slow=1), 80, 24, force_terminal=True, color_system="256"))
    assert "\x1b[41m" in colour and "#" not in colour
    plain = "\n".join(picture(snapshot(tmp_path, 4, 10, slow=1), 80, 24))
    assert "\x1b" not in plain and "rank 1   ##########" in plain


def test_a_run_that_is_just_beginning(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 40}\n")
    answer = meshwright("monitor", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert "starting" in answer.out and "step 0 of 40" in answer.out and "no spans yet" in answer.out
    (tmp_path / "config.yaml").unlink()
    assert "expected a run's folder" in meshwright("monitor", tmp_path).err


def test_a_finished_run(finished: Path) -> None:
    answer = meshwright("monitor", finished, "--json").json
    assert (answer["step"], answer["steps"], answer["checkpoint_step"], answer["state"]) == (6, 6, 6, "finished")
    heat = answer["heat_map"]
    assert (heat["ranks"], heat["steps"]) == ([[0, 0]], [[step, step] for step in range(1, 7)])
    assert heat["ratio"] == [[1.0] * 6], "one rank is its own median"
    assert [rank["step"] for rank in answer["ranks"]] == [6] and answer["waiting"] is None
    assert "step 6 of 6" in meshwright("monitor", finished, "--once").out


@pytest.mark.parametrize("end", ["q", "interrupt"])
def test_q_and_control_c_end_it_and_restore_the_terminal(tmp_path: Path, end: str) -> None:
    """Without torch, so that it starts quickly."""
    (tmp_path / "config.yaml").write_text("train: {steps: 40}\n")
    master, slave = pty.openpty()
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['meshwright', 'monitor', {str(tmp_path)!r}]"
    command = [sys.executable, "-c", f"{code}\nfrom meshwright.cli.main import main; main()"]
    env = {**os.environ, "TERM": "xterm"}
    # A job in the background of a shell passes on that it ignores the interrupt; a terminal does not.
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    shown = b""
    try:
        deadline = time.monotonic() + 60
        while b"step 0 of 40" not in shown and time.monotonic() < deadline:
            shown += _read(master)
        if end == "q":
            os.write(master, b"q")
        else:
            process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            shown += _read(master)
        assert process.poll() == 0, shown
        while data := _read(master):
            shown += data
    finally:
        process.kill()
        os.close(master)
    assert b"\x1b[?1049h" in shown and shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
    assert b"Traceback" not in shown and b"interrupted" not in shown


@pytest.mark.slow
def test_a_real_run_is_scraped_and_shown_while_it_trains(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "train", str(tiny), "train.steps=2000", "observe.prometheus=:0"]
    process = subprocess.Popen([*command, "--runs", tmp_path], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().decode().split()[-1]
        step, deadline = 0.0, time.monotonic() + 120
        while not step and time.monotonic() < deadline:
            time.sleep(0.2)
            with urllib.request.urlopen(url, timeout=60) as answer:
                found = parse(answer.read().decode())
            step = sum(found["meshwright_step"][2].values())
        assert step and found["meshwright_tokens"][2].keys() == {frozenset({("run", "tiny")})}
        assert {dict(labels)["rank"] for labels in found["meshwright_rank_phase_age_seconds"][2]} == {"0", "1"}
        shown = meshwright("monitor", tmp_path / "tiny", "--json").json
        while {rank["phase"] for rank in shown["ranks"]} == {"start"} and time.monotonic() < deadline:
            shown = meshwright("monitor", tmp_path / "tiny", "--json").json  # heartbeats are 3 s apart
        assert (shown["state"], shown["steps"], len(shown["ranks"])) == ("running", 2000, 2)
        assert shown["step"] >= step and 0 < shown["goodput"] <= 1
        assert {rank["phase"] for rank in shown["ranks"]} <= {"compile", "train"} and shown["ranks"][0]["action"]
    finally:
        process.terminate()
        process.wait(60)
    after = meshwright("monitor", tmp_path / "tiny", "--json").json
    assert (after["state"], after["running"]) == ("ended with code 75", False)


def _read(master: int) -> bytes:
    ready, _, _ = select.select([master], [], [], 0.2)
    try:
        return os.read(master, 1 << 16) if ready else b""
    except OSError:
        return b""


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (60, 20)])
def test_loads_of_experts_fit_and_show_the_busiest(tmp_path: Path, width: int, height: int) -> None:
    """48 layers with 128 experts of equal loads, except that expert 100 of the 7th mixture has 9.89 × the mean."""
    loads = [[100] * 128 for _ in range(48)]
    loads[6] = [93] * 128
    loads[6][100] = 12800 - 127 * 93
    steps = [{"kind": "step", "step": step, "expert_loads": loads} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    reader = RunFigureReader(tmp_path)
    reader.read()
    shown = replace(snapshot(tmp_path, 64, 70, slow=1), expert_loads=reader.expert_loads)
    lines = picture(shown, width, height, no_color=True)
    assert len(lines) < height and all(len(line) <= width for line in lines)
    moe_layers = [line for line in lines if line.startswith("MoE ")]
    (busiest,) = [line for line in moe_layers if "@" in line]
    first, _, last = busiest.split()[1].partition("-")
    assert int(first) <= 7 <= int(last or first) and busiest.count("@") == 1
    cells = busiest.split()[2]
    assert abs(cells.index("@") / len(cells) - 100 / 128) <= 1 / len(cells)
    assert any("expert 100 of MoE layer 7: 9.89 ×" in line for line in lines)
