"""Continuous batching: decides which tokens of which requests the next step computes, and in which cache blocks.

Each step decodes one token of every running request, and computes chunks of prompts up to the token budget. Requests are served in order of
arrival; each level of priority counts like an earlier arrival by some seconds. If a request needs a cache block and none is free, the last
request in this order loses its blocks and is computed again later (preemption). The first request therefore always advances, and no request
starves.

The caller plans a step, computes it, and completes it. It may plan the next step before the results of the current one are known: the
policy knows how many tokens are coming, and gets their values with `complete`. If a block is released while a step is in flight, only later
steps write to it. Steps must therefore be computed in the order in which they were planned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

from meshwright.policies.batch_queue import RequestQueue
from meshwright.policies.batch_request import (
    LARGEST_PRIORITY,
    LONGEST_SALT,
    BatchLimits,
    EngineStep,
    Reason,
    Request,
    RequestEnded,
    RequestPart,
    RequestProgress,
)
from meshwright.policies.cache_blocks import NO_SALT, BlockTables, block_digest, extend_digests, root_digest
from meshwright.policies.running_batch import RunningBatch
from meshwright.spec.errors import BadInput

Cache = TypeVar("Cache", bound=BlockTables)


class BatchPolicy(Generic[Cache]):
    """Plans the steps of one model replica. The blocks of its requests come from `cache`."""

    def __init__(self, limits: BatchLimits, cache: Cache) -> None:
        self.limits = limits
        self.cache = cache
        self._progress: dict[int, RequestProgress] = {}
        self._queue = RequestQueue()
        self._batch = RunningBatch(limits, cache, self._queue)
        self._last_parts: list[RequestPart] | None = None
        self._ended: list[RequestEnded] = []
        self._in_flight = self._steps = 0
        self._drafts_in_flight = self._preempted = False

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._progress)

    @property
    def running(self) -> int:
        """Requests that have a slot in the batch and cache blocks."""
        return len(self._batch.requests)

    @property
    def decodes(self) -> Sequence[RequestPart]:
        """The decode parts of the running requests; the next step computes one more token of each."""
        return self._batch.current_decodes()

    @property
    def prompts_wait(self) -> bool:
        """Whether any prompt has tokens that are not planned yet."""
        return bool(self._batch.prefills) or self._batch.next_head() is not None

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks."""
        return self._batch.preemptions

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache. A request counts when it is first admitted."""
        return self._batch.cached_tokens

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens that were looked up in the prefix cache, at least `cached_tokens`. A request counts when it is first admitted."""
        return self._batch.looked_up_tokens

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of an unfinished request, in seconds; None if no request has one."""
        return self._queue.next_deadline()

    def add(self, request: Request, digests: Sequence[bytes] = (), tail: bytes | None = None) -> None:
        """Queue a request.

        If the caller has computed them, `digests` are the digests of the first full blocks, and `tail` is the digest of the tokens after
        the last full block of the prompt. Raises BadInput if the cache is too small for this request alone, or if its numbers are invalid.
        """
        self.check(request)
        key = (self.limits.turn(request.arrival, request.priority), request.number)
        salt = NO_SALT + request.salt if self.limits.prefix_cache else None
        progress = RequestProgress(request, key, len(self.cache.counts), salt)
        progress.digests.extend(digests)
        progress.tail = tail
        self._progress[request.number] = progress
        if request.deadline is not None:
            self._queue.watch_deadline(progress, request.deadline)
        leader = None if request.samples_of is None else self._progress.get(request.samples_of)
        if leader is None or leader.request.salt != request.salt:
            self._queue.push(progress)
            return
        if not self.limits.prefix_cache:
            progress.salt = leader.salt
            progress.shares = True
            leader.shares = True
        if len(leader.tokens) > len(leader.request.prompt):
            self._queue.push(progress)
        else:
            self._queue.wait_for(leader.request.number, progress)

    def abort(self, number: int) -> None:
        """End a request at once. A number that is unknown, or whose request has ended, is ignored."""
        if number in self._progress:
            self._end(self._progress[number], "abort")

    def fail_request(self, number: int, *, poisoned: bool = False) -> None:
        """End a request because of an error of its own. The other requests of its step continue.

        With `poisoned`, the contents of its blocks must not be used again: they are removed from the prefix cache, including shared blocks.
        """
        if (progress := self._progress.get(number)) is not None:
            if poisoned:
                self._batch.forget_blocks(progress)
            self._end(progress, "failed")

    def drain_ended(self) -> list[RequestEnded]:
        """The requests that ended since the last call, in the order in which they ended."""
        ended = self._ended
        self._ended = []
        return ended

    def prompt_digests(
        self, prompt: Sequence[int], generation: int | None = None, *, tail: bool = False, salt: str = ""
    ) -> list[bytes]:
        """Digests of the full blocks of a prompt, for requests with `salt`. With `tail`, also of the tokens after the last full block.

        `generation` is the generation of the weights; None is the current one. Example: with blocks of 4 tokens, a prompt of 10 tokens has
        two full blocks, and the tail has 2 tokens.
        """
        size = self.cache.tokens_per_block
        root = root_digest(NO_SALT + salt, self._batch.generation if generation is None else generation)
        digests: list[bytes] = []
        extend_digests(digests, root, prompt, len(prompt) // size, size)
        if tail and len(prompt) % size:
            digests.append(block_digest(digests[-1] if digests else root, prompt[len(digests) * size :]))
        return digests

    def forget_cache(self) -> None:
        """Empty the prefix cache for new weights. All running requests lose their blocks and are computed again.

        A step with draft tokens must be completed before this call, else RuntimeError is raised.
        """
        if self._drafts_in_flight:
            raise RuntimeError("complete the step with draft tokens before the cache is emptied")
        self._batch.forget_cache()

    def next_step(self, now: float, drafts: Mapping[int, int] | None = None) -> EngineStep | None:
        """Plan a step at time `now` in seconds. Returns None if nothing can be computed before a step in flight is completed.

        `drafts` maps request numbers to the number of draft tokens to verify. Fewer are planned if the budget, the free blocks or the end
        of the request do not allow all. A step with drafts must be completed before the next step is planned, else RuntimeError is raised.
        """
        if self._drafts_in_flight:
            raise RuntimeError("complete the step with draft tokens before planning the next one")
        while (late := self._queue.take_late(now)) is not None:
            self._end(late, "deadline")
        batch = self._batch
        preemptions = batch.preemptions
        if not (batch.current_decodes() or batch.prefills or self._queue.head()):
            self._preempted = False
            return None
        step = EngineStep(self._steps, released=batch.released)
        self._plan_decodes(step)
        chunks: list[RequestPart] = []
        joining: list[RequestPart] = []
        if batch.prefills or batch.next_head() is not None:
            self._plan_prefills(step, chunks, joining, preemptions)
        self._preempted = batch.preemptions > preemptions
        decodes = batch.current_decodes()
        if not decodes and not chunks:
            return None
        if step.final:
            step.final = [progress for progress in step.final if progress.live]
        step.decodes = step.tokens = len(decodes)
        step.parts = step.sampling = decodes
        if chunks:
            step.tokens += sum([part.count for part in chunks])
            step.parts = decodes + chunks
            step.sampling = decodes + [part for part in chunks if part.samples]
        if drafts:
            self._add_drafts(step, decodes, drafts)
        step.unchanged = step.parts is self._last_parts and not step.drafts
        self._last_parts = None if step.drafts else step.parts
        for progress in step.final:
            batch.drain(progress)
        if joining:
            batch.decodes = decodes + joining
        self._steps += 1
        self._in_flight += 1
        return step

    def _plan_decodes(self, step: EngineStep) -> None:
        """Advance every decode by one position, and give it a new block if its last block is full."""
        decodes = self._batch.current_decodes()
        reached = []
        for index, part in enumerate(decodes):
            part.start = start = part.start + 1
            if start >= part.limit:
                reached.append(index)
        for index in reached:
            part = decodes[index]
            progress = part.progress
            start = part.start
            if progress.part is not part:
                continue
            full = start >= len(part.tables[0]) * self.cache.tokens_per_block
            if full and not self._batch.begin_block(step, index, part, start):
                continue
            if start >= progress.final:
                step.final.append(progress)
            self._batch.set_limit(part)

    def _add_drafts(self, step: EngineStep, decodes: list[RequestPart], drafts: Mapping[int, int]) -> None:
        """Add draft tokens to decode parts. Drafts use only budget that prefills left, and only free blocks: no request is preempted."""
        for index, part in enumerate(decodes):
            allowed = min(self.limits.tokens + len(decodes) - step.tokens, part.progress.final - part.start)
            wanted = min(drafts.get(part.request.number, 0), allowed)
            wanted = min(wanted, self.cache.room(part.tables) - part.start - 1) if wanted > 0 else 0
            if wanted > 0:
                part.count = 1 + wanted
                step.tokens = step.tokens + wanted
                step.drafts = True
                self.cache.grow(part.tables, part.start + part.count)
                step.grown.append(index)
                self._batch.set_limit(part)
        self._drafts_in_flight = step.drafts

    def _plan_prefills(
        self, step: EngineStep, chunks: list[RequestPart], joining: list[RequestPart], preemptions: int
    ) -> None:
        """Fill the token budget with chunks of prompts in order. Admit requests in their turn, unless this step preempted any."""
        batch = self._batch
        index = 0
        budget = self.limits.tokens
        admitting = True
        while budget > 0:
            head = batch.next_head() if admitting and batch.preemptions == preemptions else None
            admitting = head is not None
            current = batch.prefills[index] if index < len(batch.prefills) else None
            if head is not None and (current is None or head.key < current.key):
                admitting = batch.admit_head(budget)
                if admitting and head.part is not None and head.part.start >= head.final:
                    step.final.append(head)
            elif current is None:
                break
            elif (count := batch.plan_chunk(current, budget, chunks)) and chunks[-1].samples:
                batch.prefills.remove(current)
                joining.extend(batch.begin_decode(current, step))
                budget -= count
            else:
                budget -= count
                index += 1

    def extends(self, step: EngineStep) -> bool:
        """Whether `extend` may make `step` represent several steps, if there are enough blocks."""
        single = self._in_flight > 1 or step.number != self._steps - 1 or step.decodes < len(step.parts) or step.drafts
        admits = self._preempted or self._batch.next_head() is not None
        releases = self.cache.smallest_window is not None and self._queue.head() is not None
        return not (single or admits or releases or step.final)

    def extend(self, step: EngineStep, most: int) -> int:
        """Let a step that was just planned, and that only decodes, represent several identical steps. Returns their number, at most `most`.

        If the step already represents several, `most` counts from the last of them. The result equals that many single steps with unknown
        tokens, each completed before the next is planned, provided that no request is added, aborted or late in between. `complete` then
        completes all of them. A step with a prefill or with drafts is not extended, and neither is a step while another is in flight.
        """
        if most < 2 or not self.extends(step):
            return 1
        steps, reached = self._batch.grow_ahead(step, most)
        step.repeat += steps - 1
        for index in reached:
            progress = step.parts[index].progress
            if step.parts[index].start == progress.final:
                step.final.append(progress)
                self._batch.drain(progress)
        return steps

    def complete(self, step: EngineStep, tokens: Sequence[int] | None, stopped: Collection[int] = ()) -> None:
        """Process the results of a step without drafts.

        `tokens` has one new token for each part of `step.sampling`, in that order; None if the tokens are unknown, as in a simulation.
        `stopped` has the numbers of requests that end with their new token.
        """
        if step.drafts or (step.repeat > 1 and tokens is not None):
            raise ValueError("a step with drafts is completed by complete_drafts, a repeated one without tokens")
        values = bytes(len(step.sampling)) if tokens is None else tokens
        if tokens is None and step.released == self._batch.released:
            for part in step.sampling:  # all of them are live
                part.tokens.append(0)
        else:
            for part, token in zip(step.sampling, values, strict=True):
                if part.progress.live:
                    part.tokens.append(token)
                else:
                    self._deliver(part.progress, (token,))
        self._finish(step, stopped)

    def complete_drafts(self, step: EngineStep, tokens: Sequence[Sequence[int]], stopped: Collection[int] = ()) -> None:
        """Process the results of a step with drafts. `tokens`: for each part of `step.sampling`, accepted drafts and one token."""
        for index, (part, new) in enumerate(zip(step.sampling, tokens, strict=True)):
            if not 0 < len(new) <= (part.count if index < step.decodes else 1):
                raise ValueError(f"request {part.request.number}: {len(new)} new tokens from a part of {part.count}")
            self._deliver(part.progress, new)
            if part.progress.part is part:
                part.start = part.start + len(new) - 1
                part.count = 1
                if part.start >= part.progress.final and part.progress not in step.final:
                    step.final.append(part.progress)
        self._drafts_in_flight = False
        self._finish(step, stopped)

    def fail(self, step: EngineStep) -> None:
        """End all requests of a step that could not be computed. Blocks that it computed do not enter the prefix cache."""
        self._in_flight -= 1
        self._drafts_in_flight = False
        for part in step.parts:
            self._end(part.progress, "failed")

    def _deliver(self, progress: RequestProgress, tokens: Sequence[int]) -> None:
        """Append new tokens to a request. If it lost its blocks and now all its tokens in flight are known, queue it again."""
        if progress.ended:
            return
        progress.tokens.extend(tokens)
        if not progress.live and len(progress.tokens) == progress.expected < progress.total:
            self._queue.push(progress)

    def _finish(self, step: EngineStep, stopped: Collection[int]) -> None:
        """Register computed prompts in the prefix cache, and end requests that stopped or have all their tokens."""
        self._in_flight -= 1
        for part in step.parts[step.decodes :]:
            progress = part.progress
            if part.computation == progress.computation and not progress.ended:
                progress.confirmed = part.start + part.count
                self._batch.register(progress)
                if part.samples:
                    self._queue.release_samples(progress.request.number)
        for number in stopped:
            if number in self._progress:
                self._end(self._progress[number], "stop")
        for progress in step.final:
            if len(progress.tokens) >= progress.total:
                self._end(progress, "length")

    def _end(self, progress: RequestProgress, reason: Reason) -> None:
        """End a request, release its blocks, and let a waiting sample of its prompt take its place."""
        if progress.ended:
            return
        if progress.live:
            self._batch.free(progress)
        progress.ended = True
        del self._progress[progress.request.number]
        self._ended.append(RequestEnded(progress.request.number, reason, progress.new_tokens))
        self._queue.replace_leader(progress.request.number)

    def check(self, request: Request) -> None:
        """Raise BadInput if the cache is too small for this request alone, or if its numbers are invalid."""
        name = f"request {request.number}"
        if request.number in self._progress:
            raise BadInput(f"{name}: another request has this number")
        if not request.prompt or request.new_tokens < 1:
            raise BadInput(f"{name}: expected a prompt of at least one token and at least one new token")
        if not -LARGEST_PRIORITY <= request.priority <= LARGEST_PRIORITY:
            raise BadInput(f"{name}: expected a priority of at most {LARGEST_PRIORITY}, got {request.priority}")
        if len(request.salt) > LONGEST_SALT:
            raise BadInput(f"{name}: expected a salt of at most {LONGEST_SALT} characters, got {len(request.salt)}")
        if request.new_tokens <= len(request.given):
            raise BadInput(f"{name}: {len(request.given)} of {request.new_tokens} new tokens are given; none is left")
        self._batch.check_size(request)
