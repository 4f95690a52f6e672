"""Adapters beside frozen weights on every axis equal one device: loss, gradient norm, gradients and weights of the adapters.

The oracle is that of test_equality: a plain decoder with the same adapters and torch's own AdamW. A starts random and B from zero, so the
second step is the first with gradients of A.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.models.convert import export_adapter, export_checkpoint, merge_adapter
from meshwright.checkpoint.models.single_device import load_model
from meshwright.config.load import load_resolved
from meshwright.data.loader import open_data
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec
from meshwright.training.evaluate import HeldOut, evaluate_plain
from tests.adapted import adapter_of
from tests.distributed import test_hybrid as hybrid
from tests.distributed.pool import CaseFailed, Pool
from tests.distributed.test_equality import GPT, LLAMA, compare, one_device, sharded
from tests.distributed.test_experts import SHARED
from tests.distributed.test_schedules import STEPS, Case, named
from tests.distributed.test_training import merge_tensors, same_bits, tiny, trained
from tests.slow import quick_first
from tests.training.tiny import prepared, ranks, staged

__all__ = ["tiny"]

DENSE = adapter_of(replace(LLAMA, layers=4), rank=3, alpha=6.0)
SOME = adapter_of(LLAMA, rank=4, alpha=16.0, targets=("q_proj", "v_proj", "down_proj"), kind="rslora")
"""Not every part of a fused layer has an adapter."""
FUSED = adapter_of(replace(GPT, heads=4, kv_heads=4), rank=2, alpha=2.0)
"""One adapter for queries, keys and values, biases, and a tied head."""
ROWS = adapter_of(LLAMA, rank=3, kind="dora")
BESIDE_EXPERTS = adapter_of(SHARED, rank=2)
"""Frozen routed experts; attention, dense layers and the shared expert have adapters."""
OF_EXPERTS = adapter_of(SHARED, rank=8, experts=True)
CASES = [
    (SOME, Case("1f1b", micro=4)),
    (DENSE, Case("1f1b", shard=2, micro=2, recompute="selective")),
    (SOME, Case("1f1b", tensor=2, shard=2, micro=2)),
    (DENSE, Case("zbv", pipeline=2, micro=4)),
    (ROWS, Case("1f1b", shard=2, micro=2)),
]
WIDER = [
    (FUSED, Case("1f1b", tensor=2, pipeline=2, micro=4)),
    (FUSED, Case("breadth_first", shard=2, replicate=2, recompute="full")),
    (DENSE, Case("1f1b", tensor=4, micro=4, recompute="full")),
    (DENSE, Case("1f1b", shard=4, micro=2, gradients="whole", reshard=False)),
    (DENSE, Case("zb_h1", pipeline=2, shard=2)),
    (DENSE, Case("1f1b", ring=2, micro=4)),
    (SOME, Case("1f1b", ulysses=2, shard=2, micro=2, recompute="all_but_attention")),
    (DENSE, Case("1f1b", micro=4, offload="optimizer")),
    (DENSE, Case("1f1b", shard=2, micro=4, offload="activations")),
    (DENSE, Case("1f1b", shard=2, micro=4, compile=True, recompute="selective")),
    (FUSED, Case("1f1b", tensor=2, micro=4, compile=True)),
    (ROWS, Case("1f1b", micro=4, compile=True)),
    (BESIDE_EXPERTS, Case("1f1b", shard=2, expert=2, micro=2, recompute="selective")),
    (BESIDE_EXPERTS, Case("zbv", pipeline=2, ulysses=2, expert=2)),
    (OF_EXPERTS, Case("1f1b", shard=2, expert=2, micro=2, recompute="selective")),
    (OF_EXPERTS, Case("1f1b", shard=4, expert=2, micro=2)),
    (OF_EXPERTS, Case("1f1b", shard=2, micro=2, recompute="full")),
    (OF_EXPERTS, Case("1f1b", tensor=2, shard=2, expert=2, micro=2)),
]


@pytest.mark.parametrize(
    ("spec", "case"), [*CASES, *(pytest.param(*row, marks=pytest.mark.slow) for row in WIDER)], ids=named
)
def test_float64_equals_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    results = pool.run(sharded, case.plan.ranks, spec, case.plan, 1.0, STEPS)
    compare(results, one_device(spec)[:STEPS], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [hybrid.Case(3, recompute="selective"), hybrid.Case(4, tensor=2, exchange=0.0), hybrid.Case(2, pipeline=2)]
)
def test_samples_that_ranks_divide(pool: Pool, case: hybrid.Case) -> None:
    hybrid.check(pool, adapter_of(hybrid.WIDE, rank=3), case, range(2))


ADAPTER = "model.adapter={rank: 2, targets: [q_proj, v_proj, down_proj]}"
TENSOR = [*ranks(1), "cluster.gpus_per_node=2", "plan.tensor=2"]
PLANS = {
    "fsdp": ranks(2),
    "pipeline, bf16": [*staged(2, "zbv"), "plan.compute=bf16"],
    "tensor": TENSOR,
    "fp8": [*ranks(1), "plan.compute=bf16", "plan.linear=fp8_tensorwise"],
    "fp8, pipeline": [*staged(2, "1f1b"), "plan.compute=bf16", "plan.linear=fp8_tensorwise"],
    "fp8, fsdp": [*ranks(2), "plan.compute=bf16", "plan.linear=fp8_rowwise"],
}


@pytest.mark.parametrize("name", quick_first(1, PLANS))
def test_a_run_with_adapters_resumes_bit_for_bit(pool: Pool, tiny: Path, tmp_path: Path, name: str) -> None:
    """Checkpoints have the adapters alone; the base comes from `model.init` again, here the weights of the run's seed."""
    options = [ADAPTER, *PLANS[name]]
    whole = trained(pool, tiny, tmp_path / "whole", *options)
    first = trained(pool, tiny, tmp_path / "parts", *options, stop_at=3)
    second = trained(pool, tiny, tmp_path / "parts", *options)
    assert {result.began for result in second} == {3}
    assert first[0].losses + second[0].losses == whole[0].losses
    tensors = merge_tensors(whole)
    assert same_bits(merge_tensors(second), tensors)
    assert tensors and all(".adapter." in key for key in tensors)


