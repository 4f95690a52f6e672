"""The choice of partner hosts for all mesh shapes of up to six hosts."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from meshwright.policies.partner_host import (
    OUTSIDE_AXES,
    PartnerHosts,
    choose_partner_hosts,
    choose_replicas,
    partner_sentence,
)
from meshwright.spec.layout import Layout

AXES = ("pipeline", "replicate", "shard", "tensor")


def shapes() -> list[Layout]:
    """Every mesh of up to 24 ranks whose axes have 1 to 4 ranks, in three orders, on up to six equal hosts."""
    layouts = []
    for order in list(permutations(AXES))[::8]:
        for sizes in product((1, 2, 3, 4), repeat=len(AXES)):
            layout = Layout(tuple(zip(order, sizes, strict=True)), 1)
            if layout.ranks <= 24:
                hosts = [count for count in range(1, 7) if layout.ranks % count == 0]
                layouts += [Layout(layout.axes, layout.ranks // count) for count in hosts]
    return layouts


def inside(layout: Layout, rank: int, host: int) -> bool:
    """Whether a host has a rank of a rank's tensor or pipeline group."""
    return any(layout.node(other) == host for axis in OUTSIDE_AXES for other in layout.group(axis, rank))


def test_every_host_keeps_the_copies_of_one_other_host_outside_of_its_groups_where_a_ring_allows_it() -> None:
    seen = 0
    for layout in shapes():
        hosts = layout.ranks // layout.ranks_per_node
        partners = choose_partner_hosts(layout)
        if hosts == 1:
            assert partners is None
            continue
        assert partners is not None
        pairs = {(layout.node(rank), partners.host_of(rank)) for rank in range(layout.ranks)}
        assert len(pairs) == hosts, "all ranks of a host have one partner host"
        assert {host for host, _ in pairs} == {partner for _, partner in pairs} == set(range(hosts))
        assert all(host != partner for host, partner in pairs)
        by_shift = [
            sum(inside(layout, rank, (layout.node(rank) + shift) % hosts) for rank in range(layout.ranks))
            for shift in range(1, hosts)
        ]
        assert partners.inside == by_shift[partners.shift - 1] == min(by_shift)
        assert partners.shift == 1 + by_shift.index(min(by_shift))
        seen += 1
    assert seen > 1000


@pytest.mark.parametrize(
    ("axes", "ranks_per_host", "expected"),
    [
        ([("shard", 16)], 8, (1, 0)),  # no tensor or pipeline groups: the next host
        ([("pipeline", 2), ("shard", 16)], 8, (1, 0)),  # stages of two hosts each: the partner is in the same stage
        ([("shard", 2), ("pipeline", 2), ("tensor", 8)], 8, (2, 0)),  # a pipeline of two hosts: the next pipeline
        ([("pipeline", 4), ("tensor", 8)], 8, (1, 32)),  # one pipeline over all hosts: no host is outside
        ([("tensor", 16)], 8, (1, 16)),
    ],
)
def test_examples(axes: list[tuple[str, int]], ranks_per_host: int, expected: tuple[int, int]) -> None:
    partners = choose_partner_hosts(Layout(tuple(axes), ranks_per_host))
    assert partners is not None and (partners.shift, partners.inside) == expected
    assert ("as no other host is better" in partner_sentence(partners)) == (partners.inside > 0)


def test_each_rank_keeps_the_part_of_one_replica_on_another_host_where_one_distance_allows_it() -> None:
    chosen = 0
    for layout in shapes():
        groups = [layout.group("replicate", rank) for rank in range(layout.ranks)]

        def outside(shift: int, groups: list[tuple[int, ...]] = groups, layout: Layout = layout) -> bool:
            """Whether the replica `shift` further along the axis is on another host, for all ranks."""
            return all(
                layout.node(group[(group.index(rank) + shift) % len(group)]) != layout.node(rank)
                for rank, group in enumerate(groups)
            )

        replicas = choose_replicas(layout)
        assert (replicas is not None) == any(outside(shift) for shift in range(1, layout.size("replicate")))
        if replicas is not None:
            assert sorted(replicas) == list(range(layout.ranks)), "each rank's part is kept once"
            assert all(replicas[rank] in group for rank, group in enumerate(groups))
            assert all(layout.node(other) != layout.node(rank) for rank, other in enumerate(replicas))
            chosen += 1
    assert chosen > 300


@pytest.mark.parametrize(
    ("axes", "ranks_per_host", "expected"),
    [
        ([("replicate", 2), ("shard", 2)], 2, (2, 3, 0, 1)),
        ([("replicate", 4)], 2, (2, 3, 0, 1)),  # the next replica is on the same host
        ([("replicate", 2), ("shard", 2)], 4, None),
        ([("shard", 4)], 2, None),
    ],
)
def test_examples_of_replicas(
    axes: list[tuple[str, int]], ranks_per_host: int, expected: tuple[int, ...] | None
) -> None:
    assert choose_replicas(Layout(tuple(axes), ranks_per_host)) == expected


def test_a_thousand_hosts_take_no_time() -> None:
    layout = Layout((("pipeline", 16), ("replicate", 8), ("shard", 8), ("tensor", 8)), 8)
    assert choose_partner_hosts(layout) == PartnerHosts(1024, 8, 1, 0)
