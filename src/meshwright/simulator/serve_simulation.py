"""Discrete-event simulation of a serving deployment over the engine's own batching policy.

A router gives each request to an instance (`policies.request_routing`). An instance of role `both` computes it whole. One of role
`decode` reserves blocks for the prompt, in order of arrival, and has it computed by the prefill instance with the fewest
prompt tokens to compute; after each chunk the full blocks move to the decode instance, and with the last of them the first
token. Then the decode instance continues the text: it finds the blocks in its prefix cache and computes the tokens behind
them. What concerns an instance happens between its steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from meshwright.costs.serve_costs import TRANSFER_SECONDS, InstanceCosts, ServeCosts
from meshwright.policies.batch_request import Part, Request
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.policies.moving_blocks import ReservedBlocks, UnsentBlocks
from meshwright.policies.request_routing import RequestRouting
from meshwright.simulator.counted_blocks import CountedBlocks, CountedReservation, CountedUnsent
from meshwright.simulator.serve_instance import NEVER, Instance
from meshwright.simulator.serve_links import Port, transfer
from meshwright.simulator.serve_types import RequestTimes, ServedDeployment
from meshwright.spec.deployment import PREFIX_BLOCK, Deployment, InstanceSpec, ServeLimits, TimedRequest
from meshwright.spec.errors import BadInput


def simulate(
    deployment: Deployment,
    requests: Sequence[TimedRequest],
    costs: ServeCosts | Callable[[InstanceSpec], InstanceCosts],
    limits: ServeLimits,
    *,
    watched: bool = False,
) -> ServedDeployment:
    """Serve all requests, which are in order of arrival, and return their times. `costs` prices an instance; of
    a `watched` simulation the result has what each instance held over time.

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
    return _Simulation(deployment, requests, cost_of, limits, watched).run()


def can_count(requests: Sequence[TimedRequest], costs: InstanceCosts) -> bool:
    """Whether `CountedBlocks` can stand for the cache: prompts share nothing, and attention has no window."""
    return costs.window is None and not any(request.prefix_blocks for request in requests)


class _Prompt:
    """A request on its way: digests of its blocks, and the blocks that are reserved and held for it."""

    __slots__ = ("come", "digests", "front", "reserved", "times", "unsent")

    def __init__(self, times: RequestTimes, digests: Sequence[bytes], front: _Member) -> None:
        self.times, self.digests, self.front = times, digests, front
        self.reserved: ReservedBlocks | CountedReservation | None = None
        self.unsent: UnsentBlocks | CountedUnsent | None = None
        self.come = 0.0
        """When the last of the blocks that were sent has come."""


