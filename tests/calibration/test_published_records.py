"""Records of tables of runs: any text gives a default or a reason, and measured columns change nothing."""

from __future__ import annotations

import csv
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
)
from meshwright.calibration.record_predictions import predict_records
from tests.slow import examples

RUNS = Path(__file__).parents[2] / "benchmarks" / "data" / "published-runs.csv"
PACKAGE = Path(__file__).parents[2] / "src" / "meshwright"
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
    with RUNS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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


texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "-1", "0", "1e9", "2", "8", "nan", "inf", "H100", "fp8", "full", "zero-3"]),
)


@given(
    st.dictionaries(
        st.sampled_from(
            [*RECORD, "cp", "ep", "vpp", "zero/fsdp", "recompute", "interconnect", "params", "ffn", "note"]
        ),
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
