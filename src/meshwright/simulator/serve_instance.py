"""Simulates one instance of a serving deployment: the engine's own batching policy, with step times from the cost model.

Order of host and device:

- With overlap, as the engine does on a GPU, the host plans step n + 1 as soon as it has the tokens of step n - 1. The device
  still computes step n then. Without overlap, the host plans step n + 1 when step n ends.
- After planning, the host launches the step. A launch takes long if the step contains a prompt chunk. During a launch the host
  reads no tokens, and sees no requests that arrive.
- If the device ends step n no later than the host ends the launch of step n, and a prompt waits, the host reads the tokens of
  step n before it plans step n + 1. Otherwise these tokens would wait for the launch of the prompt.

To save time, the simulator treats a series of identical decode steps as one event, called a *run* here. If a request arrives
during a run, the run ends with the current step (`BatchPolicy.extend`). So all times are the same as with single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

from meshwright.costs.serve_costs import InstanceCosts
from meshwright.costs.step_times import soft_maximum
from meshwright.policies.batch_request import BatchLimits, EngineStep, Request, RequestPart
from meshwright.policies.batching import BatchPolicy
from meshwright.simulator.counted_blocks import SimulatedBlocks
from meshwright.simulator.serve_types import InstanceFigures, Occupancy
from meshwright.spec.deployment import Role

NEVER = float("inf")
LONGEST_RUN = 4096
"""Maximum number of decode steps that one run may have."""
ROUNDING = 1e-6
"""Allowed relative rounding error when many step times are added."""
Action = Callable[[float], None]
"""A function that the instance calls between two steps, with the time in seconds."""


class _Planned:
    """A planned step, and the inputs of its cost at the time of planning. The policy's own state changes with the next plan.

    `positions`: cached positions that all decodes of the step attend to. `longest`: those of the longest sequence among the decodes.
    `chunks`: the prompt chunks of the step.
    """

    __slots__ = ("chunks", "end", "ends_with_launch", "launched", "longest", "positions", "step")

    def __init__(self, step: EngineStep, positions: int, longest: int, chunks: Sequence[RequestPart]) -> None:
        self.step = step
        self.positions = positions
        self.longest = longest
        self.chunks = chunks
        self.launched = self.end = 0.0
        """`launched`: time when the host has launched the step. `end`: time when the device has computed it."""
        self.ends_with_launch = False
        """Whether the launch limits the step: when the device is free, it needs less time for the step than the rest of the launch."""


class SimulatedInstance:
    """Simulates the steps of one instance, driven by a caller that has the events of all instances.

    The caller calls `advance` at time `wake`, which is the time of the instance's next event, and `post` for whatever arrives at
    the instance from outside: requests, or blocks of the cache.
    """

    def __init__(self, role: Role, costs: InstanceCosts, token_budget: int, cache: SimulatedBlocks) -> None:
        self.role = role
        self.costs = costs
        self.policy = BatchPolicy(BatchLimits(token_budget, costs.sequences), cache)
        (self._pool,) = cache.counts
        self.wake = NEVER
        self.prompt_tokens = 0
        """Only for a prefill instance: prompt tokens of the requests whose prompts it has not finished."""
        self.requests = self.answered = 0
        """`requests`: requests at this instance that have not ended. `answered`: requests that have ended."""
        self.after_chunk: Callable[[RequestPart, float], None] = lambda part, now: None
        """Called after each step for each prompt chunk in it: (chunk, time)."""
        self.after_end: Callable[[int, float], None] = lambda number, now: None
        """Called for each request that ends: (number of the request, time)."""
        self.between_steps: Action | None = None
        """Called after each step, once the posted actions have run."""
        self._posted: list[Action] = []
        self._running: _Planned | None = None
        self._ahead: _Planned | None = None
        self._device_free = 0.0
        """Time when the device has computed all steps that were launched."""
        self._context = self._longest = 0
        self._run_begin = 0.0
        """Time in seconds when the current run began. If the run was divided: when its last part began."""
        self._run_steps = 0
        """Number of steps of the run from `_run_begin` on; 0 without a run."""
        self._run_passed = 0
        """Number of steps of a divided run before `_run_begin`. They have ended, but the policy does not know of them yet."""
        self._divisible = False
        """Whether the run may be divided: enough blocks are free for all of its steps, wherever it is divided."""
        self._line = 0.0, 0.0, 0.0
        """Seconds of a step of the run, as three terms: fixed seconds, seconds for each position that the decodes attend to, and
        seconds for each position of the longest sequence (`InstanceStepTimes.decode_line`)."""
        self._one_more_step = False
        """Whether one more step follows a run that an arrival has ended: with overlap, that step was planned before the arrival."""
        self._busy = self._held_seconds = self._peak = self._changed = 0.0
        """`_busy`: seconds in which the device computed. `_held_seconds`: integral of the share of blocks that requests held, over time.
        `_peak`: the largest such share. `_changed`: time of the last call of `note_usage`."""
        self._ended_run: tuple[int, float, float] | None = None
        """The run that ended since `_changed`, for `note_usage`: (steps of the run, share of the blocks that requests held in
        its first step, seconds by which each step is longer than the step before)."""
        self.occupancy: list[Occupancy] | None = None
        """If it is a list, it gets an entry after each change, and during a run every `tokens_per_block` steps. None: not recorded."""

    def post(self, now: float, action: Action) -> None:
        """Call `action` when the host is next free: after it has read a step's tokens or launched a step. An idle host calls it at once."""
        self._posted.append(action)
        if self._running is None and self._ahead is None:
            self.wake = min(self.wake, now)
        elif self._run_steps:
            self._cut_run(now)

    def divide_run(self, now: float) -> bool:
        """Divide the current run after the step that is computed at `now`, so that the caller can act there without ending the run.

        For example, the caller enters received blocks into the prefix cache. The policy learns of the whole run only when it
        ends, so the caller's action must change neither the batch nor the number of free blocks. Returns false, and changes
        nothing, if there is no divisible run, or if fewer than two steps of the run follow the current step.
        """
        if not self._run_steps or not self._divisible:
            return False
        if self._run_passed and now <= self._run_begin:
            return True  # an earlier action has divided it after this step
        steps = self._step_at(now)
        planned = self._running
        assert planned is not None
        if steps + 2 > self._run_steps:
            return False
        begin = self._run_end(steps)
        end = self._run_end(steps + 1)
        self._note_end(planned, end)
        planned.positions += planned.step.decodes * steps
        planned.longest += steps
        self._run_begin = begin
        self._run_steps = self._run_steps - steps
        self._run_passed = self._run_passed + steps
        self.wake = self._run_end(self._run_steps)
        return True

    def add(self, request: Request, digests: Sequence[bytes], tail: bytes) -> None:
        """Queue a request. May be called only in a posted action, in `after_chunk` and in `after_end`.

        `digests` are those of the request's blocks; `tail` is the digest of the block that its prompt fills in part.
        """
        self.policy.add(request, digests, tail)

    def note_answer(self) -> None:
        """Count a request as answered."""
        self.requests -= 1
        self.answered += 1

    def advance(self, now: float) -> None:
        """Handle the event at time `now`: end the current step or run, call the posted actions, and begin the next step."""
        after_run = self._run_steps > 0
        if self._run_steps:
            self._end_run(self._run_steps)
        self.note_usage(now)
        if self._one_more_step:
            self._one_more_step = False
        else:
            if self._running is not None:
                self._complete(self._running, now)
            self._running = self._ahead
            self._ahead = None
        posted = self._posted
        self._posted = []
        for action in posted:
            action(now)
        if self.between_steps is not None:
            self.between_steps(now)
        if self._running is None and (after_run or not self.costs.overlap):
            self._running = self._launch(now)
        running = self._running
        if running is not None and running.ends_with_launch and self.policy.prompts_wait:
            # The host reads the running step's tokens before it launches a prompt, as the device has ended it by then.
            self.wake = max(running.end, now)
        elif running is None or running.chunks or not self._begin_run(running, now):
            self._begin_step(now)

    def _begin_step(self, now: float) -> None:
        """With overlap, launch the step after the current one. Then set `wake` to the instance's next event."""
        running = self._running
        if self.costs.overlap:
            self._ahead = self._launch(now)
        if running is not None:
            self.wake = max(running.end, now if self._ahead is None else self._ahead.launched)
        else:
            self.wake = NEVER if self._ahead is None else self._ahead.launched

    def _launch(self, now: float) -> _Planned | None:
        """Plan a step and launch it. With overlap, the device computes it after the steps that were launched before.

        Returns None if there is nothing to compute.
        """
        planned = self._plan(now)
        if planned is None:
            return None
        times = self.costs.times
        decodes = planned.step.decodes
        chunks = planned.chunks
        shape = decodes, planned.positions, chunks, planned.longest
        begin = planned.launched = now
        if self.costs.overlap:
            begin = max(now, self._device_free)
            if chunks:
                planned.launched += times.launch_seconds(decodes, chunks)
            exposed = max(0.0, planned.launched - begin)
            computed = times.device_seconds(*shape)
            planned.end = begin + soft_maximum(computed, exposed)
            planned.ends_with_launch = computed < exposed
        else:
            planned.end = now + times.seconds(*shape)
        self._busy += planned.end - begin
        self._device_free = planned.end
        return planned

    def figures(self, seconds: float) -> InstanceFigures:
        """Return how much the instance was used from time 0 until `seconds`, the end of the simulation."""
        self.note_usage(seconds)
        policy = self.policy
        whole = max(seconds, 1e-12)
        busy = self._busy / whole
        assert busy < 1 + ROUNDING, "a step began before the device had ended the one before it"
        return InstanceFigures(
            self.role,
            busy,
            self._held_seconds / whole,
            self._peak,
            policy.preemptions,
            policy.cached_tokens,
        )

    def note_usage(self, now: float) -> None:
        """Record the cache blocks that requests held since the last call. Within a run, each step adds the same number of blocks.

        The caller calls it before blocks are released between two events, and never during a run.
        """
        assert not self._run_steps
        share = self._share()
        seconds = now - self._changed
        steps, before, growth = self._ended_run or (1, share, 0.0)
        self._ended_run = None
        more = share - before
        # Step k of the run (0 … steps - 1) holds the share `before + more * k / (steps - 1)` for `first + growth * k` seconds, and all
        # steps together take `seconds`. This is the sum of share times seconds over the steps.
        self._held_seconds += share * seconds - more * (seconds / 2 - growth * steps * (steps + 1) / 12)
        if self.occupancy is not None:
            first = seconds / steps - growth * (steps - 1) / 2
            running = self.policy.running
            for step in range(0, steps, self.policy.cache.tokens_per_block):
                begin = self._changed + step * first + growth * step * (step - 1) / 2
                self.occupancy.append(Occupancy(begin, running, before + more * step / max(1, steps - 1)))
        self._changed = now
        if share > self._peak:
            self._peak = share

    def _share(self) -> float:
        """Return the share of the instance's blocks that requests hold now."""
        return 1 - self._pool.free / self._pool.blocks

    def _plan(self, now: float) -> _Planned | None:
        step = self.policy.next_step(now)
        if step is None:
            return None
        decodes = step.decodes
        if step.unchanged:
            self._context += decodes
            self._longest += 1
        elif decodes:
            starts = [part.start for part in step.parts[:decodes]]
            self._context = sum(starts) + decodes
            self._longest = max(starts) + 1
        else:
            self._context = self._longest = 0
        return _Planned(step, self._context, self._longest, step.parts[decodes:] if decodes < len(step.parts) else ())

    def _complete(self, planned: _Planned, now: float) -> None:
        self.policy.complete(planned.step, None)
        for part in planned.chunks:
            self.after_chunk(part, now)
        for ended in self.policy.drain_ended():
            self.note_answer()
            self.after_end(ended.number, now)

    def _begin_run(self, planned: _Planned, now: float) -> bool:
        """Let a decode step that begins be the first of a run, if no known event changes the batch during the run.

        Returns whether a run has begun; `wake` is then its end.
        """
        policy = self.policy
        if not policy.extends(planned.step):
            return False
        if self.costs.overlap and policy.unfinished > policy.running:
            return False  # the step after the run is planned before the run's last requests release their blocks
        parts = planned.step.parts
        cache = policy.cache
        most = min([part.progress.final - part.start for part in parts]) + 1
        # For `room` steps the free blocks suffice, even if every request begins a new block with the first of these steps.
        room = self._pool.free // len(parts) * cache.tokens_per_block
        steps = min(most, room, LONGEST_RUN)
        if steps < 2:
            return False
        self._run_begin = now
        self._run_steps = steps
        self._line = self.costs.times.decode_line(len(parts))
        # Each request takes at most one block more than it has filled, so with `tokens_per_block` steps to spare any division fits.
        self._divisible = self.costs.overlap and cache.alike and most + cache.tokens_per_block <= min(room, LONGEST_RUN)
        self.wake = self._run_end(steps)
        return True

    def _run_end(self, steps: int) -> float:
        """Return the time when the first `steps` steps from `_run_begin` on have ended.

        Each step attends to one position more than the step before for every decode, so the time is quadratic in `steps`.
        """
        planned = self._running
        assert planned is not None
        fixed, each, of_longest = self._line
        more = steps * (steps - 1) // 2
        positions = planned.positions * steps + planned.step.decodes * more
        longest = planned.longest * steps + more
        return self._run_begin + steps * fixed + each * positions + of_longest * longest

    def _cut_run(self, now: float) -> None:
        """End the run with the step that is computed at `now`. With overlap, one more step follows (`_one_more_step`) or is launched."""
        if self._run_passed and now <= self._run_begin:
            self.wake = self._run_begin
            self._one_more_step = True
            self._plan_run(1)
            return
        steps = self._step_at(now)
        self.wake = self._run_end(steps)
        self._one_more_step = self.costs.overlap and steps < self._run_steps
        self._end_run(steps)
        if self.costs.overlap and not self._one_more_step:
            self._ahead = self._launch(now)

    def _step_at(self, now: float) -> int:
        """Return the number (from 1) of the run's step that is computed at `now`: the first step that ends at `now` or later.

        If `now` is after the end of the run, it is the number of the last step.
        """
        planned = self._running
        assert planned is not None
        fixed, each, of_longest = self._line
        # Solve the quadratic equation `_run_end(steps) == now`. Rounding may give a wrong step; the loops below correct it.
        growth = (each * planned.step.decodes + of_longest) / 2
        seconds = now - self._run_begin
        first = fixed + each * planned.positions + of_longest * planned.longest - growth
        steps = min(max(1, int(2 * seconds / (first + sqrt(first * first + 4 * growth * seconds)))), self._run_steps)
        while steps < self._run_steps and self._run_end(steps) < now:
            steps += 1
        while steps > 1 and self._run_end(steps - 1) >= now:
            steps -= 1
        return steps

    def _end_run(self, steps: int) -> None:
        planned = self._running
        assert planned is not None
        steps += self._one_more_step
        self._note_end(planned, self._run_end(steps))
        self._plan_run(steps)

    def _note_end(self, planned: _Planned, end: float) -> None:
        """Move the time at which the device ends a planned step to `end`, and correct the busy time."""
        self._busy += end - planned.end
        planned.end = self._device_free = end

    def _plan_run(self, steps: int) -> None:
        """Tell the policy that the run had `steps` steps since `_run_begin`. It has planned only the run's first step so far."""
        planned = self._running
        whole = self._run_passed + steps
        assert planned is not None
        ended = whole - self._one_more_step
        if ended > 1:
            # No action has changed the number of free blocks since the run began, so `_share()` still is the share of its first step.
            _, each, of_longest = self._line
            self._ended_run = ended, self._share(), each * planned.step.decodes + of_longest
        if whole > 1 and self.policy.extend(planned.step, whole) != whole:
            raise AssertionError("a run of decodes was planned without blocks for it")
        self._context = planned.positions = planned.positions + planned.step.decodes * (steps - 1)
        self._longest = planned.longest = planned.longest + steps - 1
        self._run_steps = self._run_passed = 0
