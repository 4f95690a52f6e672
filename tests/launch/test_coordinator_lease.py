"""The lease of the coordinator: never two processes that act, whatever their clocks, stops and the store do."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.slow import examples

from meshwright.launch import coordinator_lease
from meshwright.launch.control import ControlClient
from meshwright.launch.coordinator_lease import CoordinatorWatch, HeldLease, LeaseTaken, take_coordinator_lease
from meshwright.launch.lease_store import KEPT_VERSIONS, FolderLeases, LeaseStore, lease_store
from meshwright.policies.coordinator_lease import (
    ACTING_SECONDS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    CoordinatorLease,
    LeaseWatch,
    acts,
)
from meshwright.spec.errors import BadInput

LEASE = CoordinatorLease(1, "a", "process 1 on a", "a", "10.0.0.1:29400")


class Memory:
    """A register in memory, whose content changes between the begin and the end of a request."""

    def __init__(self, pause: Callable[[], None] = lambda: None, fails: Callable[[], bool] = lambda: False) -> None:
        self.content: CoordinatorLease | None = None
        self._pause, self._fails = pause, fails

    def read(self) -> CoordinatorLease | None:
        self._pause()
        content = self.content
        self._pause()
        return content

    def replace(self, seen: CoordinatorLease | None, new: CoordinatorLease) -> bool:
        self._pause()
        won = seen == self.content
        if won and not self._fails():
            self.content = new
        self._pause()
        if self._fails():
            raise OSError("no answer")
        return won and self.content == new


class Process(threading.Thread):
    """A process that takes the lease again and again, and renews it. It runs only while `World.step` lets it."""

    def __init__(self, world: World, rate: float, offset: float) -> None:
        super().__init__(daemon=True)
        self.world, self.rate, self.offset = world, rate, offset
        self.held: HeldLease | None = None
        self.may_run, self.paused = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def clock(self) -> float:
        return self.offset + self.rate * self.world.now

    def pause(self) -> None:
        self.paused.release()
        self.may_run.acquire()
        if self.world.over:
            raise SystemExit

    def run(self) -> None:
        self.may_run.acquire()
        with suppress(SystemExit):
            while not self.world.over:
                try:
                    self.held = take_coordinator_lease(self.world.store, "here:1")
                except (LeaseTaken, OSError):
                    self.pause()
                    continue
                self.world.taken += 1
                while self.held.taken is None:
                    self.pause()
                    with suppress(OSError):
                        self.held._renew()
        self.paused.release()


class World:
    """Processes with clocks of their own, one register, and a time that the test advances."""

    def __init__(self, rates: list[float], fails: Callable[[], bool]) -> None:
        self.now, self.taken, self.over = 0.0, 0, False
        self.store = Memory(lambda: self.running.pause(), fails)
        self.processes = [Process(self, rate, 1000.0 * number) for number, rate in enumerate(rates)]
        self.running = self.processes[0]
        for process in self.processes:
            process.start()

    def step(self, number: int, seconds: float) -> None:
        """Let time pass, and then one process run until its next pause."""
        self.now += seconds
        self.running = self.processes[number % len(self.processes)]
        self.running.may_run.release()
        self.running.paused.acquire()

    def acting(self) -> int:
        found = 0
        for process in self.processes:
            self.running = process
            found += process.held is not None and process.held.acts
        return found

    def end(self) -> None:
        self.over = True
        for process in self.processes:
            self.running = process
            process.may_run.release()
            process.join()


@contextmanager
def clocks_of(world: World) -> Iterator[None]:
    """Let the module use the clock of the process that runs, and no threads."""
    module, names = coordinator_lease, ("lease_clock", "time", "threading")
    before = {name: getattr(module, name) for name in names}
    idle = SimpleNamespace(start=lambda: None, join=lambda seconds: None, is_alive=lambda: True)
    try:
        vars(module).update(
            lease_clock=lambda: world.running.clock,
            time=SimpleNamespace(sleep=lambda seconds: world.running.pause()),
            threading=SimpleNamespace(Event=threading.Event, Thread=lambda **_: idle),
        )
        yield
    finally:
        world.end()
        vars(module).update(before)


def test_never_two_processes_act() -> None:
    """Requests take any time and may fail before or after their effect; processes stop anywhere; clocks differ by 30%."""
    for seed in range(examples(80, 3000)):
        drawn = random.Random(seed)
        failing = drawn.choice([0.0, 0.05, 0.3])
        rates = [drawn.uniform(0.87, 1.13) for _ in range(drawn.randint(2, 4))]
        world = World(rates, lambda drawn=drawn, failing=failing: drawn.random() < failing)
        with clocks_of(world):
            for _ in range(150):
                number = drawn.randrange(drawn.randint(1, len(rates)))  # the first ones run more often
                world.step(number, drawn.choice([0.0, 0.1, 0.3, 1.0, 6.0]) * drawn.random())
                assert world.acting() <= 1, f"seed {seed}"


def test_the_lease_is_taken_again_and_again_in_such_a_world() -> None:
    """The test above does not pass because nothing happens."""
    world = World([1.0, 1.1, 0.9], lambda: False)
    with clocks_of(world):
        seen = set()
        for number in range(600):
            world.step(number % 3 if number % 200 < 150 else number // 200, 0.15)
            assert world.acting() <= 1
            seen |= {index for index, each in enumerate(world.processes) if each.held and each.held.taken is None}
        assert world.taken > 2 and len(seen) > 1


def test_a_clock_that_is_a_third_faster_breaks_the_promise() -> None:
    """The bound of the drift is what the seconds say."""
    assert pytest.approx(4 / 3) == LEASE_SECONDS / ACTING_SECONDS
    watch = LeaseWatch()
    watch.see(LEASE, 0.0)
    for rate, both in ((1.3, False), (1.35, True)):
        moment = LEASE_SECONDS / rate + 1e-9  # when the watching clock has the lease for free
        assert watch.is_free(moment * rate) and acts(0.0, moment) is both


def test_a_watch_frees_only_what_was_not_renewed() -> None:
    watch = LeaseWatch()
    assert watch.is_free(0.0), "there is no lease"
    watch.see(LEASE, 10.0)
    assert not watch.renewed and not watch.is_free(10.0 + LEASE_SECONDS - 0.1) and watch.is_free(10.0 + LEASE_SECONDS)
    watch.see(replace(LEASE, version=2), 15.0)
    assert watch.renewed and not watch.is_free(15.0 + LEASE_SECONDS - 0.1)
    watch.see(replace(LEASE, version=3, released=True), 16.0)
    assert watch.is_free(16.0) and not watch.renewed
    handed_on = LeaseWatch(3, 10.0)
    handed_on.see(replace(LEASE, version=3), 16.0)
    assert handed_on.is_free(16.0), "the process that starts another one has waited already"


@pytest.fixture
def folder(tmp_path: Path) -> FolderLeases:
    return FolderLeases(tmp_path / "run" / "coordinator")


def test_a_folder_takes_each_version_once(folder: FolderLeases) -> None:
    assert folder.read() is None
    assert folder.replace(None, LEASE) and not folder.replace(None, replace(LEASE, holder="b"))
    last = LEASE
    for version in range(2, 40):
        new = replace(last, version=version)
        assert folder.replace(last, new) and not folder.replace(last, replace(new, holder="b"))
        assert folder.read() == new
        last = new
    late = replace(LEASE, version=2, holder="b")
    assert not folder.replace(LEASE, late), "its name is free again, and newer versions are there"
    assert folder.read() == last
    assert len(os.listdir(folder._folder)) <= KEPT_VERSIONS + 1
    taken = replace(last, version=40, holder="b", host="b")
    assert folder.replace(last, taken) and folder.read() == taken


def test_one_of_many_threads_takes_each_version_of_a_folder(tmp_path: Path) -> None:
    check_one_winner(lambda: FolderLeases(tmp_path / "coordinator"))


def check_one_winner(make: Callable[[], LeaseStore], threads: int = 6, versions: int = 12) -> None:
    """Each version is taken by one of several writers at the same time."""
    winners: list[tuple[int, str]] = []
    barrier = threading.Barrier(threads)

    def write(name: str) -> None:
        store = make()
        for version in range(1, versions + 1):
            barrier.wait(30)
            seen = store.read()
            barrier.wait(30)
            if store.replace(seen, replace(LEASE, version=version, holder=name)):
                winners.append((version, name))

    writers = [threading.Thread(target=write, args=(f"writer{number}",)) for number in range(threads)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(version for version, _ in winners) == list(range(1, versions + 1))
    newest = make().read()
    assert newest is not None and (newest.version, newest.holder) == max(winners)


def test_a_renewal_needs_no_space(folder: FolderLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.replace(None, LEASE)

    def full(*values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("meshwright.launch.lease_store.write_durable", full)
    assert folder.replace(LEASE, replace(LEASE, version=2))
    with pytest.raises(OSError, match="No space"):
        folder.replace(replace(LEASE, version=2), replace(LEASE, version=3, holder="b"))


def test_a_folder_without_hard_links_is_refused(folder: FolderLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*values: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BadInput, match=r"no hard links .*; expected a folder with hard links, .* in supervision.lease"):
        folder.replace(None, LEASE)
    assert not list(folder._folder.iterdir())


def test_places_for_a_lease(tmp_path: Path) -> None:
    def place(lease: str | None) -> Any:
        return lease_store(lease, "run", tmp_path)

    assert place(None)._folder == tmp_path / "coordinator"
    assert place(str(tmp_path))._folder == place(f"file://{tmp_path}")._folder == tmp_path / "run" / "coordinator"
    with pytest.raises(BadInput, match="there is no such folder"):
        place(str(tmp_path / "none"))
    with pytest.raises(BadInput, match="expected a path, or the URL of a store"):
        place("ftp://host/lease")


def test_a_lease_ends_while_the_store_fails_and_goes_on_if_nobody_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(coordinator_lease, "lease_clock", lambda: now[0])
    fails = [False]
    store = Memory(fails=lambda: fails[0])
    with closing(take_coordinator_lease(store, "here:1")) as held:
        held._closing.set()  # renewals are made here
        held._thread.join()
        fails[0], now[0] = True, RENEW_SECONDS
        with pytest.raises(OSError):
            held._renew()
        now[0] = ACTING_SECONDS - 0.1
        assert held.acts
        now[0] = ACTING_SECONDS
        assert not held.acts and held.taken is None
        fails[0] = False
        held._renew()
        assert held.acts
        store.content = replace(LEASE, version=99)
        held._renew()
        assert not held.acts and held.taken == store.content
    assert store.content == replace(LEASE, version=99), "what another process has is not released"


def test_a_released_lease_is_free_at_once_and_an_ended_one_names_its_holder() -> None:
    store = Memory()
    with closing(take_coordinator_lease(store, "here:1")) as first:
        assert first.acts and first.lost is None
    assert store.content is not None and store.content.released
    with closing(take_coordinator_lease(store, "here:2")) as second:
        assert second.lost is None
    store.content = LEASE
    began = time.monotonic()
    os.environ[coordinator_lease.SEEN_VARIABLE] = f"1:{coordinator_lease.lease_clock() - LEASE_SECONDS + 0.5}"
    with closing(take_coordinator_lease(store, "here:3")) as third:
        assert third.lost == LEASE and 0.4 < time.monotonic() - began < LEASE_SECONDS - 1
        with pytest.raises(LeaseTaken, match=r"process \d+ on .*, at here:3, coordinates this run"):
            take_coordinator_lease(store, "here:4")


class Started:
    """Stands in for the process that an agent starts."""

    pid = 1

    def __init__(self, seen: str) -> None:
        self.seen, self.code = seen, cast("int | None", None)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = -15

    def wait(self) -> int | None:
        return self.code


def test_an_agent_finds_the_coordinator_and_starts_one_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now, started = [0.0], list[Started]()
    monkeypatch.setattr(coordinator_lease, "lease_clock", lambda: now[0])
    monkeypatch.setattr(coordinator_lease, "LOOK_SECONDS", 1e6)  # looks are made here
    store, client = Memory(), ControlClient(("10.0.0.9", 29400), "token")
    watch = CoordinatorWatch(store, client)
    watch._thread.join(0.01)

    def start(seen: str) -> Any:
        started.append(Started(seen))
        return started[-1]

    watch.start = start
    store.content = LEASE
    watch._look(late=True)
    assert client.address == ("10.0.0.9", 29400), "it may be the lease of a job that ended long ago"
    now[0], store.content = 1.0, replace(LEASE, version=2)
    watch._look(late=False)
    assert client.address == ("10.0.0.9", 29400), "it answers"
    watch._look(late=True)
    assert client.address == ("10.0.0.1", 29400) and not started
    now[0] = 4.0
    watch._look(late=False)
    assert [each.seen for each in started] == ["2:1.0"]
    now[0] = 8.0
    watch._look(late=True)
    assert len(started) == 1, "the first one waits for the lease"
    started[0].code = 0
    now[0] = 11.0
    watch._look(late=True)
    assert len(started) == 2, "it ended without a change"
    store.content = replace(LEASE, version=3, released=True)
    started[1].code = 0
    now[0] = 20.0
    watch._look(late=False)
    assert len(started) == 2, "the coordinator has ended, and answers this agent"
    watch._look(late=True)
    assert len(started) == 3
    monkeypatch.setattr(coordinator_lease, "LOOK_SECONDS", 0.01)
    watch._closing.set()
    watch.close()
    assert started[2].code == -15, "it does not coordinate"
