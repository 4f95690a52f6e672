"""Instance of a deployment in simulated time: the engine's batching policy, and steps that take modelled seconds.

With overlap, an instance plans step n + 1 when the host has the tokens of step n - 1, as the engine does on a GPU. Without
overlap, it plans step n + 1 when step n ends. Then the host launches the step; the launch of a step with a prompt takes long.
During a launch the host reads neither tokens nor requests that arrive. If a prompt waits and the device ends step n together
with its launch, the host reads the tokens of step n before it plans step n + 1: they do not wait for the prompt's launch.

Identical steps of decodes, a run, are one event. The run ends early if a request arrives (`BatchPolicy.extend`), so the
times are those of single steps.
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
"""Identical steps in one event at most."""
ROUNDING = 1e-6
"""Relative error at most of a sum of many times."""
Action = Callable[[float], None]
"""Callback of an instance between two steps, with the time in seconds."""


class _Planned:
    """A planned step with the inputs of its cost, which the policy changes when it plans the next step."""

    __slots__ = ("chunks", "end", "ends_with_launch", "launched", "longest", "positions", "step")

    def __init__(self, step: EngineStep, positions: int, longest: int, chunks: Sequence[RequestPart]) -> None:
        self.step = step
        self.positions = positions
        self.longest = longest
        self.chunks = chunks
        self.launched = self.end = 0.0
        """Time when the host has launched the step, and time when the device ends it."""
        self.ends_with_launch = False
        """Whether the device, once it is free, needs less time for the step than the rest of the launch."""


class SimulatedInstance:
    """Plays steps. `wake` is the time of its next event; the caller calls `advance` then, and `post` for what arrives."""

    def __init__(self, role: Role, costs: InstanceCosts, token_budget: int, cache: SimulatedBlocks) -> None:
        self.role = role
        self.costs = costs
        self.policy = BatchPolicy(BatchLimits(token_budget, costs.sequences), cache)
        (self._pool,) = cache.counts
        self.wake = NEVER
        self.prompt_tokens = 0
        """Tokens of the prompts that a prefill instance has still to compute."""
        self.requests = self.answered = 0
        """Requests that were sent to this instance and have not ended, and those that have."""
        self.after_chunk: Callable[[RequestPart, float], None] = lambda part, now: None
        """Called for each chunk of a prompt that is computed."""
        self.after_end: Callable[[int, float], None] = lambda number, now: None
        """Called for each request that ends."""
        self.between_steps: Action | None = None
        """Called when a step has ended and the posted actions have run."""
        self._posted: list[Action] = []
        self._running: _Planned | None = None
        self._ahead: _Planned | None = None
        self._device_free = 0.0
        """Time when the device ends the last step that was launched."""
        self._context = self._longest = 0
        self._run_begin = 0.0
        """Time in seconds when the run in flight began, or its last part if it was divided."""
        self._run_steps = 0
        """Steps of the run from `_run_begin` on; 0 without a run."""
        self._run_passed = 0
        """Steps of the run before `_run_begin`: they have ended, but the policy has not been told of them."""
        self._divisible = False
        """Whether the run may be divided: enough blocks are free for all of its steps, wherever it is divided."""
        self._line = 0.0, 0.0, 0.0
        """`InstanceStepTimes.decode_line` of the run."""
        self._one_more_step = False
        """Whether one step follows the end of a cut run: with overlap it was planned before the cut."""
        self._busy = self._held_seconds = self._peak = self._changed = 0.0
        self._ended_run: tuple[int, float, float] | None = None
        """Of the run that began at `_changed` and has ended: its steps, the share of the blocks that requests held in the
        first one, and the seconds by which each step is longer than the one before it."""
        self.occupancy: list[Occupancy] | None = None
        """Occupancy after each change, during a run once in so many steps as a block has tokens; None: not recorded."""

    def post(self, now: float, action: Action) -> None:
        """Run an action when the host next reads a step's tokens or has launched a step, or at once if it does neither."""
        self._posted.append(action)
        if self._running is None and self._ahead is None:
            self.wake = min(self.wake, now)
        elif self._run_steps:
            self._cut_run(now)

    def divide_run(self, now: float) -> bool:
        """Divide the run after the step in flight, so that an action at `now` happens between its parts without ending it.

        An example is to enter received blocks. The policy is told of all parts when the run ends, so the action must
        change neither the batch nor the number of free blocks. Returns false if there is no divisible run, or if fewer
        than two of its steps follow the step in flight.
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
        """Queue a request; only in a posted action or in `after_chunk` and `after_end`."""
        self.policy.add(request, digests, tail)

    def note_answer(self) -> None:
        """Count a request as answered."""
        self.requests -= 1
        self.answered += 1

    def advance(self, now: float) -> None:
        """End the step in flight, run the posted actions, and begin the next step."""
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
        """Launch the next step ahead, if that is done, and wait for the one that runs."""
        running = self._running
        if self.costs.overlap:
            self._ahead = self._launch(now)
        if running is not None:
            self.wake = max(running.end, now if self._ahead is None else self._ahead.launched)
        else:
            self.wake = NEVER if self._ahead is None else self._ahead.launched

    def _launch(self, now: float) -> _Planned | None:
        """Plan a step and launch it; with overlap the device computes it behind those that were launched before."""
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
        """Figures of its use in the `seconds` of the simulation."""
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
        """Count the blocks that requests held since the last call; each step of a run adds the same number of blocks.

        It is called before blocks are released between two events, but not during a run.
        """
        assert not self._run_steps
        share = self._share()
        seconds = now - self._changed
        steps, before, growth = self._ended_run or (1, share, 0.0)
        self._ended_run = None
        more = share - before
        # The sum over steps k of (before + more * k / (steps - 1)) * (first + growth * k), where all take `seconds`.
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
        """The share of the blocks that requests hold."""
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
        """Make the decodes that begin stand for identical steps, if no known event changes the batch meanwhile."""
        policy = self.policy
        if not policy.extends(planned.step):
            return False
        if self.costs.overlap and policy.unfinished > policy.running:
            return False  # the step after the run is planned before the run's last requests release their blocks
        parts = planned.step.parts
        cache = policy.cache
        most = min([part.progress.final - part.start for part in parts]) + 1
        # So many steps need no more blocks than are free, wherever in their blocks the requests are.
        room = self._pool.free // len(parts) * cache.tokens_per_block
        steps = min(most, room, LONGEST_RUN)
        if steps < 2:
            return False
        self._run_begin = now
        self._run_steps = steps
        self._line = self.costs.times.decode_line(len(parts))
        # However many steps are planned, a part has taken a block more at most than these have filled.
        self._divisible = self.costs.overlap and cache.alike and most + cache.tokens_per_block <= min(room, LONGEST_RUN)
        self.wake = self._run_end(steps)
        return True

    def _run_end(self, steps: int) -> float:
        """Return the time when the first `steps` steps of the run have ended."""
        planned = self._running
        assert planned is not None
        fixed, each, of_longest = self._line
        more = steps * (steps - 1) // 2
        positions = planned.positions * steps + planned.step.decodes * more
        longest = planned.longest * steps + more
        return self._run_begin + steps * fixed + each * positions + of_longest * longest

    def _cut_run(self, now: float) -> None:
        """End the run with the step in flight, and plan the next one if that is done ahead."""
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
        """The number of the step of the run that is in flight: the first that ends at `now` or later, else the last."""
        planned = self._running
        assert planned is not None
        fixed, each, of_longest = self._line
        # The inverse of `_run_end`, a polynomial of second degree, may be off by the rounding.
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
        """Let the device end a planned step at another time."""
        self._busy += end - planned.end
        planned.end = self._device_free = end

    def _plan_run(self, steps: int) -> None:
        """Make the policy plan the steps of the run, of which the first of all is planned."""
        planned = self._running
        whole = self._run_passed + steps
        assert planned is not None
        ended = whole - self._one_more_step
        if ended > 1:
            # Since the run began no action has changed the number of free blocks: that is still the one of its first step.
            _, each, of_longest = self._line
            self._ended_run = ended, self._share(), each * planned.step.decodes + of_longest
        if whole > 1 and self.policy.extend(planned.step, whole) != whole:
            raise AssertionError("a run of decodes was planned without blocks for it")
        self._context = planned.positions = planned.positions + planned.step.decodes * (steps - 1)
        self._longest = planned.longest = planned.longest + steps - 1
        self._run_steps = self._run_passed = 0
