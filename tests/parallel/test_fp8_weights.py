"""Layers that multiply in fp8, and devices that are refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from meshwright.kernels.linear import Linear
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts
from meshwright.parallel import fp8_weights as fp8
from meshwright.parallel.fp8_weights import use_fp8_matmuls
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import LayerStrategy, Plan, Precision
from tests.parallel.test_apply import SPEC, plan

LOW = replace(plan("none"), precision=Precision(linear="fp8_tensorwise"))
CPU = torch.device("cpu")


def scalings(tested_plan: Plan) -> dict[str, str | None]:
    with torch.device("meta"):
        model = Decoder(SPEC)
    use_fp8_matmuls(model, tested_plan, CPU)
    return {name: module.scaling for name, module in model.named_modules() if isinstance(module, Linear)}


def test_linear_layers_of_blocks_and_nothing_else() -> None:
    names = [
        f"layers.{layer}.{name}"
        for layer in range(2)
        for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    ]
    assert scalings(LOW) == dict.fromkeys(names, "tensorwise")
    assert set(scalings(plan("none")).values()) == {None}
    mixed = replace(
        LOW, layers=(LayerStrategy(range="0", linear="compute"), LayerStrategy(range="1", linear="fp8_rowwise"))
    )
    assert {name[:8]: scaling for name, scaling in scalings(mixed).items()} == {"layers.0": None, "layers.1": "rowwise"}


def test_of_a_moe_all_but_the_router() -> None:
    spec = replace(SPEC, family="mixtral", experts=4, experts_per_token=2, expert_hidden=16, shared_expert_hidden=16)
    with torch.device("meta"):
        model = Decoder(spec)
    use_fp8_matmuls(
        model, replace(LOW, layers=(LayerStrategy(range="0"), LayerStrategy(range="1", linear="compute"))), CPU
    )
    scaled = {name for name, module in model.named_modules() if isinstance(module, Linear) and module.scaling}
    names = ("attention.qkv", "attention.out", "moe.shared.gate_up", "moe.shared.down")
    assert scaled == {f"layers.0.{name}" for name in names}
    assert [module.fp8 for module in model.modules() if isinstance(module, Experts)] == [True, False]


def test_a_gpu_without_grouped_matmuls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(fp8, "find_miscompiled_kernel", lambda device: None)
    spec = replace(SPEC, family="mixtral", experts=4, experts_per_token=2, expert_hidden=16)
    with torch.device("meta"):
        dense, moe = Decoder(SPEC), Decoder(spec)
    use_fp8_matmuls(dense, LOW, torch.device("cuda", 0))
    with pytest.raises(BadInput, match="no grouped fp8 matmuls for experts on NVIDIA B200: expected Hopper"):
        use_fp8_matmuls(moe, LOW, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "capability", "wrong", "message"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), None, "NVIDIA A100-SXM4-80GB has no fp8 matmuls.*compute capability 8.9"),
        ("NVIDIA H200", (9, 0), None, None),
        (
            "NVIDIA H200",
            (9, 0),
            "fp8_swiglu",
            "fp8_swiglu gives wrong bytes as /mine assembles it; expected TRITON_PTXAS",
        ),
    ],
)
def test_a_gpu_that_would_compute_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], wrong: str | None, message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fp8, "find_miscompiled_kernel", lambda device: wrong)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine")
    with torch.device("meta"):
        model = Decoder(SPEC)
    use_fp8_matmuls(model, plan("none"), torch.device("cuda", 0))
    with nullcontext() if message is None else pytest.raises(BadInput, match=message):
        use_fp8_matmuls(model, LOW, torch.device("cuda", 0))


def test_a_frozen_weight_is_stored_as_each_step_would_round_it() -> None:
    """Output and input gradient are the same bits, whatever number of rows is read at a time."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).bfloat16()
    x, grad = (torch.randn(2, 8, width, generator=generator).bfloat16() for width in (32, 48))

    def answers(linear: Linear) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = linear(leaf)
        y.backward(grad)
        assert leaf.grad is not None and linear.weight.grad is None
        return y, leaf.grad

    rounded, stored = Linear(32, 48, bias=False), Linear(32, 48, bias=False)
    rounded.weight = torch.nn.Parameter(weight, requires_grad=False)
    stored.weight = torch.nn.Parameter(torch.empty_like(weight, dtype=torch.float8_e4m3fn), requires_grad=False)
    for linear in (rounded, stored):
        linear.scaling = "tensorwise"
    for elements in (1 << 26, 100):
        with patch.object(fp8, "READ_ELEMENTS", elements):
            fp8.StoredFp8("weight", stored).fill(lambda start, stop: weight[start:stop])
        for ours, expected in zip(answers(stored), answers(rounded), strict=True):
            assert torch.equal(ours, expected)
