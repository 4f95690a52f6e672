"""Random arrivals, aborts, failures, preemptions and new weights, against a model of what each cache slot holds."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.policies.batch_request import BatchLimits, CacheGroup, Request, RequestEnded
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from tests.policies.batching_model import STOP, VOCABULARY, CacheModel, Outcome, check_blocks, text_after

SEEDS = st.integers(0, 2**32)
LAYOUTS = ((None,), (None, 5), (3,), (None, 6, 11))
"""Windows of the cache groups."""


def make_policy(draw: random.Random) -> tuple[BatchPolicy[CacheBlocks], list[CacheGroup]]:
    size = draw.choice([1, 2, 4])
    blocks = draw.choice([14, 18, 24, 60]) * 4 // size
    groups = [CacheGroup(blocks + draw.randrange(3), window) for window in draw.choice(LAYOUTS)]
    sequences = draw.randint(1, 6)
    limits = BatchLimits(
        sequences + draw.randint(0, 12), sequences, prefix_cache=draw.random() < 0.7, priority_seconds=10.0
    )
    return BatchPolicy(limits, CacheBlocks(groups, size)), groups


def make_request(draw: random.Random, number: int, now: float, earlier: list[Request]) -> Request:
    if earlier and draw.random() < 0.25:
        other = draw.choice(earlier)
        return Request(
            number,
            other.prompt,
            draw.randint(1, 12),
            other.priority,
            arrival=now,
            samples_of=other.number,
            salt=draw.choice([other.salt, other.salt, "b"]),
        )
    # A small vocabulary and common beginnings make equal prefixes and equal whole texts likely.
    prompt = [1 + index % 3 for index in range(draw.choice([0, 8, 16]))]
    prompt += [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 12))]
    return Request(
        number,
        tuple(prompt),
        draw.randint(1, 20),
        priority=draw.choice([0, 0, 0, 1, 5, -3]),
        deadline=now + draw.randint(1, 60) if draw.random() < 0.1 else None,
        arrival=now - draw.choice([0, 0, 3]),
        salt=draw.choice(["", "", "a"]),
    )


class Session:
    """One random run: arrivals, aborts and new weights while steps are planned up to one ahead of the results."""

    def __init__(self, seed: int, drafts: bool) -> None:
        self.draw = random.Random(seed)
        self.policy, self.groups = make_policy(self.draw)
        self.model = CacheModel(self.policy, self.groups)
        self.ahead = not drafts and self.draw.random() < 0.7
        self.drafts = drafts
        self.in_flight: list[Outcome] = []
        self.requests: dict[int, Request] = {}
        self.ends: dict[int, RequestEnded] = {}
        self.now = 0.0
        self.steps = 0

    def add(self) -> None:
        request = make_request(self.draw, len(self.requests), self.now, list(self.requests.values()))
        self.requests[request.number] = request
        self.model.add(request)

    def advance(self) -> None:
        """Plan and compute a step if one may be planned, else complete the oldest in flight."""
        self.now += self.draw.choice([0.0, 0.5, 1.0])
        if len(self.in_flight) <= self.ahead and self._plan():
            return
        if self.in_flight:
            self._complete()

    def _plan(self) -> bool:
        first = self._first()
        computation = first and first.computation
        drafts = {number: self.draw.randint(0, 4) for number in self.requests} if self.drafts else None
        step = self.policy.next_step(self.now, drafts)
        if first and not first.ended and not first.draining:
            assert first.computation == computation, "the first request in order lost its blocks"
        self._note(self.policy.drain_ended())
        check_blocks(self.policy)
        if step is None:
            return False
        self.steps += 1
        self.in_flight.append(self.model.compute(step, self.draw.randint(0, 4), self.draw.random() < 0.02))
        return True

    def _first(self):
        return min(self.policy._progress.values(), key=lambda progress: progress.key, default=None)

    def _complete(self) -> None:
        outcome = self.in_flight.pop(0)
        if outcome.fails:
            self.policy.fail(outcome.step)
            self._note(self.policy.drain_ended())
            check_blocks(self.policy)
        else:
            self._note(self.model.complete(outcome))

    def _note(self, ends: list[RequestEnded]) -> None:
        for ended in ends:
            assert ended.number not in self.ends
            self.ends[ended.number] = ended
            assert ended.new_tokens <= self.requests[ended.number].new_tokens

    def finish(self) -> None:
        """Run until all requests have ended; a request advances in each step in which it is the first in order."""
        left = self.policy._progress.values()
        tokens = sum(progress.total for progress in left)
        bound = self.steps + 2 * tokens + 2 * len(left) + 4
        while self.policy.unfinished or self.in_flight:
            self.advance()
            assert self.steps <= bound, "a request starves"
        assert set(self.ends) == set(self.requests)
        assert all(pool.free == pool.blocks for pool in self.policy.cache.pools)
        check_blocks(self.policy)


def check_texts(session: Session) -> None:
    for number, ended in session.ends.items():
        request = session.requests[number]
        text = text_after(list(request.prompt), request.salt, request.new_tokens)
        new = session.model.texts[number][len(request.prompt) :][: ended.new_tokens]
        assert new == text[: ended.new_tokens]
        if ended.reason in ("length", "stop"):
            assert len(new) == len(text) and (ended.reason == "stop") == (text[-1] == STOP)


def play_session(seed: int, drafts: bool) -> Session:
    session = Session(seed, drafts)
    for _ in range(40):
        event = session.draw.random()
        if event < 0.2:
            session.add()
        elif event < 0.23 and session.requests:
            session.policy.abort(session.draw.choice(list(session.requests)))
            session._note(session.policy.drain_ended())
            check_blocks(session.policy)
        elif event < 0.25 and not (drafts and session.in_flight):
            session.policy.forget_cache()
            session.model.slots.clear()  # reads of these contents fail
            check_blocks(session.policy)
        else:
            session.advance()
    session.finish()
    check_texts(session)
    return session


@given(SEEDS)
@settings(max_examples=45, deadline=None)
def test_no_leak_no_wrong_sharing_no_starvation(seed: int) -> None:
    play_session(seed, drafts=False)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_draft_tokens_give_the_same_texts(seed: int) -> None:
    play_session(seed, drafts=True)


def snapshot(policy: BatchPolicy[CacheBlocks]) -> object:
    """All that decides what the policy does next."""
    pools = [
        (list(pool.references), list(pool._empty), list(pool._idle), dict(pool.block_of)) for pool in policy.cache.pools
    ]
    requests = {
        number: (
            list(progress.tokens),
            progress.tables,
            progress.live,
            progress.registered,
            progress.part and progress.part.start,
        )
        for number, progress in policy._progress.items()
    }
    return pools, requests, policy.preemptions, policy.cached_tokens


@given(SEEDS)
@settings(max_examples=45, deadline=None)
def test_a_repeated_step_equals_single_steps(seed: int) -> None:
    draw = random.Random(seed)
    state = draw.getstate()
    single, _ = make_policy(draw)
    draw.setstate(state)
    repeated, _ = make_policy(draw)
    requests: list[Request] = []
    while len(requests) < 8 or repeated.unfinished:
        if len(requests) < 8 and draw.random() < 0.4:
            request = make_request(draw, len(requests), 0.0, requests)
            requests.append(replace(request, new_tokens=request.new_tokens * 2 - 1, prompt=request.prompt[:8]))
            single.add(requests[-1])
            repeated.add(requests[-1])
        step = repeated.next_step(0.0)
        if step is None:
            assert single.next_step(0.0) is None
            continue
        repeat = repeated.extend(step, draw.choice([1, 3, 20]))
        tables = [[list(table) for table in part.tables] for part in step.parts]
        starts = [part.start for part in step.parts]
        repeated.complete(step, None)
        for _ in range(repeat):
            last = single.next_step(0.0)
            parts = last.parts
            last_tables = [[list(table) for table in part.tables] for part in parts]
            last_starts = [part.start for part in parts]
            single.complete(last, None)
        assert [part.request.number for part in step.parts] == [part.request.number for part in parts]
        assert (tables, starts) == (last_tables, last_starts)
        assert snapshot(single) == snapshot(repeated)
        assert single.drain_ended() == repeated.drain_ended()
    check_blocks(repeated)
