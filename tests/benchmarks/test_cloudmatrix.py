"""The prediction of CloudMatrix384: operators by hand, published rates within 15%, gains in order, and the kept file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = yaml.safe_load((BENCHMARKS / "cloudmatrix.yaml").read_text(encoding="utf-8"))
sys.path.insert(0, str(BENCHMARKS))
try:
    import cloudmatrix
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def operators() -> Any:
    return cloudmatrix.Operators(FIGURES["operators"], FIGURES["deployment"])


def test_operators_are_those_of_the_matrices(operators: Any) -> None:
    # Down to latents of 1,536 and 512 + 64, up to 128 heads of 192, and of 128 + 128 from the latent, and the output.
    attention = 7168 * 2112 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert operators.weights.attention == attention and operators.weights.expert == 3 * 7168 * 2048
    assert operators.matmuls(attention, 48) == pytest.approx(attention / (0.841 * 1.6e12))
    # 96 tokens of 48 requests: 128 heads score 576 numbers and sum 512 of 4,096 positions.
    assert operators.decode_attention(48, 96, 4096) == pytest.approx(2 * 96 * 4096 * 128 * 1088 / (0.654 * 376e12))
    # Few tokens of each request: the latents of all positions are read in bf16.
    assert operators.decode_attention(48, 6, 4096) == pytest.approx(48 * 4096 * 1152 / (0.841 * 1.6e12))
    # The measured transfer of 128 tokens to 8 experts each.
    assert operators.exchange("dispatch", 128, 256, 8) == pytest.approx(152e-6)
    assert operators.exchange("combine", 128, 8, 8) == pytest.approx(118e-6)


def test_published_rates_are_within_15_percent() -> None:
    table = cloudmatrix.table(FIGURES)
    lines = {line["name"]: line["error"] for line in table["tokens_per_s_of_an_npu"]}
    assert all(abs(error) < 0.15 for name, error in lines.items() if name.startswith("decode"))
    assert abs(lines["prefill, experts as routed"]) < 0.15
    layer = table["layer_without_mtp_us"]
    assert layer["predicted"] == pytest.approx(layer["published"], rel=0.15)


def test_gains_are_in_the_published_order() -> None:
    ablations = cloudmatrix.table(FIGURES)["ablations"]
    micro_batches = [predicted for predicted, _ in ablations["two micro-batches in flight, decode"].values()]
    mtp, _ = ablations["MTP by batch"]
    prefill, _ = ablations["two micro-batches in flight, prefill"]
    prefixes = [predicted for predicted, _ in ablations["cached prefix"].values()]
    assert 0 < max(micro_batches) < prefill
    assert mtp[8] > mtp[24] > mtp[96] > 0
    assert 1 < prefixes[0] < prefixes[1]


def test_no_prediction_depends_on_published_rates() -> None:
    changed = yaml.safe_load(yaml.safe_dump(FIGURES))
    changed["published"]["decode"] = [[*line[:3], 1.0, 1.0] for line in changed["published"]["decode"]]
    changed["published"]["prefill"] = dict.fromkeys(changed["published"]["prefill"], 1.0)
    before, after = (cloudmatrix.table(figures)["tokens_per_s_of_an_npu"] for figures in (FIGURES, changed))
    assert [line["predicted"] for line in before] == [line["predicted"] for line in after]


def test_the_file_of_results_is_current() -> None:
    (file,) = (BENCHMARKS / "results").glob("*-cloudmatrix.json")
    kept = json.loads(file.read_text(encoding="utf-8"))
    lines = cloudmatrix.table(FIGURES)["tokens_per_s_of_an_npu"]
    assert [line["name"] for line in kept["tokens_per_s_of_an_npu"]] == [line["name"] for line in lines]
    rates = [line["predicted"] for line in kept["tokens_per_s_of_an_npu"]]
    assert rates == pytest.approx([line["predicted"] for line in lines])
