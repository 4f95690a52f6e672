"""The simulator of deployments, beside closed forms, single blocks and the engine itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from meshwright.costs.serve_costs import TRANSFER_SECONDS, InstanceCosts
from meshwright.costs.step_times import InstanceStepTimes, soft_maximum
from meshwright.policies.batch_request import BatchLimits, CacheGroup, EngineStep, Request
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.batching_player import play
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.serve.engine import Engine
from meshwright.serve.readback import LaunchedStep
from meshwright.simulator import serve_instance, serve_simulation
from meshwright.simulator.serve_instance import SimulatedInstance
from meshwright.simulator.serve_simulation import simulate
from meshwright.simulator.serve_types import Occupancy, ServedDeployment
from meshwright.spec.deployment import PREFIX_BLOCK, Deployment, InstanceSpec, Role, TimedRequest
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import BadInput
from tests.models.tiny import LLAMA, built
from tests.simulator.serve_cases import (
    BLOCK,
    BLOCK_BYTES,
    LIMITS,
    costs_of,
    prefix_requests,
    random_requests,
    simple_times,
)
from tests.slow import quick_first

COLOCATED = Deployment(instances=(InstanceSpec(token_budget=8),))
DIVIDED = Deployment(
    instances=(InstanceSpec(role="prefill", token_budget=8), InstanceSpec(role="decode", token_budget=8))
)


def test_a_lone_request_takes_its_chunks_and_decodes() -> None:
    served = simulate(COLOCATED, [TimedRequest(10.0, 18, 5)], costs_of(simple_times(0.5)), LIMITS)
    assert served.requests[0].ttft == pytest.approx(3 * 0.5)
    assert served.requests[0].tpot == pytest.approx(0.5)
    assert served.seconds == pytest.approx(10 + 7 * 0.5)
    assert (served.attainment, served.instances[0].cache_peak) == (0.0, pytest.approx(6 / 999))


def test_moved_blocks_add_the_time_of_the_last_transfer_alone() -> None:
    rate = 1000.0
    served = simulate(DIVIDED, [TimedRequest(0.0, 18, 5)], costs_of(simple_times(0.5), rate=rate), LIMITS)
    # Chunks of 8, 8 and 2 tokens fill 2, 2 and half a block; a step is longer than the transfer of two blocks.
    assert 2 * BLOCK_BYTES / rate + TRANSFER_SECONDS < 0.5
    assert served.requests[0].ttft == pytest.approx(3 * 0.5 + BLOCK_BYTES / rate + TRANSFER_SECONDS)
    # Four further tokens, all by decodes.
    assert served.requests[0].tpot == pytest.approx(0.5)
    assert served.transferred_bytes == 5 * BLOCK_BYTES
    slow = simulate(DIVIDED, [TimedRequest(0.0, 16, 5)], costs_of(simple_times(0.5), rate=100.0), LIMITS)
    # The port carries 2 blocks in 2 s; those of the second chunk wait for it.
    assert slow.requests[0].ttft == pytest.approx(0.5 + 2 * 2.0 + TRANSFER_SECONDS)


def test_one_new_token_ends_where_it_was_computed() -> None:
    served = simulate(DIVIDED, [TimedRequest(0.0, 8, 1)], costs_of(simple_times(0.5), rate=1e6), LIMITS)
    assert served.requests[0].end == served.requests[0].first_token
    assert served.requests[0].tpot == 0.0


@pytest.mark.parametrize("role", quick_first(1, ["both", "prefill"]))
def test_mean_wait_is_that_of_a_queue_with_one_server(role: str) -> None:
    draw, now, requests = random.Random(5), 0.0, []
    for _ in range(6000):
        now += draw.expovariate(1.0)
        requests.append(TimedRequest(now, 8, 1))
    load = 0.7
    deployment = COLOCATED if role == "both" else DIVIDED
    served = simulate(deployment, requests, costs_of(simple_times(load)), LIMITS)
    expected = load + load * load / (2 * (1 - load))  # M/D/1
    # With `both`, a request that comes while the instance is idle waits for nothing, as in the formula.
    assert served.ttft.mean() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("seed", quick_first(2, range(12)))
def test_one_instance_has_the_times_of_the_player(seed: int) -> None:
    requests = random_requests(60, seed, every=1.0)
    times = simple_times(0.2, token=0.01, position=0.001)
    served = simulate(COLOCATED, requests, costs_of(times, blocks=60), LIMITS)
    policy = BatchPolicy(BatchLimits(8, 8, prefix_cache=True), CacheBlocks([CacheGroup(60)], BLOCK))
    played = play(
        policy,
        [
            Request(
                number,
                [number * 100 + index for index in range(request.input_tokens)],
                request.output_tokens,
                arrival=request.arrival_seconds,
            )
            for number, request in enumerate(requests)
        ],
        times.seconds,
        longest_repeat=1,
    )
    assert policy.preemptions
    np.testing.assert_allclose([each.first_token for each in served.requests], [each.first_token for each in played])
    np.testing.assert_allclose([each.end for each in served.requests], [each.end for each in played])


@pytest.mark.parametrize("seed", quick_first(1, [*range(6), 7, 8]))
@pytest.mark.parametrize("deployment", [COLOCATED, DIVIDED])
@pytest.mark.parametrize("overlap", [False, True])
def test_counted_blocks_give_the_times_of_single_blocks(
    seed: int, deployment: Deployment, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(80, seed, every=1.0)
    costs = costs_of(simple_times(0.1, token=0.005, position=0.001), blocks=50, overlap=overlap)
    counted, single = _counted_and_single(deployment, requests, costs, monkeypatch)
    assert sum(figures.preemptions for figures in single.instances)
    assert counted == single


@pytest.mark.parametrize("seed", quick_first(2, range(40)))
@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_counted_blocks_of_shared_prefixes_give_the_times_of_single_blocks(
    seed: int, roles: Sequence[Role], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for the longest prompt and little more, blocks that prefix blocks do not always contain, and two instances of a role.
    size, count = (16, 1) if seed % 2 else (48, 2)
    deployment = Deployment(instances=tuple(InstanceSpec(role=role, count=count, token_budget=200) for role in roles))
    costs = costs_of(
        simple_times(0.1, token=0.005, position=0.001),
        blocks=2400 // size,
        overlap=seed % 3 == 0,
        size=size,
        rate=100.0 if seed % 5 == 0 else 1e4,
    )
    requests = prefix_requests(80, seed, every=2.0)
    counted, single = _counted_and_single(deployment, requests, costs, monkeypatch)
    assert counted == single
    assert all(times.end < float("inf") for times in counted.requests)


def _counted_and_single(
    deployment: Deployment,
    requests: Sequence[TimedRequest],
    costs: Callable[[InstanceSpec], InstanceCosts],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[ServedDeployment, ServedDeployment]:
    counted = simulate(deployment, requests, costs, LIMITS, watched=True)
    monkeypatch.setattr(serve_simulation, "can_count", lambda *_: False)
    return counted, simulate(deployment, requests, costs, LIMITS, watched=True)


@pytest.mark.parametrize("seed", quick_first(1, range(12)))
def test_blocks_that_come_during_a_run_change_no_times(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(80, seed, every=4.0, longest=300)
    times = simple_times(0.1, token=0.001, position=0.00013, longest=0.0002)
    costs = costs_of(times, blocks=4000, overlap=True, rate=1e4)
    divided: list[bool] = []
    divide = SimulatedInstance.divide_run

    def noted(instance: SimulatedInstance, now: float) -> bool:
        divided.append(divide(instance, now))
        return divided[-1]

    monkeypatch.setattr(SimulatedInstance, "divide_run", noted)
    served = simulate(DIVIDED, requests, costs, LIMITS)
    assert sum(divided) > 50
    monkeypatch.setattr(SimulatedInstance, "divide_run", lambda *_: False)
    assert simulate(DIVIDED, requests, costs, LIMITS).requests == served.requests


def test_an_instance_with_the_prefix_gets_the_request_and_computes_the_remainder() -> None:
    first = TimedRequest(0.0, PREFIX_BLOCK + 8, 2, (1,))
    requests = [first, first._replace(arrival_seconds=1.0), TimedRequest(1.0, 8, 300, (2,))]
    times, deployment = (
        simple_times(0.01, token=0.001),
        Deployment(instances=(InstanceSpec(count=2, token_budget=600),)),
    )
    served = simulate(deployment, requests, costs_of(times), LIMITS)
    assert served.requests[1].ttft == pytest.approx(0.01 + 0.001 * 8)
    assert [figures.cached_tokens for figures in served.instances] == [PREFIX_BLOCK, 0]
    assert served.requests[0].ttft == pytest.approx(0.01 + 0.001 * (PREFIX_BLOCK + 8))


def test_prefixes_are_not_moved_again() -> None:
    request = TimedRequest(0.0, PREFIX_BLOCK + 8, 4, (1,))
    served = simulate(DIVIDED, [request, request._replace(arrival_seconds=100.0)], costs_of(simple_times(0.01)), LIMITS)
    assert served.transferred_bytes == (PREFIX_BLOCK + 8 + 8) / BLOCK * BLOCK_BYTES


def test_attainment_is_joint_and_leaves_out_both_ends() -> None:
    requests = [TimedRequest(100.0 * index, 8 + 8 * (index % 2), 3) for index in range(40)]
    limits = LIMITS.__class__(ttft_seconds=0.7, tpot_seconds=0.6)
    served = simulate(COLOCATED, requests, costs_of(simple_times(0.5)), limits)
    assert served.attainment == 0.5
    assert (served.attainment_within(0.8), served.attainment_within(2.0)) == (0.0, 1.0)
    assert served.rate == pytest.approx(0.01)
    assert served.good_rate_per_gpu == pytest.approx(0.005)


@pytest.mark.parametrize("deployment", [COLOCATED, DIVIDED])
def test_a_simulation_is_cut_where_the_sought_attainment_is_out_of_reach(deployment: Deployment) -> None:
    requests, costs = random_requests(60, 7, every=8.0), costs_of(simple_times(0.5))
    times = simulate(deployment, requests, costs, LIMITS)
    limits = replace(
        LIMITS, ttft_seconds=float(np.median(times.ttft)), tpot_seconds=float(np.quantile(times.tpot, 0.8))
    )
    whole = simulate(deployment, requests, costs, limits)
    assert 0.2 < whole.attainment < 0.9 and not whole.cut
    kept = simulate(deployment, requests, costs, limits, sought=whole.attainment)
    assert not kept.cut and kept.requests == whole.requests
    for sought in (whole.attainment + 1e-9, 0.9, 1.0):
        cut = simulate(deployment, requests, costs, limits, sought=sought)
        assert cut.cut and not cut.instances
        assert whole.attainment <= cut.attainment < sought


def test_a_watched_simulation_has_what_each_instance_held() -> None:
    served = simulate(COLOCATED, [TimedRequest(1.0, 8, 3)], costs_of(simple_times(0.5)), LIMITS, watched=True)
    ((idle, prompt, *decodes, last),) = served.occupancy
    assert idle == (0.0, 0, 0.0)
    assert prompt == (1.0, 1, pytest.approx(2 / 999))
    assert decodes and all(entry[1:] == (1, pytest.approx(3 / 999)) for entry in decodes)
    assert last == (pytest.approx(2.5), 0, 0.0)
    assert not simulate(COLOCATED, [TimedRequest(1.0, 8, 3)], costs_of(simple_times(0.5)), LIMITS).occupancy


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("deployment", [COLOCATED, DIVIDED])
def test_runs_hold_the_blocks_of_single_steps(
    deployment: Deployment, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Later steps are twice as long as the first ones; the second request comes, in parts, during a run of the first.
    requests = [TimedRequest(0.0, 16, 1000), TimedRequest(30.0, 80, 1500)]
    costs = costs_of(simple_times(0.1, position=0.0001), blocks=1000, overlap=overlap, rate=1e4)
    runs = simulate(deployment, requests, costs, LIMITS, watched=True)
    monkeypatch.setattr(serve_instance, "LONGEST_RUN", 1)
    single = simulate(deployment, requests, costs, LIMITS, watched=True)
    assert sum(map(len, single.occupancy)) > 1500 and sum(map(len, runs.occupancy)) < 600
    # With overlap the blocks of the step after a single one are held too: at most one more block for each request.
    blocks = 2 / 999
    for figures, expected in zip(runs.instances, single.instances, strict=True):
        assert figures.busy == pytest.approx(expected.busy)
        assert figures.cache_mean == pytest.approx(expected.cache_mean, rel=0.002)
        assert figures.cache_peak == pytest.approx(expected.cache_peak, abs=blocks)
    for occupancy, steps in zip(runs.occupancy, single.occupancy, strict=True):
        for seconds in np.linspace(0, runs.seconds, 200)[:-1]:
            entry, expected = _at(occupancy, seconds), _at(steps, seconds)
            assert entry.running == expected.running
            assert entry.cache == pytest.approx(expected.cache, abs=1.5 * blocks)


def _at(occupancy: Sequence[Occupancy], seconds: float) -> Occupancy:
    return [entry for entry in occupancy if entry.seconds <= seconds][-1]


def test_a_sender_holds_blocks_until_they_have_come() -> None:
    served = simulate(DIVIDED, [TimedRequest(0.0, 16, 2)], costs_of(simple_times(0.5), rate=100.0), LIMITS)
    # Chunks of 2 blocks from 0 s and from 0.5 s on; the port carries each in 2 s, so they have come after 2.5 and 4.5 s.
    held = 2 * (2.5 - 0.0) + 2 * (4.5 - 0.5) + 4 * TRANSFER_SECONDS
    assert served.instances[0].cache_mean * served.seconds == pytest.approx(held / 999)


def test_refuses_what_it_cannot_play() -> None:
    mixed = Deployment(instances=(InstanceSpec(), InstanceSpec(role="decode")))
    with pytest.raises(BadInput, match="both, decode"):
        simulate(mixed, [TimedRequest(0.0, 1, 1)], costs_of(simple_times()), LIMITS)
    with pytest.raises(BadInput, match="at least one"):
        simulate(COLOCATED, [], costs_of(simple_times()), LIMITS)
    with pytest.raises(BadInput, match="cache blocks"):
        simulate(COLOCATED, [TimedRequest(0.0, 100, 1)], costs_of(simple_times(), blocks=10), LIMITS)


@pytest.mark.parametrize(
    ("overlap", "launch", "seed"),
    quick_first(
        3,
        [(False, 0.1, 0), (True, 0.0, 1), (True, 0.5, 2), (True, 0.0, 3), (True, 0.5, 4), (True, 0.3, 5)],
        unpack=True,
    ),
)
def test_times_are_those_of_the_engine_itself(overlap: bool, launch: float, seed: int) -> None:
    requests = random_requests(20, seed, every=0.6, longest=24)
    times = simple_times(0.2, token=0.01, position=0.001, launch=launch, longest=0.002)
    served = simulate(COLOCATED, requests, costs_of(times, overlap=overlap), LIMITS)
    first, end = _engine_times(requests, times, overlap=overlap)
    np.testing.assert_allclose([each.first_token for each in served.requests], first)
    np.testing.assert_allclose([each.end for each in served.requests], end)


def _engine_times(
    requests: Sequence[TimedRequest], times: InstanceStepTimes, *, overlap: bool
) -> tuple[list[float], list[float]]:
    """First and last tokens of the engine's loop, on a clock that the modelled times of steps and launches move on."""
    now, free = 0.0, 0.0
    ends: dict[int, float] = {}
    launched_slowly: set[int] = set()
    sizes = EngineOptions(
        step_tokens=8, sequences=8, tokens_per_block=BLOCK, cache_blocks=1000, context=64, overlap=overlap, texts=False
    )
    engine = Engine(built(LLAMA, dtype=torch.float32), options=sizes, clock=lambda: now)
    plan, complete = engine._policy.next_step, engine._complete

    def next_step(*arguments: Any) -> EngineStep | None:
        nonlocal free, now
        if (step := plan(*arguments)) is not None:
            decodes = step.parts[: step.decodes]
            attended = [part.start + 1 for part in decodes]
            chunks, longest = step.parts[step.decodes :], max(attended, default=0)
            computed = times.device_seconds(step.decodes, sum(attended), chunks, longest)
            begin = max(free, now)
            if chunks:
                now += times.launch_seconds(step.decodes, chunks)
            if computed < now - begin:
                launched_slowly.add(step.number)
            ends[step.number] = free = begin + soft_maximum(computed, max(0.0, now - begin))
        return step

    def wait(launched: Any, updates: list[Any]) -> None:
        nonlocal now
        now = max(now, ends[launched.step.number])
        complete(launched, updates)

    tokens: dict[int, list[float]] = {}
    index_of: dict[int, int] = {}
    sent = 0
    with (
        patch.object(engine._policy, "next_step", next_step),
        patch.object(engine, "_complete", wait),
        patch.object(LaunchedStep, "has_come", lambda launched: launched.step.number in launched_slowly),
    ):
        while sent < len(requests) or engine.unfinished:
            while sent < len(requests) and requests[sent].arrival_seconds <= now:
                index_of[
                    engine.submit([sent + 1] * requests[sent].input_tokens, new_tokens=requests[sent].output_tokens)
                ] = sent
                sent += 1
            if not engine.unfinished:
                now = requests[sent].arrival_seconds
                continue
            for update in engine.step():
                tokens.setdefault(index_of[update.number], []).extend([now] * len(update.tokens))
    assert all(len(tokens[index]) == request.output_tokens for index, request in enumerate(requests))
    assert all(first.arrival_seconds <= second.arrival_seconds for first, second in pairwise(requests))
    return [tokens[index][0] for index in range(sent)], [tokens[index][-1] for index in range(sent)]
