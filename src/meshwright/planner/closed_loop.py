"""Latencies of a deployment under a fixed number of users. A user sends the next request as soon as the last one has ended.

Published serving benchmarks load a server in this way.

- Instances that compute whole requests: the tokens of a request wait for the prompts of other requests. While a request gets its new
  tokens, every other running request computes one prompt.
- Prefill and decode instances: the slower of the two roles limits the rate. A decode instance has as many requests as arrive in the time
  that one request stays there (Little's law). No more requests arrive than prefill instances compute prompts.
- At the start, all users send their first prompts at the same time, so a prompt waits for half of the others on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.costs.serve_costs import InstanceCosts
from meshwright.planner.deployment_estimate import PromptChunk
from meshwright.spec.deployment import Deployment, InstanceSpec
from meshwright.spec.errors import BadInput

ROUNDS = 25
"""Number of iterations of the fixed-point calculation."""
REQUESTS_OF_A_USER = 10
"""Assumed requests of each user in a benchmark. So the wait of a user's first request counts 1/10 in the mean."""
BUSIEST = 0.95
"""Upper bound on the share of time with prompts in computation, in the formula for the wait of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of `users` users whose requests all have the same numbers of tokens."""

    users: int
    """Number of users, and so of requests at a time."""
    input_tokens: int
    output_tokens: int

    @property
    def positions(self) -> float:
        """How many positions a decode attends to, as the mean over the new tokens of a request."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Mean latencies under a load."""

    ttft_seconds: float
    """Time to the first token."""
    tpot_seconds: float
    """Time of a further token."""
    requests_per_s: float
    """Requests per second of the whole deployment."""


def loaded_latencies(deployment: Deployment, load: Load, cost_of: Callable[[InstanceSpec], InstanceCosts]) -> Latencies:
    """Return the latencies of a deployment under `load`. All instances of a role must be equal.

    `cost_of` gives the cost model of an instance. Raises BadInput if the deployment has several entries of one role, and OutOfResources
    if an instance does not fit its devices.
    """
    by_role = {entry.role: entry for entry in deployment.instances}
    if len(by_role) != len(deployment.instances):
        raise BadInput("instances: expected one entry of each role")
    if deployment.colocated:
        return _colocated(by_role["both"], load, cost_of(by_role["both"]))
    prefill = by_role["prefill"]
    decode = by_role["decode"]
    return _with_roles(prefill, decode, load, cost_of(prefill), cost_of(decode))


def _colocated(instance: InstanceSpec, load: Load, costs: InstanceCosts) -> Latencies:
    users = load.users / instance.count
    new_tokens = load.output_tokens
    running_limit = min(users, _most_running(load, costs))
    prompt = _prompt_seconds(instance, load, costs)
    first = _first_seconds(users, prompt, costs)
    running = running_limit
    wait = 0.0
    token = 0.0
    for _ in range(ROUNDS):
        step = _step_seconds(running, load, costs)
        token = step + running / costs.groups * prompt / new_tokens
        busy = min(BUSIEST, running / costs.groups * prompt / (new_tokens * token))
        wait = first + prompt * busy + step
        running = min(running_limit, users * new_tokens * token / (wait + new_tokens * token))
    return _latencies(load, max(wait, (users / running - 1) * new_tokens * token), token)


def _with_roles(
    prefill: InstanceSpec, decode: InstanceSpec, load: Load, prefill_costs: InstanceCosts, decode_costs: InstanceCosts
) -> Latencies:
    prompt = _prompt_seconds(prefill, load, prefill_costs)
    rate = prefill.count * prefill_costs.groups / prompt
    running_limit = running = min(load.users / decode.count, _most_running(load, decode_costs))
    for _ in range(ROUNDS):
        stay = load.output_tokens * _step_seconds(running, load, decode_costs)
        arriving = min(rate, load.users / (prefill_costs.request_seconds + prompt + stay)) * stay / decode.count
        running = (running + min(running_limit, max(1.0, arriving))) / 2
    step = _step_seconds(running, load, decode_costs)
    first = _first_seconds(load.users / prefill.count, prompt, prefill_costs) + step
    busiest = min(rate, running * decode.count / (load.output_tokens * step))
    return _latencies(load, max(first, load.users / busiest - load.output_tokens * step), step)


def busy_prefills(
    prefill: InstanceSpec, decode: InstanceSpec, load: Load, prefill_costs: InstanceCosts, decode_costs: InstanceCosts
) -> float:
    """Return how many prefill instances, busy all the time, compute the prompts for decode instances that never wait for a prompt."""
    running = min(load.users / decode.count, _most_running(load, decode_costs))
    requests_per_s = decode.count * running / (load.output_tokens * _step_seconds(running, load, decode_costs))
    return requests_per_s * _prompt_seconds(prefill, load, prefill_costs) / prefill_costs.groups


def _most_running(load: Load, costs: InstanceCosts) -> float:
    """Return how many requests an instance can run at a time: limited by its setting and by its cache, for requests of mean size."""
    fitting = (costs.blocks - 1) * costs.tokens_per_block / load.positions
    return max(1.0, min(costs.sequences, fitting))


def _first_seconds(users: float, prompt: float, costs: InstanceCosts) -> float:
    """Return the mean seconds until a request's first token, without waits in later rounds.

    The first request of each user waits for half of the other users' first prompts. This wait is spread over `REQUESTS_OF_A_USER` requests.
    """
    others = max(0.0, users / costs.groups - 1)
    return costs.request_seconds + prompt + others * prompt / (2 * REQUESTS_OF_A_USER)


def _latencies(load: Load, ttft: float, tpot: float) -> Latencies:
    """Return `ttft` and `tpot`, with the requests per second that follow if each user sends one request after another.

    8 users with 100 new tokens each: a request takes 0.5 + 100 · 0.02 = 2.5 seconds, so 8 / 2.5 requests end per second:

    >>> _latencies(Load(users=8, input_tokens=1000, output_tokens=100), ttft=0.5, tpot=0.02).requests_per_s
    3.2
    """
    rate = load.users / (ttft + load.output_tokens * tpot)
    return Latencies(ttft_seconds=ttft, tpot_seconds=tpot, requests_per_s=rate)


def _step_seconds(running: float, load: Load, costs: InstanceCosts) -> float:
    """Return the seconds of a step with `running` decodes."""
    decodes = max(1, round(running))
    fixed, each, of_longest = costs.times.decode_line(decodes)
    return fixed + each * decodes * load.positions + of_longest * (load.input_tokens + load.output_tokens)


def _prompt_seconds(instance: InstanceSpec, load: Load, costs: InstanceCosts) -> float:
    """Return the seconds of all steps of a prompt, if each expert group of the instance computes such a prompt at the same time."""
    budget = instance.token_budget
    total = load.input_tokens
    chunks = [PromptChunk(start, min(budget, total - start)) for start in range(0, total, budget)]
    return sum(costs.times.seconds(0, 0, [chunk] * costs.groups) for chunk in chunks)
