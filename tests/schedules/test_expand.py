"""`expand` cuts stages into FSDP units: same compute and transfers, with gathers and reductions as often as requested."""

from collections import Counter

import pytest

from meshwright.schedules.action import COMPUTE, parse_all
from meshwright.schedules.activation_residency import peak_in_flight
from meshwright.schedules.expand import expand
from meshwright.schedules.looping import forward_only
from meshwright.schedules.registry import SCHEDULES, build
from meshwright.schedules.validity import check
from tests.schedules.sizes import PIPELINES, sizes

GATHERS, REDUCTIONS = ("never", "step", "stretch"), ("never", "once", "stretch")


def collective_counts_of(schedule):
    """Number of gathers and reductions of each unit: {(op, stage, unit): count}."""
    counted_ops = ("unshard", "reduce_grad")
    return Counter(
        (action.op, action.stage, action.unit)
        for rank_actions in schedule.actions
        for action in rank_actions
        if action.op in counted_ops
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("order", ["depth_first", "layered"])
def test_every_expansion_can_run(name, order):
    for index, (ranks, batches, stages) in enumerate(sizes(name, range(1, 5), range(1, 9))):
        gather, reduce = GATHERS[index % 3], REDUCTIONS[index // 3 % 3]
        units = [1 + (stage + index) % 3 for stage in range(ranks * stages)]
        schedule = build(name, ranks, batches, stages)
        cut = expand(schedule, units, order=order, gather=gather, reduce=reduce)
        check(cut)
        assert peak_in_flight(cut) == peak_in_flight(schedule)


@pytest.mark.parametrize("name", PIPELINES)
def test_transfers_keep_their_order(name):
    for ranks, batches, stages in sizes(name, range(2, 5), range(4, 9)):
        schedule = build(name, ranks, batches, stages)
        for order in ("depth_first", "layered"):
            for before, after in zip(schedule.actions, expand(schedule, 2, order=order).actions, strict=True):
                for op in ("send", "recv"):
                    assert [action for action in before if action.op == op] == [
                        action for action in after if action.op == op
                    ]


@pytest.mark.parametrize("batches", [1, 2, 7])
def test_layered_accumulation_gathers_each_unit_once_per_direction(batches):
    """The backward of the last unit follows its forward, so it needs one gather only (arXiv 2106.02679)."""
    cut = expand(build("breadth_first", 1, batches), 4, order="layered")
    assert [collective_counts_of(cut)["unshard", 0, unit] for unit in range(4)] == [2, 2, 2, 1]
    assert [collective_counts_of(cut)["reduce_grad", 0, unit] for unit in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_modular_pipeline_gathers_each_layer_once_per_direction(ranks):
    cut = expand(build("breadth_first", ranks, 5, 3), 1, reduce="stretch")
    last = {3 * ranks - 1 - rank for rank in range(ranks)}
    assert {stage for stage in range(3 * ranks) if collective_counts_of(cut)["unshard", stage, 0] == 1} == last
    assert all(collective_counts_of(cut)["unshard", stage, 0] == 2 for stage in set(range(3 * ranks)) - last)
    assert all(collective_counts_of(cut)["reduce_grad", stage, 0] == 1 for stage in range(3 * ranks))


@pytest.mark.parametrize("batches", [1, 3])
def test_depth_first_accumulation_gathers_each_unit_for_each_micro_batch(batches):
    cut = expand(build("1f1b", 1, batches), 3, gather="stretch", reduce="stretch")
    # The last unit's backward follows its forward, and the first unit's next forward follows its backward: no new gather.
    assert collective_counts_of(cut)["unshard", 0, 1] == 2 * batches
    assert collective_counts_of(cut)["unshard", 0, 2] == batches
    assert collective_counts_of(cut)["unshard", 0, 0] == batches + 1
    assert all(collective_counts_of(cut)["reduce_grad", 0, unit] == batches for unit in range(3))


def test_kept_parameters_are_gathered_once_and_gradients_reduced_once():
    cut = expand(build("1f1b", 2, 6), [2, 3], gather="step", reduce="once")
    assert set(collective_counts_of(cut).values()) == {1}
    assert len(collective_counts_of(cut)) == 2 * 5


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_collectives_at_the_ends_do_not_depend_on_the_number_of_micro_batches(batches):
    (actions,) = expand(build("1f1b", 1, batches), 3, gather="start", reduce="end").actions
    collectives = [(action.op, action.unit) for action in actions if action.op in ("unshard", "reduce_grad")]
    assert collectives == [("unshard", 0), ("unshard", 1), ("unshard", 2)] + [
        ("reduce_grad", unit) for unit in (2, 1, 0)
    ]
    computes = [index for index, action in enumerate(actions) if action.op in COMPUTE]
    assert all(action.op == "unshard" for action in actions[: computes[0]])
    assert not any(action.op in ("unshard", "reduce_grad") for action in actions[computes[0] : computes[-1]])


def test_gathering_may_differ_by_unit():
    cut = expand(build("1f1b", 1, 2), 3, gather=[["never", "step", "stretch"]], reduce="never")
    assert collective_counts_of(cut) == {("unshard", 0, 1): 1, ("unshard", 0, 2): 2}


@pytest.mark.parametrize("name", SCHEDULES)
def test_at_most_two_units_are_gathered_at_once(name):
    for ranks, batches, stages in sizes(name, range(1, 4), range(1, 7)):
        for order in ("depth_first", "layered"):
            for rank_actions in expand(build(name, ranks, batches, stages), 3, order=order).actions:
                gathered_units = peak = 0
                for action in rank_actions:
                    gathered_units += (action.op == "unshard") - (action.op == "reshard")
                    peak = max(peak, gathered_units)
                assert peak <= 2


@pytest.mark.parametrize("name", PIPELINES)
def test_gathers_are_issued_one_unit_ahead(name):
    """Another unit computes between a gather and the first use of its unit, except at the start of the step."""
    for rank_actions in expand(build(name, 2, 4), 3).actions:
        first_compute = next(index for index, action in enumerate(rank_actions) if action.op in COMPUTE)
        for index, action in enumerate(rank_actions[first_compute:], first_compute):
            if action.op == "unshard":
                following = next(a for a in rank_actions[index:] if a.op in COMPUTE)
                assert (action.stage, action.unit) not in [(part.stage, part.unit) for part in following.parts]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "1f1b",
            {"gather": "step"},
            "U0/0 U0/1 F0.0/0 F0.0/1 B0.0/1 B0.0/0 F0.1/0 F0.1/1 B0.1/1 D0/1 G0/1 B0.1/0 D0/0 G0/0 N O",
        ),
        (
            "1f1b",
            {"gather": "never", "reduce": "stretch"},
            "F0.0/0 F0.0/1 B0.0/1 G0/1 B0.0/0 G0/0 F0.1/0 F0.1/1 B0.1/1 G0/1 B0.1/0 G0/0 N O",
        ),
        (
            "breadth_first",
            {"order": "layered"},
            "U0/0 U0/1 F0.0/0 F0.1/0 D0/0 U0/0 F0.0/1 F0.1/1 B0.0/1 B0.1/1 D0/1 G0/1 B0.0/0 B0.1/0 D0/0 G0/0 N O",
        ),
        (
            "paired",
            {"reduce": "stretch"},
            "U0/0 U0/1 F0.0/0&F0.1/0 D0/0 U0/0 F0.0/1&F0.1/1 B0.0/1&B0.1/1 D0/1 G0/1 B0.0/0&B0.1/0 D0/0 G0/0 N O",
        ),
    ],
)
def test_one_rank_two_units_two_micro_batches(name, options, expected):
    assert expand(build(name, 1, 2), 2, **options).actions == (parse_all(expected),)


def test_sends_go_before_collectives():
    cut = expand(build("zb_h1", 2, 1), 1)
    assert str(cut).splitlines()[1] == "1: U1/0 RA1.0<0 F1.0/0 I1.0/0 SG1.0>0 D1/0 W1.0/0 G1/0 N O"


def test_expand_cuts_a_forward_only_schedule():
    cut = expand(forward_only(build("zbv", 2, 2).placement, 3), 2, order="layered", reduce="never")
    check(cut)
    assert set(collective_counts_of(cut).values()) == {1}
