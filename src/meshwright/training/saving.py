"""Saves of a run: when a checkpoint is due, its plain files, and whether it is written while training continues or while it waits."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.checkpoint.format.manifest import step_name
from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.mirror.process import MirrorUploader
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.write.background import BackgroundSaver, LiveState, SaveResult, memory_obstacle
from meshwright.checkpoint.write.staging import Copies
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import host_rate
from meshwright.costs.plan_costs import as_nodes, matmul_dtype, number
from meshwright.data.text_format import TEXT_FORMAT, recorded_text_format
from meshwright.durable.lease import LeaseLost
from meshwright.policies.checkpoint_times import auto_interval, due_after_step, due_by_clock
from meshwright.policies.snapshot_copies import PassTimes
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.job import ASYNC_BYTES, AUTO_SECONDS, CheckpointSpec
from meshwright.training.partner import find_copies, missing_copy_bytes
from meshwright.training.reporting import Reporter
from meshwright.training.session import TrainingSession
from meshwright.training.stop import BUSY, NO_REQUEST, SAVE, UNREADY, StopFlags

COUNTED_STEPS = 50
"""The step time is the median of at most this many recent steps without a save."""
FEWEST_STEPS = 5
"""Fewest steps without a save from which the median is taken."""
WAIT_SECONDS = 2.0
"""Longest time for which the first rank waits for a save before it answers the other ranks, in seconds."""

log = logging.getLogger("meshwright")


class CheckpointTimer:
    """Decides when a checkpoint is due by the clock, under `checkpoint.every: auto`.

    The clocks of ranks differ, so the first rank decides and sends its answer to all ranks with the stop flags.
    """

    def __init__(self, spec: CheckpointSpec, cluster: ClusterSpec) -> None:
        self._spec = spec
        self._cluster = cluster
        self._since = time.monotonic()
        self._written = 0
        self._interval: float = AUTO_SECONDS

    def due(self) -> bool:
        return due_by_clock(self._spec, time.monotonic() - self._since, self._written, self._interval)

    def restart(self) -> None:
        """Count a checkpoint that begins now, and start the interval again."""
        self._since = time.monotonic()
        self._written = self._written + 1

    def measured(self, cost_seconds: float, save_seconds: float) -> None:
        """Set the interval, given the training time that a checkpoint cost and the time until it was durable."""
        self._interval = auto_interval(cost_seconds, save_seconds, self._cluster.nodes, self._cluster.host_mtbf_hours)


class SaveCost:
    """Measures what a background save costs: the seconds by which steps during the save take longer than other steps."""

    def __init__(self) -> None:
        self._free: deque[float] = deque(maxlen=COUNTED_STEPS)
        self._beside: list[float] = []

    def step(self, seconds: float, beside: bool) -> None:
        """Count the time of a step. `beside` tells whether a save was in flight."""
        self._beside.append(seconds) if beside else self._free.append(seconds)

    def take(self) -> float | None:
        """Return the seconds of training that the finished save cost; None if too few steps ran without a save."""
        beside = self._beside
        self._beside = []
        if len(self._free) < FEWEST_STEPS:
            return None
        return max(0.0, sum(beside) - len(beside) * statistics.median(self._free))

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step without a save in flight, in seconds; None if too few such steps were measured."""
        return statistics.median(self._free) if len(self._free) >= FEWEST_STEPS else None