class _Member:
    """An instance with its ports, and the prompts of a decode instance that wait for blocks or are computed elsewhere."""

    def __init__(self, index: int, instance: Instance) -> None:
        self.index, self.instance = index, instance
        rate = instance.costs.port_bytes_per_s
        self.out, self.into = Port(rate), Port(rate)
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
    ) -> None:
        self._deployment, self._limits = deployment, limits
        self._times = [RequestTimes(request) for request in requests]
        self._routing: RequestRouting[Instance] = RequestRouting()
        self._counted = can_count(requests, cost_of(deployment.instances[0]))
        self._members: list[_Member] = []
        for spec in deployment.instances:
            for _ in range(spec.count):
                prices = cost_of(spec)
                cache = CountedBlocks(prices.blocks, prices.tokens_per_block) if self._counted else None
                instance = Instance(spec.role, prices, spec.token_budget, cache)
                instance.occupancy = [] if watched else None
                instance.after_chunk = partial(self._after_chunk, len(self._members))
                instance.after_end = partial(self._after_end, len(self._members))
                member = _Member(len(self._members), instance)
                instance.between_steps = partial(self._reserve, member)
                self._members.append(member)
        self._fronts = [index for index, member in enumerate(self._members) if member.instance.role != "prefill"]
        self._prefills = [index for index, member in enumerate(self._members) if member.instance.role == "prefill"]
        self._prompts: dict[int, _Prompt] = {}
        self._events: list[tuple[float, int, int, Callable[[float], None] | None]] = []
        """Time, 0 for what comes over a link and 1 for the end of a step, a number, and what happens."""
        self._count = 0
        self._bytes = 0.0
        self._digests_of: dict[tuple[int, int], list[bytes]] = {}
        """By prefix block, and the token in it at which its first cache block begins."""

    def run(self) -> ServedDeployment:
        arrivals, events, next_arrival = self._times, self._events, 0
        now = 0.0
        due = arrivals[0].request.arrival_seconds
        while True:
            if due < NEVER and (not events or due <= events[0][0]):
                now = due
                self._arrive(next_arrival, now)
                next_arrival += 1
                due = arrivals[next_arrival].request.arrival_seconds if next_arrival < len(arrivals) else NEVER
                continue
            if not events:
                break
            now, at_end, index, happen = heapq.heappop(events)
            if happen is not None:
                happen(now)
            elif at_end and self._members[index].instance.wake == now:
                self._members[index].instance.advance(now)
                self._schedule(index)
        return ServedDeployment(
            limits=self._limits,
            devices=self._deployment.devices,
            requests=self._times,
            instances=[member.instance.figures(now) for member in self._members],
            seconds=now,
            transferred_bytes=self._bytes,
            occupancy=[member.instance.occupancy for member in self._members if member.instance.occupancy is not None],
        )

    def _schedule(self, index: int) -> None:
        wake = self._members[index].instance.wake
        if wake < NEVER:
            heapq.heappush(self._events, (wake, 1, index, None))

    def _post(self, index: int, now: float, action: Callable[[float], None]) -> None:
        instance = self._members[index].instance
        before = instance.wake
        instance.post(now, action)
        if instance.wake != before:
            self._schedule(index)

    def _at(self, now: float, happen: Callable[[float], None]) -> None:
        """Let something happen later, before the steps that end at that time."""
        self._count += 1
        heapq.heappush(self._events, (now, 0, self._count, happen))

    def _arrive(self, number: int, now: float) -> None:
        """Route a request."""
        times = self._times[number]
        digests = self._digests(number, times.request)
        instances = [self._members[index].instance for index in self._fronts]
        prefixes = [times.request.prefix_blocks[: length + 1] for length in range(len(times.request.prefix_blocks))]
        index = self._fronts[instances.index(self._routing.choose(instances, prefixes, PREFIX_BLOCK))]
        front = self._members[index]
        self._prompts[number] = _Prompt(times, digests, front)
        front.instance.requests += 1
        here = front.instance.role == "both"
        self._post(index, now, partial(self._submit if here else self._begin_elsewhere, number))

    def _digests(self, number: int, request: TimedRequest) -> list[bytes]:
        """Digests of a prompt's full blocks: blocks with a prefix id are named by it, others by the request.

        With counted blocks one name stands for all blocks of the text.
        """
        size = self._members[0].instance.costs.tokens_per_block
        own = b"o" + number.to_bytes(8, "little")
        if self._counted:
            return [own] * ((request.input_tokens + request.output_tokens) // size)
        digests: list[bytes] = []
        for index, prefix in enumerate(request.prefix_blocks):
            digests += self._prefix_digests(prefix, -index * PREFIX_BLOCK % size, size)
        blocks = request.input_tokens // size
        digests += [own + block.to_bytes(4, "little") for block in range(len(digests), blocks)]
        return digests[:blocks]

    def _prefix_digests(self, prefix: int, first: int, size: int) -> list[bytes]:
        """Digests of the blocks that begin in a prefix block, of which the first begins at token `first` of it."""
        known = self._digests_of.get((prefix, first))
        if known is None:
            head, offsets = prefix.to_bytes(8, "little"), range(first, PREFIX_BLOCK, size)
            known = self._digests_of[prefix, first] = [head + offset.to_bytes(4, "little") for offset in offsets]
        return known

    def _submit(self, number: int, now: float) -> None:
        """Queue a request at its front instance: whole, or what follows its first token."""
        prompt = self._prompts[number]
        timed = prompt.times.request
        known = 0 if prompt.times.first_token > now else 1
        tokens, new_tokens = bytes(timed.input_tokens + known), timed.output_tokens - known
        # The salt tells apart texts that begin with less than a block.
        request = Request(number, tokens, new_tokens, arrival=timed.arrival_seconds, salt=str(number))
        prompt.front.instance.add(request, prompt.digests)

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
            blocks = self._reservation(policy.cache, prompt)
            if not len(blocks):  # a prompt shorter than a block, or one that is cached
                front.waiting.popleft()
                self._submit(number, now)
                continue
            busy = policy.unfinished + front.reservations
            if busy >= policy.limits.sequences or not blocks.fit(policy.limits.reserve if busy else 0):
                return
            front.waiting.popleft()
            blocks.take()
            front.reservations += 1
            prompt.reserved = blocks
            index = min(self._prefills, key=lambda index: self._members[index].instance.prompt_tokens)
            self._members[index].instance.requests += 1
            self._members[index].instance.prompt_tokens += prompt.times.request.input_tokens
            self._post(index, now, partial(self._prefill, index, number))

    def _prefill(self, index: int, number: int, now: float) -> None:
        """Queue a prompt at a prefill instance."""
        del now
        prompt, instance = self._prompts[number], self._members[index].instance
        assert prompt.reserved is not None
        timed = prompt.times.request
        instance.add(Request(number, bytes(timed.input_tokens), 1, arrival=timed.arrival_seconds), prompt.digests)
        cache, digests = instance.policy.cache, prompt.digests[: self._full_blocks(prompt)]
        first = prompt.reserved.first
        counted = isinstance(cache, CountedBlocks)
        prompt.unsent = CountedUnsent(cache, digests, first) if counted else UnsentBlocks(cache, digests, first)

    def _reservation(self, cache: CacheBlocks, prompt: _Prompt) -> ReservedBlocks | CountedReservation:
        digests = prompt.digests[: self._full_blocks(prompt)]
        return (
            CountedReservation(cache, digests) if isinstance(cache, CountedBlocks) else ReservedBlocks(cache, digests)
        )

    def _full_blocks(self, prompt: _Prompt) -> int:
        return prompt.times.request.input_tokens // prompt.front.instance.costs.tokens_per_block

    def _after_chunk(self, index: int, part: Part, now: float) -> None:
        """Note a first token, or send the blocks that a prefill instance has computed."""
        number, member = part.request.number, self._members[index]
        prompt = self._prompts[number]
        if member.instance.role == "prefill":
            self._send(member, prompt, part.samples, number, now)
            return
        if part.samples and prompt.times.first_token > now:
            prompt.times.first_token = now

    def _send(self, sender: _Member, prompt: _Prompt, last: bool, number: int, now: float) -> None:
        """Send the full blocks that are computed; `last` says whether the first token is known too."""
        unsent, front = prompt.unsent, prompt.front
        assert unsent is not None
        first = unsent.next + len(unsent)
        unsent.extend()
        count = unsent.next + len(unsent) - first
        if count:
            size = count * sender.instance.costs.block_bytes
            self._bytes += size
            prompt.come = transfer(sender.out, front.into, now, size, TRANSFER_SECONDS)
        if last:
            sender.instance.prompt_tokens -= prompt.times.request.input_tokens
        if count or last:
            self._at(max(now, prompt.come), partial(self._receive, number, first, count, last))

    def _receive(self, number: int, first: int, count: int, last: bool, now: float) -> None:
        """Release the sender's references on blocks that have come, and let the decode instance enter them."""
        prompt = self._prompts[number]
        assert prompt.unsent is not None
        if count:
            prompt.unsent.copied(count)
        self._post(prompt.front.index, now, partial(self._enter, number, first, first + count, last))

    def _enter(self, number: int, first: int, end: int, last: bool, now: float) -> None:
        """Put blocks that have come into the prefix cache; continue the text after the last of them."""
        reserved = self._prompts[number].reserved
        assert reserved is not None
        if end > first:
            for index in range(first, end) if isinstance(reserved, ReservedBlocks) else (end - 1,):
                reserved.enter(index)
        if last:
            self._continue(number, now)

    def _continue(self, number: int, now: float) -> None:
        """Continue a text after its first token, which has come with the last blocks."""
        prompt = self._prompts[number]
        front, instance = prompt.front, prompt.front.instance
        assert prompt.reserved is not None
        prompt.reserved.release()
        front.reservations -= 1
        prompt.times.first_token = now
        if prompt.times.request.output_tokens > 1:
            self._submit(number, now)
        else:
            instance.note_answer()
            self._end(number, now)

    def _after_end(self, index: int, number: int, now: float) -> None:
        if self._members[index].instance.role != "prefill":
            self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        self._prompts.pop(number).times.end = now
