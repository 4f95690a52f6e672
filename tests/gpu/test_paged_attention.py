"""GPU: the compiled kernels of the paged cache against the plain references, with the sizes of models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.kernels import paged_attention as paged
from meshwright.kernels.rope import rotary_tables

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    (torch.bfloat16, 32, 8, 128, 64, None),
    (torch.bfloat16, 32, 8, 128, 16, None),
    (torch.bfloat16, 32, 8, 128, 32, 100),
    (torch.bfloat16, 14, 2, 64, 64, 300),
    (torch.bfloat16, 16, 16, 96, 64, 100),
    (torch.bfloat16, 8, 1, 256, 64, None),
    (torch.float16, 32, 8, 128, 64, None),
    (torch.float32, 14, 2, 64, 64, 100),
]
"""(dtype, heads, kv_heads, head_dim, tokens of a block, window): each compiles its own kernels."""
LENGTHS = [1000, 1, 64, 0, 129, 2048, 77]


class Step:
    """A layer's cache, NaN in all places that a sequence does not use, and the tensors of a step."""

    def __init__(
        self,
        lengths: list[int],
        counts: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        block: int,
        dtype: torch.dtype,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        draw = torch.Generator("cuda").manual_seed(seed)
        needed = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(needed) + 1, generator=draw, device="cuda", dtype=torch.int32)
        self.tables = torch.full((len(lengths), max(needed)), -(2**30), dtype=torch.int32, device="cuda")
        self.layer = torch.full((len(order), 3, 2, kv_heads, block, dim), torch.nan, dtype=dtype, device="cuda")[:, 1]
        used = 0
        for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.tables[sequence, : needed[sequence]] = order[used : used + needed[sequence]]
            used += needed[sequence]
            position = torch.arange(length, device="cuda")
            slots = self.tables[sequence, position // block].long() * block + position % block
            k, v = torch.randn(2, length, kv_heads, dim, generator=draw, device="cuda").to(dtype)
            paged.write_cache(k, v, self.layer, slots)
            if window is not None:
                self.tables[sequence, : max(0, length - count - window + 1) // block] = -(2**30)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        self.q = torch.randn(sum(counts), heads, dim, generator=draw, device="cuda").to(dtype)
        self.window = window

    def attention(self, **options) -> Tensor:
        step = (self.layer, self.tables, self.lengths, self.starts)
        return paged.paged_attention(self.q, *step, window=self.window, **options)

    def exact(self) -> Tensor:
        """The plain reference in fp64 on the same numbers."""
        step = (self.layer.double(), self.tables, self.lengths, self.starts)
        return paged.paged_attention(self.q.double(), *step, window=self.window, reference=True)

    def agrees(self, out: Tensor) -> None:
        exact = self.exact()
        bound = max(torch.finfo(out.dtype).eps, 1e-5) * float(exact.abs().max())
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim", "block", "window"), CASES)
def test_decode(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block: int, window: int | None) -> None:
    step = Step(LENGTHS, [1] * len(LENGTHS), heads, kv_heads, dim, block, dtype, window)
    step.agrees(step.attention(decodes=len(LENGTHS)))
    step.agrees(step.attention(decodes=len(LENGTHS), invariant=True))


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim", "block", "window"), CASES)
def test_decodes_and_chunks(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block: int, window: int | None
) -> None:
    """A step of two decodes of 3 queries and chunks at the begin, in the middle and at the end of prompts."""
    step = Step(
        [700, 65, 500, 1000, 3, 128, 77], [3, 3, 500, 321, 1, 64, 77], heads, kv_heads, dim, block, dtype, window
    )
    step.agrees(step.attention(decodes=2, decode_queries=3))
    step.agrees(step.attention())


def test_one_graph_for_all_lengths() -> None:
    """A captured decode replays for other lengths, without a copy to the host."""
    step = Step(LENGTHS, [1] * len(LENGTHS), 32, 8, 128, 64, torch.bfloat16)
    step.attention(decodes=len(LENGTHS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attention(decodes=len(LENGTHS))
    for lengths in (LENGTHS, [5, 1, 10, 0, 100, 1500, 64], [0] * len(LENGTHS)):
        step.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        if any(lengths):
            step.agrees(out)
        else:
            assert not out.any(), "padding gives zeros"


def test_invariant_bits() -> None:
    """A sequence alone, and as part of a batch, decoded and in chunks of other sizes."""
    many = [300 + 37 * index for index in range(40)]
    step = Step(many, [1] * len(many), 32, 8, 128, 64, torch.bfloat16)
    together = step.attention(decodes=len(many), invariant=True)
    for index in (0, 7, 39):
        part = slice(index, index + 1)
        tensors = (step.tables[part], step.lengths[part], step.starts[:2])
        alone = paged.paged_attention(step.q[part], step.layer, *tensors, decodes=1, invariant=True)
        assert torch.equal(alone, together[part])
    step = Step([900, 70], [900, 70], 32, 8, 128, 64, torch.bfloat16)
    whole = step.attention(invariant=True)[:900]
    for chunk in (1, 100, 333, 512):
        for begin in range(0, 900, 300):
            end = min(begin + chunk, 900)
            length = torch.tensor([end], dtype=torch.int32, device="cuda")
            starts = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
            tensors = (step.tables[:1], length, starts)
            part = paged.paged_attention(step.q[begin:end], step.layer, *tensors, invariant=True)
            assert torch.equal(part, whole[begin:end])


def test_no_copy_to_the_host() -> None:
    step = Step([700, 65, 500], [1, 1, 100], 32, 8, 128, 64, torch.bfloat16)
    step.attention(decodes=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.attention(decodes=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (12, 12, 96), (8, 1, 256)])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("neighbours", [False, True])
def test_rotation_and_write(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, share: float, neighbours: bool
) -> None:
    """The bits of the plain reference, which rotates a share of each head as the trainer does."""
    tokens, block = 300, 64
    draw = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=draw, device="cuda").to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    positions = torch.randint(0, 8192, (tokens,), generator=draw, device="cuda", dtype=torch.int32)
    slots = torch.randperm(400, generator=draw, device="cuda")[:tokens]
    slots[::7] = -1
    cos, sin = rotary_tables(torch.arange(8192, device="cuda"), int(dim * share) or dim, 5e5, None, dtype)
    tables = (cos[0, :, 0], sin[0, :, 0]) if share else None
    caches = torch.zeros(2, 7, 2, 2, kv_heads, block, dim, dtype=dtype, device="cuda")
    keys = torch.empty(2, tokens, kv_heads, dim, dtype=dtype, device="cuda")
    ours, expected = (
        paged.rotate_and_write(
            *(q, k, v, tables, positions, caches[index, :, 1], slots),
            rotated_keys=keys[index],
            neighbours=neighbours,
            reference=index == 1,
        )
        for index in (0, 1)
    )
    assert torch.equal(ours, expected) and torch.equal(keys[0], keys[1]) and torch.equal(caches[0], caches[1])
    paged.write_cache(k, v, caches[0, :, 0], slots)
    paged.write_cache(k, v, caches[1, :, 0], slots, reference=True)
    assert torch.equal(caches[0], caches[1]) and caches[:, :, 0].any()


def test_fp8_cache() -> None:
    """The stored bytes and the results of the plain reference."""
    draw = torch.Generator("cuda").manual_seed(0)
    k, v = 3 * torch.randn(2, 500, 8, 128, generator=draw, device="cuda").bfloat16()
    scales = torch.rand(2, 8, generator=draw, device="cuda") * 0.03 + 0.005
    layers = torch.zeros(2, 8, 2, 8, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    slots = torch.randperm(512, generator=draw, device="cuda")[:500]
    for index in (0, 1):
        paged.write_cache(k, v, layers[index], slots, scales=scales, reference=index == 1)
    assert torch.equal(layers[0].view(torch.uint8), layers[1].view(torch.uint8))
    q = torch.randn(300, 32, 128, generator=draw, device="cuda").bfloat16()
    tables = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([200, 250], [0, 100, 300]))
    step = (layers[0], tables, lengths, starts)
    exact = paged.paged_attention(q.float(), *step, scales=scales, reference=True)
    out = paged.paged_attention(q, *step, scales=scales)
    torch.testing.assert_close(out.float(), exact, rtol=0, atol=2**-7 * float(exact.abs().max()))
    step = (layers[0], tables, lengths, torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda"))
    exact = paged.paged_attention(q[:2].float(), *step, scales=scales, reference=True)
    out = paged.paged_attention(q[:2], *step, decodes=2, scales=scales)
    torch.testing.assert_close(out.float(), exact, rtol=0, atol=2**-7 * float(exact.abs().max()))
