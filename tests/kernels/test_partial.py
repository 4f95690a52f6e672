"""Ring attention with all ranks in one process: combined partial attention equals attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels import partial
from meshwright.kernels.attention import attention
from meshwright.kernels.partial import AttentionAccumulator, partial_attention, partial_gradients, visible_block
from meshwright.spec.layout import AxisPart, local_tokens


def inputs(seq=24, heads=4, kv_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, seq, heads, head_dim), (2, seq, kv_heads, head_dim), (2, seq, kv_heads, head_dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def part_of(x, rank, ranks):
    return torch.cat(
        [x[:, chunk.start : chunk.stop] for chunk in local_tokens(x.shape[1], AxisPart(rank, ranks))], dim=1
    )


def whole_of(rank_tensors):
    """The sequence of which each rank has two chunks."""
    sequence = torch.empty(
        rank_tensors[0].shape[0],
        len(rank_tensors) * rank_tensors[0].shape[1],
        *rank_tensors[0].shape[2:],
        dtype=rank_tensors[0].dtype,
    )
    for rank, rank_tensor in enumerate(rank_tensors):
        start = 0
        for chunk in local_tokens(sequence.shape[1], AxisPart(rank, len(rank_tensors))):
            sequence[:, chunk.start : chunk.stop] = rank_tensor[:, start : start + len(chunk)]
            start += len(chunk)
    return sequence


def ring(q, k, v, grad, ranks, logsumexp_of=lambda logsumexp: logsumexp, reference=True):
    """Result and gradients, where every rank processes the other ranks' keys in the order of a ring."""
    rank_tensors = [[part_of(x, rank, ranks) for rank in range(ranks)] for x in (q, k, v, grad)]
    q_parts, k_parts, v_parts, grads = rank_tensors
    outs, gradients = (
        [],
        [
            [torch.zeros_like(rank_tensor) for rank_tensor in rank_tensors]
            for rank_tensors in (q_parts, k_parts, v_parts)
        ],
    )
    for rank, q_part in enumerate(q_parts):
        accumulator = None
        for ring_step in range(ranks):
            source = (rank - ring_step) % ranks
            queries, keys, causal = visible_block(rank, source, q_part.shape[1])
            out, logsumexp = partial_attention(
                q_part[:, queries], k_parts[source][:, keys], v_parts[source][:, keys], causal, reference=reference
            )
            if accumulator is None:
                accumulator = AttentionAccumulator(out, logsumexp)
            else:
                accumulator.add(queries, out, logsumexp)
        outs.append(accumulator.out)
        for source in range(ranks):
            queries, keys, causal = visible_block(rank, source, q_part.shape[1])
            q_grad, k_grad, v_grad = partial_gradients(
                grads[rank][:, queries],
                q_part[:, queries],
                k_parts[source][:, keys],
                v_parts[source][:, keys],
                accumulator.out[:, queries],
                logsumexp_of(accumulator.logsumexp)[..., queries],
                causal,
                reference=reference,
            )
            gradients[0][rank][:, queries] += q_grad
            gradients[1][source][:, keys] += k_grad
            gradients[2][source][:, keys] += v_grad
    return whole_of(outs), [whole_of(gradient_parts) for gradient_parts in gradients]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "operators"])
def test_combined_parts_equal_attention_over_the_whole_sequence(ranks, kv_heads, reference):
    q, k, v = inputs(kv_heads=kv_heads)
    expected = attention(q, k, v, reference=True)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, gradients = ring(q, k, v, grad, ranks, reference=reference)
        assert torch.allclose(out, expected, rtol=0, atol=1e-13)
        for ours, theirs in zip(gradients, truth, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_a_wrong_logsumexp_changes_the_gradients():
    q, k, v = inputs()
    grad = torch.ones_like(q)
    truth = torch.autograd.grad(attention(q, k, v, reference=True), (q, k, v), grad)
    with torch.no_grad():
        _, gradients = ring(q, k, v, grad, 2, lambda logsumexp: logsumexp + 1e-3)
    assert not any(torch.allclose(ours, theirs, rtol=1e-6) for ours, theirs in zip(gradients, truth, strict=True))


def test_all_ranks_compute_equally_many_scores_in_each_ring_step():
    for ranks in (2, 4, 7):
        for ring_step in range(1, ranks):
            score_counts = set()
            for rank in range(ranks):
                queries, keys, causal = visible_block(rank, (rank - ring_step) % ranks, 8)
                assert not causal
                score_counts.add(len(range(8)[queries]) * len(range(8)[keys]))
            assert score_counts == {32}


def test_bf16_attention_has_an_fp32_logsumexp():
    q, k, v = (x.detach().to(torch.bfloat16) for x in inputs())
    out, logsumexp = partial_attention(q, k, v, True, reference=True)
    assert out.dtype == torch.bfloat16 and logsumexp.dtype == torch.float32
    assert torch.equal(out, attention(q, k, v, reference=True))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("shape", [(1, 1024, 8, 2, 128), (2, 768, 8, 8, 64)], ids=["gqa", "mha"])
def test_operators_that_return_the_logsumexp_equal_plain_attention(backend, shape, monkeypatch):
    """Rank 1 of 3: partial attention over each rank's keys, the combined result, and the gradients of each part."""
    batch, seq, heads, kv_heads, head_dim = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, seq, n, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    if backend == "flash":
        monkeypatch.setattr(partial, "can_use_cudnn_attention", lambda params: False)
    assert partial._backend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True) == backend
    results = []
    for reference in (False, True):
        accumulator = AttentionAccumulator(*partial_attention(q, k, v, True, reference=reference))
        values = []
        for source in (0, 2):
            queries, keys, causal = visible_block(1, source, seq)
            out, logsumexp = partial_attention(q[:, queries], v[:, keys], k[:, keys], causal, reference=reference)
            accumulator.add(queries, out, logsumexp)
            values += [out, logsumexp]
        out = accumulator.out.to(q.dtype)
        values += [accumulator.out, accumulator.logsumexp]
        for source, key_values in ((1, (k, v)), (0, (v, k)), (2, (v, k))):
            queries, keys, causal = visible_block(1, source, seq)
            inputs_of_part = (
                q[:, queries],
                *(tensor[:, keys] for tensor in key_values),
                out[:, queries],
                accumulator.logsumexp[..., queries],
            )
            values += partial_gradients(grad[:, queries], *inputs_of_part, causal, reference=reference)
        results.append(values)
    for fast, reference in zip(*results, strict=True):
        assert (fast.float() - reference.float()).abs().max() < 0.02 * reference.float().abs().max()
