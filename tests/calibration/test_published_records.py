"""Records of tables of runs: any text gives a default or a reason, and measured columns change nothing."""

from __future__ import annotations

import csv
import gzip
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.calibration.published_records import (
    PLAN_COLUMNS,
    fully_specified,
    measured_seconds,
    port_bandwidth,
    read_record,
    release_of,
)
from meshwright.calibration.record_predictions import predict_records, price
from meshwright.costs.constants import table
from tests.slow import examples

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.csv.gz"
PACKAGE = Path(__file__).parents[2] / "src" / "meshwright"
OPTIONAL = (
    "cp", "ep", "vpp", "zero/fsdp", "recompute", "interconnect", "params", "ffn", "note", "software", "experts", "top_k", "expert_ffn",
    "gated", "one_copy", "overlap", "balance", "sequence", "optimizer_sharding", "attention", "layer_graphs", "eager",
)  # fmt: skip
MEASURED = ("iter_time_s", "tokens_per_s", "tflops_per_gpu", "mfu", "mem_gb")
RECORD = {
    "source": "a paper",
    "model": "Llama-3-8B",
    "gpu": "H100",
    "gpus": "16",
    "tp": "2",
    "pp": "1",
    "dp": "8",
    "micro_batch": "1",
    "global_batch": "64",
    "seq": "4096",
    "layers": "32",
    "hidden": "4096",
    "dtype": "bf16",
}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, str]]:
    with gzip.open(RUNS, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_layers_as_graphs_take_launches_from_the_host_and_the_differences_between_nodes_with_them() -> None:
    """MLPerf training 4.0 on 10,752 GPUs: LAYER_CUDA_GRAPH=1."""
    small = {**RECORD, "gpus": "16", "seq": "256"}
    plain, graphs = (read_record({**small, "layer_graphs": given}).case for given in ("", "yes"))
    assert plain is not None and graphs is not None
    values = table()
    uneven = {**values, "stacks": {**values["stacks"], "default": {**values["stacks"]["default"], "jitter": 0.1}}}
    even, unlike_nodes = (price([plain, graphs], given) for given in (values, uneven))
    assert even.host[1] < 0.2 * even.host[0] and even.seconds[1] < even.seconds[0]
    assert unlike_nodes.seconds[0] > 1.02 * even.seconds[0]
    assert unlike_nodes.seconds[1] == even.seconds[1]


def test_eager_operations_move_more_bytes() -> None:
    plain, eager = (price([case]) for given in ("", "yes") if (case := read_record({**RECORD, "eager": given}).case))
    assert 1.02 < eager.seconds[0] / plain.seconds[0] < 1.3


def test_every_row_is_answered(runs: list[dict[str, str]]) -> None:
    predictions = predict_records(runs)
    assert len(predictions) == len(runs)
    assert all((p.seconds is None) == bool(p.reason) for p in predictions)
    complete = [p.seconds is not None for record, p in zip(runs, predictions, strict=True) if fully_specified(record)]
    assert sum(complete) >= 0.9 * len(complete)
    assert all(p.low <= p.seconds <= p.high for p in predictions if p.seconds is not None and p.low and p.high)


def test_measured_columns_change_nothing(runs: list[dict[str, str]]) -> None:
    sampled = runs[::7]
    blank = [{**record, **dict.fromkeys(MEASURED, "")} for record in sampled]
    assert predict_records(blank) == predict_records(sampled)


def test_no_row_is_in_the_package(runs: list[dict[str, str]]) -> None:
    text = "\n".join(
        file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*") if file.suffix in (".py", ".yaml", ".csv")
    )
    long = [
        record[key]
        for record in runs
        for key in ("iter_time_s", "tokens_per_s")
        if len(record[key].replace(".", "")) >= 6
    ]
    assert all(re.fullmatch(r"[\d.]+", number) for number in long)
    numbers_of_package = "\n".join(set(re.findall(r"[\d.]+", text)))  # a hundredth of the text
    assert not [number for number in set(long) if number in numbers_of_package]


def test_blanks_take_stated_defaults() -> None:
    reading = read_record({**RECORD, "micro_batch": "", "dtype": ""})
    assert reading.case is not None
    assumed_text = " | ".join(reading.assumed)
    for word in ("micro_batch 1", "cp 1", "ep 1", "vpp 1", "kv_heads 8", "dtype bf16", "network 400 Gb/s", "ffn"):
        assert word in assumed_text or word == "ffn"
    assert float(reading.case.shape.ffn) == 14336
    unknown = read_record({**RECORD, "model": "Mine", "layers": "10", "hidden": "1024"})
    assert unknown.case is not None
    assert unknown.case.shape.heads == unknown.case.shape.kv_width / 2 / (1024 / unknown.case.shape.heads)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"gpu": "Abacus 9000"}, "Abacus 9000"),
        ({"gpu": ""}, "gpu"),
        ({"tp": ""}, "tp"),
        ({"gpus": "many"}, "many"),
        ({"model": "Mine", "layers": ""}, "Mine"),
        ({"global_batch": "0"}, "global_batch"),
        ({"seq": "nan"}, "seq"),
    ],
)
def test_what_cannot_be_expressed_says_why(changed: dict[str, str], word: str) -> None:
    (prediction,) = predict_records([{**RECORD, **changed}])
    assert prediction.seconds is None
    assert prediction.reason is not None
    assert word in prediction.reason


@pytest.mark.parametrize("gpu", ["Ascend910", "V100", "L4"])
def test_a_run_on_a_chip_that_lacks_a_format_is_priced(gpu: str) -> None:
    """The chip table has no fp32 peak for Ascend910 and no bf16 peak for V100."""
    (prediction,) = predict_records([{**RECORD, "gpu": gpu}])
    assert prediction.seconds, prediction.reason


texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "-1", "0", "1e9", "2", "8", "nan", "inf", "H100", "fp8", "full", "zero-3"]),
)


@given(
    st.dictionaries(
        st.sampled_from([*RECORD, *OPTIONAL]),
        texts,
    )
)
@example({"layers": "", "hidden": "1"})
@settings(max_examples=examples(15, 150), deadline=None)
def test_no_text_is_a_crash(changed: dict[str, str]) -> None:
    (prediction,) = predict_records([{**RECORD, **changed}])
    assert (prediction.seconds is None) == bool(prediction.reason)
    if prediction.seconds is not None:
        assert prediction.seconds > 0
        assert prediction.seconds < float("inf")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["-1", "-0.5", "0.3", "1e-300", "1e308", "1e15", "nan", "inf", "0"])
@pytest.mark.parametrize(
    "column", ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tp", "pp", "cp", "dp", "micro_batch"]
)
def test_no_size_is_a_wrong_figure(column: str, value: str) -> None:
    """An impossible size gives a reason or counts as blank; a time is never negative or NaN."""
    (prediction,) = predict_records([{**RECORD, column: value}])
    if value in ("-1", "-0.5", "0.3", "1e-300", "1e308"):
        assert prediction.seconds is None and prediction.reason is not None and column in prediction.reason
    elif prediction.seconds is not None:
        assert 0 < prediction.seconds < float("inf")


MOE = {**RECORD, "model": "Mine", "experts": "8", "top_k": "2", "expert_ffn": "4096", "ep": "8"}


def test_a_row_states_its_software_and_a_stated_one_wins() -> None:
    guessed = read_record({**RECORD, "source": "a note on Megatron-LM of 2021"}).case
    stated = read_record({**RECORD, "source": "a note on Megatron-LM of 2021", "software": "Torchtitan"}).case
    assert guessed is not None and stated is not None
    assert (guessed.stack, stated.stack) == ("megatron_lm", "torchtitan")
    (prediction,) = predict_records([{**RECORD, "software": "torchtitn"}])
    assert prediction.reason is not None and "nearest: torchtitan" in prediction.reason


def test_a_row_states_a_moe_and_its_exchange() -> None:
    plain = read_record(MOE).case
    stated = read_record({**MOE, "one_copy": "yes", "overlap": "yes", "balance": "forced", "gated": "no"}).case
    assert plain is not None and stated is not None
    assert (plain.shape.experts, plain.shape.top_k, plain.shape.expert_ffn) == (8, 2, 4096)
    assert (plain.layout.imbalance, plain.layout.one_copy, plain.layout.exchange_overlaps) == (1.2, 0, 0)
    assert (stated.layout.imbalance, stated.layout.one_copy, stated.layout.exchange_overlaps) == (1, 1, 1)
    assert stated.shape.gated == 0 and plain.shape.gated == 1
    slow, fast = predict_records([MOE, {**MOE, "one_copy": "yes", "overlap": "yes", "balance": "forced"}])
    assert slow.seconds and fast.seconds and fast.seconds < slow.seconds


def test_a_row_states_sharding_sequence_and_attention() -> None:
    fused, unfused, flash2 = (
        predict_records([{**RECORD, "attention": kernel}])[0].seconds
        for kernel in ("cudnn", "unfused", "flash-attention 2")
    )
    assert fused and unfused and flash2 and fused < flash2 < unfused
    case = read_record({**RECORD, "sequence": "yes", "optimizer_sharding": "yes"}).case
    assert case is not None and (case.layout.sequence, case.layout.zero) == (1, 1)
    older = read_record({**RECORD, "gpu": "A100", "attention": "te"})
    assert any("not measured" in text for text in older.assumed)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"experts": "8", "top_k": "2", "expert_ffn": ""}, "expert_ffn is not given"),
        ({"experts": "2", "top_k": "4", "expert_ffn": "64"}, "more than the 2 experts"),
        ({"overlap": "perhaps"}, "expected yes or no"),
        ({"balance": "0.5"}, "balance"),
        ({"attention": "magic"}, "expected one of"),
    ],
)
def test_a_wrong_statement_says_what_is_expected(changed: dict[str, str], word: str) -> None:
    (prediction,) = predict_records([{**RECORD, "model": "Mine", **changed}])
    assert prediction.reason is not None and word in prediction.reason


@pytest.mark.parametrize(
    ("source", "note", "year"),
    [
        ("a table 2026-04", "", 1.25),
        ("a readme 2025", "", 0.5),
        ("a table", "readme of 2026-05-13", 1 + 4 / 12),
        ("a report (arXiv 2412.19437)", "", 0.0),
        ("a table 2026-04", "container 25.09", 8 / 12),
    ],
)
def test_releases_of_sources(source: str, note: str, year: float) -> None:
    assert release_of(source, note) == pytest.approx(year)


def test_a_time_may_come_from_tokens() -> None:
    assert measured_seconds({**RECORD, "tokens_per_s": "131072"}) == 64 * 4096 / 131072
    assert measured_seconds(RECORD) is None
    assert all(key in RECORD for key in PLAN_COLUMNS)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("NVLink; 800 Gb/s per node", 12.5),
        ("NVSwitch; 8x HDR200 InfiniBand (Selene)", 25),
        ("NVLink; CX-7 400 Gb/s per GPU", 50),
        ("NVLink4; 8x50 GB/s InfiniBand per node", 50),
        ("RoCE 1600 Gb/s per node", 25),
        ("NVLink4; EFA between nodes", 50),
        ("NVLink (single node)", None),
        ("", None),
    ],
)
def test_networks_in_words(text: str, gigabytes: float | None) -> None:
    assert port_bandwidth(text, 8) == (None if gigabytes is None else gigabytes * 1e9)
