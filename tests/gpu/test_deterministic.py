"""GPU: with `train.deterministic` runs are equal bit for bit, also after a resume; attention's gradients are those of the plain form."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LLAMA, RUNS_LIMIT, Record, steps, trained

from meshwright.checkpoint.format.inventory import newest_checkpoint
from meshwright.kernels import fixed_order_attention
from meshwright.kernels.attention import attention, make_mask

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

MOE = LLAMA.replace(
    "ffn_hidden: 1024", "ffn_hidden: 1024, experts: 8, experts_per_token: 2, expert_hidden: 256"
).replace("family: llama", "family: qwen3_moe")
DETERMINISTIC = [
    "train.deterministic=true",
    "train.steps=12",
    "checkpoint.every=6",
    "checkpoint.at_end=true",
    "checkpoint.keep=2",
]


def weights(run: Path) -> list[bytes]:
    """The files of weights and optimizer state of a run's newest checkpoint."""
    return [file.read_bytes() for file in sorted(newest_checkpoint(run).glob("*.safetensors"))]


def losses_of(records: list[Record]) -> dict[int, float]:
    """The loss of each step."""
    return {line["step"]: line["loss"] for line in steps(records)}


@pytest.mark.parametrize("text", [LLAMA, MOE], ids=["dense", "experts"])
def test_runs_and_a_resume_are_equal_bit_for_bit(tmp_path: Path, text: str) -> None:
    losses = [losses_of(trained(tmp_path, text, name, 1, DETERMINISTIC)) for name in ("a", "b")]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    resumed = tmp_path / "c"
    shutil.copytree(tmp_path / "a", resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000012")
    for name in ("summary.json", "metrics.jsonl"):
        (resumed / name).unlink()
    again = losses_of(trained(tmp_path, text, "c", 1, DETERMINISTIC))
    assert 0 < len(again) < 12 and again == {step: losses[0][step] for step in again}
    assert weights(tmp_path / "a") == weights(tmp_path / "b") == weights(resumed)


@pytest.mark.parametrize("limit", [1, 2 << 30], ids=["single groups", "all at once"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "seq"), [(8, 2, 64, 300), (4, 4, 128, 256), (6, 3, 96, 129)])
@pytest.mark.parametrize("package", [True, False], ids=["cuDNN", "flex"])
def test_gradients_are_equal_bits_and_those_of_plain_attention(
    monkeypatch: pytest.MonkeyPatch, limit: int, heads: int, kv_heads: int, head_dim: int, seq: int, package: bool
) -> None:
    if package and not fixed_order_attention.INSTALLED:
        pytest.skip("needs nvidia-cudnn-frontend")
    monkeypatch.setattr(fixed_order_attention, "SCORE_BYTES", limit)
    monkeypatch.setattr(fixed_order_attention, "INSTALLED", package)
    draw = torch.Generator("cuda").manual_seed(seq)
    shapes = [(2, seq, heads, head_dim), (2, seq, kv_heads, head_dim), (2, seq, kv_heads, head_dim)]
    tensors = [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes
    ]
    grad = torch.randn(shapes[0], generator=draw, device="cuda", dtype=torch.bfloat16)

    def gradients() -> tuple[torch.Tensor, ...]:
        mask = make_mask(None, None, seq, torch.device("cuda"))
        return torch.autograd.grad(attention(*tensors, mask), tensors, grad)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [gradients() for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(before)
    for other in others:
        assert all(map(torch.equal, first, other))
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(attention(*wide, reference=True), wide, grad.double())
    for ours, truth in zip(first, expected, strict=True):
        assert (ours - truth).norm() <= 1e-2 * truth.norm()
