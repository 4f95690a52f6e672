"""Whatever a reward function does, it costs its own verdict only, and leaves no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from meshwright.rl import rewards
from meshwright.rl.rewards import RewardProcesses, RewardVerdict
from meshwright.spec.errors import BadInput
from meshwright.spec.rl import RewardSpec

JUDGE = str(Path(__file__).with_name("judge.py"))


def submit(judge: RewardProcesses, answer: str) -> Future[RewardVerdict]:
    return judge.submit("q", lambda: answer, {})


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardProcesses]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "WAITING", 3)
        with RewardProcesses(
            RewardSpec(file=JUDGE, function="by_name", processes=2, seconds=1.0, memory_gib=1)
        ) as judge:
            yield judge


@pytest.mark.parametrize(
    ("answer", "outcome", "reward"),
    [
        ("0.25", "reward", 0.25),
        ("print", "reward", 0.5),
        ("environment", "reward", 0.0),
        ("alarm", "reward", 0.75),
        ("none", "no verdict", None),
        ("text", "error", None),
        ("nan", "error", None),
        ("raise", "error", None),
        ("exit", "error", None),
        ("memory", "error", None),
        ("forge", "timeout", None),
        ("kill", "timeout", None),
        ("spin", "timeout", None),
        ("hide", "timeout", None),
        ("sleep", "timeout", None),
    ],
)
def test_a_call_gives_a_reward_or_says_why_not(
    judge: RewardProcesses, answer: str, outcome: str, reward: float
) -> None:
    first, second = submit(judge, answer), submit(judge, "1")
    assert first.result(60)[:2] == (outcome, reward)
    assert second.result(60) == RewardVerdict("reward", 1.0)
    assert submit(judge, "-3").result(60) == RewardVerdict("reward", -3.0)


def test_what_is_wrong_is_in_the_message(judge: RewardProcesses) -> None:
    assert submit(judge, "raise").result(60).message == "ValueError: a fault of the judge"
    assert "expected a finite number or None, got '1.0'" in submit(judge, "text").result(60).message


def test_no_process_outlives_the_run() -> None:
    judge = RewardProcesses(RewardSpec(file=JUDGE, function="by_name", processes=2))
    pid = int(submit(judge, "child").result(60).reward or 0)
    running = submit(judge, "sleep")
    time.sleep(0.2)
    judge.close()
    assert running.result(60).reward is None
    deadline = time.monotonic() + 30
    while (
        group := [name for name in os.listdir("/proc") if name.isdigit() and _group_of(name) == pid]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group


def _group_of(process: str) -> int | None:
    try:
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])


def test_a_file_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    for spec, message in (
        (RewardSpec(file=str(tmp_path / "absent.py")), "expected a Python file, got .*absent.py"),
        (RewardSpec(file=str(broken)), "No module named 'nothing_of_this_name'"),
        (
            RewardSpec(file=JUDGE, function="strike"),
            r"strike\(\) -> 'None': expected the arguments \(prompt, answer, record\)",
        ),
        (RewardSpec(file=JUDGE, function="corect"), "expected a function corect; it has by_name, common, correct"),
    ):
        with pytest.raises(BadInput, match=message):
            RewardProcesses(spec)
