"""The tables of docs/parallelism/executor.md: what goes together is what the equality tests try, what is refused is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, get_args

import pytest
from tests.distributed import test_equality, test_experts, test_pairs, test_schedules, test_tensor
from tests.docs.pages import codes, table

from meshwright.launch.prepare import training_plan
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import stage_table
from meshwright.spec.load import load_run
from meshwright.spec.plan import Plan, ScheduleName

PAGE = "docs/parallelism/executor.md"
DEEP = test_schedules.DEEP.layers
Tested = tuple[Plan, bool]
"""A plan that is compared with one device, and whether the model's ends are tied."""


def uneven(plan: Plan) -> bool:
    sizes = {len(stage) for row in stage_table(plan.schedule, plan.axis_size("pipeline"), DEEP) for stage in row}
    return len(sizes) > 1


COLUMNS: dict[str, Callable[[Plan, bool], bool]] = {
    "shards": lambda plan, tied: plan.axis_size("shard") > 1,
    "replicas": lambda plan, tied: plan.axis_size("replicate") > 1,
    "tensor": lambda plan, tied: plan.axis_size("tensor") > 1,
    "expert": lambda plan, tied: plan.experts is not None and plan.experts.expert > 1,
    "weights kept": lambda plan, tied: any(not layer.reshard for layer in plan.layers),
    "gradients whole": lambda plan, tied: any(layer.gradients == "whole" for layer in plan.layers),
    "recompute": lambda plan, tied: any(layer.recompute != "none" for layer in plan.layers),
    "compile": lambda plan, tied: plan.compile,
    "tied ends": lambda plan, tied: tied,
    "uneven stages": lambda plan, tied: uneven(plan),
}
ORDERS: dict[str, Callable[[Plan, bool], bool]] = {
    "no pipeline, one after another": lambda plan, tied: plan.axis_size("pipeline") == 1 and not plan.layered,
    "no pipeline, layered": lambda plan, tied: plan.axis_size("pipeline") == 1 and plan.layered,
    **{
        f"pipeline, `{name}`": (
            lambda plan, tied, name=name: plan.axis_size("pipeline") > 1 and plan.schedule.name == name
        )
        for name in get_args(ScheduleName)
    },
}


def parametrized(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments a test function is run with."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    for values in product(*(map(_plain, mark.args[1]) for mark in marks)):
        given: dict[str, Any] = {}
        for mark, value in zip(marks, values, strict=True):
            names = mark.args[0]
            given |= {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
        yield given


def _plain(value: Any) -> Any:
    """An argument without the marks of `pytest.param`."""
    if not hasattr(value, "marks"):
        return value
    return value.values if len(value.values) > 1 else value.values[0]


def compared() -> list[Tested]:
    """Every plan that is compared with one device."""
    found = [
        (test_equality.PLANS[given["name"]], given["spec"].tied)
        for given in parametrized(test_equality.test_float64_equals_one_device)
    ]
    for test, tied in (
        (test_schedules.test_one_stage, None),
        (test_schedules.test_two_ranks, False),
        (test_schedules.test_four_ranks, False),
        (test_schedules.test_four_ranks_tied, True),
        (test_schedules.test_eight_ranks, True),
        (test_schedules.test_compiled, False),
        (test_pairs.test_crowded, True),
        (test_pairs.test_compiled, True),
        (test_tensor.test_up_to_four_ranks, None),
        (test_tensor.test_eight_ranks, None),
        (test_tensor.test_compiled, None),
        (test_experts.test_experts_on_ranks_of_their_own_equal_one_device, None),
    ):
        for given in parametrized(test):
            ends = given["spec"].tied if "spec" in given else given.get("tied", tied)
            found.append((given["case"].plan, ends))
    return found


def expected() -> list[dict[str, str]]:
    everything, rows = compared(), []
    for row, belongs in (ORDERS | COLUMNS).items():
        mine = [one for one in everything if belongs(*one)]
        cells = {"with": row}
        for column, has in COLUMNS.items():
            alone = row == column or (column == "uneven stages" and row.startswith("no pipeline"))
            cells[column] = "–" if alone else "tested" if any(has(*one) for one in mine) else "allowed"
        rows.append(cells)
    return rows


def test_what_goes_together_is_what_the_equality_tests_try() -> None:
    rows = expected()
    text = "\n".join(f"| {' | '.join(row.values())} |" for row in rows)
    assert table(PAGE, "with") == rows, f"{PAGE} should say\n{text}"


@pytest.mark.parametrize("row", table(PAGE, "asked"), ids=lambda row: codes(row["asked"])[0])
def test_what_is_refused_is_refused_before_the_start(row: dict[str, str]) -> None:
    base = [
        "model=llama-nano",
        "model.layers=8",
        "model.vocab_size=512",
        "train.steps=100",
        "train.global_batch=8",
        "cluster.gpu=cpu",
        "cluster.gpus_per_node=2",
    ]
    training_plan(load_run(None, [*base, "plan.pipeline=2"]))
    with pytest.raises(BadInput):
        training_plan(load_run(None, [*base, *codes(row["asked"])[0].split()]))
