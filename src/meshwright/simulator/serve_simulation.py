"""Discrete-event simulation of a serving deployment over the engine's own batching policy.

A router sends each request to an instance (`policies.request_routing`), called the request's *front* here.

- An instance of role `both` computes the whole request.
- An instance of role `decode` reserves cache blocks for the prompt, in the order in which requests arrive. Then it asks the
  prefill instance that has the fewest prompt tokens left to compute. After each prompt chunk, the prefill instance sends the full
  blocks to the decode instance. The last block, which may be partly filled, arrives together with the first token. Then the
  decode instance computes the other tokens, and finds the prompt's blocks in its own prefix cache.

Whatever happens at an instance from outside happens between two of its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from meshwright.costs.serve_costs import TRANSFER_SECONDS, InstanceCosts, ServeCosts
from meshwright.policies.batch_request import CacheGroup, Request, RequestPart
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.policies.moving_blocks import ReservedBlocks, UnsentBlocks
from meshwright.policies.request_routing import RequestRouting
from meshwright.simulator.counted_blocks import CountedBlocks, CountedReservation, CountedUnsent, SimulatedBlocks
from meshwright.simulator.serve_instance import NEVER, SimulatedInstance
from meshwright.simulator.serve_links import Port, transfer
from meshwright.simulator.serve_types import RequestTimes, ServedDeployment, counted_requests, spare_misses
from meshwright.simulator.text_pieces import Text, TextPieces, block_digests
from meshwright.spec.deployment import PREFIX_BLOCK, Deployment, InstanceSpec, ServeLimits, TimedRequest
from meshwright.spec.errors import BadInput


def simulate(
    deployment: Deployment,
    requests: Sequence[TimedRequest],
    costs: ServeCosts | Callable[[InstanceSpec], InstanceCosts],
    limits: ServeLimits,
    *,
    watched: bool = False,
    sought: float = 0.0,
) -> ServedDeployment:
    """Simulate `deployment` serving `requests`, which are in order of arrival, and return the times of each request.

    `costs` gives the cost model of each instance. With `watched`, the result has each instance's batch and cache use over time.

    With `sought` > 0, the simulation stops as soon as the attainment must be below `sought`. Requests that have not ended by then count
    as within the limits, so the attainment of the result is an upper bound of the true one, and still below `sought`.

    Equal arguments give equal results. Raises BadInput if there are no requests, if an instance's cache cannot hold a request, and
    if instances of role `both` are mixed with other roles; OutOfResources if an instance does not fit its devices.
    """
    if not requests:
        raise BadInput("requests: expected at least one")
    roles = {instance.role for instance in deployment.instances}
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise BadInput(
            f"roles: expected instances of role both, or of prefill and decode; got {', '.join(sorted(roles))}"
        )
    cost_of = costs.of if isinstance(costs, ServeCosts) else costs
    return _Simulation(deployment, requests, cost_of, limits, watched, sought).run()


def can_count(costs: InstanceCosts) -> bool:
    """Whether the faster `CountedBlocks` can replace the engine's cache: only if no attention layer has a window."""
    return costs.window is None


class _Prompt:
    """A request that has not ended: its front instance, the digests of its blocks, and the blocks that are reserved or held for it.

    `digests`: of the full blocks of prompt and answer. `tail`: of the block that the prompt fills in part.
    `reserved`: the prompt's blocks at the decode instance. `unsent`: computed blocks at the prefill instance that are not copied yet.
    """

    __slots__ = ("come", "digests", "front", "full_digests", "moved_digests", "reserved", "tail", "times", "unsent")

    def __init__(self, times: RequestTimes, digests: Sequence[bytes], tail: bytes, front: _Member) -> None:
        self.times = times
        self.digests = digests
        self.tail = tail
        self.front = front
        full, behind = divmod(times.request.input_tokens, front.instance.costs.tokens_per_block)
        self.full_digests = digests[:full]
        """Digests of the prompt's full blocks."""
        self.moved_digests = [*self.full_digests, tail] if behind else self.full_digests
        """Digests of all blocks of the prompt, with a partly filled last block: the blocks that a prefill instance sends."""
        self.reserved: ReservedBlocks | CountedReservation | None = None
        self.unsent: UnsentBlocks | CountedUnsent | None = None
        self.come = 0.0
        """Time when all blocks that were sent so far have arrived."""


