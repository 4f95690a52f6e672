"""Conventions of sources fill blank cells only, and are printed among the assumptions."""

from __future__ import annotations

import csv
import gzip
from dataclasses import fields
from pathlib import Path

import pytest

from meshwright.calibration.published_records import measured_seconds, read_record
from meshwright.calibration.record_predictions import price
from meshwright.calibration.source_conventions import CONVENTIONS, applicable_conventions, with_conventions
from meshwright.workload.layouts import Layouts

RUNS = tuple((Path(__file__).parents[2] / "benchmarks" / "data").glob("published-runs*.csv.gz"))
RECORD = {
    "source": "a paper",
    "model": "Qwen3-30B-A3B",
    "gpu": "H100",
    "gpus": "16",
    "tp": "1",
    "pp": "1",
    "dp": "16",
    "micro_batch": "1",
    "global_batch": "64",
    "seq": "4096",
    "layers": "48",
    "hidden": "2048",
    "ep": "8",
    "dtype": "bf16",
}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, str]]:
    return [record for path in RUNS for record in csv.DictReader(gzip.open(path, "rt", encoding="utf-8"))]


def test_every_convention_holds_for_rows_and_names_what_exists(runs: list[dict[str, str]]) -> None:
    names = {field.name for field in fields(Layouts)}
    for convention in CONVENTIONS:
        assert any(convention.applies_to(record) for record in runs), convention
        assert {*convention.only, *convention.blanks, *convention.read_as} <= set(runs[0]), convention
        assert set(convention.layout) <= names


@pytest.mark.slow
def test_cells_that_a_source_prints_stay(runs: list[dict[str, str]]) -> None:
    for record in runs:
        cells, changes = with_conventions(record)
        changed = {key for key in cells if cells[key] != record[key]}
        read_as = {key for convention in applicable_conventions(record) for key in convention.read_as}
        assert all(not record[key] or key in read_as for key in changed)
        assert all(any(key in words for words in changes) for key in changed)
        assert set(changes) <= set(read_record(record).assumed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "Llama-3-8B", "layers": "32", "hidden": "4096"}, ("ep is 8", "Llama-3-8B", "no MoE model")),
        ({"model": "Mine-MoE"}, ("ep is 8", "Mine-MoE", "no MoE model")),
        ({"layers": "48", "hidden": "4096"}, ("ep is 8", "no MoE model")),
        ({"gpus": "256", "dp": "256", "ep": "256"}, ("ep is 256", "128 experts")),
        ({"ep": "32"}, ("ep is 32", "16 ranks")),
    ],
)
def test_expert_ranks_that_no_model_has(changed: dict[str, str], words: tuple[str, ...]) -> None:
    reading = read_record({**RECORD, **changed})
    assert reading.case is None
    assert reading.reason is not None
    assert all(word in reading.reason for word in words)


@pytest.mark.parametrize(
    ("source", "gpu", "ranks"),
    [("NVIDIA-NeMo/NeMo docs", "H100", 8), ("NVIDIA-NeMo/Megatron-Bridge docs", "GB200", 16), ("a paper", "H100", 1)],
)
def test_blank_expert_ranks_follow_the_recipes_of_a_source(source: str, gpu: str, ranks: int) -> None:
    reading = read_record({**RECORD, "source": source, "gpu": gpu, "ep": ""})
    assert reading.case is not None
    assert reading.case.layout.expert == ranks
    assert any(f"ep {ranks}" in words for words in reading.assumed)


def test_a_release_is_named_or_assumed_in_words(runs: list[dict[str, str]]) -> None:
    named, unnamed = (read_record({**RECORD, "note": note}) for note in ("container 26.02", ""))
    assert named.case is not None and unnamed.case is not None
    assert named.case.release == pytest.approx(1 + 1 / 12)
    assert unnamed.case.release == 0 and any("release not named" in words for words in unnamed.assumed)
    case = next(case for record in runs if "Nemotron-4" in record["source"] and (case := read_record(record).case))
    assert case.release == pytest.approx(-0.6)


def test_load_of_experts_is_uneven_unless_a_source_says_otherwise() -> None:
    plain, forced = (
        read_record({**RECORD, "source": source}) for source in ("a paper", "NVIDIA-NeMo/Megatron-Bridge docs")
    )
    assert plain.case is not None
    assert forced.case is not None
    assert (plain.case.layout.imbalance, forced.case.layout.imbalance) == (1.2, 1.0)
    assert any("busiest expert rank 1.2" in words for words in plain.assumed)
    assert any("force-balanced" in words for words in forced.assumed)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("full", 3),
        ("selective", 1),
        ("selective (norm, act)", 0),
        ("selective (core_attn)", 1),
        ("selective (op)", 1),
        ("selective (layernorm, moe)", 2),
        ("", 0),
    ],
)
def test_modules_of_selective_recompute(text: str, mode: int) -> None:
    case = read_record({**RECORD, "recompute": text}).case
    assert case is not None
    assert case.layout.recompute == mode


def test_llama_3_gathers_weights_and_sums_gradients_once_a_step(runs: list[dict[str, str]]) -> None:
    records = [record for record in runs if "Llama 3 herd" in record["source"]]
    assert [record["gpus"] for record in records] == ["8192", "16384", "16384"]
    cases = [case for case in (read_record(record).case for record in records) if case is not None]
    assert [(case.layout.zero, case.layout.virtual) for case in cases] == [(2.0, 8.0)] * 3
    cost = price(cases)
    assert all(cost.exposed["shard"] == 0)
    assert all(cost.exposed["data"] < 0.05 * cost.seconds)
    # 430 TFLOP/s a GPU that count 6 FLOPs a parameter and 12 L h s for attention: 16.8 million tokens in 12.5 s.
    assert measured_seconds(records[0]) == pytest.approx(
        2048 * 8192 * (6 * 405e9 + 12 * 126 * 16384 * 8192) / (8192 * 430e12)
    )


def test_runs_that_are_no_full_training_are_refused() -> None:
    record = {**RECORD, "source": "NVIDIA-NeMo/NeMo docs", "note": "FP8; LoRA fine-tuning"}
    reading = read_record(record)
    assert reading.case is None and reading.reason is not None and "LoRA" in reading.reason
    assert read_record({**record, "note": "FP8; SFT fine-tuning"}).case is not None


def test_a_source_may_hold_rows_of_another_stack(runs: list[dict[str, str]]) -> None:
    records = [record for record in runs if record["source"].startswith("SC21 Table 2")]
    stacks = {record["zero/fsdp"]: case.stack for record in records if (case := read_record(record).case)}
    assert stacks == {"zero-3": "deepspeed_2021", "ddp": "megatron_lm"}


def test_a_second_predicted_token_is_a_layer(runs: list[dict[str, str]]) -> None:
    records = [record for record in runs if record["model"] == "DeepSeek-V3" and "Automodel" not in record["source"]]
    cases = [(record, case) for record in records if (case := read_record(record).case)]
    assert {float(case.shape.layers) for record, case in cases if "w/o MTP" in record["note"]} == {61.0}
    assert {float(case.shape.layers) for record, case in cases if "w/o MTP" not in record["note"]} == {62.0}


def test_a_rate_in_flops_is_a_time_only_where_its_source_says_what_it_counts() -> None:
    record = {**RECORD, "tflops_per_gpu": "400", "params": "30e9"}
    assert measured_seconds(record) is None
    assert measured_seconds({**record, "source": "Llama 3 herd"}) is not None
