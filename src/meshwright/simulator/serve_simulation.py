"""Discrete-event simulation of a serving deployment over the engine's own batching policy.

A router gives each request to an instance (`policies.request_routing`). An instance of role `both` computes it whole. One of role
`decode` reserves blocks for the prompt, in order of arrival, and has it computed by the prefill instance with the fewest
prompt tokens to compute; after each chunk the full blocks move to the decode instance, and with the last block, which need not
be full, the first token. Then the decode instance continues the text: it finds the blocks in its prefix cache. All
actions at an instance run between its steps.
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
    """Serve all requests, which are in order of arrival, and return their times. `costs` prices an instance; of
    a `watched` simulation the result has what each instance held over time.

    The simulation is cut as soon as the attainment is certainly below `sought`. Requests whose times are then open count as good, so the
    attainment is an upper bound, below `sought`.

    Raises BadInput without requests, for a request that an instance's cache cannot hold, and for instances of role `both` beside others;
    OutOfResources if an instance does not fit its devices. The result depends on the arguments alone.
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
    """Whether `CountedBlocks` can stand for the cache: attention has no window."""
    return costs.window is None


class _Prompt:
    """A request on its way: digests of its blocks, and the blocks that are reserved and held for it."""

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
        """Digests of all blocks of the prompt."""
        self.reserved: ReservedBlocks | CountedReservation | None = None
        self.unsent: UnsentBlocks | CountedUnsent | None = None
        self.come = 0.0
        """Time when the last of the sent blocks has arrived."""


class _Member:
    """An instance with its ports, and the prompts of a decode instance that wait for blocks or are computed elsewhere."""

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
        """Requests that may still miss a limit, of those that attainment counts."""
        self._counted_requests = counted_requests(len(requests))
        self._times = [RequestTimes(request) for request in requests]
        self._routing: RequestRouting[SimulatedInstance] = RequestRouting()
        prices = cost_of(deployment.instances[0])
        self._counted = can_count(prices)
        self._size = prices.tokens_per_block
        self._request_seconds = prices.request_seconds
        """Seconds from a request's arrival at the server to that at its engine."""
        self._pieces = TextPieces(requests, self._size)
        self._texts: dict[bytes, Text] = {}
        """Counted sequences of unfinished requests, by name."""
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
        """Events: time, 0 for an arrival over a link and 1 for the end of a step, a number, and the event's function."""
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
        """Let requests whose times are open keep the limits."""
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
        """Schedule the next event of an instance, unless that is done."""
        wake = member.instance.wake
        if wake != before:
            heappush(self._events, (wake, 1, member.index, None))

    def _at(self, now: float, happen: Callable[[float], None]) -> None:
        """Schedule an event, before the steps that end at that time."""
        self._count += 1
        heappush(self._events, (now, 0, self._count, happen))

    def _arrive(self, number: int, now: float) -> None:
        """Route a request."""
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
        """Queue a request at its front instance: whole, or its continuation after the first token."""
        prompt = self._prompts[number]
        timed = prompt.times.request
        first = () if prompt.times.first_token > now else (0,)
        # The salt tells apart sequences that begin with less than a block.
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
        """Reserve blocks for waiting prompts in order, and have them computed by prefill instances."""
        policy = front.instance.policy
        while front.waiting:
            number = front.waiting[0]
            prompt = self._prompts[number]
            if policy.cache.matching(prompt.full_digests) == len(prompt.full_digests):
                # A prompt shorter than a block, or one of which all full blocks are cached.
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
        """Queue a prompt at a prefill instance."""
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
        """Note the first token of a request."""
        times = self._times[number]
        times.first_token = now
        if times.ttft > self._limits.ttft_seconds and number in self._counted_requests:
            self._spare -= 1

    def _send(self, sender: _Member, part: RequestPart, now: float) -> None:
        """Send the blocks that a prefill instance has computed, and with the last of them the first token."""
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
        """Release the sender's references on blocks that have come, and let the decode instance enter them.

        A sender whose next prompt found no free blocks goes on.
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
        # Blocks of which none is cached change nothing for requests that decode, in whatever step they are entered.
        quiet = not last and not front.waiting and not cache.has_any(prompt.moved_digests, first, end)
        if quiet and instance.divide_run(now):
            self._enter(number, first, end, last, now)
            self._note_wake(front, before)
        else:
            self._post(front, now, partial(self._enter, number, first, end, last))

    def _enter(self, number: int, first: int, end: int, last: bool, now: float) -> None:
        """Put received blocks into the prefix cache; continue the text after the last of them."""
        reserved = self._prompts[number].reserved
        assert reserved is not None
        if end > first:
            reserved.enter(first, end - first)
        if last:
            self._continue(number, now)

    def _continue(self, number: int, now: float) -> None:
        """Continue a text after its first token, which has come with the last blocks."""
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