class _Member:
    """An instance with its network ports. For a decode instance also:

    `waiting`: numbers of the requests that wait for a reservation of blocks. `reservations`: how many requests have reserved blocks
    here while a prefill instance computes their prompts.
    """

    def __init__(self, index: int, instance: SimulatedInstance) -> None:
        self.index = index
        self.instance = instance
        rate = instance.costs.port_bytes_per_s
        self.out = Port(rate)
        self.into = Port(rate)
        self.waiting: deque[int] = deque()
        self.reservations = 0


class _Simulation:
    def __init__(
        self,
        deployment: Deployment,
        requests: Sequence[TimedRequest],
        cost_of: Callable[[InstanceSpec], InstanceCosts],
        limits: ServeLimits,
        watched: bool,
        sought: float,
    ) -> None:
        self._deployment = deployment
        self._limits = limits
        self._spare = spare_misses(len(requests), sought)
        """How many more of the counted requests may miss a limit; below 0 the sought attainment cannot be reached any more."""
        self._counted_requests = counted_requests(len(requests))
        self._times = [RequestTimes(request) for request in requests]
        self._routing: RequestRouting[SimulatedInstance] = RequestRouting()
        prices = cost_of(deployment.instances[0])
        self._counted = can_count(prices)
        self._size = prices.tokens_per_block
        self._request_seconds = prices.request_seconds
        """Seconds from a request's arrival at the server until it arrives at the engine."""
        self._pieces = TextPieces(requests, self._size)
        self._texts: dict[bytes, Text] = {}
        """For `CountedBlocks`: the pieces of the sequences of unfinished requests, by name."""
        self._members: list[_Member] = []
        for spec in deployment.instances:
            for _ in range(spec.count):
                prices = cost_of(spec)
                instance = SimulatedInstance(spec.role, prices, spec.token_budget, self._cache(prices))
                instance.occupancy = [] if watched else None
                member = _Member(len(self._members), instance)
                if spec.role == "prefill":
                    instance.after_chunk = partial(self._send, member)
                else:
                    instance.after_chunk = self._note_first_token
                    instance.after_end = self._end
                if spec.role == "decode":
                    instance.between_steps = partial(self._reserve, member)
                self._members.append(member)
        self._front_of = {member.instance: member for member in self._members if member.instance.role != "prefill"}
        self._fronts = list(self._front_of)
        self._prefills = [member for member in self._members if member.instance.role == "prefill"]
        self._prompts: dict[int, _Prompt] = {}
        self._events: list[tuple[float, int, int, Callable[[float], None] | None]] = []
        """A heap of events, as (time, kind, number, function).

        kind 0: blocks have arrived; `number` counts these events, and `function` handles the event.
        kind 1: an instance's next event; `number` is the instance's index, and `function` is None.
        """
        self._count = 0
        self._bytes = 0.0

    def run(self) -> ServedDeployment:
        arrivals = self._times
        events = self._events
        next_arrival = 0
        instances = [member.instance for member in self._members]
        now = 0.0
        due = arrivals[0].request.arrival_seconds + self._request_seconds
        while True:
            if due < NEVER and (not events or due <= events[0][0]):
                now = due
                self._arrive(next_arrival, now)
                next_arrival += 1
                due = NEVER
                if next_arrival < len(arrivals):
                    due = arrivals[next_arrival].request.arrival_seconds + self._request_seconds
                continue
            if not events or self._spare < 0:
                break
            now, _, index, happen = heappop(events)
            if happen is not None:
                happen(now)
            elif (instance := instances[index]).wake == now:
                instance.advance(now)
                if instance.wake < NEVER:
                    heappush(events, (instance.wake, 1, index, None))
        if cut := self._spare < 0:
            self._close_open_requests()
        return ServedDeployment(
            limits=self._limits,
            devices=self._deployment.devices,
            requests=self._times,
            instances=() if cut else [member.instance.figures(now) for member in self._members],
            seconds=now,
            transferred_bytes=self._bytes,
            occupancy=[member.instance.occupancy for member in self._members if member.instance.occupancy is not None],
            cut=cut,
        )

    def _close_open_requests(self) -> None:
        """Give requests that have not ended times within the limits."""
        for times in self._times:
            if times.first_token == NEVER:
                times.first_token = times.request.arrival_seconds
            if times.end == NEVER:
                times.end = times.first_token

    def _cache(self, prices: InstanceCosts) -> SimulatedBlocks:
        if self._counted:
            return CountedBlocks(prices.blocks, prices.tokens_per_block, self._texts)
        cache = CacheBlocks([CacheGroup(prices.blocks, prices.window)], prices.tokens_per_block)
        cache.alike = prices.window is None  # which request takes which block changes no time
        return cache

    def _post(self, member: _Member, now: float, action: Callable[[float], None]) -> None:
        before = member.instance.wake
        member.instance.post(now, action)
        self._note_wake(member, before)

    def _note_wake(self, member: _Member, before: float) -> None:
        """Schedule the next event of an instance if its time is not the earlier one, `before`."""
        wake = member.instance.wake
        if wake != before:
            heappush(self._events, (wake, 1, member.index, None))

    def _at(self, now: float, happen: Callable[[float], None]) -> None:
        """Schedule the call of `happen` at time `now`, before the steps that end at the same time."""
        self._count += 1
        heappush(self._events, (now, 0, self._count, happen))

    def _arrive(self, number: int, now: float) -> None:
        """Choose the front instance of request `number`, which has arrived at the engines, and hand it over."""
        times = self._times[number]
        text, prompt = self._pieces.texts(number)
        if self._counted:
            name = b"text%d" % number
            end = b"prompt%d" % number
            self._texts[name] = text
            self._texts[end] = prompt
            digests = [name] * text[-1][2]
        else:
            digests, (end,) = block_digests(text), block_digests(prompt[-1:])
        front = self._front_of[self._routing.choose(self._fronts, self._pieces.prefixes[number], PREFIX_BLOCK)]
        self._prompts[number] = _Prompt(times, digests, end, front)
        front.instance.requests += 1
        here = front.instance.role == "both"
        self._post(front, now, partial(self._submit if here else self._begin_elsewhere, number))

    def _submit(self, number: int, now: float) -> None:
        """Queue a request at its front instance. If its first token is known already, the instance continues after that token."""
        prompt = self._prompts[number]
        timed = prompt.times.request
        first = () if prompt.times.first_token > now else (0,)
        # All simulated tokens are 0. A sequence shorter than a block has no digests of its own, so only the salt makes it unique.
        request = Request(
            number,
            bytes(timed.input_tokens),
            timed.output_tokens,
            arrival=timed.arrival_seconds,
            salt=str(number),
            given=first,
        )
        prompt.front.instance.add(request, prompt.digests, prompt.tail)

    def _begin_elsewhere(self, number: int, now: float) -> None:
        front = self._prompts[number].front
        front.waiting.append(number)
        self._reserve(front, now)

    def _reserve(self, front: _Member, now: float) -> None:
        """Reserve blocks for waiting prompts, in order of arrival, and give each prompt to a prefill instance.

        Stop at the first prompt for which too few blocks are free, or if the instance has as many requests as it may have.
        """
        policy = front.instance.policy
        while front.waiting:
            number = front.waiting[0]
            prompt = self._prompts[number]
            if policy.cache.matching(prompt.full_digests) == len(prompt.full_digests):
                # The prompt is shorter than a block, or all of its full blocks are cached: this instance computes it.
                front.waiting.popleft()
                self._submit(number, now)
                continue
            blocks = self._reservation(policy.cache, prompt)
            busy = policy.unfinished + front.reservations
            if busy >= policy.limits.sequences or not blocks.fit(policy.limits.reserve if busy else 0):
                return
            front.waiting.popleft()
            blocks.take()
            front.reservations += 1
            prompt.reserved = blocks
            member = min(self._prefills, key=lambda member: member.instance.prompt_tokens)
            member.instance.requests += 1
            member.instance.prompt_tokens += prompt.times.request.input_tokens
            self._post(member, now, partial(self._prefill, member.instance, number))

    def _prefill(self, instance: SimulatedInstance, number: int, now: float) -> None:
        """Queue the prompt of request `number` at a prefill instance."""
        del now
        prompt = self._prompts[number]
        assert prompt.reserved is not None
        timed = prompt.times.request
        request = Request(number, bytes(timed.input_tokens), 1, arrival=timed.arrival_seconds, continued_elsewhere=True)
        instance.add(request, prompt.digests, prompt.tail)
        cache = instance.policy.cache
        digests = prompt.moved_digests
        first = prompt.reserved.first
        if isinstance(cache, CountedBlocks):
            prompt.unsent = CountedUnsent(cache, digests, first)
        else:
            prompt.unsent = UnsentBlocks(cache, digests, first)

    def _reservation(self, cache: SimulatedBlocks, prompt: _Prompt) -> ReservedBlocks | CountedReservation:
        digests = prompt.moved_digests
        if isinstance(cache, CountedBlocks):
            return CountedReservation(cache, digests)
        return ReservedBlocks(cache, digests, prompt.times.request.input_tokens)

    def _note_first_token(self, part: RequestPart, now: float) -> None:
        number = part.request.number
        if part.samples and self._times[number].first_token > now:
            self._begin_text(number, now)

    def _begin_text(self, number: int, now: float) -> None:
        """Record that the first token of request `number` has come, and whether it came too late."""
        times = self._times[number]
        times.first_token = now
        if times.ttft > self._limits.ttft_seconds and number in self._counted_requests:
            self._spare -= 1

    def _send(self, sender: _Member, part: RequestPart, now: float) -> None:
        """Send the blocks that a prefill instance has computed in a chunk. The last blocks of a prompt carry its first token."""
        number = part.request.number
        last = part.samples
        prompt = self._prompts[number]
        unsent = prompt.unsent
        front = prompt.front
        assert unsent is not None
        count = unsent.extend()
        if count:
            size = count * sender.instance.costs.block_bytes
            self._bytes += size
            prompt.come = transfer(sender.out, front.into, now, size, TRANSFER_SECONDS)
        if last:
            sender.instance.prompt_tokens -= prompt.times.request.input_tokens
        if count or last:
            self._at(max(now, prompt.come), partial(self._receive, sender, number, count, last))

    def _receive(self, sender: _Member, number: int, count: int, last: bool, now: float) -> None:
        """Handle the arrival of `count` blocks: the sender releases them, and the decode instance enters them into its prefix cache.

        If the sender was idle because its next prompt found no free blocks, it tries again now.
        """
        prompt = self._prompts[number]
        unsent = prompt.unsent
        assert unsent is not None
        first = unsent.next
        if count:
            sender.instance.note_usage(now)
            unsent.copied(count)
            if sender.instance.wake == NEVER and sender.instance.policy.unfinished:
                self._post(sender, now, lambda _: None)
        front = prompt.front
        instance = prompt.front.instance
        end = first + count
        cache = instance.policy.cache
        before = instance.wake
        # If none of the blocks is cached yet, entering them does not affect the requests that decode, so their run need not end.
        quiet = not last and not front.waiting and not cache.has_any(prompt.moved_digests, first, end)
        if quiet and instance.divide_run(now):
            self._enter(number, first, end, last, now)
            self._note_wake(front, before)
        else:
            self._post(front, now, partial(self._enter, number, first, end, last))

    def _enter(self, number: int, first: int, end: int, last: bool, now: float) -> None:
        """Put the received blocks `first` … `end - 1` of a prompt into the prefix cache. With its last blocks, continue the request."""
        reserved = self._prompts[number].reserved
        assert reserved is not None
        if end > first:
            reserved.enter(first, end - first)
        if last:
            self._continue(number, now)

    def _continue(self, number: int, now: float) -> None:
        """Continue a request at its decode instance. Its first token has come with the last blocks of its prompt."""
        prompt = self._prompts[number]
        front = prompt.front
        instance = prompt.front.instance
        assert prompt.reserved is not None
        prompt.reserved.release()
        front.reservations -= 1
        self._begin_text(number, now)
        if prompt.times.request.output_tokens > 1:
            self._submit(number, now)
        else:
            instance.note_answer()
            self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        prompt = self._prompts.pop(number)
        times = prompt.times
        limits = self._limits
        times.end = now
        missed = times.ttft <= limits.ttft_seconds and times.tpot > limits.tpot_seconds
        if missed and number in self._counted_requests:
            self._spare -= 1
        for name in (*prompt.digests[:1], prompt.tail):
            self._texts.pop(name, None)
