"""Pairs of features that the equality tests combine, and pairs that are refused before a run starts.

A `Feature` recognises itself in a plan and adds itself to a plan. A new feature is an entry in `FEATURES` (or `ORDERS`), and its equality
tests an entry in `compared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any, get_args

from tests.distributed import (
    test_async_tensor,
    test_context,
    test_copy_engine,
    test_deepseek,
    test_drawn,
    test_equality,
    test_experts,
    test_fp8,
    test_host_optimizer,
    test_offload,
    test_pairs,
    test_schedules,
    test_tensor,
    test_zero,
)
from tests.distributed.drawn import draw_case
from tests.docs.pages import text_of

from meshwright.planner.candidate import untrainable
from meshwright.spec.layout import stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import (
    AxisName,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Offload,
    Plan,
    ScheduleName,
    SchedulePlan,
)

PAGE = "docs/reference/features.md"
Tested = tuple[Plan, ModelSpec]
"""A plan that a test compares with one device, and the model of that test."""


@dataclass(frozen=True)
class Feature:
    """Recognises a feature in a plan, and adds it to a plan."""

    in_plan: Callable[[Plan, ModelSpec], bool]
    add: Callable[[Plan], Plan] = lambda plan: plan


def axis(name: AxisName) -> Feature:
    def add(plan: Plan) -> Plan:
        return replace(plan, mesh=(*plan.mesh, MeshAxis(axis=name, size=2)))

    return Feature(lambda plan, spec: plan.axis_size(name) > 1, add)


def add_expert_ranks(plan: Plan) -> Plan:
    return replace(
        plan, mesh=(*plan.mesh, MeshAxis(axis="shard", size=2)), experts=ExpertPlan(expert=2, expert_shard=1)
    )


def strategy(**fields: Any) -> Feature:
    """Returns the feature of a layer whose strategy has these values."""

    def in_plan(plan: Plan, spec: ModelSpec) -> bool:
        return any(all(getattr(layer, key) == value for key, value in fields.items()) for layer in plan.layers)

    return Feature(in_plan, lambda plan: replace(plan, layers=tuple(replace(layer, **fields) for layer in plan.layers)))


def host_offload(content: Offload) -> Feature:
    """Returns the feature of `content` in host memory, alone or with the other content."""

    def extend(layer: LayerStrategy) -> LayerStrategy:
        return replace(layer, offload=content if layer.offload in ("none", content) else "both")

    return Feature(
        lambda plan, spec: any(layer.offload in (content, "both") for layer in plan.layers),
        lambda plan: replace(plan, layers=tuple(map(extend, plan.layers))),
    )


def precision(**fields: Any) -> Feature:
    def in_plan(plan: Plan, spec: ModelSpec) -> bool:
        return all(getattr(plan.precision, key) == value for key, value in fields.items())

    return Feature(in_plan, lambda plan: replace(plan, precision=replace(plan.precision, **fields)))


def uneven(plan: Plan, spec: ModelSpec) -> bool:
    sizes = {len(stage) for row in stage_table(plan.schedule, plan.axis_size("pipeline"), spec.layers) for stage in row}
    return len(sizes) > 1


def schedule(name: ScheduleName) -> Feature:
    def add(plan: Plan) -> Plan:
        return replace(axis("pipeline").add(plan), schedule=SchedulePlan(name=name))

    return Feature(lambda plan, spec: plan.axis_size("pipeline") > 1 and plan.schedule.name == name, add)


FEATURES: dict[str, Feature] = {
    "shard (FSDP)": axis("shard"),
    "replicate (HSDP)": axis("replicate"),
    "tensor": axis("tensor"),
    "context ring": axis("context_ring"),
    "Ulysses": axis("context_ulysses"),
    "MoE layer": Feature(
        lambda plan, spec: spec.experts > 0, lambda plan: replace(plan, experts=ExpertPlan(expert=1, expert_shard=1))
    ),
    "expert parallelism": Feature(
        lambda plan, spec: plan.experts is not None and plan.experts.expert > 1, add_expert_ranks
    ),
    "`reshard: false`": strategy(reshard=False),
    "`gradients: whole`": strategy(gradients="whole"),
    "`recompute: selective`": strategy(recompute="selective"),
    "`recompute: all_but_attention`": strategy(recompute="all_but_attention"),
    "`recompute: full`": strategy(recompute="full"),
    "`gather_transport: copy_engine`": Feature(
        lambda plan, spec: plan.gather_transport == "copy_engine",
        lambda plan: replace(plan, gather_transport="copy_engine"),
    ),
    "`tensor_transport: copy_engine`": Feature(
        lambda plan, spec: plan.tensor_transport == "copy_engine",
        lambda plan: replace(axis("tensor").add(plan), tensor_transport="copy_engine"),
    ),
    "`offload: activations`": host_offload("activations"),
    "`offload: optimizer`": host_offload("optimizer"),
    "`linear: fp8_tensorwise`": Feature(
        lambda plan, spec: plan.precision.linear != "compute", precision(linear="fp8_tensorwise").add
    ),
    "`gather: fp8`": precision(linear="fp8_tensorwise", gather="fp8"),
    "`reduce_replicas: bf16`": precision(reduce_replicas="bf16"),
    "`compile`": Feature(lambda plan, spec: plan.compile, lambda plan: replace(plan, compile=True)),
    "tied embedding": Feature(lambda plan, spec: spec.tied),
    "uneven stages": Feature(uneven),
}
ORDERS: dict[str, Feature] = {
    "depth-first without pipeline": Feature(
        lambda plan, spec: plan.axis_size("pipeline") == 1 and not (plan.layered or plan.paired)
    ),
    "layered accumulation without pipeline": Feature(
        lambda plan, spec: plan.axis_size("pipeline") == 1 and plan.layered,
        lambda plan: replace(plan, schedule=SchedulePlan(name="breadth_first")),
    ),
    "paired micro-batches": Feature(
        lambda plan, spec: plan.paired,
        lambda plan: replace(add_expert_ranks(plan), schedule=SchedulePlan(name="paired")),
    ),
    **{f"`{name}` pipeline": schedule(name) for name in get_args(ScheduleName) if name != "paired"},
}
NOTHING = {
    ("uneven stages", "depth-first without pipeline"),
    ("uneven stages", "layered accumulation without pipeline"),
    ("uneven stages", "paired micro-batches"),
    ("MoE layer", "expert parallelism"),
    ("`linear: fp8_tensorwise`", "`gather: fp8`"),
    *combinations(("`recompute: selective`", "`recompute: all_but_attention`", "`recompute: full`"), 2),
}
"""Pairs that have no combination."""


def compared(*, slow: bool = True) -> Iterator[Tested]:
    """Yields every plan whose results a test compares with those of a reference run.

    The reference is one device, one rank in fp8, or the plan without offload (bit for bit). Without `slow` only the
    plans of the tests of `make test`.
    """
    given_to = partial(parametrized, slow=slow)
    for given in given_to(test_equality.test_float64_equals_one_device):
        yield test_equality.PLANS[given["name"]], given["spec"]
    for given in given_to(test_equality.test_sums_over_replicas_in_bf16_round_and_are_the_same_on_all):
        yield test_equality.with_bf16_sums(test_equality.WIDE[given["shard"]]), test_equality.LLAMA
    deep = {False: test_schedules.DEEP, True: test_schedules.DEEP_TIED}
    for test, tied in (
        (test_schedules.test_one_stage, None),
        (test_schedules.test_two_ranks, False),
        (test_schedules.test_four_ranks, False),
        (test_schedules.test_four_ranks_tied, True),
        (test_schedules.test_eight_ranks, True),
        (test_schedules.test_compiled, False),
        (test_pairs.test_little_device_memory, True),
        (test_pairs.test_compiled, True),
        (test_tensor.test_up_to_four_ranks, None),
        (test_tensor.test_eight_ranks, None),
        (test_tensor.test_compiled, None),
        (test_context.test_up_to_four_ranks, None),
        (test_context.test_eight_ranks, None),
        (test_context.test_compiled, None),
        (test_offload.test_float64_equals_one_device, None),
        (test_offload.test_compiled, None),
        (test_host_optimizer.test_float64_equals_one_device, None),
        (test_experts.test_experts_on_ranks_of_their_own_equal_one_device, None),
    ):
        for given in given_to(test):
            yield given["case"].plan, given["spec"] if "spec" in given else deep[given.get("tied", tied)]
    for given in given_to(test_experts.test_float64_equals_one_device):
        yield given["case"].plan, test_experts.of_case(given["case"])
    for given in given_to(test_copy_engine.test_float64_equals_one_device):
        spec, chosen = test_copy_engine.CASES[given["name"]]
        yield test_copy_engine.with_copy_engine(chosen), spec
    yield test_copy_engine.with_copy_engine(test_copy_engine.IN_FP8), test_equality.LLAMA
    for given in given_to(test_async_tensor.test_float64_equals_one_device):
        yield test_async_tensor.with_copied_tokens(given["case"].plan), given["spec"]
    for given in given_to(test_zero.test_over_shards):
        yield test_zero.by_range(test_zero.OVER_SHARDS, given["stages"]), deep[False]
    for given in given_to(test_zero.test_beside_other_axes):
        yield test_zero.by_range(given["case"], given["stages"]), deep[True]
    for given in given_to(test_fp8.test_layouts_agree):
        gather = "fp8" if given["linear"] == "fp8_tensorwise" else "compute"
        yield test_fp8.with_fp8(test_fp8.LAYOUTS[given["name"]], given["linear"], gather), test_equality.LLAMA
    for given in given_to(test_fp8.test_mixtures_gather_in_fp8):
        yield test_fp8.with_fp8(given["case"].plan), test_fp8.MOE
    for given in given_to(test_fp8.test_schedules_agree_also_where_the_backward_is_split):
        yield test_fp8.with_fp8(given["case"].plan), deep[False]
    for given in given_to(test_offload.test_fp8_comes_back_bit_for_bit):
        yield test_fp8.with_fp8(replace(given["case"], offload="activations").plan), deep[False]
    for given in given_to(test_host_optimizer.test_same_bits_as_without):
        spec, chosen = test_host_optimizer.BITS[given["name"]]
        yield chosen, spec
    for test, usual in (
        (test_drawn.test_float64_equals_one_device, {"precision": test_drawn.FLOAT64}),
        (test_drawn.test_compiled, {"precision": test_drawn.FLOAT64, "compile": True}),
        (test_drawn.test_fp8_equals_one_rank, {"precision": test_drawn.LOW}),
        (test_drawn.test_sums_over_replicas_in_bf16_round_and_nothing_else, {}),
    ):
        for given in given_to(test):
            spec, chosen, _ = draw_case(**usual, **given)
            yield chosen, spec

    for given in given_to(test_drawn.test_layers_of_several_kinds_equal_one_device):
        spec, chosen, _ = draw_case(given["seed"], test_drawn.FLOAT64, of=test_drawn.OF_KINDS[given["model"]])
        yield chosen, spec
    for given in given_to(test_drawn.test_families_equal_one_device):
        spec, chosen, _ = draw_case(given["seed"], test_drawn.FLOAT64, of=test_drawn.FAMILIES[given["family"]])
        yield chosen, spec
    for given in given_to(test_deepseek.test_random_plans_equal_one_device):
        spec, chosen, _ = test_deepseek.case_of(given["seed"])
        yield chosen, spec


def parametrized(test: Callable[..., None], *, slow: bool) -> Iterator[dict[str, Any]]:
    """Yields the arguments of a test function; without `slow` not those of cases marked slow."""
    marked = getattr(test, "pytestmark", [])
    marks = [mark for mark in marked if mark.name == "parametrize"]
    for values in product(*(mark.args[1] for mark in marks)):
        inside = (mark for value in values for mark in getattr(value, "marks", ()))
        if not slow and any(mark.name == "slow" for mark in (*marked, *inside)):
            continue
        given: dict[str, Any] = {}
        for mark, value in zip(marks, values, strict=True):
            names = (
                [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            )
            inner = getattr(value, "values", value)  # of a pytest.param
            given |= dict(zip(names, inner if len(names) > 1 or inner is not value else (value,), strict=True))
        yield given


BASE = Plan(
    mesh=(), batch=BatchPlan(global_batch=8, micro_batch=1, accumulate=8), layers=(LayerStrategy(),), compile=False
)
"""A plan on one rank, not compiled, to which features are added."""


def refused(first: str, second: str) -> bool:
    """Whether a plan with both features is refused before a run starts."""
    plan = BASE
    for name in sorted((first, second), key=lambda name: name not in ORDERS):
        plan = (ORDERS | FEATURES)[name].add(plan)
    return untrainable(plan) is not None


def expected() -> list[dict[str, str]]:
    """Returns the table: features with exceptions and their exceptions, then one entry for all features without any."""
    plans, entries, without_exception = list(compared()), [], []
    for name, feature in (ORDERS | FEATURES).items():
        with_feature = [plan for plan in plans if feature.in_plan(*plan)]
        exceptions: dict[str, list[str]] = {"refused with": [], "no combination with": [], "untested with": []}
        for other_name, other in (FEATURES if name in ORDERS else ORDERS | FEATURES).items():
            if name == other_name:
                continue
            if (other_name, name) in NOTHING or (name, other_name) in NOTHING:
                exceptions["no combination with"].append(other_name)
            elif not any(other.in_plan(*plan) for plan in with_feature):
                exceptions["refused with" if refused(name, other_name) else "untested with"].append(other_name)
        if any(exceptions.values()):
            entries.append(
                {"feature": name, **{column: ", ".join(names) or "–" for column, names in exceptions.items()}}
            )
        else:
            without_exception.append(name)
    return [*entries, {"feature": ", ".join(without_exception), **dict.fromkeys(exceptions, "–")}]


def lines() -> list[str]:
    """Returns the lines of the table, without columns that are empty."""
    entries = expected()
    head = [column for column in entries[0] if any(entry[column] != "–" for entry in entries)]
    cells = [[entry[column] for column in head] for entry in entries]
    return [f"| {' | '.join(entry)} |" for entry in [head, ["---"] * len(head), *cells]]


def page() -> str:
    """The text of the page, with new lines in place of its first table."""
    old = text_of(PAGE).splitlines()
    start = next(index for index, line in enumerate(old) if line.startswith("| feature | refused"))
    end = next(index for index in range(start, len(old)) if not old[index].startswith("|"))
    return "\n".join([*old[:start], *lines(), *old[end:], ""])
