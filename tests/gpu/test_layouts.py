"""On GPUs every layout of a small run gives the same losses; each case is one `meshwright train` with its own ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, needs, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

CASES = {
    "shard 2": (2, ["plan.shard=2", "plan.reshard=true"]),
    "shard 2, weights kept gathered, accumulate 2": (2, ["plan.shard=2", "plan.reshard=false", "plan.micro_batch=2"]),
    "shard 2, unsharded gradients, accumulate 4": (2, ["plan.shard=2", "plan.gradients=whole", "plan.micro_batch=1"]),
    "shard 2, breadth-first, accumulate 4": (2, ["plan.shard=2", "plan.schedule=breadth_first", "plan.micro_batch=1"]),
    "tensor 2, accumulate 4, recompute full": (2, ["plan.tensor=2", "plan.micro_batch=2", "plan.recompute=full"]),
    "accumulate 4": (1, ["plan.micro_batch=2"]),
    "shard 4": (4, ["plan.shard=4"]),
    "replicate 2 x shard 2": (4, ["plan.replicate=2", "plan.micro_batch=1"]),
    "pipeline 2, one micro-batch": (2, ["plan.pipeline=2", "plan.schedule=1f1b", "plan.micro_batch=8"]),
    "pipeline 2, one micro-batch, split backward": (
        2,
        ["plan.pipeline=2", "plan.schedule=zb_h1", "plan.micro_batch=8"],
    ),
    "pipeline 2": (2, ["plan.pipeline=2", "plan.schedule=1f1b", "plan.micro_batch=2"]),
    "tensor 2": (2, ["plan.tensor=2"]),
    "tensor 2, several sequences, not compiled": (2, ["plan.tensor=2", "plan.micro_batch=4", "plan.compile=false"]),
    "tensor 2 x shard 2, recompute selective": (4, ["plan.tensor=2", "plan.shard=2", "plan.recompute=selective"]),
    "tensor 2 x pipeline 2": (4, ["plan.tensor=2", "plan.pipeline=2", "plan.schedule=1f1b", "plan.micro_batch=1"]),
    "tensor 8, two ranks a key/value head": (8, ["plan.tensor=8"]),
    "context ring 2": (2, ["plan.context_ring=2"]),
    "context ring 2, several sequences, not compiled": (
        2,
        ["plan.context_ring=2", "plan.micro_batch=4", "plan.compile=false"],
    ),
    "context ring 2, recompute selective": (2, ["plan.context_ring=2", "plan.recompute=selective"]),
    "ulysses 2": (2, ["plan.context_ulysses=2"]),
    "ulysses 2, recompute full, not compiled": (
        2,
        ["plan.context_ulysses=2", "plan.recompute=full", "plan.compile=false"],
    ),
    "ulysses 2, recompute all_but_attention": (2, ["plan.context_ulysses=2", "plan.recompute=all_but_attention"]),
    "ring 2 x ulysses 2": (4, ["plan.context_ring=2", "plan.context_ulysses=2"]),
    "ring 2 x tensor 2": (4, ["plan.context_ring=2", "plan.tensor=2"]),
    "ulysses 8, two ranks a key/value head": (8, ["plan.context_ulysses=8"]),
    "recompute full": (1, ["plan.recompute=full"]),
    "recompute selective": (1, ["plan.recompute=selective"]),
    "recompute all_but_attention": (1, ["plan.recompute=all_but_attention"]),
    "not compiled": (1, ["plan.compile=false"]),
}


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return figures(trained(tmp_path_factory.mktemp("one"), LLAMA, "one", 1))


@pytest.mark.parametrize("name", CASES)
def test_layouts_agree(name: str, one_gpu: list[float], tmp_path: Path) -> None:
    gpus, overrides = CASES[name]
    needs(gpus)
    assert figures(trained(tmp_path, LLAMA, "run", gpus, overrides)) == pytest.approx(one_gpu, rel=LAYOUT_BOUND)


def test_stages_in_a_v_agree_with_one_gpu(tmp_path: Path) -> None:
    """Both ranks send to each other at the same time; the schedule decides the order."""
    needs(2)
    common = ["model.layers=4", "plan.micro_batch=1"]
    one_gpu = figures(trained(tmp_path, LLAMA, "alone", 1, common))
    in_a_v = figures(trained(tmp_path, LLAMA, "v", 2, [*common, "plan.pipeline=2", "plan.schedule=zbv"]))
    assert in_a_v == pytest.approx(one_gpu, rel=LAYOUT_BOUND)


def losses_with_masks(folder: Path, name: str, gpus: int, *overrides: str) -> list[float]:
    return figures(trained(folder, LLAMA, name, gpus, ["data.document_mask=true", *overrides]))


def test_document_masks_agree_with_the_plain_kernels(tmp_path: Path) -> None:
    """Flex attention over packed documents against the dense mask of fp32 on the CPU, and across layouts."""
    on_gpu = losses_with_masks(tmp_path, "gpu", 1)
    assert on_gpu == pytest.approx(losses_with_masks(tmp_path, "cpu", 1, "cluster.gpu=cpu"), rel=1e-2)
    if torch.cuda.device_count() >= 2:
        for axis in ("shard", "context_ring", "context_ulysses"):
            assert losses_with_masks(tmp_path, axis, 2, f"plan.{axis}=2") == pytest.approx(on_gpu, rel=LAYOUT_BOUND), (
                axis
            )
