"""Every key that a run fixes in its section `plan` is in the plan that the search finds."""

from __future__ import annotations

from dataclasses import fields

import pytest

from meshwright.config.load import load_run
from meshwright.planner.search import search
from meshwright.spec.fields import to_plain
from meshwright.spec.plan_keys import PlanKeys, keys_of

FILE_ONLY = {"global_batch", "samples", "predicted", "why"}
"""Keys of plan files, which a run does not fix."""
BASE = "model=llama-nano cluster.gpu=H200 cluster.gpus_per_node=4 train.seq_len=512 train.global_batch=16"
EXPERTS = (
    "model=olmoe-1b-7b cluster.gpu=H200 cluster.gpus_per_node=4 train.seq_len=512 train.global_batch=16 plan.expert=4"
)
SAMPLES = "model=llama-nano cluster.gpu=H200 cluster.gpus_per_node=4 train.seq_len=1024 train.global_batch_tokens=65536 data.packing=none"
PINNED = {
    "order": (BASE, "[shard,pipeline]", "plan.pipeline=2 plan.shard=2"),
    "replicate": (BASE, "4", ""),
    "shard": (BASE, "4", ""),
    "hybrid": (SAMPLES, "4", ""),
    "capacity": (SAMPLES, "512", "plan.hybrid=4"),
    "offload_capacity": (SAMPLES, "1024", "plan.hybrid=4 plan.capacity=512"),
    "hybrid_attention": (SAMPLES, "ulysses", "plan.hybrid=4"),
    "pipeline": (BASE, "2", ""),
    "context_ring": (BASE, "2", ""),
    "context_ulysses": (BASE, "2", ""),
    "tensor": (BASE, "2", ""),
    "expert": (EXPERTS.removesuffix("4"), "2", ""),
    "expert_policy": (EXPERTS, "hecate", ""),
    "expert_slots": (EXPERTS, "3", "plan.expert_policy=hecate"),
    "expert_keep": (EXPERTS, "true", "plan.expert_policy=hecate"),
    "expert_load_window": (EXPERTS, "7", "plan.expert_policy=hecate"),
    "expert_placement": (EXPERTS, "balanced", ""),
    "expert_placement_every": (EXPERTS, "30", "plan.expert_placement=balanced"),
    "expert_exchange": (EXPERTS, "peer", ""),
    "expert_receive_bound": (EXPERTS, "3", "plan.expert_exchange=peer"),
    "schedule": (BASE, "zb_h1", "plan.pipeline=2"),
    "stages": (BASE, "[[0-0],[1-3]]", "plan.pipeline=2 plan.schedule=1f1b"),
    "micro_batch": (BASE, "2", ""),
    "reshard": (BASE, "true", "plan.shard=4"),
    "gradients": (BASE, "whole", "plan.shard=4 plan.micro_batch=1"),
    "recompute": (BASE, "full", ""),
    "offload": (BASE, "optimizer", ""),
    "layers": (BASE, "[{range: 0-1, recompute: full}, {range: 2-3}]", ""),
    "compute": (BASE, "fp32", ""),
    "linear": (BASE, "fp8_rowwise", ""),
    "gather": (BASE, "compute", "plan.linear=fp8_tensorwise"),
    "reduce": (BASE, "bf16", ""),
    "reduce_replicas": (BASE, "bf16", "plan.replicate=2"),
    "moments": (BASE, "bf16", "plan.offload=optimizer"),
    "offload_fraction": (BASE, "0.5", "plan.offload=optimizer"),
    "offload_staging": (BASE, "0.5", "plan.offload=optimizer"),
    "accumulation": (BASE, "bf16", "plan.shard=4 plan.micro_batch=1 plan.gradients=shard"),
    "gather_transport": (BASE, "nccl", "plan.shard=4"),
    "tensor_transport": (BASE, "nccl", "plan.tensor=2"),
    "mlp_tile": (BASE, "64", "plan.recompute=full"),
    "compile": (BASE, "false", ""),
}
"""By key: a question whose answer without the pin has another value, the pin, and what it needs beside."""


def test_every_key_has_a_question() -> None:
    assert {field.name for field in fields(PlanKeys)} == set(PINNED) | FILE_ONLY


@pytest.mark.parametrize("key", PINNED)
def test_a_pinned_key_is_in_the_plan(key: str) -> None:
    """A key that the search does not read would leave the plan as it is without the pin."""
    question, value, beside = PINNED[key]
    words = [*question.split(), *beside.split()]

    def found(*pins: str) -> object:
        plan = search(load_run(None, [*words, *pins]), trainable=False).best.plan
        return to_plain(keys_of(plan))[key]

    pinned = load_run(None, [*words, f"plan.{key}={value}"])
    assert isinstance(pinned.plan, PlanKeys)
    assert found(f"plan.{key}={value}") == to_plain(pinned.plan)[key] != found()
