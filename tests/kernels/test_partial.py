"""Ring attention with all ranks in one process: pieces over each rank's keys, joined, against attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels import partial
from meshwright.kernels.attention import attention
from meshwright.kernels.partial import Joined, partial_attention, partial_gradients, piece
from meshwright.spec.layout import Part, local_tokens


def inputs(seq=24, heads=4, kv_heads=2, head_dim=8):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, seq, heads, head_dim), (2, seq, kv_heads, head_dim), (2, seq, kv_heads, head_dim)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def part_of(x, rank, ranks):
    return torch.cat([x[:, one.start : one.stop] for one in local_tokens(x.shape[1], Part(rank, ranks))], dim=1)


def whole_of(parts):
    """The sequence of which each rank has two chunks."""
    whole = torch.empty(parts[0].shape[0], len(parts) * parts[0].shape[1], *parts[0].shape[2:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        start = 0
        for one in local_tokens(whole.shape[1], Part(rank, len(parts))):
            whole[:, one.start : one.stop] = part[:, start : start + len(one)]
            start += len(one)
    return whole


def ring(q, k, v, grad, ranks, total_of=lambda total: total):
    """Result and gradients, every rank taking the others' keys in the order in which a ring brings them."""
    parts = [[part_of(x, rank, ranks) for rank in range(ranks)] for x in (q, k, v, grad)]
    q_parts, k_parts, v_parts, grads = parts
    outs, gradients = [], [[torch.zeros_like(one) for one in mine] for mine in (q_parts, k_parts, v_parts)]
    for rank, mine in enumerate(q_parts):
        joined = None
        for turn in range(ranks):
            source = (rank - turn) % ranks
            queries, keys, causal = piece(rank, source, mine.shape[1])
            out, total = partial_attention(
                mine[:, queries], k_parts[source][:, keys], v_parts[source][:, keys], causal, plain=True
            )
            if joined is None:
                joined = Joined(out, total)
            else:
                joined.add(queries, out, total)
        outs.append(joined.out)
        for source in range(ranks):
            queries, keys, causal = piece(rank, source, mine.shape[1])
            found = partial_gradients(
                grads[rank][:, queries], mine[:, queries], k_parts[source][:, keys], v_parts[source][:, keys],
                joined.out[:, queries], total_of(joined.total)[..., queries], causal, plain=True,
            )  # fmt: skip
            gradients[0][rank][:, queries] += found[0]
            gradients[1][source][:, keys] += found[1]
            gradients[2][source][:, keys] += found[2]
    return whole_of(outs), [whole_of(mine) for mine in gradients]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_joined_pieces_are_attention_over_the_whole_sequence(ranks, kv_heads):
    q, k, v = inputs(kv_heads=kv_heads)
    expected = attention(q, k, v, plain=True)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, gradients = ring(q, k, v, grad, ranks)
        assert torch.allclose(out, expected, rtol=0, atol=1e-13)
        for ours, theirs in zip(gradients, truth, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_a_wrong_log_sum_is_noticed():
    q, k, v = inputs()
    grad = torch.ones_like(q)
    truth = torch.autograd.grad(attention(q, k, v, plain=True), (q, k, v), grad)
    with torch.no_grad():
        _, gradients = ring(q, k, v, grad, 2, lambda total: total + 1e-3)
    assert not any(torch.allclose(ours, theirs, rtol=1e-6) for ours, theirs in zip(gradients, truth, strict=True))


def test_every_turn_has_as_many_scores_on_every_rank():
    for ranks in (2, 4, 7):
        for turn in range(1, ranks):
            counts = set()
            for rank in range(ranks):
                queries, keys, causal = piece(rank, (rank - turn) % ranks, 8)
                assert not causal
                counts.add(len(range(8)[queries]) * len(range(8)[keys]))
            assert counts == {32}


def test_the_own_piece_joins_to_itself_in_narrow_formats():
    q, k, v = (x.detach().to(torch.bfloat16) for x in inputs())
    out, total = partial_attention(q, k, v, True, plain=True)
    assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(out, attention(q, k, v, plain=True))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("shape", [(1, 1024, 8, 2, 128), (2, 768, 8, 8, 64)], ids=["gqa", "mha"])
def test_operators_that_hand_out_the_log_sum_equal_the_plain_twin(backend, shape, monkeypatch):
    """Each kind of piece of rank 1 of 3, its gradients for a log-sum joined with another's; then two pieces joined."""
    batch, seq, heads, kv_heads, head_dim = shape
    draw = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, seq, n, head_dim, generator=draw, device="cuda", dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    if backend == "flash":
        monkeypatch.setattr(partial, "can_use_cudnn_attention", lambda asked: False)
    assert partial._backend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True) == backend
    results = []
    for plain in (False, True):
        joined = Joined(*partial_attention(q, k, v, True, plain=plain))
        found = []
        for source in (0, 2):
            queries, keys, causal = piece(1, source, seq)
            out, total = partial_attention(q[:, queries], v[:, keys], k[:, keys], causal, plain=plain)
            joined.add(queries, out, total)
            found += [out, total]
        out = joined.out.to(q.dtype)
        found += [joined.out, joined.total]
        for source, mine in ((1, (k, v)), (0, (v, k)), (2, (v, k))):
            queries, keys, causal = piece(1, source, seq)
            given = q[:, queries], *(one[:, keys] for one in mine), out[:, queries], joined.total[..., queries]
            found += partial_gradients(grad[:, queries], *given, causal, plain=plain)
        results.append(found)
    for fast, plain in zip(*results, strict=True):
        assert (fast.float() - plain.float()).abs().max() < 0.02 * plain.float().abs().max()
