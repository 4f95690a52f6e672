"""Latencies of a deployment under a fixed number of users, each of which sends its next request when the last one ends.

That is how published serving benchmarks load a server. Where instances compute whole requests, a request's tokens wait for the prompts
of others: in the time of its new tokens each other running request computes one prompt. Instances with roles are bound by the slower of
both: decodes hold as many requests as arrive in the time that a request stays (Little's law), and no more arrive than prompts are
computed. The first prompts of all users come together, and each has waited for half of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.costs.serve_costs import InstanceCosts
from meshwright.planner.deployment_estimate import PromptChunk
from meshwright.spec.deployment import Deployment, InstanceSpec
from meshwright.spec.errors import BadInput

ROUNDS = 25
"""Rounds of the fixed point."""
REQUESTS_OF_A_USER = 10
"""Requests of a user in a benchmark: its first one is so large a share of the mean wait."""
BUSIEST = 0.95
"""Share of the time in which prompts are computed at most, for the wait of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Equal requests of so many users."""

    users: int
    """Requests at a time."""
    input_tokens: int
    output_tokens: int

    @property
    def positions(self) -> float:
        """Positions that a decode attends to, mean over the new tokens."""
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
    """The latencies of a deployment of equal instances, or of equal prefill and equal decode instances.

    Raises BadInput for more entries of a role, OutOfResources if an instance does not fit its devices.
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
    most = min(users, _most_running(load, costs))
    prompt = _prompt_seconds(instance, load, costs)
    first = _first_seconds(users, prompt, costs)
    running = most
    wait = 0.0
    token = 0.0
    for _ in range(ROUNDS):
        step = _step_seconds(running, load, costs)
        token = step + running / costs.groups * prompt / new_tokens
        busy = min(BUSIEST, running / costs.groups * prompt / (new_tokens * token))
        wait = first + prompt * busy + step
        running = min(most, users * new_tokens * token / (wait + new_tokens * token))
    return _latencies(load, max(wait, (users / running - 1) * new_tokens * token), token)


def _with_roles(
    prefill: InstanceSpec, decode: InstanceSpec, load: Load, prefill_costs: InstanceCosts, decode_costs: InstanceCosts
) -> Latencies:
    prompt = _prompt_seconds(prefill, load, prefill_costs)
    rate = prefill.count * prefill_costs.groups / prompt
    most = running = min(load.users / decode.count, _most_running(load, decode_costs))
    for _ in range(ROUNDS):
        stay = load.output_tokens * _step_seconds(running, load, decode_costs)
        arriving = min(rate, load.users / (prefill_costs.request_seconds + prompt + stay)) * stay / decode.count
        running = (running + min(most, max(1.0, arriving))) / 2
    step = _step_seconds(running, load, decode_costs)
    first = _first_seconds(load.users / prefill.count, prompt, prefill_costs) + step
    busiest = min(rate, running * decode.count / (load.output_tokens * step))
    return _latencies(load, max(first, load.users / busiest - load.output_tokens * step), step)


def busy_prefills(
    prefill: InstanceSpec, decode: InstanceSpec, load: Load, prefill_costs: InstanceCosts, decode_costs: InstanceCosts
) -> float:
    """Prefill instances that are always busy with the prompts of decode instances which never wait for one."""
    running = min(load.users / decode.count, _most_running(load, decode_costs))
    requests_per_s = decode.count * running / (load.output_tokens * _step_seconds(running, load, decode_costs))
    return requests_per_s * _prompt_seconds(prefill, load, prefill_costs) / prefill_costs.groups


def _most_running(load: Load, costs: InstanceCosts) -> float:
    """Requests of which the cache holds the positions, by their mean size, if it has room for all that may run."""
    fitting = (costs.blocks - 1) * costs.tokens_per_block / load.positions
    return max(1.0, min(costs.sequences, fitting))


def _first_seconds(users: float, prompt: float, costs: InstanceCosts) -> float:
    """Seconds to a first token with the wait for the first prompts of the other users, without a queue later."""
    others = max(0.0, users / costs.groups - 1)
    return costs.request_seconds + prompt + others * prompt / (2 * REQUESTS_OF_A_USER)


def _latencies(load: Load, ttft: float, tpot: float) -> Latencies:
    """The latencies, and the requests a second of users who each send one request after another.

    8 users with 100 new tokens each: one answer takes 0.5 + 100 · 0.02 = 2.5 seconds.

    >>> _latencies(Load(users=8, input_tokens=1000, output_tokens=100), ttft=0.5, tpot=0.02).requests_per_s
    3.2
    """
    rate = load.users / (ttft + load.output_tokens * tpot)
    return Latencies(ttft_seconds=ttft, tpot_seconds=tpot, requests_per_s=rate)


def _step_seconds(running: float, load: Load, costs: InstanceCosts) -> float:
    """Seconds of a step of so many decodes."""
    decodes = max(1, round(running))
    fixed, each, of_longest = costs.times.decode_line(decodes)
    return fixed + each * decodes * load.positions + of_longest * (load.input_tokens + load.output_tokens)


def _prompt_seconds(instance: InstanceSpec, load: Load, costs: InstanceCosts) -> float:
    """Seconds of the steps of a prompt, while each other group of experts computes one too."""
    budget = instance.token_budget
    total = load.input_tokens
    chunks = [PromptChunk(start, min(budget, total - start)) for start in range(0, total, budget)]
    return sum(costs.times.seconds(0, 0, [chunk] * costs.groups) for chunk in chunks)
