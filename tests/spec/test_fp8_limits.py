"""Features and sizes that matrix products in fp8 support."""

from __future__ import annotations

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.fields import from_plain
from meshwright.spec.fp8_limits import fp8_conflict, supports_fp8
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, Linear, MeshAxis, Plan, Precision

LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])


def on(tensor: int, linear: Linear, *layers: Linear | None) -> Plan:
    return Plan(
        mesh=(MeshAxis(axis="tensor", size=tensor),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        layers=tuple(LayerStrategy(range=str(number), linear=kind) for number, kind in enumerate(layers or (None,))),
        precision=Precision(linear=linear),
    )


@pytest.mark.parametrize(
    ("plan", "experts", "expected_text"),
    [
        (on(1, "fp8_tensorwise"), False, None),
        (on(2, "fp8_tensorwise"), False, "tensor ranks"),
        (on(1, "fp8_rowwise"), True, "a mixture of experts"),
        (on(2, "fp8_rowwise"), True, "tensor ranks and a mixture of experts"),
        (on(2, "compute"), True, None),
        (on(2, "compute", None, "fp8_rowwise"), False, "tensor ranks"),
        (on(2, "fp8_tensorwise", "compute", "compute"), False, None),
    ],
)
def test_tensor_ranks_and_experts_are_not_trained_beside_it(
    plan: Plan, experts: bool, expected_text: str | None
) -> None:
    assert fp8_conflict(plan, experts=experts) == expected_text


def test_every_side_of_a_product_is_a_multiple_of_16() -> None:
    assert supports_fp8(LLAMA, 8192) and supports_fp8(LLAMA, 8192, 8)
    assert not supports_fp8(LLAMA, 8200) and not supports_fp8(LLAMA, 128, 16)
