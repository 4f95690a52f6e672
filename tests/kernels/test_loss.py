"""The chunked loss against torch's cross-entropy over all logits."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels import loss as kernels
from meshwright.kernels.loss import linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 23, 16, 50


def tensors(dtype=torch.float64, device="cpu", tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB):
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=draw, dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=draw, dtype=torch.float64) / hidden**0.5
    targets = torch.randint(0, vocab, (tokens,), generator=draw)
    targets[::5] = -100
    targets[1] = -1
    return h.to(device, dtype).requires_grad_(), w.to(device, dtype).requires_grad_(), targets.to(device)


def value_and_gradients(hidden, weight, targets, chunk, *, reference=False, scale=1.0, cap=None):
    loss = linear_cross_entropy(hidden, weight, targets, chunk, cap=cap, reference=reference).loss
    return loss, *torch.autograd.grad(loss * scale, (hidden, weight))


@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (7, None), (TOKENS, 1.2), (4096, None), (8, 1.2)])
def test_equals_plain_in_value_and_both_gradients(chunk, cap):
    h, w, targets = tensors()
    for actual, expected in zip(
        value_and_gradients(h, w, targets, chunk, scale=0.37, cap=cap),
        value_and_gradients(h, w, targets, chunk, reference=True, scale=0.37, cap=cap),
        strict=True,
    ):
        assert actual.dtype == torch.float64
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-13)


def test_fp32_in_fp32_out():
    h, w, targets = tensors(torch.float32)
    for actual, expected in zip(
        value_and_gradients(h, w, targets, 8), value_and_gradients(h, w, targets, 8, reference=True), strict=True
    ):
        assert actual.dtype == torch.float32
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


def bfloat16_errors(device, **shape):
    """Relative errors of loss, hidden gradient and weight gradient against fp64 on the same rounded inputs."""
    h, w, targets = tensors(torch.bfloat16, device, **shape)
    actual = value_and_gradients(h, w, targets, 8, scale=1 / 3)
    exact = value_and_gradients(
        h.detach().double().requires_grad_(),
        w.detach().double().requires_grad_(),
        targets,
        8,
        reference=True,
        scale=1 / 3,
    )
    assert actual[0].dtype == torch.float32
    assert actual[1].dtype == actual[2].dtype == torch.bfloat16
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(actual, exact, strict=True)]


def test_bfloat16_within_its_rounding():
    loss, hidden_grad, weight_grad = bfloat16_errors("cpu")
    assert loss < 2e-3
    assert hidden_grad < 1e-2
    assert weight_grad < 1e-2


def test_many_chunks_do_not_wear_the_bfloat16_weight_gradient_down():
    h, w, targets = tensors(torch.bfloat16, tokens=512)
    one_chunk = value_and_gradients(h, w, targets, 512)[2].double()
    of_chunks = value_and_gradients(h, w, targets, 4)[2].double()
    assert (of_chunks - one_chunk).norm() / one_chunk.norm() < 6e-3


def test_an_aligned_weight_is_not_copied():
    weight = torch.empty(48, 4)
    assert kernels.pad_vocabulary(weight) is weight
    for vocab in (41, 47, 63, 65):
        padded = kernels.pad_vocabulary(torch.ones(vocab, 4))
        assert padded.shape[0] == -(-vocab // 64) * 64
        assert padded.sum() == 4 * vocab


@pytest.mark.parametrize("vocab", [48, 49, 55, 63, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_vocabulary_equals_plain(vocab, dtype):
    h, w, targets = tensors(dtype, vocab=vocab)
    targets[2] = vocab - 1
    with torch.no_grad():  # a row whose padded logits, were they zeros, would win the softmax
        h[2] = -40 * w.sum(0)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    expected = value_and_gradients(h, w, targets, 8, reference=True)
    for actual, reference in zip(value_and_gradients(h, w, targets, 8), expected, strict=True):
        assert actual.shape == reference.shape and actual.is_contiguous()
        assert torch.allclose(actual, reference, rtol=bound, atol=bound)
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(h, w, targets, 8).loss, expected[0], rtol=bound)


def test_the_weight_is_padded_once_per_call(monkeypatch):
    calls = []
    pad = kernels.F.pad
    monkeypatch.setattr(kernels.F, "pad", lambda *arguments: calls.append(arguments) or pad(*arguments))
    h, w, targets = tensors()
    value_and_gradients(h, w, targets, 4)
    assert len(calls) == 1


def test_without_gradients_only_the_loss():
    h, w, targets = tensors()
    expected = linear_cross_entropy(h, w, targets, 8, reference=True).loss
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(h, w, targets, 8).loss, expected, rtol=1e-13)
    detached = linear_cross_entropy(h.detach(), w.detach(), targets, 8).loss
    assert not detached.requires_grad
    assert torch.allclose(detached, expected, rtol=1e-13)


def test_a_frozen_head_costs_no_weight_gradient():
    h, w, targets = tensors()
    loss = linear_cross_entropy(h, w.detach(), targets, 8).loss
    loss.backward()
    expected = value_and_gradients(h, w, targets, 8, reference=True)[1]
    assert h.grad is not None
    assert torch.allclose(h.grad, expected, rtol=1e-12)


def test_nothing_to_predict_is_zero():
    h, w, targets = tensors()
    loss, *gradients = value_and_gradients(h, w, torch.full_like(targets, -100), 8)
    assert loss == 0
    assert all(not g.any() for g in gradients)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("vocab", [48, 50])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_z_loss_is_in_the_gradient_and_beside_the_cross_entropy(dtype, bound, vocab, reference):
    h, w, targets = tensors(dtype, vocab=vocab)
    trained = targets >= 0
    logits = h @ w.t()
    cross_entropy = torch.nn.functional.cross_entropy(logits[trained], targets[trained], reduction="sum")
    squares = logits[trained].exp().sum(-1).log().square().sum()
    expected = torch.autograd.grad(0.37 * (cross_entropy + 0.2 * squares), (h, w))
    sums = linear_cross_entropy(h, w, targets, 7, z_loss=0.2, reference=reference)
    assert torch.allclose(sums.loss, cross_entropy, rtol=bound)
    assert torch.allclose(sums.squares, squares, rtol=bound) and not sums.squares.requires_grad
    for ours, theirs in zip(torch.autograd.grad(0.37 * sums.loss, (h, w)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.gpu
def test_cuda_within_bfloat16():
    for vocab in (1000, 1001):
        loss, hidden_grad, weight_grad = bfloat16_errors("cuda", tokens=256, hidden=128, vocab=vocab)
        assert loss < 2e-3
        assert hidden_grad < 1e-2
        assert weight_grad < 1e-2


def test_the_slope_knows_nothing_of_padding():
    h, w, targets = (tensor.detach() for tensor in tensors())
    bare, padded = h @ w.t(), kernels._logits(h, kernels.pad_vocabulary(w), VOCAB)[0]
    sums, gradient = kernels._gradient_eager(bare, targets, 0.1)
    padded_sums, padded_gradient = kernels._gradient_eager(padded, targets, 0.1)
    assert torch.allclose(torch.stack(sums), torch.stack(padded_sums), rtol=1e-13)
    assert torch.allclose(gradient, padded_gradient[:, :VOCAB], rtol=0, atol=1e-14)
    assert not padded_gradient[:, VOCAB:].any()
