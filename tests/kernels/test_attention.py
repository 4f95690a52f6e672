"""Every way of computing attention against one written out as loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from meshwright.kernels.attention import attention, block_mask, make_mask
from meshwright.spec.blocks.attention import MASK_BLOCK
from meshwright.workload.model_shape import computed_span
from tests.slow import quick_first

CPU = torch.device("cpu")
SEQ = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 2 + [1] * 4 + [2] * 6])


def inputs(seq=SEQ, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, device="cpu"):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, seq, heads, head_dim), (2, seq, kv_heads, head_dim), (2, seq, kv_heads, head_dim)]
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def token_by_token(q, k, v, documents, window):
    """One query at a time, over a list of the keys it may see."""
    out = torch.zeros_like(q)
    queries_per_head = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            visible = [j for j in range(i + 1) if window is None or i - j < window]
            visible = [j for j in visible if documents is None or documents[b, i] == documents[b, j]]
            for h in range(q.shape[2]):
                scores = torch.stack([q[b, i, h] @ k[b, j, h // queries_per_head] for j in visible]) / math.sqrt(
                    q.shape[3]
                )
                out[b, i, h] = torch.softmax(scores, 0) @ torch.stack([v[b, j, h // queries_per_head] for j in visible])
    return out


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("documents", "window"), [(None, None), (DOCUMENTS, None), (None, 3), (DOCUMENTS, 4)])
def test_equals_a_loop_over_tokens(reference, kv_heads, documents, window):
    q, k, v = inputs(kv_heads=kv_heads)
    mask = make_mask(documents, window, SEQ, CPU, reference=reference)
    expected = token_by_token(q.detach(), k.detach(), v.detach(), documents, window)
    assert torch.allclose(attention(q, k, v, mask, reference=reference), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("documents", "window"), [(None, None), (DOCUMENTS, 4)])
def test_fast_and_plain_gradients_agree(documents, window):
    q, k, v = inputs()
    gradients = []
    for reference in (True, False):
        out = attention(q, k, v, make_mask(documents, window, SEQ, CPU, reference=reference), reference=reference)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for fast, reference in zip(*gradients, strict=True):
        assert torch.allclose(fast, reference, rtol=0, atol=1e-12)


def test_bfloat16_is_summed_wider():
    q, k, v = (t.detach().bfloat16() for t in inputs(seq=64))
    exact = attention(q.double(), k.double(), v.double(), reference=True)
    assert (attention(q, k, v, reference=True).double() - exact).abs().max() < 2**-8 * exact.abs().max()


def test_no_mask_when_causality_says_it_all():
    assert make_mask(None, None, 8, CPU) is None
    assert make_mask(None, 8, 8, CPU) is None
    assert make_mask(None, 7, 8, CPU) is not None


def documents_of(document_order, batch, seq):
    draw = torch.Generator().manual_seed(1)
    rising = torch.randint(0, 20, (batch, seq), generator=draw).eq(0).cumsum(1)
    return {"none": None, "rising": rising, "any order": torch.randint(0, 3, (batch, seq), generator=draw) // 2}[
        document_order
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("document_order", "window"),
    quick_first(
        2,
        [("rising", None), ("any order", 100), ("any order", None)]
        + [(order, window) for order in ("none", "rising") for window in (100, 1, 300)]
        + [("any order", 1), ("any order", 300)],
        unpack=True,
    ),
)
@pytest.mark.parametrize("seq", quick_first(1, [500, 128]))
def test_block_mask_gives_the_same_as_the_dense_one(document_order, window, seq):
    documents = documents_of(document_order, 2, seq)
    q, k, v = (t.detach().float() for t in inputs(seq=seq, head_dim=16))
    expected = attention(q, k, v, make_mask(documents, window, seq, CPU, reference=True), reference=True)
    blocks = block_mask(documents, window, seq, CPU)
    with torch.no_grad():
        actual = flex_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=blocks, enable_gqa=True
        )
    assert torch.allclose(actual.transpose(1, 2), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seq", [128, 500, 4096])
def test_keys_that_a_window_computes(seq):
    """The cost model counts the blocks that are in the mask."""
    assert computed_span(1024, 4096) == 1008
    for window in (1, 2, 128, 129, 130, 257, 300, 1024):
        if window < seq:
            mask = block_mask(None, window, seq, CPU)
            blocks = mask.kv_num_blocks + mask.full_kv_num_blocks
            assert computed_span(window, seq) == pytest.approx(float(blocks.float().mean()) * MASK_BLOCK)


QUERIES = torch.cat((torch.arange(70, 200), torch.arange(340, 470)))
"""A rank's two chunks of 500 tokens, whose border lies inside a block."""


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("document_order", "window"),
    quick_first(1, [("any order", 100), ("rising", None), ("none", 100)], unpack=True),
)
def test_a_mask_for_some_queries_has_their_rows(document_order, window):
    documents = documents_of(document_order, 2, 500)
    dense = make_mask(documents, window, 500, CPU, reference=True).dense
    part_mask = make_mask(documents, window, 500, CPU, queries=QUERIES, reference=True)
    assert torch.equal(part_mask.dense, dense[..., QUERIES, :])
    q, k, v = (t.detach().float() for t in inputs(seq=500, head_dim=16))
    expected = attention(q, k, v, make_mask(documents, window, 500, CPU, reference=True), reference=True)[:, QUERIES]
    blocks = block_mask(documents, window, 500, CPU, QUERIES)
    with torch.no_grad():
        part_queries = q[:, QUERIES].transpose(1, 2)
        actual = flex_attention(part_queries, k.transpose(1, 2), v.transpose(1, 2), block_mask=blocks, enable_gqa=True)
    assert torch.allclose(actual.transpose(1, 2), expected, rtol=0, atol=2e-6)
    assert torch.allclose(attention(q[:, QUERIES], k, v, part_mask, reference=True), expected, rtol=0, atol=2e-6)


