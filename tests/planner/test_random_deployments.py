"""Random serving questions over all chips, formats and servers: each has an answer within the limits or says why there is none."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from tests.slow import quick_first

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serving_software import matmul_format
from meshwright.planner import deployment_search
from meshwright.planner.deployment_estimate import PromptChunk
from meshwright.planner.deployment_search import plan_deployment
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import (
    InstanceSpec,
    PricedFormat,
    Quantisation,
    ServeLimits,
    ServingSoftwareName,
    TimedRequest,
)
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

MODELS = ("llama3-8b", "llama3-70b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3")
LARGEST_SHARE = 0.75
"""Share of the peak that matmuls reach at most."""
QUESTIONS = 200


def question(seed: int) -> tuple[ModelSpec, ClusterSpec, Quantisation, ServingSoftwareName | None, random.Random]:
    draw = random.Random(seed)
    model = from_plain(ModelSpec, {"vocab_size": 128256, **MODEL_PRESETS[draw.choice(MODELS)]})
    formats: Any = Quantisation(
        weights=draw.choice((None, *get_args(PricedFormat))),
        experts=draw.choice((None, *get_args(PricedFormat))) if model.experts else None,
        kv_cache=draw.choice((None, "fp8")),
    )
    cluster = ClusterSpec(gpu=draw.choice(sorted(CHIPS)), gpus_per_node=draw.choice((1, 2, 4, 8)))
    return model, cluster, formats, draw.choice((None, *get_args(ServingSoftwareName))), draw


def test_no_step_is_faster_than_its_device() -> None:
    priced = 0
    for seed in range(QUESTIONS):
        model, cluster, formats, software, draw = question(seed)
        expert = draw.choice([degree for degree in (1, 2, 4, 8) if model.experts % degree == 0]) if model.experts else 1
        instance = InstanceSpec(tensor=draw.choice((1, 2, 4, 8)), expert=expert, token_budget=2048)
        try:
            costs = ServeCosts(model, cluster, formats, software=software).of(instance)
        except (BadInput, OutOfResources):
            continue
        priced += 1
        times, chip = costs.times, CHIPS[cluster.gpu]
        work, decodes, length = times.work, draw.choice((1, 8, 64, 256)), draw.choice((128, 2048))
        read = work.dense_bytes + work.head_bytes + work.read_expert_bytes(decodes)
        read += work.attended(decodes, decodes * length) * work.cache_bytes / expert
        assert read / chip.hbm <= times.seconds(decodes, decodes * length), seed
        peak, expert_peak = (
            chip.peak_flops[matmul_format(chip, name)] for name in (formats.weights, formats.experts or formats.weights)
        )
        local = 2048 / expert
        ideal = local * (work.dense_flops / peak + work.expert_flops / expert_peak)
        ideal += (
            work.pairs([PromptChunk(0, 2048)])
            * work.attention_flops
            / expert
            / chip.peak_flops[matmul_format(chip, None)]
        )
        assert ideal <= LARGEST_SHARE * times.seconds(0, 0, [PromptChunk(0, 2048)]), seed
    assert priced > QUESTIONS / 3


@pytest.mark.parametrize("seed", quick_first(4, list(range(QUESTIONS))))
def test_an_answer_keeps_the_limits_or_says_why_there_is_none(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COARSE_REQUESTS", "FINE_REQUESTS", "BAND_REQUESTS", "LOW_REQUESTS"):
        monkeypatch.setattr(deployment_search, name, 100)
    model, cluster, formats, software, draw = question(seed)
    sizes = draw.choice((128, 1024, 4096)), draw.choice((1, 32, 256))
    requests = [TimedRequest(index / 5, *sizes) for index in range(100)]
    limits = ServeLimits(ttft_seconds=draw.choice((0.5, 2.0)), tpot_seconds=draw.choice((0.01, 0.05)))
    try:
        answer = plan_deployment(model, cluster, requests, limits, formats, software=software)
    except OutOfResources as error:
        assert str(error)
        return
    except BadInput as error:
        assert str(error).startswith(f"cluster.gpu: {cluster.gpu} has no ")
        return
    served = answer.chosen.goodput.served
    assert served is not None and served.attainment >= limits.attainment
    assert all(figures.busy <= 1 + 1e-6 and figures.cache_peak <= 1 for figures in served.instances)
    assert 0 < answer.low <= answer.chosen.goodput_per_gpu <= answer.high
    assert answer.deployment.devices <= cluster.ranks
