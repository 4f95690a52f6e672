"""The requests that have cache blocks: how they are admitted, get and release blocks, are preempted, and enter the prefix cache."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from meshwright.policies.batch_queue import RequestQueue
from meshwright.policies.batch_request import BatchLimits, EngineStep, Request, RequestPart, RequestProgress
from meshwright.policies.cache_blocks import BlockTables, block_digest, extend_digests, root_digest
from meshwright.spec.errors import BadInput


class RunningBatch:
    """Requests that have been admitted and have not ended or been preempted, with their blocks."""

    def __init__(self, limits: BatchLimits, cache: BlockTables, queue: RequestQueue) -> None:
        self.limits = limits
        self.cache = cache
        self.queue = queue
        self.requests: dict[int, RequestProgress] = {}
        self.decodes: list[RequestPart] = []
        """Decode parts in the order of their first decode. The list is replaced, never changed, so a step can refer to it."""
        self.prefills: list[RequestProgress] = []
        """Requests whose prompts are not completely planned yet, in the order of their keys."""
        self.stale = False
        """Whether `decodes` contains parts of requests that do not decode any more."""
        self.preemptions = self.cached_tokens = self.looked_up_tokens = self.generation = 0
        self.released = 0
        """How often a request has left the batch."""
        self._refused: RequestProgress | None = None
        """The request that was last refused. It is tried again after blocks were released, by requests or by transfers."""
        self._refused_releases = 0
        """The number of releases at that time."""

    def check_size(self, request: Request) -> None:
        """Raise BadInput if the cache is too small for this request alone."""
        tokens = len(request.prompt) + request.new_tokens
        for group, pool in enumerate(self.cache.counts):
            needed = self.cache.most_held(group, tokens - 1)
            if needed > pool.blocks:
                size = f"{len(request.prompt)} tokens and {request.new_tokens} new ones need {needed} cache blocks"
                raise BadInput(
                    f"request {request.number}: {size}; there are {pool.blocks}. Allow fewer new tokens or a larger cache"
                )

    def current_decodes(self) -> list[RequestPart]:
        """`decodes` without stale parts."""
        if self.stale:
            self.stale = False
            self.decodes = [part for part in self.decodes if part.progress.part is part]
        return self.decodes

    def next_head(self) -> RequestProgress | None:
        """The request at the head of the queue; None if it was refused and no block has been released since."""
        head = self.queue.head()
        refused = head is not None and head is self._refused and self._refused_releases == self._releases()
        return None if refused else head

    def _releases(self) -> int:
        return sum([pool.releases for pool in self.cache.counts])

    def admit_head(self, budget: int) -> bool:
        """Admit the request at the head of the queue if there are a slot and enough blocks. Returns whether it was admitted.

        Running requests of lower priority are preempted for it if necessary.
        """
        progress = self.queue.head()
        assert progress is not None
        if progress.generation != self.generation:
            progress.digests = []
            progress.tail = None
            progress.generation = self.generation
        digests = progress.digests
        if progress.request.computes_all:
            digests = []
        elif progress.shares:
            blocks = (len(progress.tokens) - 1) // self.cache.tokens_per_block
            self._extend_digests(progress, blocks)
            digests = digests[:blocks]
        matched = self.cache.matching(digests)
        while len(self.requests) >= self.limits.sequences or not self._fits(progress, digests, matched, budget):
            last = self._last() if self.requests else None
            if last is None or last.draining or not self._may_displace(progress, last):
                self._refused, self._refused_releases = progress, self._releases()
                return False
            self.detach(last)
            matched = self.cache.matching(digests)
        self.queue.pop()
        self.cache.share(progress.tables, digests, matched)
        progress.live = True
        progress.registered = matched
        progress.computed = progress.confirmed = matched * self.cache.tokens_per_block
        known = len(progress.tokens)
        prompt = len(progress.request.prompt)
        if known > prompt > progress.computed and self._claim_tail(progress, matched):
            progress.computed = progress.confirmed = prompt
        if progress.cached is None:
            progress.cached = min(progress.computed, prompt)
            self.cached_tokens += progress.cached
            self.looked_up_tokens += 0 if progress.request.computes_all else prompt
        self.requests[progress.request.number] = progress
        if known > prompt and progress.computed == known - 1:
            self._begin_cached(progress)
        else:
            insort(self.prefills, progress, key=lambda running: running.key)
        return True

    def _claim_tail(self, progress: RequestProgress, matched: int) -> bool:
        """Take the cached block with the prompt's last tokens, after `matched` full blocks, for this request alone: it will write to it."""
        request = progress.request
        if not progress.shares or request.computes_all or matched != len(request.prompt) // self.cache.tokens_per_block:
            return False
        return self.cache.claim(progress.tables, self._tail_digest(progress))

    def _tail_digest(self, progress: RequestProgress) -> bytes:
        """Digest of the prompt's last, partly filled block. The digests of the full blocks before it must be known."""
        if progress.tail is None:
            prompt = progress.request.prompt
            full = len(prompt) // self.cache.tokens_per_block
            parent = progress.digests[full - 1] if full else root_digest(progress.salt, progress.generation)
            progress.tail = block_digest(parent, prompt[full * self.cache.tokens_per_block :])
        return progress.tail

    def _begin_cached(self, progress: RequestProgress) -> None:
        """Let a request decode in the step that is being planned. All its known tokens except the newest are cached."""
        known = len(progress.tokens)
        self.cache.grow(progress.tables, known)
        progress.computed = progress.confirmed = known
        progress.part = RequestPart(progress, known - 1, 1, samples=True)
        self.set_limit(progress.part)
        self.decodes = [*self.current_decodes(), progress.part]

    @staticmethod
    def _may_displace(progress: RequestProgress, running: RequestProgress) -> bool:
        """Whether a waiting request may preempt a running one: it comes earlier in order and has a higher priority."""
        return running.key > progress.key and running.request.priority < progress.request.priority

    def _fits(self, progress: RequestProgress, digests: Sequence[bytes], matched: int, budget: int) -> bool:
        """Whether every group has free blocks for all known tokens of a request, after subtracting what running prefills still need."""
        tokens = len(progress.tokens)
        for group, pool in enumerate(self.cache.counts):
            matched_blocks = matched - self.cache.first_block(group, matched * self.cache.tokens_per_block)
            blocks = min(self.cache.most_held(group, tokens, min(budget, tokens)), pool.blocks) - matched_blocks
            owed = sum([self._owed(group, running, budget) for running in self.prefills])
            reserve = int(self.limits.reserve * pool.blocks) if self.requests else 0
            if pool.free - self.cache.idle_matches(group, digests, matched) < blocks + owed + reserve:
                return False
        return True

    def _owed(self, group: int, progress: RequestProgress, budget: int) -> int:
        """Blocks of a group that a running prefill still needs."""
        matched_blocks = len(progress.tables[group]) - self.cache.first_block(group, progress.confirmed)
        tokens = len(progress.tokens)
        return max(self.cache.most_held(group, tokens, min(budget, tokens)) - matched_blocks, 0)

    def begin_block(self, step: EngineStep, index: int, part: RequestPart, start: int) -> bool:
        """Take the block for position `start` of part `index`, preempting others if needed. False if the request itself was preempted."""
        progress = part.progress
        if self.cache.smallest_window is not None:
            self.leave_window(progress, start)
        while not self.cache.append(part.tables):
            last = self._last()
            self.detach(last)
            if last is progress:
                return False
        step.grown.append(index)
        return True

    def room_for_prefill(self, progress: RequestProgress) -> int:
        """Number of positions that the request's tables can cover. If not even one more can be covered, requests after it are preempted."""
        if self.cache.smallest_window is not None:
            self.leave_window(progress, progress.confirmed)
        while (room := self.cache.room(progress.tables)) <= progress.computed:
            last = self._last()
            if not last.draining and last.key <= progress.key:
                return progress.computed
            self.detach(last)
        return room

    def plan_chunk(self, progress: RequestProgress, budget: int, chunks: list[RequestPart]) -> int:
        """Plan the next tokens of a prompt. Returns their number; 0 if there are no blocks."""
        start = progress.computed
        known = len(progress.tokens)
        count = min(budget, known - start, self.room_for_prefill(progress) - start)
        if count > 0:
            progress.computed = start + count
            self.cache.grow(progress.tables, progress.computed)
            chunks.append(RequestPart(progress, start, count, samples=progress.computed == known))
        return count

    def begin_decode(self, progress: RequestProgress, step: EngineStep) -> list[RequestPart]:
        """A list with the decode part that follows the last chunk of a prompt; an empty list if the request ends there."""
        last = len(progress.tokens) - 1
        if last >= progress.final:
            step.final.append(progress)
            return []
        progress.part = RequestPart(progress, last, 1, samples=True)
        self.set_limit(progress.part)
        return [progress.part]

    def grow_ahead(self, step: EngineStep, most: int) -> tuple[int, list[int]]:
        """Take the blocks of `most` decode steps, in the same order as single steps would take them.

        Returns how many steps are possible, and the indices of the parts that needed a block or reached their last token.
        """
        reached = []
        for index, part in enumerate(step.parts):
            if part.limit < part.start + most:
                reached.append(index)
                most = min(most, part.progress.final - part.start + 1)
        if not self._grow_at_once(step, reached, most):
            most = self._grow_in_order(step, reached, most)
        more = most - 1
        unknown = bytes(more)
        for part in step.parts:
            part.start += more
            missing = part.start + 1 - len(part.tokens)
            part.tokens.extend(unknown if missing == more else unknown[:missing])
        for index in reached:
            self.set_limit(step.parts[index])
        return most, reached

    def _grow_at_once(self, step: EngineStep, reached: Sequence[int], most: int) -> bool:
        """Take all blocks of these parts in one call. Returns False, without changes, if the order matters or too few are free."""
        if not self.cache.alike:
            return False
        size = self.cache.tokens_per_block
        grown = []
        wanted = []
        for index in reached:
            part = step.parts[index]
            more = -(-(part.start + most) // size) - len(part.tables[0])
            if more > 0:
                grown.append(index)
                wanted.append((part.tables, more))
        if sum([more for _, more in wanted]) > min([pool.free for pool in self.cache.counts]):
            return False
        self.cache.append_all(wanted)
        step.grown.extend(grown)
        return True

    def _grow_in_order(self, step: EngineStep, reached: Sequence[int], most: int) -> int:
        """Take the blocks of these parts one by one, as single steps do. Returns the number of steps for which there are blocks."""
        size = self.cache.tokens_per_block
        events: dict[int, list[int]] = {}
        for index in reached:
            part = step.parts[index]
            for position in range(len(part.tables[0]) * size, part.start + most, size):
                events.setdefault(position - part.start, []).append(index)
        for offset in sorted(events):
            if min(pool.free for pool in self.cache.counts) < len(events[offset]):
                return offset
            for index in events[offset]:
                part = step.parts[index]
                part.tokens.extend(bytes(part.start + offset + 1 - len(part.tokens)))
                self.begin_block(step, index, part, part.start + offset)
        return most

    def set_limit(self, part: RequestPart) -> None:
        """Set the position at which a decode needs a new block, or reaches its last token."""
        covered = len(part.tables[0]) * self.cache.tokens_per_block
        final = part.progress.final
        part.limit = covered if covered < final else final

    def _last(self) -> RequestProgress:
        """The request to preempt. One whose last part is in flight is preferred, as it needs no blocks any more; else the last in order."""
        return max(self.requests.values(), key=lambda progress: (progress.draining, progress.key))

    def detach(self, progress: RequestProgress) -> None:
        """Preempt a request: it loses its blocks. When its tokens in flight are known, it is queued again, unless they are the last."""
        if progress.draining:
            progress.expected = progress.total
        else:
            # `start` has moved on already, to the position of a token that is known or in flight.
            progress.expected = progress.part.start + 1 if progress.part is not None else len(progress.tokens)
            self.preemptions += 1
        self.free(progress)
        progress.tables = [[] for _ in progress.tables]
        progress.computation += 1
        progress.computed = progress.confirmed = progress.registered = 0
        if len(progress.tokens) == progress.expected:
            self.queue.push(progress)

    def free(self, progress: RequestProgress) -> None:
        """Remove a request from the batch, register its full blocks in the prefix cache, and release them."""
        self.released += 1
        self.register(progress)
        self.cache.release(progress.tables)
        del self.requests[progress.request.number]
        if progress.part is not None:
            progress.part = None
            self.stale = True
        elif progress in self.prefills:
            self.prefills.remove(progress)
        progress.live = False

    def forget_blocks(self, progress: RequestProgress) -> None:
        """Remove the blocks of a request from the prefix cache, and register no more of its blocks."""
        progress.shares = False
        self.cache.remove(progress.tables, progress.digests)

    def drain(self, progress: RequestProgress) -> None:
        """Mark a request whose last part is planned."""
        progress.draining = True
        if progress.part is not None:
            progress.part = None
            self.stale = True

    def leave_window(self, progress: RequestProgress, position: int) -> None:
        """Release blocks to which no query from `position` on attends."""
        # Register only these blocks. If several requests have an equal block, which one is registered must not depend on how many steps are
        # planned in one call.
        self.register(progress, self.cache.blocks_outside(position))
        self.cache.leave_window(progress.tables, position)

    def register(self, progress: RequestProgress, blocks: int | None = None) -> None:
        """Enter the computed full blocks of a request into the prefix cache; with `blocks`, only the first `blocks` of them."""
        if not progress.shares or progress.generation != self.generation:
            return
        confirmed = progress.confirmed_positions()
        full = confirmed // self.cache.tokens_per_block
        if blocks is not None and blocks < full:
            full = blocks
        if full > progress.registered:
            if len(progress.digests) < full:
                self._extend_digests(progress, full)
            self.cache.register(progress.tables, progress.digests, progress.registered, full)
            progress.registered = full
        if progress.request.continued_elsewhere and confirmed == len(progress.request.prompt):
            self._register_tail(progress, full)

    def _register_tail(self, progress: RequestProgress, full: int) -> None:
        """Enter the last, partly filled block of a computed prompt, after its `full` full blocks, into the prefix cache."""
        size = self.cache.tokens_per_block
        prompt = progress.request.prompt
        if progress.registered == full == len(prompt) // size and len(prompt) > full * size:
            self._extend_digests(progress, full)
            digests = [*progress.digests[:full], self._tail_digest(progress)]
            self.cache.register(progress.tables, digests, full, full + 1)
            progress.registered = full + 1

    def _extend_digests(self, progress: RequestProgress, blocks: int) -> None:
        """Compute the missing digests of the first `blocks` full blocks."""
        if len(progress.digests) >= blocks:
            return
        root = root_digest(progress.salt, progress.generation)
        extend_digests(progress.digests, root, progress.tokens, blocks, self.cache.tokens_per_block)

    def forget_cache(self) -> None:
        """Empty the prefix cache. All requests lose their blocks and are computed again."""
        self.generation += 1
        self.cache.forget()
        for progress in list(self.requests.values()):
            if progress.part is not None:
                progress.part.start += 1  # as if a step were being planned, which `detach` expects
            self.detach(progress)
