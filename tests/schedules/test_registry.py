import pytest

from meshwright.schedules.registry import SCHEDULES, build
from meshwright.spec.errors import BadInput
from tests.schedules.sizes import PIPELINES


def test_the_schedules_of_this_release():
    assert list(SCHEDULES) == ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "breadth_first", "paired"]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (("zvb", 2, 4), "unknown schedule 'zvb'; expected one of gpipe, 1f1b, .*; nearest: zbv"),
        (("gpipe", 0, 4), "schedule gpipe: pipeline ranks must be at least 1, got 0; nearest: 1"),
        (("gpipe", 2, 0), "schedule gpipe: micro-batches must be at least 1, got 0; nearest: 1"),
        (("1f1b", 2, 4, 2), "schedule 1f1b has exactly 1 stages per rank, got 2; nearest: 1"),
        (("zbv", 2, 4, 3), "schedule zbv has exactly 2 stages per rank, got 3; nearest: 2"),
        (("interleaved", 2, 4, 1), "schedule interleaved has at least 2 stages per rank, got 1; nearest: 2"),
        (("paired", 2, 4), "paired runs on one pipeline rank, got 2; nearest: 1$"),
        (("paired", 1, 5), "paired needs an even number of micro-batches, got 5; nearest: 6$"),
    ],
)
def test_unsupported_sizes_are_refused_with_the_nearest_supported(sizes, reason):
    with pytest.raises(BadInput, match=reason):
        build(*sizes)


def test_default_is_the_fewest_stages_per_rank():
    assert {name: build(name, 2, 4).stages // 2 for name in PIPELINES} == {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved": 2,
        "zb_h1": 1,
        "zbv": 2,
        "breadth_first": 1,
    }


def test_a_schedule_knows_its_name_and_sizes():
    for name in PIPELINES:
        schedule = build(name, 2, 4)
        assert (schedule.name, schedule.ranks, schedule.micro_batches) == (name, 2, 4)
