"""Token exchange by kernels, in Triton's interpreter: emulated ranks in one process, against a plain reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.emulated_ranks import EmulatedRanks, check_exchanges, drawn_loads
from tests.kernels.test_fp8_products import numbers

from meshwright.spec.errors import BadInput

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
NAMES = ["uneven", "one expert", "even", "one rank"]


def test_rows_arrive_and_return_with_the_same_bits() -> None:
    check_exchanges([drawn_loads("uneven", 2, 4, 5)], "cpu", 5, 24, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "experts"), [(8, 16), (3, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exchanges_follow_each_other_in_the_same_windows(ranks: int, experts: int, dtype: torch.dtype) -> None:
    check_exchanges([drawn_loads(name, ranks, experts, 9) for name in NAMES], "cpu", 9, 40, dtype)


@pytest.mark.slow
def test_rows_beyond_the_bound_are_an_error() -> None:
    loads, rows = drawn_loads("one expert", 2, 4, 6), [torch.ones(6, 8), torch.ones(6, 8)]
    emulated = EmulatedRanks(2, "cpu", 1.5)
    routes = emulated.route(loads.counts, rows)
    received = emulated.move(rows, routes, back=False)
    returned = emulated.move(received, routes, back=True)
    assert routes[1].offsets.tolist() == [0, 9] and bool((received[1] == 1).all()), "as many as fit"
    assert all(bool(own.isnan().all()) for own in returned)
    for exchange in emulated.exchanges:
        with pytest.raises(BadInput, match=r"plan\.receive_bound = 1\.5"):
            exchange.start_route(loads.counts[0], rows[0])


@pytest.mark.slow
def test_rows_in_fp8_keep_their_scales() -> None:
    """The interpreter cuts off where a GPU rounds to nearest, an error below 2⁻³ instead of 2⁻⁴, and has no subnormal numbers."""
    loads, rows = drawn_loads("uneven", 2, 4, 7), [numbers(rank, 7, 48).bfloat16() for rank in range(2)]
    emulated = EmulatedRanks(2, "cpu", 2.0, fp8=True)
    received = emulated.move(rows, emulated.route(loads.counts, rows), back=False)
    for rank in range(2):
        exact = loads.received(rows, rank).double()
        largest = exact.abs().amax(1, keepdim=True)
        errors = (received[rank][: len(exact)].double() - exact).abs()
        assert bool((errors <= exact.abs() * 2**-3 + largest * 2**-13).all())
