"""Estimates the goodput of a deployment in about a millisecond; the estimate decides which deployments are simulated.

It is a mean-field estimate:

- All instances of a role get the same share of the requests.
- A prefill instance is a queue with one server (M/G/1), whose waiting time is exponential. Several prefill instances
  share one queue.
- The number B of concurrent decodes of an instance is the fixed point of Little's law: B = rate × new tokens × step
  time.
- An instance of role `both` also computes prompt chunks in its steps. The time per token of a request is the time of a
  decode step, plus the chunks that are computed during the request. Their number has a Poisson distribution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import erf, exp, sqrt
from typing import NamedTuple

from meshwright.costs.serve_costs import TRANSFER_SECONDS, InstanceCosts
from meshwright.costs.step_times import soft_maximum
from meshwright.spec.deployment import PREFIX_BLOCK, Deployment, InstanceSpec, ServeLimits, TimedRequest

SAMPLED = 24
"""Number of requests whose sizes represent all requests."""
ROUNDS = 25
"""Maximum number of iterations of the fixed point, and of the bisection over rates."""
LARGEST_RATE = 1e6
"""Requests per second at which the search for the highest rate ends."""


class PromptChunk(NamedTuple):
    """Consecutive tokens of a prompt that one step computes."""

    start: int
    """Number of the prompt's tokens before the chunk."""
    count: int
    """Number of tokens of the chunk."""


