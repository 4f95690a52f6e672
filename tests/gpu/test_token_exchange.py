"""Token exchange by kernels on one GPU: emulated ranks against a plain reference, two processes against messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.distributed.cases_token_exchange import by_kernels_and_messages
from tests.distributed.pool import Pool
from tests.kernels.emulated_ranks import EmulatedRanks, check_exchanges, drawn_loads

from meshwright.kernels.fp8_matmuls import quantize
from meshwright.spec.errors import BadInput

pytestmark = pytest.mark.gpu
NAMES = ["uneven", "one expert", "even", "one rank"]


@pytest.mark.parametrize(
    ("ranks", "experts", "row_count", "width", "dtype"),
    [
        (8, 128, 4096, 2048, torch.bfloat16),
        (8, 64, 1000, 7168, torch.bfloat16),
        (8, 16, 37, 24, torch.bfloat16),
        (6, 30, 515, 520, torch.float32),
        (32, 256, 512, 1024, torch.bfloat16),
    ],
)
def test_rows_arrive_and_return_with_the_same_bits(
    ranks: int, experts: int, row_count: int, width: int, dtype: torch.dtype
) -> None:
    check_exchanges([drawn_loads(name, ranks, experts, row_count) for name in NAMES], "cuda", row_count, width, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_fp8_are_those_of_a_plain_quantization(name: str) -> None:
    ranks, rows, width = 8, 512, 1024
    loads, draw = drawn_loads(name, ranks, 32, rows), torch.Generator().manual_seed(0)
    sent = [torch.randn(rows, width, generator=draw).exp().cuda().bfloat16() for _ in range(ranks)]
    emulated = EmulatedRanks(ranks, "cuda", loads.bound, fp8=True)
    _, routes = emulated.route(loads.counts.cuda(), sent)
    received = emulated.move(sent, routes, back=False)
    returned = emulated.move(received, routes, back=True)
    rounded = []
    for own in sent:
        values, scale = quantize(own, "rowwise")
        rounded.append((values.float() * scale.view(-1, 1)).bfloat16())
        largest = own.abs().amax(1, keepdim=True).float()
        # Half a step of e4m3's three bits, and of its smallest numbers.
        assert bool(((rounded[-1] - own).abs().float() <= own.abs().float() * 2**-4 + largest * 2**-17).all())
    for rank in range(ranks):
        expected = loads.received(rounded, rank)
        assert torch.equal(received[rank][: len(expected)], expected)
        assert torch.equal(returned[rank], rounded[rank]), "the way back keeps bf16"


def test_rows_beyond_the_bound_are_an_error() -> None:
    ranks, rows = 8, 256
    loads = drawn_loads("one expert", ranks, 32, rows)
    sent = [torch.ones(rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(ranks)]
    emulated = EmulatedRanks(ranks, "cuda", 1.5)
    offsets, routes = emulated.route(loads.counts.cuda(), sent)
    received = emulated.move(sent, routes, back=False)
    returned = emulated.move(received, routes, back=True)
    assert offsets[-1].tolist() == [0, 0, 0, 384] and bool((received[-1] == 1).all()), "as many as fit"
    assert all(bool(own.isnan().all()) for own in returned)
    for exchange in emulated.exchanges:
        with pytest.raises(BadInput, match=r"plan\.expert_receive_bound = 1\.5"):
            exchange.start_route(loads.counts[0].cuda(), sent[0])


def test_the_host_reads_nothing_from_the_device() -> None:
    loads = drawn_loads("uneven", 8, 32, 128)
    counts, sent = loads.counts.cuda(), [torch.randn(128, 256, device="cuda").bfloat16() for _ in range(8)]
    emulated = EmulatedRanks(8, "cuda", 2.0)
    _, routes = emulated.route(counts, sent)  # opens the windows
    emulated.move(emulated.move(sent, routes, back=False), routes, back=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, routes = emulated.route(counts, sent)
        emulated.move(emulated.move(sent, routes, back=False), routes, back=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """New processes, which may share a GPU."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_and_gradients_of_two_processes_equal_those_by_messages(processes: Pool, compiled: bool) -> None:
    """Through the grouped matmuls in bf16: the same rows, but matmuls may be tiled otherwise among more rows."""
    for pairs in processes.run(by_kernels_and_messages, 2, None, 300, compiled):
        assert len(pairs) == 4 * 3 + 2
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7 * float(theirs.abs().max()))
