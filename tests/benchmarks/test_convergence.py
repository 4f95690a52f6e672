"""The comparison with transformers over a whole training: its parts, and all of it with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.convergence import difference, too_different
from benchmarks.draw_convergence import chart_svg, ticks
from benchmarks.peers.transformers_llama import Fp8Linear, learning_rate
from torch import nn

from meshwright.optim.schedule import learning_rate as our_learning_rate
from meshwright.spec.job import TrainSpec

ROOT = Path(__file__).parents[2]


def test_the_peer_has_our_learning_rates() -> None:
    settings = {"learning_rate": 6e-4, "warmup_steps": 7, "steps": 40, "floor": 0.1}
    train = TrainSpec(steps=40, global_batch=1, learning_rate=6e-4, warmup_steps=7, min_learning_rate=0.1)
    for step in range(1, 41):
        assert learning_rate(settings, step) == pytest.approx(our_learning_rate(train, step), rel=1e-12)


def test_the_peers_fp8_layer_rounds_all_three_products_and_nothing_else() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=False)
    layer = Fp8Linear(plain.weight)
    x, gradient = torch.randn(2, 16, 32), torch.randn(2, 16, 48)
    results = []
    for module in (plain, layer):
        plain.weight.grad = None
        inputs = x.clone().requires_grad_()
        output = module(inputs)
        output.backward(gradient)
        results.append((output.detach(), inputs.grad, plain.weight.grad))
    for exact, in_fp8 in zip(*results, strict=True):
        assert exact is not None and in_fp8 is not None
        error = ((in_fp8 - exact).norm() / exact.norm()).item()
        assert 1e-3 < error < 0.08  # e4m3 has 3 bits of mantissa, e5m2 has 2


def side(first: float, means: list[float], held_out: float) -> dict[str, object]:
    return {
        "steps": 50 * len(means),
        "loss_first": first,
        "losses": {"1": first} | {str(10 * step): mean for step, mean in enumerate(means, 1)},
        "means": {50 * number: mean for number, mean in enumerate(means, 1)},
        "held_out_loss": held_out,
    }


def test_differences_are_relative_to_the_reference() -> None:
    reference = side(10.0, [5.0, 4.0, 2.0], 2.0)
    compared = difference(side(10.01, [5.0, 4.04, 1.96], 2.01), reference)
    assert compared == {"first": 0.001, "median": 0.01, "largest": -0.02, "held_out": 0.005}
    assert "held_out" not in difference(side(10.0, [5.0], 4.0), reference)  # stopped earlier


def test_first_losses_that_rounding_does_not_explain_and_failed_sides_are_named() -> None:
    results = {f"{who} {how}": side(10.0, [], 1.0) for who in ("transformers", "meshwright") for how in ("bf16", "fp8")}
    assert not too_different(results)
    results["meshwright fp8"]["loss_first"] = 10.05
    assert not too_different(results)
    results["meshwright bf16"]["loss_first"] = 10.05
    assert too_different(results) == ["meshwright bf16: first loss +0.50% of that of transformers in bf16"]
    results["transformers fp8"] = {"error": 1, "steps": 0, "log": ""}
    assert too_different(results) == ["transformers fp8: exit code 1"]


def test_the_picture_has_a_curve_in_each_panel_and_the_held_out_losses() -> None:
    names = [f"{who} {how}" for who in ("transformers", "meshwright") for how in ("bf16", "fp8")]
    sides = {name: side(10.0, [5.0, 4.0 + number / 100], 3.0 + number) for number, name in enumerate(names)}
    configuration = {"model": "tiny", "parameters": 1_000_000, "batch": 4, "seq_len": 64}
    picture = ElementTree.fromstring(
        chart_svg(json.loads(json.dumps({"sides": sides, "configuration": configuration})))
    )
    assert len(picture.findall("{*}polyline")) == 4 + 3
    texts = [element.text for element in picture.findall("{*}text")]
    assert all(f"{name}: {3 + number}.0000" in texts for number, name in enumerate(names))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 2000, [0, 500, 1000, 1500, 2000]),
        (-0.004, 0.004, [-0.004, -0.002, 0, 0.002, 0.004]),
        (1.9, 3.2, [2, 2.5, 3]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.slow
def test_a_tiny_model_has_the_losses_of_transformers_in_fp32(tmp_path: Path) -> None:
    """In fp32 the two engines differ by rounding alone, so an optimizer, schedule or order of tokens that differs would be seen."""
    out = tmp_path / "convergence.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "convergence.py"), "--cpu", "--steps", "10"]
    command += ["--learning-rate", "1e-2", "--warmup-steps", "3", "--text", str(ROOT / "src" / "meshwright" / "spec")]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path / "runs"), "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    ours, theirs = (results["sides"][f"{who} bf16"] for who in ("meshwright", "transformers"))
    assert ours["loss_last"] < ours["loss_first"] - 0.3
    assert ours["loss_last"] == pytest.approx(theirs["loss_last"], rel=2e-5)
    assert ours["held_out_loss"] == pytest.approx(theirs["held_out_loss"], rel=2e-5)
    for precision in ("meshwright fp8", "transformers fp8"):
        assert results["sides"][precision]["loss_last"] == pytest.approx(theirs["loss_last"], rel=2e-2)
        assert results["sides"][precision]["loss_last"] != theirs["loss_last"]
