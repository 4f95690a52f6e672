"""Step times of the engine by shape: beside arithmetic by hand, measured steps, and the engine's own sizes."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.serve_constants import usual_constants
from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serve_fit import FITTED, fit_constants
from meshwright.costs.serve_work import device_work
from meshwright.costs.step_times import InstanceStepTimes, interpolated_factor, soft_maximum
from meshwright.serve.engine_profile import even_lengths, exponential_lengths
from meshwright.serve.engine_sizes import blocks_that_fit
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import InstanceSpec, Quantisation
from meshwright.spec.engine import EngineOptions, EngineSettings
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, parameter_count
from meshwright.spec.serve_profile import ProfiledChunk, StepConstants, StepFactor, StepTime
from tests.models.tiny import LLAMA, MIXTRAL, SLIDING, built

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LLAMA_8B = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
H200 = ClusterSpec(gpu="H200", gpus_per_node=8)
FAST = 1e30
NOTHING = StepConstants(
    weight_bytes_per_s=FAST,
    flops_per_s=FAST,
    cache_bytes_per_s=FAST,
    attention_flops_per_s=FAST,
    decode_seconds=0.0,
    prompt_seconds=0.0,
    sequence_seconds=0.0,
    chunk_seconds=0.0,
)


def test_work_of_a_dense_model() -> None:
    work = device_work(LLAMA_8B)
    assert work.stored_bytes == 2 * parameter_count(LLAMA_8B)
    assert work.head_bytes == 2 * 128256 * 4096
    assert (
        work.dense_bytes + work.head_bytes == work.stored_bytes - work.head_bytes
    )  # an embedding as large as the head
    assert work.cache_bytes == 128 * 1024
    assert work.attention_flops == 32 * 4 * 32 * 128
    half = device_work(LLAMA_8B, 2)
    norms = 2 * (2 * 32 + 1) * 4096
    assert 2 * (half.dense_bytes - norms) == work.dense_bytes - norms
    assert (half.cache_bytes, half.head_flops) == (64 * 1024, work.head_flops / 2)


def test_fp8_halves_the_linear_layers_of_blocks_only() -> None:
    work, rounded = device_work(LLAMA_8B), device_work(LLAMA_8B, weights="fp8", cache_item=1)
    norms = 2 * (2 * 32 + 1) * 4096
    assert rounded.dense_bytes - norms == (work.dense_bytes - norms) / 2
    assert (rounded.head_bytes, rounded.cache_bytes) == (work.head_bytes, work.cache_bytes / 2)


def test_the_engine_keeps_experts_that_devices_share_in_16_bits_with_fp8() -> None:
    for devices in (1, 2):
        instance = InstanceSpec(expert=devices)
        work, int8, fp8, stated = (
            ServeCosts(replace(MIXTRAL, experts=4), H200, formats).of(instance).times.work
            for formats in (
                Quantisation(),
                Quantisation(weights="int8"),
                Quantisation(weights="fp8"),
                Quantisation(weights="fp8", experts="fp8"),
            )
        )
        assert (int8.expert_bytes, int8.expert_flops) == (work.expert_bytes / 2, work.expert_flops)
        assert fp8.expert_bytes == (work.expert_bytes if devices > 1 else work.expert_bytes / 2)
        assert stated == int8


def test_int8_takes_int8_matmuls() -> None:
    a100 = ClusterSpec(gpu="A100", gpus_per_node=8)
    plain, faster = (ServeCosts(LLAMA_8B, a100, Quantisation(weights=each)).constants for each in (None, "int8"))
    assert faster.flops_per_s / plain.flops_per_s == pytest.approx(624 / 312 * 0.55 / 0.63)
    with pytest.raises(BadInput, match="B300 has no int8 matmuls"):
        ServeCosts(LLAMA_8B, ClusterSpec(gpu="B300", gpus_per_node=8), Quantisation(weights="int8"))


def test_a_step_reads_the_experts_that_a_token_is_sent_to() -> None:
    work = device_work(MIXTRAL)
    one = 2 * MIXTRAL.expert_hidden * 3 * MIXTRAL.hidden
    assert work.expert_bytes == one
    chosen = MIXTRAL.layers * MIXTRAL.experts_per_token
    assert work.read_expert_bytes(1) == pytest.approx(one * chosen)
    assert work.read_expert_bytes(10_000) == pytest.approx(one * MIXTRAL.layers * MIXTRAL.experts)
    assert device_work(LLAMA).read_expert_bytes(8) == 0
    assert work.expert_flops == one * chosen
    spread = device_work(MIXTRAL, 1, 2)
    assert (spread.expert_slots, spread.expert_bytes) == (work.expert_slots / 2, one)
    assert spread.stored_bytes == work.stored_bytes - one * work.expert_slots / 2


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 20), (4, 3), (5, 10), (30, 7)])
def test_pairs_of_queries_and_positions(window: int | None, start: int, count: int) -> None:
    work = device_work(LLAMA if window is None else SLIDING)
    expected = sum(min(position + 1, window or position + 1) for position in range(start, start + count))
    assert work.pairs([ProfiledChunk(start=start, count=count)]) == expected


CHUNK = ProfiledChunk(start=0, count=1024)


def test_a_step_is_the_slower_of_bytes_and_flops_and_attention_is_added() -> None:
    work = device_work(LLAMA_8B)
    bytes_only = InstanceStepTimes(work, replace(NOTHING, weight_bytes_per_s=1e12))
    assert bytes_only.seconds(7, 100) == pytest.approx((work.dense_bytes + work.head_bytes) / 1e12)
    flops_only = InstanceStepTimes(work, replace(NOTHING, flops_per_s=1e12))
    assert flops_only.seconds(3, 0, [ProfiledChunk(start=0, count=5)]) == pytest.approx(
        (8 * work.dense_flops + 4 * work.head_flops) / 1e12
    )
    cache_only = InstanceStepTimes(work, replace(NOTHING, cache_bytes_per_s=1e9))
    assert cache_only.seconds(2, 50) == pytest.approx(50 * work.cache_bytes / 1e9)
    attention_only = InstanceStepTimes(work, replace(NOTHING, attention_flops_per_s=1e9))
    assert attention_only.seconds(2, 50, [ProfiledChunk(start=3, count=2)]) == pytest.approx(
        (4 + 5) * work.attention_flops / 1e9
    )
    fixed, each, of_longest = cache_only.decode_line(2)
    assert of_longest == 0 and fixed + 50 * each == pytest.approx(cache_only.seconds(2, 50))


def test_the_longest_text_is_read_by_few_programs() -> None:
    work = device_work(LLAMA_8B)
    head_bytes = work.cache_bytes / 8
    times = InstanceStepTimes(work, replace(NOTHING, text_bytes_per_s=1e9, decode_programs=528))
    # 528 programs of 8 heads: 66 for one text of a head, at most 32; graphs of 8 decodes leave 9, of 40 two, and of more than 66 one.
    for decodes, parts in ((1, 32), (2, 32), (5, 9), (8, 9), (33, 2), (64, 2), (80, 1), (256, 1)):
        seconds = times.seconds(decodes, 100 * decodes, (), 900)
        assert seconds == pytest.approx(900 * head_bytes / parts / 1e9), decodes
        assert seconds == pytest.approx(
            times.device_seconds(decodes, 100 * decodes, [ProfiledChunk(start=0, count=4)], 900)
        )
    assert times.seconds(8, 800) == pytest.approx(times.seconds(8, 800, (), 100))
    window = InstanceStepTimes(replace(work, windows=((50, 1.0),)), times.constants)
    assert window.seconds(8, 800, (), 900) == pytest.approx(times.seconds(8, 400, (), 50))


def test_the_price_of_the_longest_text_is_found_in_two_distributions() -> None:
    work = device_work(LLAMA_8B)
    start = replace(usual_constants(ServeCosts(LLAMA_8B, H200)._machine), decode_programs=528)
    made = replace(start, text_bytes_per_s=2e10, cache_bytes_per_s=3.5e12)
    times, steps = InstanceStepTimes(work, made), []
    for count in (1, 4, 16, 32, 64, 128):
        for lengths in ([40] * count, exponential_lengths(count, 1024), even_lengths(count, 1024)):
            shape = {"decodes": count, "positions": sum(lengths), "longest": max(lengths)}
            steps.append(StepTime(**shape, seconds=times.seconds(count, sum(lengths), (), max(lengths))))
    steps.append(StepTime(decodes=0, positions=0, chunks=(CHUNK,), seconds=times.seconds(0, 0, [CHUNK])))
    fitted = fit_constants(work, start, steps).constants
    assert fitted.text_bytes_per_s == pytest.approx(2e10, rel=0.1)
    assert fitted.cache_bytes_per_s == pytest.approx(3.5e12, rel=0.1)
    assert InstanceStepTimes(work, fitted).seconds(48, 50_000, (), 3000) == pytest.approx(
        times.seconds(48, 50_000, (), 3000), rel=0.01
    )


def test_factors_are_interpolated_in_the_logarithm_of_tokens() -> None:
    factors = [StepFactor(tokens=1, factor=1.0), StepFactor(tokens=100, factor=2.0)]
    assert interpolated_factor(factors, 10) == pytest.approx(1.5)
    assert [interpolated_factor(factors, tokens) for tokens in (1, 100, 10_000)] == [1.0, 2.0, 2.0]
    assert interpolated_factor((), 10) == 1.0


def test_steps_with_prompts_cost_as_much_as_the_graph_that_they_are_padded_to() -> None:
    made = replace(
        NOTHING, flops_per_s=1e12, prompt_sizes=(64, 128), prompt_factors=(StepFactor(tokens=128, factor=1.5),)
    )
    times = InstanceStepTimes(device_work(LLAMA_8B), made)

    def seconds(decodes: int, tokens: int) -> float:
        return times.device_seconds(decodes, decodes, [ProfiledChunk(start=0, count=tokens)])

    head = times.matmul_seconds(128, 9) - times.matmul_seconds(128, 1)  # of eight decodes more
    assert seconds(0, 65) == pytest.approx(seconds(0, 128), rel=1e-9)
    assert seconds(8, 70) == pytest.approx(seconds(0, 128) + 1.5 * head, rel=1e-9)
    assert seconds(0, 64) < 0.6 * seconds(0, 65)
    assert seconds(0, 129) > seconds(0, 128)
    assert times.device_seconds(65, 65) == InstanceStepTimes(times.work, replace(made, prompt_sizes=())).device_seconds(
        65, 65
    )


def test_the_fit_takes_steps_of_one_graph_as_alike() -> None:
    work = device_work(LLAMA_8B)
    start = replace(usual_constants(ServeCosts(LLAMA_8B, H200)._machine), prompt_sizes=(64, 256))
    times = InstanceStepTimes(work, start)
    steps = [StepTime(decodes=8, positions=800, seconds=times.seconds(8, 800))]
    for tokens, factor in ((16, 1.1), (60, 1.1), (200, 0.8), (700, 1.0)):
        chunk = ProfiledChunk(start=0, count=tokens)
        steps.append(
            StepTime(decodes=0, positions=0, chunks=(chunk,), seconds=factor * times.device_seconds(0, 0, [chunk]))
        )
    fitted = fit_constants(work, start, steps).constants
    assert [factor.tokens for factor in fitted.prompt_factors] == [64, 256, 700]
    assert fitted.prompt_sizes == (64, 256)


def test_usual_constants_are_near_the_steps_measured_on_an_h200() -> None:
    (file,) = RESULTS.glob("*-engine-H200.json")
    lines = json.loads(file.read_text())["lines"]
    checked = 0
    for line in lines:
        if line["side"] != "meshwright" or line["model"] != "llama3-8b" or "batch" not in line:
            continue
        formats = Quantisation(weights=line["weights"], kv_cache=line["kv_cache"])
        times = ServeCosts(LLAMA_8B, H200, formats).of(InstanceSpec()).times
        # The median step of 192 after prompts of 960 tokens.
        predicted = 1000 * times.seconds(line["batch"], line["batch"] * (960 + 96))
        assert predicted == pytest.approx(line["decode_milliseconds"], rel=0.1 if line["kv_cache"] else 0.06)
        checked += 1
    assert checked == 15


def test_decodes_of_an_moe_model_are_near_those_measured_on_an_h200() -> None:
    (file,) = RESULTS.glob("*-moe-decode-H200.json")
    spec = from_plain(ModelSpec, MODEL_PRESETS["qwen3-30b-a3b"])
    checked = 0
    for row in json.loads(file.read_text())["rows"]:
        if "reverted" in row["commit"]:
            continue
        times = (
            ServeCosts(spec, H200, Quantisation(weights=row["weights"], kv_cache=row["kv_cache"]))
            .of(InstanceSpec())
            .times
        )
        for batch, milliseconds in row["ms"].items():
            seconds = times.seconds(int(batch), int(batch) * (960 + 96))
            assert 1000 * seconds == pytest.approx(milliseconds, rel=0.07), (row, batch)
            checked += 1
    assert checked == 10


def test_a_rate_and_a_time_of_experts_count_where_there_are_some() -> None:
    work, dense = device_work(MIXTRAL), device_work(LLAMA_8B)
    usual = replace(NOTHING, weight_bytes_per_s=1e12)
    own = replace(usual, expert_bytes_per_s=2e12, routed_seconds=0.5)
    assert InstanceStepTimes(dense, own).seconds(3, 0) == InstanceStepTimes(dense, usual).seconds(3, 0)
    saved = InstanceStepTimes(work, usual).seconds(3, 0) - InstanceStepTimes(work, own).seconds(3, 0)
    assert saved == pytest.approx(work.read_expert_bytes(3) / 2e12 - 0.5 * MIXTRAL.layers)


def test_the_fit_finds_the_constants_that_made_the_steps() -> None:
    work = device_work(LLAMA_8B)
    made = StepConstants(
        weight_bytes_per_s=3e12,
        flops_per_s=5e14,
        cache_bytes_per_s=4e12,
        attention_flops_per_s=3e14,
        decode_seconds=1e-3,
        prompt_seconds=8e-3,
        sequence_seconds=2e-5,
        chunk_seconds=1e-3,
    )
    times = InstanceStepTimes(work, made)
    shapes = [(count, count * length, ()) for count in (1, 8, 64, 256) for length in (64, 2000)]
    shapes += [(count, 500 * count, (tokens,)) for count in (0, 64) for tokens in (16, 1024, 8192)]
    shapes += [(0, 0, (512, 512)), (0, 0, (64,) * 8)]
    steps = []
    for decodes, positions, lengths in shapes:
        chunks = tuple(ProfiledChunk(start=0, count=length) for length in lengths)
        steps.append(
            StepTime(
                decodes=decodes, positions=positions, chunks=chunks, seconds=times.seconds(decodes, positions, chunks)
            )
        )
    fit = fit_constants(work, usual_constants(ServeCosts(LLAMA_8B, H200)._machine), steps)
    assert fit.median_error < 0.002
    # Weights and a fixed time are told apart by large steps only.
    for name in set(FITTED) - {"decode_seconds"}:
        assert math.log(getattr(fit.constants, name) / getattr(made, name)) == pytest.approx(0, abs=0.3), name
    fitted = InstanceStepTimes(work, fit.constants)
    unseen = [ProfiledChunk(start=1000, count=700)]
    assert fitted.seconds(48, 48 * 900, unseen) == pytest.approx(times.seconds(48, 48 * 900, unseen), rel=0.01)
    with pytest.raises(BadInput, match="with a prompt and without"):
        fit_constants(work, made, [step for step in steps if step.chunks])


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_slow_host_does_not_change_the_constants_of_the_device(noise: float) -> None:
    work = device_work(LLAMA_8B)
    start = replace(usual_constants(ServeCosts(LLAMA_8B, H200)._machine), whole_tokens=1024)
    launch = {"prompt_seconds": 0.02, "beside_seconds": 0.01, "whole_seconds": 0.015}
    made = replace(start, flops_per_s=1.2 * start.flops_per_s, chunk_seconds=2e-4, **launch)
    times, draw = InstanceStepTimes(work, made), random.Random(3)
    steps = [
        StepTime(decodes=count, positions=900 * count, seconds=times.seconds(count, 900 * count))
        for count in (1, 16, 128)
    ]
    for tokens, decodes in product((16, 256, 1024, 1536, 2048), (0, 64)):
        chunks = (ProfiledChunk(start=0, count=tokens),)
        by_hand = 0.02 + (0.01 if decodes else 0.0) + (0.015 if tokens >= 1024 else 0.0)
        assert times.launch_seconds(decodes, chunks) == pytest.approx(by_hand)
        launched = by_hand * draw.uniform(1 - noise, 1 + noise)
        exposed = launched - (0.005 if decodes else 0.0)
        seconds = soft_maximum(times.device_seconds(decodes, 300 * decodes, chunks), exposed)
        shape = {"decodes": decodes, "positions": 300 * decodes, "chunks": chunks}
        steps.append(StepTime(**shape, seconds=seconds, launch_seconds=launched, exposed_seconds=exposed))
    fit = fit_constants(work, start, steps).constants
    found = {name: getattr(fit, name) for name in launch}
    assert found == pytest.approx(launch, rel=1e-6 + 2 * noise)
    assert sum(found.values()) == pytest.approx(sum(launch.values()), rel=1e-6 + noise / 2)
    fitted, unseen = InstanceStepTimes(work, fit), (8, 8 * 900, [ProfiledChunk(start=0, count=1300)])
    assert fitted.device_seconds(*unseen) == pytest.approx(times.device_seconds(*unseen), rel=0.01)
    # The factors of steps that ended with their launch are 1.
    assert all(each.factor == pytest.approx(1, abs=0.01) for each in fit.prompt_factors)
    assert times.launch_seconds(8, [ProfiledChunk(start=1024, count=1024)]) == pytest.approx(0.03)


def test_an_instance_has_the_blocks_that_the_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 3000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    options = EngineOptions(step_tokens=64, sequences=64, context=256)
    costs = ServeCosts(LLAMA, ClusterSpec(), settings=EngineSettings(sequences=64, context=256))
    blocks = costs.of(InstanceSpec(token_budget=64)).blocks
    assert blocks == blocks_that_fit(built(LLAMA, dtype=torch.float32), options)
    assert 1 + 64 * 16 > blocks > 17  # the memory is the limit


def test_blocks_on_a_gpu_fill_what_weights_and_a_step_leave() -> None:
    one, two = (ServeCosts(LLAMA_8B, H200).of(InstanceSpec(tensor=tensor)) for tensor in (1, 2))
    block = 16 * 128 * 1024
    free = 0.92 * 140 * 2**30 - 16.06e9
    assert free - 4e9 < one.blocks * block < free
    assert two.blocks > 2 * one.blocks
    assert (one.block_bytes, two.block_bytes) == (block, block)
    with pytest.raises(OutOfResources, match="131072 tokens"):
        ServeCosts(LLAMA_8B, ClusterSpec(gpu="L4")).of(InstanceSpec())
    with pytest.raises(BadInput, match="tensor"):
        ServeCosts(LLAMA_8B, H200).of(InstanceSpec(tensor=3))
    with pytest.raises(BadInput, match="expert"):
        ServeCosts(LLAMA_8B, H200).of(InstanceSpec(expert=2))


def test_tensor_ranks_shorten_a_step_but_pay_for_their_sums() -> None:
    costs = ServeCosts(LLAMA_8B, H200)
    seconds = [costs.of(InstanceSpec(tensor=tensor)).times.seconds(1, 1000) for tensor in (1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / 2 < seconds[1]