@dataclass(frozen=True)
class SizeSample:
    """Sizes of a few requests that represent all requests."""

    sizes: tuple[tuple[int, int, int], ...]
    """For each request (prompt tokens, tokens at the start of the prompt that an earlier prompt has too, new tokens).
    """

    @classmethod
    def of(cls, requests: Sequence[TimedRequest], seed: int = 0) -> SizeSample:
        """Return the sizes of `SAMPLED` of the requests. Prefixes are shared as by a cache of unlimited size."""
        shared = []
        seen = set()
        for request in requests:
            known = 0
            while known < len(request.prefix_blocks) and request.prefix_blocks[: known + 1] in seen:
                known += 1
            seen.update(request.prefix_blocks[: length + 1] for length in range(known, len(request.prefix_blocks)))
            shared.append(min(known * PREFIX_BLOCK, request.input_tokens - 1))
        order = sorted(range(len(requests)), key=lambda index: requests[index].input_tokens)
        count = min(SAMPLED, len(order))
        draw = random.Random(seed)
        # One request is drawn from each quantile of prompt lengths, so that the sample has both short and long
        # prompts.
        edges = [index * len(order) // count for index in range(count + 1)]
        chosen = [order[draw.randrange(low, high)] for low, high in pairwise(edges)]
        return cls(tuple((requests[i].input_tokens, shared[i], requests[i].output_tokens) for i in chosen))

    @property
    def new_tokens(self) -> float:
        """Return the mean number of new tokens of a request."""
        return sum(new for _, _, new in self.sizes) / len(self.sizes)

    @property
    def context(self) -> float:
        """Return how many positions a decode attends to, as a mean over all new tokens."""
        total = sum(new * (prompt + new / 2) for prompt, _, new in self.sizes)
        return total / sum(new for _, _, new in self.sizes)

    def longest(self, decodes: int) -> int:
        """Return the positions of the longest of `decodes` concurrent sequences: the quantile that one of them probably
        exceeds.
        """
        ascending = sorted((prompt + new // 2, new) for prompt, _, new in self.sizes)
        # A sequence with more new tokens runs longer, so it counts more. Skip the longest ones, by their new tokens.
        skipped_tokens = self.new_tokens * len(ascending) / (decodes + 1)
        while len(ascending) > 1 and skipped_tokens >= ascending[-1][1]:
            skipped_tokens -= ascending.pop()[1]
        return ascending[-1][0]


def estimate_goodput(
    deployment: Deployment, sample: SizeSample, cost_of: Callable[[InstanceSpec], InstanceCosts], limits: ServeLimits
) -> float:
    """Return the highest rate in requests per second at which the estimated attainment is at least `limits.attainment`.

    The result is 0 if there is none.

    `cost_of` returns the costs of an instance.
    """
    estimates = [_Instances(instance, sample, cost_of(instance), limits) for instance in deployment.instances]

    def meets(rate: float) -> bool:
        shares = [estimate.attainment(rate) for estimate in estimates]
        attainment = 1.0
        for share in shares:
            attainment *= share
        return attainment >= limits.attainment

    low = 0.0
    high = 1e-3
    if not meets(high):
        return 0.0
    while meets(high) and high < LARGEST_RATE:
        low = high
        high = 4 * high
    for _ in range(ROUNDS):
        if high < 1.02 * low:
            break
        middle = sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def alone_seconds(
    sample: SizeSample, costs: InstanceCosts, instance: InstanceSpec, attainment: float
) -> tuple[float, float]:
    """Return the latencies of a request that runs alone on an instance: (seconds to the first token, seconds per
    further token).

    The share `attainment` of the requests needs at most these seconds to the first token.
    """
    alone = _Instances(instance, sample, costs, ServeLimits(ttft_seconds=1.0, tpot_seconds=1.0))
    seconds = sorted(costs.request_seconds + prompt for prompt in alone.services(0))
    return seconds[min(len(seconds) - 1, int(attainment * len(seconds)))], alone.decode_seconds(1.0)


class _Instances:
    """Estimates the instances of one entry of a deployment."""

    def __init__(self, instance: InstanceSpec, sample: SizeSample, costs: InstanceCosts, limits: ServeLimits) -> None:
        self._instance = instance
        self._sample = sample
        self._costs = costs
        self._limits = limits
        block = costs.tokens_per_block
        if instance.role == "decode":
            self._chunks: list[list[PromptChunk]] = [[] for _ in sample.sizes]
        else:
            self._chunks = [_chunks(prompt, shared, instance.token_budget) for prompt, shared, _ in sample.sizes]
        self._services: dict[int, list[float]] = {}
        # The number of requests for which the cache has space. Their mean size is that in the middle of their
        # decoding.
        self._most_decodes = min(costs.sequences, (costs.blocks - 1) * block / max(block, sample.context))

    def attainment(self, rate: float) -> float:
        """Return the share of requests that meet the limits which depend on this role.

        `rate` is the rate of the whole deployment.
        """
        share = rate / self._instance.count
        if self._instance.role == "prefill":
            services = self.services(0)
            moved = [
                prompt * self._bytes_per_token() / self._costs.port_bytes_per_s for prompt, _, _ in self._sample.sizes
            ]
            delays = [
                TRANSFER_SECONDS + seconds / max(1, len(c)) for seconds, c in zip(moved, self._chunks, strict=True)
            ]
            return self._met_ttft(share, services, delays)
        services: list[float] = []
        step = 0.0

        def decodes_for(batch: float) -> float:
            nonlocal services, step
            services = self.services(round(batch))
            busy = share * _mean(services)
            if busy >= 1:
                return float("inf")
            steps = share * _mean([len(chunks) for chunks in self._chunks]) + (1 - busy) / self.decode_seconds(batch)
            step = 1 / steps
            return share * self._sample.new_tokens * step

        batch = self._batch(decodes_for)
        if batch is None:
            return 0.0
        met = self._met_tpot(share, batch, services, step)
        return met if self._instance.role == "decode" else met * self._met_ttft(share, services, [0.0] * len(services))

    def _met_tpot(self, share: float, batch: float, services: Sequence[float], step: float) -> float:
        """Return the share of requests whose time per token is within the limit, including the prompt chunks between
        their tokens.

        `share` is the rate of one instance, `batch` its number of decodes, `services` the seconds of each sampled
        prompt, and `step` the mean seconds of a step.
        """
        # The number of decodes varies, and more requests run while it is large.
        crowded = min(self._most_decodes, batch + 0.5 * sqrt(batch))
        decode = self.decode_seconds(batch)
        limit = self._limits.tpot_seconds
        if self._longest_step(batch) <= limit:
            return 1.0
        # The step would have the decodes anyway, so a chunk adds only the rest of the step's seconds.
        added = [seconds - len(chunks) * decode for seconds, chunks in zip(services, self._chunks, strict=True)]
        mean = _mean(added)
        square = _mean([seconds * seconds for seconds in added])
        met = 0.0
        # The second token of a request that comes from a prefill instance waits for the running step, and for the
        # step planned after it.
        own = 1.5 * decode if self._instance.role == "decode" else 0.0
        for _, _, new in self._sample.sizes:
            if new < 2:
                met += 1.0
                continue
            prompts = share * new * step
            spare = new * (limit - self.decode_seconds(crowded)) - own
            if spare < 0:
                continue
            deviation = sqrt(max(prompts * square, 1e-18))
            met += max(exp(-prompts), 0.5 * (1 + erf((spare - prompts * mean) / (deviation * sqrt(2)))))
        return met / len(self._sample.sizes)

    def _met_ttft(self, share: float, services: Sequence[float], delays: Sequence[float]) -> float:
        """Return the share of requests whose waiting time and prompt are within the limit, for `count` servers with one
        queue.

        `services` has the seconds of each sampled prompt, `delays` the seconds after it until the first token can be
        sent.
        """
        mean = _mean(services)
        square = _mean([seconds * seconds for seconds in services])
        count = self._instance.count
        busy = share * mean
        if busy >= 1:
            return 0.0
        waiting = busy ** (sqrt(2 * (count + 1)) - 1)  # the probability that a request waits (Sakasegawa 1977)
        decay = 2 * count * (1 - busy) * mean / square
        met = 0.0
        for seconds, delay in zip(services, delays, strict=True):
            spare = self._limits.ttft_seconds - self._costs.request_seconds - seconds - delay
            met += 1 - waiting * exp(-min(700.0, spare * decay)) if spare >= 0 else 0.0
        return met / len(services)

    def _batch(self, following: Callable[[float], float]) -> float | None:
        """Return the fixed point of the number of decodes; None if the cache has no space for them.

        `following` returns the number of decodes that a given number of decodes leads to.
        """
        batch = 1e-6
        for _ in range(ROUNDS):
            after = following(batch)
            if after > self._most_decodes:
                return None
            if abs(after - batch) <= 1e-3 * after + 1e-9:
                return after
            batch = after
        return batch

    def decode_seconds(self, batch: float) -> float:
        """Return the seconds of a step with `batch` decodes."""
        decodes = max(1, round(batch))
        fixed, each, of_longest = self._costs.times.decode_line(decodes)
        return fixed + each * decodes * self._sample.context + of_longest * self._sample.longest(decodes)

    def services(self, decodes: int) -> list[float]:
        """Return the seconds of the steps that compute each sampled prompt, if each step also has `decodes` decodes."""
        if decodes not in self._services:
            positions = round(decodes * self._sample.context)
            self._services[decodes] = [
                sum(self._chunk_seconds(decodes, positions, chunk) for chunk in chunks) for chunks in self._chunks
            ]
        return self._services[decodes]

    def _longest_step(self, batch: float) -> float:
        if self._instance.role == "decode":
            return self.decode_seconds(batch)
        longest = max(
            (chunk for chunks in self._chunks for chunk in chunks), key=lambda chunk: (chunk.count, chunk.start)
        )
        decodes = round(batch)
        return self._chunk_seconds(decodes, round(decodes * self._sample.context), longest)

    def _chunk_seconds(self, decodes: int, positions: int, chunk: PromptChunk) -> float:
        """Return the seconds of a step with a chunk.

        With overlap, the host launches this step while the device computes the step before it, if there are decodes.
        """
        times = self._costs.times
        if not (self._costs.overlap and decodes):
            return times.seconds(decodes, positions, [chunk])
        exposed = max(0.0, times.launch_seconds(decodes, [chunk]) - self.decode_seconds(decodes))
        return soft_maximum(times.device_seconds(decodes, positions, [chunk]), exposed)

    def _bytes_per_token(self) -> float:
        return self._costs.block_bytes / self._costs.tokens_per_block


def _chunks(prompt: int, shared: int, budget: int) -> list[PromptChunk]:
    """Return the chunks of a prompt whose first `shared` tokens are cached, for steps of at most `budget` tokens.

    A prompt of 1,200 tokens of which 128 are cached, in steps of 512 tokens:

    >>> _chunks(prompt=1200, shared=128, budget=512)
    [PromptChunk(start=128, count=512), PromptChunk(start=640, count=512), PromptChunk(start=1152, count=48)]
    """
    return [PromptChunk(start, min(budget, prompt - start)) for start in range(shared, prompt, budget)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