def test_merged_exported_and_continued(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """A run whose base is a folder: validation equals that of the merged model; other ranks continue it, another base is refused."""
    trained(pool, tiny, tmp_path, *ranks(1), "name=full")
    base = tmp_path / "base"
    export_checkpoint(tmp_path / "full", base, dtype="fp32")
    options = [ADAPTER, f"model.init=hf:{base}", "train.learning_rate=0.05"]
    seen = trained(pool, tiny, tmp_path, *options, *ranks(2), stop_at=3)
    seen = trained(pool, tiny, tmp_path, *options, *ranks(1))
    assert seen[0].began == 3
    run = load_resolved(tmp_path / "tiny" / "config.yaml")
    measured = seen[0].validations[-1][1].loss
    data = open_data(
        run.data, seq_len=run.train.seq_len, seed=run.seed, vocab_size=run.model.vocab_size, split="validation"
    )
    held_out = HeldOut.of(data, run.data.validation_tokens, run.train.global_batch_tokens)

    def loss_of(folder: Path, adapter: Path | None = None) -> float:
        model = load_model(folder, torch.device("cpu"), torch.float32, adapter=adapter)
        return evaluate_plain(model, held_out, micro_batch=8, device=torch.device("cpu"), loss=None).loss

    assert abs(loss_of(base) - measured) > 1e-3, "six steps must change the model"
    export_checkpoint(tmp_path / "tiny", tmp_path / "merged", dtype="fp32")
    export_adapter(tmp_path / "tiny", tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged-again", dtype="fp32")
    losses = [
        loss_of(tmp_path / "tiny"),
        loss_of(tmp_path / "merged"),
        loss_of(tmp_path / "merged-again"),
        loss_of(base, tmp_path / "adapter"),
        loss_of(base, tmp_path / "tiny"),
    ]
    assert losses == pytest.approx([measured] * 5, rel=1e-5)
    assert "adapters (lora) of rank 2" in (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    # The same path with other weights: resume and inference refuse it.
    shutil.rmtree(base)
    trained(pool, tiny, tmp_path, *ranks(1), "name=other", "seed=5", "train.steps=3")
    export_checkpoint(tmp_path / "other", base, dtype="fp32")
    with pytest.raises(BadInput, match="was trained beside the weights with digest"):
        loss_of(tmp_path / "tiny")
    with pytest.raises(CaseFailed, match="give the base that it was trained with"):
        trained(pool, tiny, tmp_path, *options, *ranks(1), "train.steps=8")
    # Other data would go on from these adapters: without a step the model is the same, from a run and from peft's files.
    shutil.rmtree(base)
    export_checkpoint(tmp_path / "full", base, dtype="fp32")
    for number, (start, plan) in enumerate([("tiny", ranks(2)), ("adapter", TENSOR)]):
        begun = ADAPTER.replace("}", f", init: {tmp_path / start}}}")
        still = [begun, f"model.init=hf:{base}", "train.learning_rate=1e-12", "train.steps=3", f"name=begun-{number}"]
        seen = trained(pool, tiny, tmp_path, *still, *plan)
        assert seen[0].validations[-1][1].loss == pytest.approx(measured, rel=1e-5)
    for words, change in {
        "model.adapter.rank 4: expected 2, the rank in": {"rank: 2": "rank: 4"},
        "model.adapter.alpha 8: expected 32 with kind lora": {"rank: 2": "rank: 2, alpha: 8"},
        "model.adapter.kind dora: .* has no lengths of rows": {"rank: 2": "rank: 2, kind: dora"},
        "model.adapter.targets: .* has no adapter of layers.0.attention.qkv.weight, rows 16": {
            "q_proj": "q_proj, k_proj"
        },
        "model.adapter.targets: expected also layers.0.mlp.down": {", down_proj": ""},
        "model.adapter.init: .*full has no adapters": {"tiny}": "full}"},
    }.items():
        wrong = ADAPTER.replace("}", f", init: {tmp_path / 'tiny'}}}")
        for old, new in change.items():
            wrong = wrong.replace(old, new)
        with pytest.raises(BadInput, match=words):
            prepared(tiny, tmp_path, wrong, f"model.init=hf:{base}", *ranks(1), "name=refused")
    assert run.model.adapter is not None and list(run.model.adapter.targets) == [
        "attention.qkv.q",
        "attention.qkv.v",
        "mlp.down",
    ]
