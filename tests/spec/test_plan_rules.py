"""What this release cannot train, from whole plans; `tests/config/test_plan_rules.py` breaks every rule through both forms of a file."""

from __future__ import annotations

import pytest

from meshwright.spec.plan import BatchPlan, LayerStrategy, Linear, MeshAxis, Plan, Precision
from meshwright.spec.plan_rules import untrained


def on(tensor: int, linear: Linear, *layers: Linear | None) -> Plan:
    return Plan(
        mesh=(MeshAxis(axis="tensor", size=tensor),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        layers=tuple(LayerStrategy(range=str(number), linear=kind) for number, kind in enumerate(layers or (None,))),
        precision=Precision(linear=linear),
    )


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        (on(1, "fp8_tensorwise"), False),
        (on(2, "fp8_tensorwise"), True),
        (on(2, "compute"), False),
        (on(2, "compute", None, "fp8_rowwise"), True),
        (on(2, "fp8_tensorwise", "compute", "compute"), False),
    ],
)
def test_fp8_is_not_trained_beside_tensor_ranks(plan: Plan, refused: bool) -> None:
    assert untrained(plan) == untrained(plan, "linear") == ["matmuls in fp8 with tensor ranks"] * refused
