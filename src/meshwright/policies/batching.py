"""Continuous batching: which tokens of which requests the next step computes, and in which cache blocks.

Each step decodes every running request and fills the token budget with chunks of prompts. Requests go first come, first
served; a level of priority is worth a number of seconds. A request that needs a block when none is free takes it from
the last in this order, which is computed again later. So the first request always advances, and none starves.

The caller plans a step, computes it and completes it. It may plan one step before the step ahead of it is completed: the
policy knows how many tokens are coming, only their values arrive with `complete`. Blocks that are released while a step is
in flight are written again by later steps only, so steps must be computed in the order in which they are planned.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence

from meshwright.policies.batch_queue import RequestQueue
from meshwright.policies.batch_request import BatchLimits, CacheGroup, Ended, Part, Progress, Reason, Request, Step
from meshwright.policies.cache_blocks import CacheBlocks, block_digest, root_digest
from meshwright.spec.errors import BadInput


class BatchPolicy:
    """Plans the steps of one model replica."""

    def __init__(self, limits: BatchLimits, groups: Sequence[CacheGroup], tokens_per_block: int) -> None:
        self.limits = limits
        self.cache = CacheBlocks(groups, tokens_per_block)
        self.preemptions = 0
        """Times that a request lost its blocks."""
        self.cached_tokens = 0
        """Positions that were taken from the prefix cache."""
        self._progress: dict[int, Progress] = {}
        self._queue = RequestQueue()
        self._running: dict[int, Progress] = {}
        self._decodes: list[Part] = []
        self._prefills: list[Progress] = []
        self._stale_decodes = False
        self._last_parts: list[Part] | None = None
        self._ended: list[Ended] = []
        self._in_flight = self._steps = self._generation = self._releases = 0
        self._refused: tuple[Progress | None, int] = (None, 0)
        """The head of the queue that was not admitted, and `_releases` at that time: until then it need not be tried again."""
        self._drafts_in_flight = False

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._progress)

    @property
    def running(self) -> int:
        """Requests that hold cache blocks."""
        return len(self._running)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline in seconds of an unfinished request."""
        return self._queue.next_deadline()

    def add(self, request: Request) -> None:
        """Queue a request. Raises BadInput if the cache could not hold it alone or its numbers make no sense."""
        self._check(request)
        key = (request.arrival - request.priority * self.limits.priority_seconds, request.number)
        salt = f"={request.salt}" if self.limits.prefix_cache else None
        progress = Progress(request, key, len(self.cache.pools), salt)
        self._progress[request.number] = progress
        if request.deadline is not None:
            self._queue.watch_deadline(progress, request.deadline)
        leader = None if request.samples_of is None else self._progress.get(request.samples_of)
        if leader is None:
            self._queue.push(progress)
            return
        if not self.limits.prefix_cache:
            progress.salt, progress.shares, leader.shares = leader.salt, True, True
        if len(leader.tokens) > len(leader.request.prompt):
            self._queue.push(progress)
        else:
            self._queue.wait_for(leader.request.number, progress)

    def abort(self, number: int) -> None:
        """End a request at once; a number that is unknown or has ended is ignored."""
        if number in self._progress:
            self._end(self._progress[number], "abort")

    def drain_ended(self) -> list[Ended]:
        """Requests that ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def forget_cache(self) -> None:
        """Empty the prefix cache, for new weights; blocks of running requests are not entered in it any more."""
        self._generation += 1
        self.cache.forget()

    def next_step(self, now: float, drafts: Mapping[int, int] | None = None) -> Step | None:
        """Plan a step at time `now` in seconds; None if there is nothing to compute until a step in flight is completed.

        `drafts` maps request numbers to draft tokens to verify; fewer are planned where budget, blocks or the request's
        end do not allow all. A step with drafts must be completed before the next is planned.
        """
        if self._drafts_in_flight:
            raise RuntimeError("complete the step with draft tokens before planning the next one")
        while (late := self._queue.take_late(now)) is not None:
            self._end(late, "deadline")
        step = Step(self._steps)
        decodes = self._plan_decodes(step)
        chunks: list[Part] = []
        joining: list[Part] = []
        if self._prefills or self._queue.head() is not None:
            self._plan_prefills(step, len(decodes), chunks, joining)
        if self._stale_decodes:
            decodes = self._drop_stale(decodes)
            step.final = [progress for progress in step.final if progress.live]
        step.tokens = len(decodes) + sum(part.count for part in chunks)
        if drafts:
            self._add_drafts(step, decodes, drafts)
        return self._finish_plan(step, decodes, chunks, joining)

    def _finish_plan(self, step: Step, decodes: list[Part], chunks: list[Part], joining: list[Part]) -> Step | None:
        for progress in step.final:
            progress.draining, progress.part, self._stale_decodes = True, None, True
        self._decodes = decodes + joining if joining else decodes
        if not decodes and not chunks:
            return None
        step.parts = decodes + chunks if chunks else decodes
        step.sampling = decodes + [part for part in chunks if part.samples] if chunks else decodes
        step.decodes = len(decodes)
        step.unchanged = step.parts is self._last_parts and not step.drafts
        self._last_parts = None if step.drafts else step.parts
        self._steps += 1
        self._in_flight += 1
        return step

    def _plan_decodes(self, step: Step) -> list[Part]:
        """Move every decode to its next position and take the blocks that this needs."""
        decodes = self._decodes
        if self._stale_decodes:
            decodes = self._drop_stale(decodes)
        reached = []
        for index, part in enumerate(decodes):
            part.start = start = part.start + 1
            if start >= part.limit:
                reached.append(index)
        for index in reached:
            part = decodes[index]
            if part.progress.part is part:
                self._reach_limit(part, index, step)
        return self._drop_stale(decodes) if self._stale_decodes else decodes

    def _drop_stale(self, decodes: list[Part]) -> list[Part]:
        self._stale_decodes = False
        return [part for part in decodes if part.progress.part is part]

    def _reach_limit(self, part: Part, index: int, step: Step) -> None:
        progress, start, size = part.progress, part.start, self.cache.tokens_per_block
        if start >= len(part.tables[0]) * size:
            if not self._make_room(progress, start):
                return
            self.cache.grow(part.tables, start + 1)
            step.grown.append(index)
            step.filled.append((progress, start // size))
        if start >= progress.final:
            step.final.append(progress)
        part.limit = min(len(part.tables[0]) * size, progress.final)

    def _make_room(self, progress: Progress, start: int) -> bool:
        """Free a block for position `start` of a decode; false if the request itself was the last in order."""
        self._leave_window(progress, start)
        while self.cache.room(progress.tables) <= start:
            last = self._last_running()
            self._detach(last, last.total if last.draining else self._positions(last))
            if last is progress:
                return False
        return True

    def _positions(self, progress: Progress) -> int:
        """Tokens of a request that are known or in flight, while a step is planned without it."""
        return len(progress.tokens) if progress.part is None else progress.part.start + 1

    def _last_running(self) -> Progress:
        """The request to preempt: one whose last part is in flight, for it needs its blocks no more, or the last in order."""
        return max(self._running.values(), key=lambda progress: (progress.draining, progress.key))

    def _detach(self, progress: Progress, expected: int) -> None:
        """Take the blocks of a request; it is queued again when `expected` tokens are known, unless these are all."""
        self._free(progress)
        progress.tables = [[] for _ in progress.tables]
        progress.expected, progress.computation = expected, progress.computation + 1
        progress.computed = progress.confirmed = progress.registered = 0
        if not progress.draining:
            self.preemptions += 1
        if len(progress.tokens) == expected:
            self._queue.push(progress)

    def _free(self, progress: Progress) -> None:
        self._register(progress)
        self._releases += 1
        self.cache.release(progress.tables)
        del self._running[progress.request.number]
        if progress.part is not None:
            progress.part, self._stale_decodes = None, True
        elif progress in self._prefills:
            self._prefills.remove(progress)
        progress.live = False

    def _leave_window(self, progress: Progress, position: int) -> None:
        if self.cache.smallest_window is not None:
            self._register(progress)
            self._releases += self.cache.leave_window(progress.tables, position)

    def _add_drafts(self, step: Step, decodes: list[Part], drafts: Mapping[int, int]) -> None:
        """Lengthen decode parts by draft tokens."""
        for part in decodes:
            final = part.progress.final
            wanted = min(drafts.get(part.request.number, 0), self.limits.tokens - step.tokens, final - part.start)
            wanted = min(wanted, self.cache.room(part.tables) - part.start - 1) if wanted > 0 else 0
            if wanted > 0:
                self.cache.grow(part.tables, part.start + wanted + 1)
                part.limit = min(len(part.tables[0]) * self.cache.tokens_per_block, final)
                part.count, step.tokens, step.drafts = 1 + wanted, step.tokens + wanted, True
        self._drafts_in_flight = step.drafts

    def _plan_prefills(self, step: Step, decodes: int, chunks: list[Part], joining: list[Part]) -> None:
        """Fill the token budget with prompts in order, admitting requests when their turn comes."""
        budget, index, blocked = self.limits.tokens - decodes, 0, False
        while budget > 0:
            head = None if blocked else self._queue.head()
            if head is not None and self._refused == (head, self._releases):
                head = None
            current = self._prefills[index] if index < len(self._prefills) else None
            if head is not None and (current is None or head.key < current.key):
                blocked = not self._admit(head, budget)
                if blocked:
                    self._refused = (head, self._releases)
                continue
            if current is None:
                break
            chunk = self._plan_chunk(current, budget, step)
            if chunk is None:
                index += 1
                continue
            budget -= chunk.count
            chunks.append(chunk)
            if chunk.samples:
                self._prefills.remove(current)
                joining.extend(self._begin_decode(current, step))
            else:
                index += 1

    def _plan_chunk(self, progress: Progress, budget: int, step: Step) -> Part | None:
        start, known = progress.computed, len(progress.tokens)
        self._leave_window(progress, progress.confirmed)
        while (room := self.cache.room(progress.tables)) <= start:
            last = self._last_running()
            if last is progress or not (last.draining or last.key > progress.key):
                return None
            self._detach(last, last.total if last.draining else self._positions(last))
        count = min(budget, known - start, room - start)
        self.cache.grow(progress.tables, start + count)
        progress.computed = start + count
        return Part(progress, start, count, samples=start + count == known)

    def _begin_decode(self, progress: Progress, step: Step) -> list[Part]:
        """The decode part that follows the last chunk of a prompt; none if the request ends there."""
        if len(progress.tokens) - 1 >= progress.final:
            step.final.append(progress)
            return []
        progress.part = part = Part(progress, len(progress.tokens) - 1, 1, samples=True)
        part.limit = min(len(part.tables[0]) * self.cache.tokens_per_block, progress.final)
        return [part]

    def _admit(self, progress: Progress, budget: int) -> bool:
        """Start the request at the head of the queue, if it gets a slot and blocks."""
        digests = self._digests(progress, (len(progress.tokens) - 1) // self.cache.tokens_per_block)
        while True:
            matched = self.cache.matching(digests)
            if len(self._running) < self.limits.sequences and self._fits(progress, digests, matched, budget):
                break
            last = self._last_running() if self._running else None
            if last is None or last.draining or last.key < progress.key:
                return False
            if last.request.priority >= progress.request.priority:
                return False
            self._detach(last, self._positions(last))
        self._queue.pop()
        self.cache.share(progress.tables, digests, matched)
        progress.live, progress.registered = True, matched
        progress.computed = progress.confirmed = matched * self.cache.tokens_per_block
        self.cached_tokens += progress.computed
        self._running[progress.request.number] = progress
        insort(self._prefills, progress, key=lambda running: running.key)
        return True

    def _fits(self, progress: Progress, digests: Sequence[bytes], matched: int, budget: int) -> bool:
        """Whether every group has free blocks for the whole request as far as it is known, beside running prefills."""
        size = self.cache.tokens_per_block
        for group, pool in enumerate(self.cache.pools):
            owed = sum(self._owed(group, running, budget) for running in self._prefills)
            tokens = len(progress.tokens)
            blocks = min(self.cache.most_held(group, tokens, min(budget, tokens)), pool.blocks)
            blocks -= matched - self.cache.first_block(group, matched * size)
            reserve = int(self.limits.reserve * pool.blocks) if self._running else 0
            if pool.free - self.cache.idle_matches(group, digests, matched) < blocks + owed + reserve:
                return False
        return True

    def _owed(self, group: int, progress: Progress, budget: int) -> int:
        """Blocks of a group that a running prefill has yet to take."""
        held = len(progress.tables[group]) - self.cache.first_block(group, progress.confirmed)
        known = len(progress.tokens)
        return max(self.cache.most_held(group, known, min(budget, known)) - held, 0)

    def _digests(self, progress: Progress, blocks: int) -> list[bytes]:
        """Digests of the first full blocks; empty for a request that shares nothing."""
        if not progress.shares:
            return []
        if progress.generation != self._generation and not progress.live:
            progress.digests, progress.generation = [], self._generation
        digests, size = progress.digests, self.cache.tokens_per_block
        parent = digests[-1] if digests else root_digest(progress.salt, progress.generation)
        for start in range(len(digests) * size, blocks * size, size):
            parent = block_digest(parent, progress.tokens[start : start + size])
            digests.append(parent)
        return digests[:blocks]

    def _register(self, progress: Progress, blocks: int | None = None) -> None:
        """Enter the computed full blocks of a request in the prefix cache, at most the first `blocks`."""
        if not progress.shares or progress.generation != self._generation:
            return
        full = progress.confirmed_positions() // self.cache.tokens_per_block
        full = full if blocks is None else min(full, blocks)
        if full > progress.registered:
            self.cache.register(progress.tables, self._digests(progress, full), progress.registered, full)
            progress.registered = full

    def extend(self, step: Step, most: int) -> int:
        """Let a step of decodes that was just planned stand for up to `most` identical ones; returns their number.

        The result is exactly that of so many single steps, each completed before the next is planned, if nothing is
        added, aborted or late meanwhile. A step with a prefill or drafts, and one beside another in flight, stays single.
        """
        parts = step.parts
        single = self._in_flight > 1 or step.number != self._steps - 1 or step.decodes < len(parts) or step.drafts
        window = self.cache.smallest_window
        if single or step.final or most < 2 or (window is not None and self._queue.head() is not None):
            return step.repeat
        most = min(most, min(part.progress.final - part.start for part in parts) + 1)
        # A block that is filled in these steps must not leave the window before it is in the prefix cache.
        most = most if window is None else min(most, max(window - 1, 1))
        step.repeat = self._grow_ahead(step, most)
        for part in parts:
            part.start += step.repeat - 1
            part.limit = min(len(part.tables[0]) * self.cache.tokens_per_block, part.progress.final)
            if part.start == part.progress.final:
                step.final.append(part.progress)
                part.progress.draining, part.progress.part, self._stale_decodes = True, None, True
        return step.repeat

    def _grow_ahead(self, step: Step, most: int) -> int:
        """Take the blocks of `most` decode steps in the order of single steps; returns how many steps the blocks allow."""
        size = self.cache.tokens_per_block
        events = sorted(
            (position - part.start, index)
            for index, part in enumerate(step.parts)
            for position in range(len(part.tables[0]) * size, part.start + most, size)
        )
        for offset, index in events:
            if any(not pool.free for pool in self.cache.pools):
                return offset
            part = step.parts[index]
            self._leave_window(part.progress, part.start + offset)
            self.cache.grow(part.tables, part.start + offset + 1)
            step.grown.append(index)
            step.filled.append((part.progress, (part.start + offset) // size))
        return most

    def complete(self, step: Step, tokens: Sequence[int] | None, stopped: Collection[int] = ()) -> None:
        """Take in the results of a step without drafts.

        `tokens` are the new tokens of `step.sampling`, in that order; None stands for unknown ones, of a simulated step.
        `stopped` are numbers of requests for which the new token is the last.
        """
        if step.drafts or (step.repeat > 1 and tokens is not None):
            raise ValueError("a step with drafts is completed by complete_drafts, a repeated one without tokens")
        if tokens is None:
            unknown = [0] * step.repeat
            for part in step.sampling:
                self._deliver(part.progress, unknown)
        else:
            for part, token in zip(step.sampling, tokens, strict=True):
                if part.progress.live:
                    part.tokens.append(token)
                else:
                    self._deliver(part.progress, (token,))
        self._finish(step, stopped)

    def complete_drafts(self, step: Step, tokens: Sequence[Sequence[int]], stopped: Collection[int] = ()) -> None:
        """Take in the results of a step with drafts: for each of `step.sampling`, the accepted draft tokens and one more."""
        for part, new in zip(step.sampling, tokens, strict=True):
            if not 0 < len(new) <= (part.count if part.progress.part is part else 1):
                raise ValueError(f"request {part.request.number}: {len(new)} new tokens from a part of {part.count}")
            self._deliver(part.progress, new)
            if part.progress.part is part:
                part.start, part.count = part.start + len(new) - 1, 1
                if part.start >= part.progress.final and part.progress not in step.final:
                    step.final.append(part.progress)
        self._drafts_in_flight = False
        self._finish(step, stopped)

    def fail(self, step: Step) -> None:
        """End all requests of a step that could not be computed. Its blocks do not enter the prefix cache."""
        self._in_flight -= 1
        self._drafts_in_flight = False
        for part in step.parts:
            self._end(part.progress, "failed")

    def _deliver(self, progress: Progress, tokens: Sequence[int]) -> None:
        if progress.ended:
            return
        progress.tokens.extend(tokens)
        if not progress.live and len(progress.tokens) == progress.expected < progress.total:
            self._queue.push(progress)

    def _finish(self, step: Step, stopped: Collection[int]) -> None:
        self._in_flight -= 1
        for part in step.parts[step.decodes :]:
            progress = part.progress
            if part.computation == progress.computation and not progress.ended:
                progress.confirmed = part.start + part.count
                self._register(progress)
                if part.samples:
                    self._queue.release_samples(progress.request.number)
        for progress, blocks in step.filled:
            if progress.live:
                self._register(progress, blocks)
        for number in stopped:
            if number in self._progress:
                self._end(self._progress[number], "stop")
        for progress in step.final:
            if len(progress.tokens) >= progress.total:
                self._end(progress, "length")

    def _end(self, progress: Progress, reason: Reason) -> None:
        if progress.ended:
            return
        if progress.live:
            self._free(progress)
        progress.ended = True
        del self._progress[progress.request.number]
        self._ended.append(Ended(progress.request.number, reason))
        self._queue.replace_leader(progress.request.number)

    def _check(self, request: Request) -> None:
        name, tokens = f"request {request.number}", len(request.prompt) + request.new_tokens
        if request.number in self._progress:
            raise BadInput(f"{name}: another request has this number")
        if not request.prompt or request.new_tokens < 1:
            raise BadInput(f"{name}: expected a prompt of at least one token and at least one new token")
        for group, pool in enumerate(self.cache.pools):
            needed = self.cache.most_held(group, tokens - 1)
            if needed > pool.blocks:
                size = f"{len(request.prompt)} tokens and {request.new_tokens} new ones need {needed} cache blocks"
                raise BadInput(f"{name}: {size}; there are {pool.blocks}. Allow fewer new tokens or a larger cache")
