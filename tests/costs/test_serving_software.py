"""Step prices of other servers: against arithmetic by hand, by physical limits, and against published points."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.serve_costs import ServeCosts
from meshwright.costs.serving_software import ServingSoftware, matmul_format, software_table
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import InstanceSpec, Quantisation, ServingSoftwareName
from meshwright.spec.engine import EngineSettings
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

LLAMA_70B = from_plain(ModelSpec, {**MODEL_PRESETS["llama3-70b"], "vocab_size": 128256})
DEEPSEEK = from_plain(ModelSpec, MODEL_PRESETS["deepseek-v3"])
SHORT = EngineSettings(context=16_384)
IDEAL = ServingSoftware(
    memory_share=1.0, peak_share=1.0, kernel_seconds=0.0, sum_seconds=0.0, sequence_seconds=0.0, request_seconds=0.0
)


def costs(
    model: ModelSpec,
    gpu: str,
    software: ServingSoftwareName | ServingSoftware,
    weights: str | None = None,
    **formats: str,
) -> ServeCosts:
    quantisation = from_plain(Quantisation, {"weights": weights, **formats})
    return ServeCosts(model, ClusterSpec(gpu=gpu, gpus_per_node=8), quantisation, SHORT, software=software)


def test_a_server_without_overheads_takes_the_time_of_its_bytes() -> None:
    times = costs(LLAMA_70B, "H200", IDEAL).of(InstanceSpec(tensor=4)).times
    layers = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    weights = 2 * (layers + 128256 * 8192) / 4
    cache = 1000 * 80 * 2 * 2 * 128 * 2
    sent = 2 * 2 * 80 * (3 / 4) * 8192 * 2
    seconds = (weights + cache) / 4.8e12 + sent / (0.7 * 450e9)
    assert times.seconds(1, 1000) == pytest.approx(seconds, rel=2e-3)


def test_each_constant_adds_its_time() -> None:
    floor = costs(DEEPSEEK, "B200", IDEAL, "fp8").of(InstanceSpec(tensor=8)).times
    kernels = 61 * (8 + 5) + 58 * 12
    added = {"kernel_seconds": kernels * 1e-6, "sum_seconds": 2 * 61 * 3 * 1e-6, "sequence_seconds": 16 * 1e-6}
    for key, seconds in added.items():
        times = costs(DEEPSEEK, "B200", replace(IDEAL, **{key: 1e-6}), "fp8").of(InstanceSpec(tensor=8)).times
        assert times.seconds(16, 16_000) - floor.seconds(16, 16_000) == pytest.approx(seconds, rel=1e-6), key


def test_decodes_of_latents_are_bound_by_flops_where_bytes_are_few() -> None:
    times = costs(DEEPSEEK, "H200", IDEAL, "fp8", kv_cache="fp8").of(InstanceSpec(tensor=1, expert=8)).times
    _, each, _ = times.decode_line(64)
    latent_bytes, flops = 61 * 576, 2 * 61 * 128 * (2 * 512 + 64)
    assert each * 8 > flops / 989e12 > latent_bytes / 4.8e12


def test_formats_of_experts_are_priced_apart_from_those_of_other_weights() -> None:
    instance = InstanceSpec(tensor=8)
    plain, fp8, nvfp4 = (
        costs(DEEPSEEK, "B200", "trtllm", weights, experts=experts).of(instance).times.work
        for weights, experts in ((None, "bf16"), ("fp8", "fp8"), (None, "nvfp4"))
    )
    assert fp8.expert_bytes == plain.expert_bytes / 2
    assert nvfp4.expert_bytes == pytest.approx(plain.expert_bytes * (1 / 2 + 1 / 16) / 2)
    assert nvfp4.dense_bytes == plain.dense_bytes > fp8.dense_bytes


def test_matmuls_with_weights_of_four_bits_take_the_format_that_the_device_has() -> None:
    assert matmul_format(CHIPS["B200"], "nvfp4") == "nvfp4"
    assert matmul_format(CHIPS["H200"], "nvfp4") == matmul_format(CHIPS["B200"], "int4") == "bf16"
    with pytest.raises(BadInput, match="A100 has no fp8 matmuls"):
        costs(LLAMA_70B, "A100", "vllm", "fp8")


def test_constants_are_few_and_within_physical_limits() -> None:
    table = software_table()
    assert set(table.software) == {"vllm", "sglang", "trtllm"}
    assert len(fields(ServingSoftware)) == 6
    for software in table.software.values():
        assert 0.3 < software.peak_share < 0.75
        assert 0.5 < software.memory_share < 1
        assert 0.5e-6 < software.kernel_seconds < 10e-6


@pytest.mark.parametrize(
    ("gpu", "tensor", "milliseconds"),
    [
        ("H100", 4, 11.78),
        ("H100", 8, 9.11),
        ("H200", 1, 21.47),
        ("B200", 1, 16.34),
        ("B200", 2, 10.64),
        ("B200", 4, 8.04),
    ],
)
def test_published_steps_of_vllm(gpu: str, tensor: int, milliseconds: float) -> None:
    """Llama-3.1-70B in fp8, four requests of 1,024 tokens in and out (benchmarks/data/serving-points.csv.gz)."""
    times = costs(LLAMA_70B, gpu, "vllm", "fp8").of(InstanceSpec(tensor=tensor)).times
    assert 1e3 * times.seconds(4, 4 * 1536) == pytest.approx(milliseconds, rel=0.25)