def test_block_mask_skips_what_no_pair_needs():
    documents = torch.arange(4).repeat_interleave(256)[None]
    one_document = torch.zeros(1, 1024, dtype=torch.long)
    assert block_mask(documents, None, 1024, CPU).sparsity() > block_mask(one_document, None, 1024, CPU).sparsity() + 25


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_paths_equal_the_plain_twin(compiled, masked):
    seq, device = 512, torch.device("cuda")
    documents = documents_of("rising", 2, seq).to(device) if masked else None
    q, k, v = inputs(seq=seq, heads=8, head_dim=64, dtype=torch.bfloat16, device=device)

    def block(q, k, v, mask):
        return attention(q, k, v, mask) * 1.0

    fast = torch.compile(block, fullgraph=True) if compiled else block
    results = []
    for function, reference in ((fast, False), (lambda *a: attention(*a, reference=True), True)):
        out = function(q, k, v, make_mask(documents, None, seq, device, reference=reference))
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for fast_value, plain_value in zip(*results, strict=True):
        error = (fast_value.float() - plain_value.float()).abs().max()
        assert error < 0.02 * plain_value.float().abs().max()


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("documents", "window"), [(None, None), (DOCUMENTS, 4)])
def test_a_sink_takes_its_share_of_each_softmax(reference, documents, window):
    """Against one more key, whose score is the sink's and whose value is 0; its gradient is the sink's."""
    q, k, v = inputs()
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    scores = q.transpose(1, 2) @ k.repeat_interleave(2, 2).transpose(1, 2).mT / math.sqrt(8)
    visible = make_mask(documents, window, SEQ, CPU, reference=True) or make_mask(torch.zeros(2, SEQ), None, SEQ, CPU)
    scores = scores.masked_fill(~visible.dense, float("-inf"))
    column = sinks[:, None, None].expand(2, 4, SEQ, 1)
    weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    expected = (weights @ v.repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2)
    out = attention(
        q, k, v, make_mask(documents, window, SEQ, CPU, reference=reference), sinks=sinks, reference=reference
    )
    assert torch.allclose(out, expected, rtol=0, atol=1e-13)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = [torch.autograd.grad(result, (q, k, v, sinks), grad) for result in (out, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("documents", "window"), [(None, None), (DOCUMENTS, 4)])
def test_scores_are_capped_before_the_mask(documents, window):
    q, k, v = inputs()
    scores = q.transpose(1, 2) @ k.repeat_interleave(2, 2).transpose(1, 2).mT / math.sqrt(8)
    mask = make_mask(documents, window, SEQ, CPU, cap=0.7)
    weights = torch.softmax((0.7 * torch.tanh(scores / 0.7)).masked_fill(~mask.dense, float("-inf")), -1)
    expected = (weights @ v.repeat_interleave(2, 2).transpose(1, 2)).transpose(1, 2)
    assert torch.allclose(attention(q, k, v, mask), expected, rtol=0, atol=1e-13)
