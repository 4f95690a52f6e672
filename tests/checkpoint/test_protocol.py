"""The commit protocol as a state machine (hypothesis): random saves, crashes, restarts, corruption and late writers.

A restart may have another number of ranks. A late writer belongs to an earlier start of the run. A model records which
steps are committed and intact. After every action the newest intact checkpoint is the model's, with that step's values.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshwright.checkpoint.format.manifest import has_commit, step_of, steps_in
from meshwright.launch.folder import take_over
from tests.checkpoint.crash import CALLS, intercept_calls
from tests.checkpoint.toy import newest
from tests.checkpoint.writers import Crash, Writers

KEEP = 2
WAITING = ("listdir", "stat")
"""Calls that writers make while they wait for each other. No crash is injected into them; a crashed writer ends there."""


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.run = Path(tempfile.mkdtemp())
        (self.run / "checkpoints").mkdir()
        self.old: list[Writers] = []
        self.started: list[Writers] = []
        self.committed: dict[int, bool] = {}
        """Each visible step, and whether it is intact."""
        self.step = 0

    def teardown(self) -> None:
        for writers in self.started:
            writers.close()
        shutil.rmtree(self.run)

    @initialize(ranks=st.integers(1, 3))
    def start(self, ranks: int) -> None:
        self.writers = Writers(self.run, take_over(self.run), ranks, keep=KEEP)
        self.started.append(self.writers)

    @rule(ranks=st.integers(1, 3))
    def restart(self, ranks: int) -> None:
        """Another start takes over and continues from the newest good checkpoint; the old one's writers may still be there."""
        self.old = [*self.old[-1:], self.writers]
        self.start(ranks)
        self.step = newest(self.run) or 0

    @rule(ahead=st.integers(1, 3))
    def save(self, ahead: int) -> None:
        self.step += ahead
        reply = self.writers.save(self.step)
        assert reply["event"] == "committed", reply
        self._commit(self.step)

    @rule(ahead=st.integers(1, 2), call=st.integers(0, 60))
    def crash(self, ahead: int, call: int) -> None:
        """The host dies at some call of a save, and the run is started again."""
        step = max([self.step, *self.committed]) + ahead
        save, lock, dead = self.writers.stage(step), threading.Lock(), threading.Event()
        call_count = [0]

        def act(number: int, name: str, arguments: tuple[Any, ...]) -> None:
            with lock:
                if dead.is_set():
                    raise Crash
                if name in WAITING:
                    return
                call_count[0] += 1
                if call_count[0] > call:
                    dead.set()
                    # What it wrote to a file before is lost. A snapshot buffer, which has no name, is not on the disk.
                    if name in ("write", "pwrite") and os.fstat(arguments[0]).st_nlink:
                        os.ftruncate(arguments[0], 1)
                    raise Crash

        try:
            with intercept_calls(act, (*CALLS, *WAITING)):
                self.writers.carry_out(save)
        except Crash:
            pass
        committed_before, visible = self.committed, self._visible()
        allowed = set(sorted({*committed_before, step})[-KEEP:]) if step in visible else set(committed_before)
        assert allowed <= visible <= {*committed_before, step}, "a crash deletes nothing, and a commit what is too old"
        assert step in visible or dead.is_set()
        self.committed = {visible_name: committed_before.get(visible_name, True) for visible_name in visible}
        self.restart(self.writers.ranks)

    @precondition(lambda self: self.old)
    @rule(ahead=st.integers(0, 3))
    def write_by_an_earlier_start(self, ahead: int) -> None:
        names_before = {path.name for path in (self.run / "checkpoints").iterdir()}
        reply = self.old[-1].save(self.step + ahead)
        assert reply["event"] == "failed" and reply["lease_lost"]
        assert {path.name for path in (self.run / "checkpoints").iterdir()} == names_before

    @precondition(lambda self: any(self.committed.values()))
    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        """One byte of a committed checkpoint changes."""
        step = data.draw(st.sampled_from(sorted(step for step, intact in self.committed.items() if intact)))
        folder = self.run / "checkpoints" / f"step-{step:08d}"
        file = data.draw(st.sampled_from(sorted(folder.iterdir())))
        content = bytearray(file.read_bytes())
        # The length of a manifest varies by the digits of its times, so what is drawn must not depend on it.
        content[data.draw(st.integers(0, 2**32)) % len(content)] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        self.committed[step] = False

    @invariant()
    def the_newest_good_checkpoint_is_the_models(self) -> None:
        intact = [step for step, good in self.committed.items() if good]
        assert newest(self.run) == max(intact, default=None)
        assert self._visible() == set(self.committed)

    def _visible(self) -> set[int]:
        return {step_of(path.name) or 0 for path in steps_in(self.run / "checkpoints") if has_commit(path)}

    def _commit(self, step: int) -> None:
        """A step became visible: it replaces what was there, and older ones are deleted, this one never."""
        self.committed[step] = True
        for old_step in sorted(self.committed)[:-KEEP]:
            if old_step != step:
                del self.committed[old_step]


def machine(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=checks,
        database=None,
        derandomize=True,
    )
    run_state_machine_as_test(Protocol, settings=options)


def test_random_histories() -> None:
    machine(8, 10)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(900)
def test_many_random_histories() -> None:
    machine(300, 30)