class Saver:
    """The checkpoints of one start. They are written in the background or, if that is not possible, while training waits.

    All ranks decide from the same values: the step, and the flags of steps that all ranks have read. The first rank's flags tell whether a
    save is in flight.
    """

    def __init__(self, session: TrainingSession, reporter: Reporter, background: BackgroundSaver | None) -> None:
        self._session = session
        self._reporter = reporter
        self._background = background
        self._ready = False
        self._ranks = RankGroup(session.world.control)
        self._timer = CheckpointTimer(session.run.checkpoint, session.run.cluster)
        self._cost = SaveCost()
        self._began = self._reported = self._committed = self._read = 0
        """Steps: of the last save that began, of the last save that was reported, of the last committed save, of the last record read."""
        self._tokens = session.tokens
        self._parent = session.step or None
        self._skipped = 0
        self._delayed = False
        spec = session.run.checkpoint
        self._mirror = (
            MirrorUploader(spec.mirror, session.folder, spec.keep, reporter.say)
            if spec.mirror is not None and session.world.leads
            else None
        )
        # An earlier start may have ended before it copied this checkpoint.
        if self._mirror is not None and session.step:
            self._mirror.offer(session.store.folder / step_name(session.step))

    @classmethod
    def open(cls, session: TrainingSession, reporter: Reporter) -> Saver:
        """Return the saver of a session whose state has its final memory. Collective."""
        spec = session.run.checkpoint
        if spec.mode == "sync" or not spec.every or session.step >= session.run.train.steps:
            return cls(session, reporter, None)
        ranks = RankGroup(session.world.control)
        optimizer = session.optimizer
        state = LiveState(
            session.state(),
            optimizer.snapshot_groups(),
            optimizer.parameter_of_state(),
            optimizer.host_state,
            optimizer.allocate_second_buffers,
        )
        largest = max(
            ranks.run_on_all(
                "planning checkpoints", lambda: sum(parts.local.nbytes for parts in state.tensors.values())
            )
        )
        partner, replicas = find_copies(session.run, session.plan, ranks, reporter.say)
        copied_elsewhere = partner is not None or replicas is not None
        if spec.mode == "auto" and largest < ASYNC_BYTES and not copied_elsewhere:
            log.info("checkpoints are written while training waits: a rank's state is small (%d bytes)", largest)
            return cls(session, reporter, None)
        background = BackgroundSaver(
            session.store.folder,
            ranks,
            state,
            session.world.device,
            lease=session.lease,
            keep=spec.keep,
            local_ranks=session.world.environment.local_ranks,
            parent=session.step or None,
            start=session.attempt,
            partner=partner,
            partner_every=spec.partner_every,
            replicas=replicas,
            kept_open=reporter.channel_descriptors,
            warm_up=lambda: _texts(session),
        )
        local_ranks = session.world.environment.local_ranks
        copied = 0
        if partner is not None:
            copied = max(ranks.run_on_all("planning checkpoints", lambda: background.layout.bytes))

        def copies() -> int:
            return missing_copy_bytes(copied, local_ranks) if copied else 0

        obstacle = memory_obstacle(background.layout.bytes, ranks, local_ranks, copies)
        if obstacle is not None and spec.mode == "async":
            without = ", checkpoint.partner=none" if copied_elsewhere else ""
            raise OutOfResources(
                f"checkpoint.mode is async: {obstacle}; use more ranks or hosts, or set checkpoint.mode=auto{without}"
            )
        if obstacle is not None:
            reporter.say(f"checkpoints are written while training waits: {obstacle}")
            return cls(session, reporter, None)
        if optimizer.host_bytes:
            both = background.layout.bytes + optimizer.host_bytes
            obstacle = memory_obstacle(both, ranks, local_ranks, copies)
            background.second_buffers = obstacle is None
            if obstacle is not None:
                reporter.say(f"updates of state in host memory wait for copies of snapshots: {obstacle}")
        # The first step already updates in groups, so that what this loads and compiles does not delay the step during the first save.
        optimizer.protect(Copies([tuple(group) for group in state.groups]))
        reporter.say(
            f"checkpoints are written beside training, from {background.layout.bytes / 1e9:.2f} GB of host memory a rank"
        )
        return cls(session, reporter, background)

    def flag(self) -> int:
        """Return this rank's flag about saves, which all ranks get at the end of the running step."""
        background = self._background
        flag = NO_REQUEST if background is None or background.prepared else UNREADY
        if self._session.world.leads:
            flag += BUSY if background is not None and background.in_flight else NO_REQUEST
            flag += SAVE if self._timer.due() else NO_REQUEST
        return flag

    def due(self, step: int, flags: StopFlags) -> bool:
        """Whether a save begins now, after `step`.

        A save that is due while another one is in flight is skipped and counted. A save that is due before all ranks are ready begins as
        soon as they are.
        """
        last = self._session.run.train.steps
        by_steps = due_after_step(self._session.run.checkpoint, step, last)
        if step == last or self._background is None:
            return by_steps or (flags.saves and flags.step > self._began)
        if not self._ready and (flags.unready or not flags.step):
            self._skipped += by_steps and self._delayed
            self._delayed |= by_steps
            return False
        if self._busy(flags):
            self._skipped += by_steps
            return False
        self._skipped += by_steps and self._delayed
        due = by_steps or self._delayed or (flags.saves and flags.step > self._began)
        self._delayed = False
        return due

    def blocks(self, step: int) -> bool:
        """Whether training waits until the save after `step` is committed."""
        return self._background is None or step == self._session.run.train.steps

    def read(self, record: Mapping[str, Any]) -> None:
        """Receive the record of a step. Its token count completes the plain files of a save that began after the step."""
        self._read = record["step"]
        self._tokens = record["tokens"]
        self._cost.step(
            record["step_seconds"], beside=self._began > 0 and self._reported < self._began < record["step"]
        )
        if self._background is not None:
            self._background.prepare()
            self._describe()

    def skip(self, record: Mapping[str, Any]) -> None:
        """Receive the record of a step with a skipped update. A save that began after the step is given up, and another one begins soon."""
        self._read = record["step"]
        self._tokens = record["tokens"]
        if self._background is None:
            return
        self._background.prepare()
        if self._began == self._read:
            self._background.give_up()
            self._reported = self._began
            self._delayed = True

    def settle(self, step: int) -> int:
        """Settle the save in flight before a rollback because of `step`. Returns the first step whose snapshot must not be loaded.

        A save of `step` or later is given up, and so is the save of a step whose record was not read. Any other save is awaited.
        Collective.
        """
        if self._background is None:
            return step
        if self._reported < self._began and (self._began >= step or self._read < self._began):
            self._background.give_up()
            return min(step, self._began)
        if self._wait(self._background, step, None):
            self.report()
        return step

    def restart_from(self, step: int) -> None:
        """Continue from the state after `step`, which a rollback has loaded."""
        self._began = self._reported = self._read = step
        self._committed = 0
        self._parent = step
        self._tokens = self._session.tokens
        self._delayed = False
        self._timer.restart()

    def save(self, step: int, *, waits: bool = False, limit: float | None = None) -> bool:
        """Save the current state, which is the state after `step`, unless this is done; then delete old checkpoints. Collective.

        With `waits`, and after the last step, it returns once the checkpoint is committed, and raises a failure. If the commit then takes
        more than `limit` seconds, it returns False. Otherwise it returns as soon as the save has begun.
        """
        self._timer.restart()
        if step in self._session.numerics.skipped_steps and not self._state_is_finite():
            self._reporter.event(step, f"no checkpoint of step {step}: weights or moments are not finite")
            return True
        self._session.gather_cursors(step)
        if self._background is not None and not self._ready and not waits:
            self._make_ready()
        if self._background is None or not self._ready:
            self._write(step)
            return True
        waits = waits or step == self._session.run.train.steps
        return self._finish(self._background, step, limit) if waits else self._begin(self._background, step)

    def report(self) -> None:
        """Report a background save, if one has ended."""
        result = self._background.result() if self._background is not None else None
        if result is None:
            return
        self._reported = result.step
        cost = self._cost.take()
        if cost is not None and result.seconds is not None:
            self._timer.measured(cost, sum(result.seconds.values()))
        if result.failure is None:
            self._report_commit(result, cost)
        elif isinstance(result.failure, LeaseLost):
            self._reporter.fail(result.failure)
        else:
            self._reporter.event(self._session.step, f"no checkpoint of step {result.step}: {result.failure}")

    def close(self) -> None:
        """Let the background writer complete its saves and end."""
        if self._background is not None:
            self._background.close()
        if self._mirror is not None:
            self._mirror.close(self._session.run.checkpoint.grace_seconds)

    def _state_is_finite(self) -> bool:
        """Whether all weights and moments on all ranks are finite. Collective; reads the whole state."""

        def check() -> bool:
            return all(parts.is_finite() for parts in self._session.state().values())

        return all(self._ranks.run_on_all("checking the state", check))

    def _busy(self, flags: StopFlags) -> bool:
        """Whether a save is in flight, by the flags that all ranks have read. True until the first rank reports that it has ended."""
        return self._background is not None and self._began > 0 and (flags.busy or flags.step <= self._began)

    def _make_ready(self) -> None:
        assert self._background is not None
        try:
            self._background.agree_on_readiness()
            self._ready = True
        except MeshwrightError as error:
            if self._session.run.checkpoint.mode == "async":
                raise
            self._reporter.event(self._session.step, f"checkpoints are written while training waits: {error}")
            self._background = None

    def _begin(self, background: BackgroundSaver, step: int, *, urgent: bool = False) -> bool:
        self.report()
        self._began = step
        times = None if urgent else self._step_times(background)
        self._session.optimizer.protect(background.begin(step, urgent=urgent, times=times))
        self._describe()
        return True

    def _step_times(self, background: BackgroundSaver) -> PassTimes | None:
        """Return the times of a step without a save; None on a CPU, if the device's rates are not known, and before steps are measured."""
        seconds = self._cost.step_seconds
        cluster = as_nodes(self._session.run.cluster)
        if seconds is None or cluster.is_cpu:
            return None
        try:
            machine = machine_of(cluster, matmul_dtype(self._session.plan.precision, cluster))
        except BadInput:
            return None
        return PassTimes.of_step(seconds, background.layout.bytes, number(machine.hbm), number(host_rate(machine)))

    def _describe(self) -> None:
        """Give the background save its plain files once the tokens of its step are known. Without them the save does not commit."""
        if self._background is not None and self._began == self._read:
            self._reporter.sync()
            self._background.describe(self._began, self._plain(self._began, self._tokens))

    def _plain(self, step: int, tokens: int) -> Callable[[], dict[str, bytes]]:
        session = self._session
        if self._background is None or not self._background.describes_first:
            return dict
        state = session.plain_state(step, tokens)
        return lambda: encode_plain(state, _texts(session))

    def _finish(self, background: BackgroundSaver, step: int, limit: float | None) -> bool:
        """Wait for the save in flight. If it is not the save of `step`, begin that one and wait for its commit."""
        deadline = None if limit is None else time.monotonic() + limit
        if not self._wait(background, step, deadline):
            return False
        self.report()
        committed = self._ranks.run_on_first(f"saving step {step}", lambda: self._committed)
        if committed == step:
            return True
        self._begin(background, step, urgent=True)
        if not self._wait(background, step, deadline):
            return False
        result = self._ranks.run_on_first(f"saving step {step}", lambda: _raise_failure(background.result()))
        if result is not None:
            self._report_commit(result)
        return True

    def _wait(self, background: BackgroundSaver, step: int, deadline: float | None) -> bool:
        """Wait until the first rank has no save in flight; returns False if the deadline comes first. Collective."""
        while True:
            left = WAIT_SECONDS if deadline is None else min(WAIT_SECONDS, deadline - time.monotonic())
            ended, more = self._ranks.run_on_first(
                f"saving step {step}", lambda left=left: (background.wait(max(0.0, left)), left > 0)
            )
            if ended or not more:
                return ended

    def _report_commit(self, result: SaveResult, cost: float | None = None) -> None:
        if result.path is None or result.seconds is None:
            return
        self._reported = self._committed = result.step
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.seconds.items())
        text = f"checkpoint {result.path.name}: {result.bytes / 1e6:,.0f} MB beside training (seconds: {phases})"
        if cost is not None:
            text += f"; cost training {cost:.2f} s"
        if self._skipped:
            text += f"; {self._skipped} saves that were due meanwhile were skipped"
        self._skipped = 0
        self._reporter.checkpoint(result.step, result.path, text)
        if self._mirror is not None:
            self._mirror.offer(result.path)

    def _write(self, step: int) -> None:
        """Write a checkpoint while training waits."""
        started = time.perf_counter()
        session = self._session
        self._began = step
        state = session.plain_state(step, session.tokens)
        with session.recorder.span("checkpoint"):
            # Every step so far was read: its loss and gradient norm are finite, or the state was checked. The records of these steps
            # become durable before the checkpoint, because a resume does not repeat the steps.
            self._reporter.sync(waits=True)
            saved = session.store.save(step, session.state(), state, _texts(session), parent=self._parent, finite=True)
            session.store.retain(session.run.checkpoint.keep)
        self._reported = step
        if saved.written:
            seconds = time.perf_counter() - started
            self._timer.measured(seconds, seconds)
            text = f"checkpoint {saved.path.name}: {saved.bytes / 1e6:,.0f} MB in {seconds:.1f} s"
            self._reporter.checkpoint(step, saved.path, text)
            if self._mirror is not None:
                self._mirror.offer(saved.path)


def _raise_failure(result: SaveResult | None) -> SaveResult | None:
    if result is not None and result.failure is not None:
        raise result.failure
    return result


def _texts(session: TrainingSession) -> dict[str, str]:
    """Return configuration, plan and text format as texts by file name, on the first rank, which writes them; empty on other ranks."""
    if not session.world.leads:
        return {}
    from meshwright.config.load import plan_yaml, resolved_yaml  # imported at the first save: a start needs none of it

    text = recorded_text_format(session.folder)
    return {
        "config.yaml": resolved_yaml(session.run),
        "plan.yaml": plan_yaml(session.plan),
        **({} if text is None else {TEXT_FORMAT: text.to_json()}),
    }
