"""Random questions again with a pin, and with more of one thing: neither a pin nor less makes an answer faster.

The questions are those of benchmarks/random_pins.py.
"""

from __future__ import annotations

import pytest
from benchmarks.random_pins import LIMITS, gains_of, seconds
from tests.slow import quick_first

SEEDS = (
    2,
    6,
    9,
    14,
    31,
    36,
    42,
    43,
    46,
    55,
    56,
    57,
    74,
    95,
    215,
    230,
    252,
    269,
    290,
    297,
    367,
    382,
    404,
    462,
    528,
    570,
    571,
    599,
    623,
    640,
    668,
    678,
    728,
    763,
    769,
    805,
    824,
    845,
    866,
)
"""Seeds of questions that are answered quickly and have an answer with pins."""
GROWING = (31, 2, 36, 42)
"""The same for questions with more bandwidth, memory, nodes or batch."""
CASES = {
    "ports of 15 GB/s": (
        "model=llama3-70b cluster.gpu=H100 cluster.nodes=16 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=256 "
        "cluster.network.port_gb_per_s=15",
        "plan.pipeline=1",
    ),
    "experts over ports of 12.5 GB/s": (
        "model=qwen3-30b-a3b cluster.gpu=H100 cluster.nodes=8 cluster.gpus_per_node=8 train.seq_len=4096 train.global_batch=512 "
        "cluster.network.port_gb_per_s=12.5",
        "plan.pipeline=1 plan.tensor=1",
    ),
    "fewer shards and more replicas, whose sums the closed form hides": (
        "model=phi4-mini cluster.gpu=B300 cluster.nodes=64 cluster.gpus_per_node=2 train.seq_len=512 train.global_batch=64 "
        "cluster.network.port_gb_per_s=20",
        "plan.offload=none plan.tensor=8",
    ),
    "state that may stay on devices whose weights are freed": (
        "model=deepseek-v3 cluster.gpu=H800 cluster.nodes=16 cluster.gpus_per_node=6 train.seq_len=32768 train.global_batch=8 "
        "cluster.network.port_gb_per_s=18",
        "plan.reshard=true",
    ),
    "virtual stages on slow ports": (
        "model=olmo2-32b cluster.gpu=RTX5090 cluster.nodes=64 cluster.gpus_per_node=8 train.seq_len=4096 train.global_batch=256 "
        "cluster.memory_gib=40",
        "plan.schedule=breadth_first",
    ),
    "few virtual stages where many were slower than estimated": (
        "model=glm4-9b-chat cluster.gpu=RTX3090 cluster.nodes=1 cluster.gpus_per_node=6 train.seq_len=2048 train.global_batch=1024",
        "plan.pipeline=6 plan.schedule=interleaved",
    ),
    "weights cast on one rank of a pipeline, freed after each use": (
        "model=llama3-70b cluster.gpu=H100 cluster.nodes=4 cluster.gpus_per_node=2 train.seq_len=8192 train.global_batch=256 "
        "cluster.network.port_gb_per_s=20",
        "plan.reshard=true",
    ),
    "gradient sums in host memory on a layout that is slow without": (
        "model=gemma-7b cluster.gpu=A10G cluster.nodes=1 cluster.gpus_per_node=4 train.seq_len=4096 train.global_batch=1024",
        "plan.shard=1",
    ),
    "weights kept where activations of all layers are offloaded": (
        "model=glm4-9b-chat cluster.gpu=RTX6000-Ada cluster.nodes=1 cluster.gpus_per_node=4 train.seq_len=32768 train.global_batch=1",
        "plan.reshard=false",
    ),
    "many layouts whose families differ in what layers save alone": (
        "model=qwen2.5-1.5b cluster.gpu=GB200 cluster.nodes=16 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=8 "
        "cluster.network.port_gb_per_s=12.5",
        "plan.context_ring=2",
    ),
    "more expert ranks beside fewer, which were slow": (
        "model=qwen2-57b-a14b cluster.gpu=RTX4090 cluster.nodes=8 cluster.gpus_per_node=4 train.seq_len=8192 train.global_batch=128 "
        "cluster.network.port_gb_per_s=18",
        "plan.shard=8 plan.context_ring=2",
    ),
    "gathers that waits for a pipeline's messages hide": (
        "model=mistral-7b cluster.gpu=H100 cluster.nodes=64 cluster.gpus_per_node=8 train.seq_len=32768 train.global_batch=1 "
        "cluster.network.port_gb_per_s=20",
        "plan.tensor=8 plan.gradients=shard",
    ),
    "two layer strategies beside one that does not fit": (
        "model=qwen2.5-72b cluster.gpu=RTX5090 cluster.nodes=4 cluster.gpus_per_node=8 train.seq_len=32768 train.global_batch=128 "
        "cluster.network.port_gb_per_s=8",
        "plan.context_ring=4",
    ),
    "gradient sums in host memory, with which other layouts are the fastest": (
        "model=glm4.5-air cluster.gpu=L4 cluster.nodes=8 cluster.gpus_per_node=6 train.seq_len=32768 train.global_batch=256 "
        "cluster.network.fabric=tcp",
        "plan.accumulation=host",
    ),
    "hosts that cannot hold all of the optimizer's state": (
        "model=gpt-530b cluster.gpu=GB300 cluster.nodes=3 cluster.gpus_per_node=8 train.seq_len=512 train.global_batch=1024 "
        "cluster.network.port_gb_per_s=15",
        "plan.context_ring=2",
    ),
    "shards without replicas, whose sums the estimate by stages hides": (
        "model=olmo2-7b cluster.gpu=GB200 cluster.nodes=8 cluster.gpus_per_node=4 train.seq_len=4096 train.global_batch=8 "
        "cluster.network.port_gb_per_s=20",
        "plan.pipeline=1 plan.recompute=none",
    ),
    "a layout that pays only where most of the offloaded state stays on the devices": (
        "model=qwen2.5-72b cluster.gpu=H800 cluster.nodes=2 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=8 "
        "cluster.network.port_gb_per_s=15",
        "plan.tensor=4",
    ),
    "hosts that hold the share of the state that devices do not": (
        "model=deepseek-v2 cluster.gpu=GB300-NVL72 cluster.nodes=1 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=24",
        "plan.micro_batch=4",
    ),
    "few replicas beside many, whose sums the closed form hides": (
        "model=gemma2-2b cluster.gpu=B300 cluster.nodes=64 cluster.gpus_per_node=6 train.seq_len=8192 train.global_batch=256 "
        "cluster.network.port_gb_per_s=18",
        "plan.replicate=4",
    ),
    "tensor ranks over ports that are as fast as links": (
        "model=gpt-oss-20b cluster.gpu=A10 cluster.nodes=64 cluster.gpus_per_node=2 train.seq_len=512 train.global_batch=256 "
        "cluster.network.port_gb_per_s=20 cluster.network.fabric=tcp",
        "plan.tensor=4 plan.context_ulysses=2",
    ),
    "layers that recompute less where the update needs most memory": (
        "model=mixtral-8x7b cluster.gpu=RTX6000-Ada cluster.nodes=1 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=24",
        "plan.gradients=shard plan.context_ulysses=1",
    ),
    "what fits is far slower than what fits by the closed form only": (
        "model=gpt3-175b cluster.gpu=B300 cluster.nodes=1 cluster.gpus_per_node=6 train.seq_len=512 train.global_batch=512",
        "plan.micro_batch=1 plan.gradients=shard",
    ),
    "virtual stages that wait for the one with the head": (
        "model=llama3-8b cluster.gpu=H20 cluster.nodes=64 cluster.gpus_per_node=6 train.seq_len=8192 train.global_batch=1024 "
        "cluster.network.port_gb_per_s=20",
        "plan.reshard=false plan.offload=none",
    ),
    "gathers of a layered pipeline, which the waits of its ranks hide": (
        "model=gpt3-175b cluster.gpu=RTX6000-Ada cluster.nodes=16 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=8 "
        "cluster.network.port_gb_per_s=5 plan.linear=fp8_tensorwise",
        "plan.pipeline=8",
    ),
    "sums over replicas after the weight halves of split backwards": (
        "model=qwen3-30b-a3b cluster.gpu=H20 cluster.nodes=64 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=128 "
        "plan.schedule=zbv",
        "plan.replicate=4",
    ),
    "a V-shaped placement, whose sums over replicas come at the end": (
        "model=llama3-8b cluster.gpu=H800 cluster.nodes=3 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=8 "
        "cluster.network.port_gb_per_s=18 plan.replicate=2 plan.linear=fp8_tensorwise",
        "plan.schedule=zbv",
    ),
}
"""Questions whose answers were once more than 2% slower than with the pins."""


@pytest.mark.parametrize("seed", quick_first(2, SEEDS))
def test_no_pin_makes_the_answer_faster(seed: int) -> None:
    gains = gains_of(seed, "pins", limit=1)
    assert gains and max(gains)[0] <= LIMITS["pins"], max(gains)


@pytest.mark.parametrize("seed", quick_first(1, GROWING))
def test_more_is_not_slower(seed: int) -> None:
    gains = gains_of(seed, "more")
    assert gains and max(gains)[0] <= LIMITS["more"], max(gains)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES)[::-1])
def test_answers_that_a_pin_once_made_faster(name: str) -> None:
    overrides, pins = (text.split() for text in CASES[name])
    unpinned, pinned = seconds(overrides), seconds([*overrides, *pins])
    assert unpinned is not None and pinned is not None and unpinned <= (1 + LIMITS["pins"]) * pinned
