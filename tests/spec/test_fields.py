"""Spec objects are equal after conversion to JSON and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.spec.fields import Bound, describe_type, field_docs, from_plain, hints_of, to_plain, to_sealed_json
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision, Predicted
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import Assignment, Lease, RunSpec

PLAN = Plan(
    mesh=(MeshAxis(axis="replicate", size=2, crosses="node"), MeshAxis(axis="shard", size=4)),
    batch=BatchPlan(global_batch=16, micro_batch=1, accumulate=2),
    layers=(LayerStrategy(range="0-3", reshard=False), LayerStrategy(range="4-7", recompute="full")),
    precision=Precision(compute="fp32"),
    predicted=Predicted(memory_peak_bytes=10**10, memory_bytes={"weights": 10**9}),
    why=("one", "two"),
)
PINS = PlanKeys(shard=2, reshard=False, layers=(LayerStrategy(range="all", recompute="selective"),))
LEASE = Lease(run_id="5f2c", epoch=3, host="node0", boot_id="b", pid=7, process_start=99)
RUN = load_run(
    None, ["plan.shard=2", "cluster.gpus_per_node=2", "model=llama3-8b", "observe.wandb=p", "data.mix={a: 1, b: 0.5}"]
)


@pytest.mark.parametrize(
    "value",
    [
        PLAN,
        PINS,
        RUN,
        RUN.train,
        RUN.data,
        RopeScaling(factor=4.0),
        *(from_plain(ModelSpec, p) for p in MODEL_PRESETS.values()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_to_plain_and_back(value: Any) -> None:
    plain = to_plain(value)
    assert from_plain(type(value), json.loads(json.dumps(plain))) == value
    assert type(from_plain(type(value), plain)) is type(value)


def test_an_assignment_is_read_as_it_was_written(tmp_path: Any) -> None:
    assignment = Assignment(run=RUN, plan=PLAN, folder="runs/x", lease=LEASE)
    (tmp_path / "assignment.json").write_text(to_sealed_json(assignment))
    assert Assignment.read(tmp_path / "assignment.json") == assignment


def test_what_a_plan_answers() -> None:
    assert (PLAN.ranks, PLAN.axis_size("shard"), PLAN.axis_size("replicate")) == (8, 4, 2)
    assert [PLAN.strategy(layer, 8).recompute for layer in (0, 3, 4, 7)] == ["none", "none", "full", "full"]


def test_an_integer_becomes_the_number_a_field_asks_for() -> None:
    run = from_plain(RunSpec, {**to_plain(RUN), "data": {"mix": {"a": 1}}})
    assert isinstance(run.data.mix["a"], float)


def test_a_key_the_class_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="no field 'widht'"):
        from_plain(BatchPlan, {"global_batch": 1, "micro_batch": 1, "accumulate": 1, "widht": 2})


@dataclass(frozen=True)
class Sample:
    """A class."""

    size: Annotated[int, Bound(at_least=1, at_most=9)]
    """Its size,
    over two lines."""
    letter: Literal["a", "b"] | None = None
    """Its letter."""


def test_docs_and_types_in_words() -> None:
    assert field_docs(Sample) == {"size": "Its size,\nover two lines.", "letter": "Its letter."}
    assert describe_type(hints_of(Sample)["size"]) == "integer (≥ 1, ≤ 9)"
    assert describe_type(dict[str, float]) == "mapping of text to number"
    assert describe_type(tuple[int, ...]) == "list of integer"
