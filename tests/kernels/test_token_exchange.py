"""Token exchange by kernels, in Triton's interpreter: emulated ranks in one process, against a plain reference."""

from __future__ import annotations

import pytest
import torch

from meshwright.spec.errors import BadInput
from tests.kernels.emulated_ranks import EmulatedRanks, check_exchanges, drawn_loads
from tests.kernels.test_fp8_matmuls import numbers

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
    offsets, routes = emulated.route(loads.counts, rows)
    received = emulated.move(rows, routes, back=False)
    returned = emulated.move(received, routes, back=True)
    assert offsets[1].tolist() == [0, 9] and bool((received[1] == 1).all()), "as many as fit"
    assert all(bool(own.isnan().all()) for own in returned)
    for exchange in emulated.exchanges:
        with pytest.raises(BadInput, match=r"plan\.expert_receive_bound = 1\.5"):
            exchange.start_route(loads.counts[0], rows[0])


def test_rows_are_rounded_with_their_scales() -> None:
    """All but the rounding, which the interpreter gets wrong: it rounds to fp32 here, so that scales undo each other."""
    from meshwright.kernels.token_exchange_triton import read_rows, write_rows

    rows, out = numbers(0, 3, 40).bfloat16(), torch.empty(3, 40, dtype=torch.bfloat16)
    scales, window = torch.empty(4), torch.empty(4, 40)
    targets = torch.tensor([2, 0, 3 + (1 << 32)])
    peers = torch.tensor([window.data_ptr(), window.data_ptr() - 2 * 4 * 40])
    totals = torch.tensor([3, 3, 0], dtype=torch.int32)
    # The second rank's lines start two before those of the first: its line 3 is line 1 here.
    offset = scales.data_ptr() - window.data_ptr()
    write_rows(rows[:2], targets, totals[:1] * 0 + 2, peers, 0, offset, torch.float32)
    write_rows(rows[2:], targets[2:], totals[:1] * 0 + 1, peers, 0, offset + 2 * 4 * 40 - 2 * 4, torch.float32)
    read_rows(window, out, totals, False, scales)
    assert torch.equal(out, rows[[1, 2, 0]])
    assert bool((window.abs().amax(1)[:3] <= 448).all()) and bool((window.abs().amax(1)[:3] > 224).all())
