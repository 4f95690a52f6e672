"""The torchtitan comparison: the order of runs, the figures of both sides, and the printed tables."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernel_times import breakdown
from kernel_trace import kernels_of
from roofline import roofline

from meshwright.spec.fields import to_plain
from meshwright.workload.device_work import step_work
from tests.benchmarks.test_kernel_times import two_steps
from tests.benchmarks.test_roofline import MODEL as SMALL
from tests.benchmarks.test_roofline import PLAN, TRAIN, profile_for

ROOT = Path(__file__).parents[2]
MODEL = "model={preset: llama-nano, layers: 1, hidden: 32, heads: 1, kv_heads: 1, head_dim: 32, ffn_hidden: 64, vocab_size: 4096}"
TABLE = {
    "run": "llama3-8b.yaml",
    "gpus": 1,
    "steps": 9,
    "skip": 2,
    "limit": 200,
    "ours": [
        MODEL,
        "cluster.gpus_per_node=gpus",
        "train.seq_len=16",
        "plan.compile=false",
        "plan.compute=fp32",
        "data.validation_tokens=16",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "train.warmup_steps=1",
    ],
    "peer": "--model.name llama3",
    "rows": {
        "base": {"sequences": 2, "peer": "--model.flavor 8B", "peer_batch": [2, 1]},
        "lever": {"sequences": 2, "ours": ["train.gc_every=0"], "against": "base"},
    },
}
LOG = """[rank0]:step:  1  loss: 12.1934  grad_norm:  3.2  memory: 80.10GiB(57.3%)  tps: 1,302  tflops: 75.4  mfu: 7.6%
[rank0]:step:  5  loss: 11.0  grad_norm:  3.2  memory: 96.31GiB(68.9%)  tps: 10,400  tflops: 75.4  mfu: 7.6%
[rank0]:step: 10  loss:  9.5  grad_norm:  3.2  memory: 96.31GiB(68.9%)  tps: 10,524  tflops: 75.4  mfu: 7.6%
"""


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import dense

    return dense


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    table = tmp_path / "tiny.yaml"
    table.write_text(yaml.safe_dump(TABLE), encoding="utf-8")
    return Namespace(
        table=table,
        only="*",
        sides="torchtitan,meshwright",
        passes=1,
        budget=1e9,
        again=False,
        no_trace=False,
        no_rates=False,
        rates_seconds=0.2,
        keep_traces=None,
        gpus=None,
        set=[],
        runs=tmp_path / "runs",
        logs=tmp_path,
        out=tmp_path / "out.jsonl",
    )


def run_line(name: str, side: str, number: int, rates: list[float]) -> dict[str, Any]:
    return {
        "kind": "run",
        "row": name,
        "side": side,
        "pass": number,
        "rates": rates,
        "counted_steps": 5 * len(rates),
        "step_seconds": 1.0,
        "tokens_per_second_per_gpu": sorted(rates)[len(rates) // 2],
        "mfu_causal": 0.5,
        "mfu_full": 0.6,
        "memory_reserved_peak_gib": 9.0,
        "loss_first": 12.0,
        "loss_last": 6.0,
        "wall_seconds": 100.0,
    }


def test_passes_visit_the_sides_in_turn(dense: Any, options: Namespace) -> None:
    comparisons = list(dense.read_comparisons(options))
    assert [(v.comparison.name, v.side) for v in dense.visits(comparisons, 1)] == [
        ("base", "torchtitan"),
        ("base", "meshwright"),
        ("lever", "meshwright"),
    ]
    assert [v.side for v in dense.visits(comparisons, 2)] == ["meshwright", "torchtitan", "meshwright"]


def test_the_peer_may_run_fewer_sequences_at_a_time(dense: Any, options: Namespace) -> None:
    base, lever = dense.read_comparisons(options)
    assert [variant[-2:] for variant in base.peer] == [
        ("--training.local_batch_size", "2"),
        ("--training.local_batch_size", "1"),
    ]
    assert base.peer[0][:4] == ("--model.name", "llama3", "--model.flavor", "8B") and not lever.peer
    assert "cluster.gpus_per_node=1" in base.ours[0] and "train.gc_every=0" in lever.ours[0]


def test_what_is_there_is_not_run_again_and_what_only_failed_only_when_asked(dense: Any, options: Namespace) -> None:
    base = next(dense.read_comparisons(options))
    book = dense.ResultFile(options.out)
    book.add(run_line("base", "meshwright", 1, [1.0]))
    book.add({"kind": "run", "row": "base", "side": "torchtitan", "pass": 1, "error": "out of memory"})
    reopened = dense.ResultFile(options.out)
    visits = [dense.Visit(base, side, number) for side in ("meshwright", "torchtitan") for number in (1, 2)]
    assert [dense.is_done(visit, reopened, options) for visit in visits] == [True, False, True, True]
    options.again = True
    assert [dense.is_done(visit, reopened, options) for visit in visits] == [True, False, False, False]


def test_no_run_is_begun_that_the_budget_does_not_hold(
    dense: Any, options: Namespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "run_visit", None)
    monkeypatch.setattr(dense, "environment", dict)
    options.budget = 30.0
    dense.run_missing(list(dense.read_comparisons(options)), options, dense.ResultFile(options.out))
    output = capsys.readouterr().out
    assert "base is not run; the same command goes on from here" in output
    assert "cannot be imported here, so rows have our side only" in output


def test_torchtitans_log_is_read_with_the_steps_each_line_covers(
    dense: Any, options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sides import titan_steps

    steps = titan_steps(LOG)
    assert [(step.step, step.rate, step.loss) for step in steps] == [
        (1, 1302, 12.1934),
        (5, 10400, 11.0),
        (10, 10524, 9.5),
    ]
    argument_lists: list[list[str]] = []

    def run(name: str, gpus: int, arguments: list[str], *_: object) -> tuple[Any, str]:
        argument_lists.append(arguments)
        return steps, LOG

    monkeypatch.setattr("dense_runs.run_torchtitan", run)
    file = {**TABLE, "steps": 14, "skip": 5}
    options.table.write_text(yaml.safe_dump(file), encoding="utf-8")
    base = next(dense.read_comparisons(options))
    (line,) = dense.run_visit(dense.Visit(base, "torchtitan", 2), options, 1e9)
    assert line["rates"] == [10524] and line["counted_steps"] == 5, "the line of step 5 covers steps that do not count"
    assert (line["memory_reserved_peak_gib"], line["loss_first"], line["loss_last"]) == (96.31, 12.1934, 9.5)
    assert line["step_seconds"] == pytest.approx(2 * 16 / 10524, abs=1e-5)
    assert argument_lists[0][-4:] == ["--training.steps", "14", "--training.global_batch_size", "2"]


def test_a_way_that_does_not_fit_gives_place_to_the_next(
    dense: Any, options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def run(name: str, gpus: int, arguments: list[str], *_: object) -> tuple[Any, str]:
        tries.append(arguments[arguments.index("--training.local_batch_size") + 1])
        return [], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4 GiB" if len(
            tries
        ) == 1 else "a slip of the pen"

    monkeypatch.setattr("dense_runs.run_torchtitan", run)
    first, second = dense.run_visit(dense.Visit(next(dense.read_comparisons(options)), "torchtitan", 2), options, 1e9)
    assert tries == ["2", "1"] and "out of memory" in first["error"] and second["error"] == "a slip of the pen"


def test_the_table_has_medians_over_all_passes_and_the_ratio_last(
    dense: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        run_line("base", "torchtitan", 1, [100.0, 100.0, 110.0]),
        run_line("base", "torchtitan", 2, [110.0, 110.0]),
        run_line("base", "meshwright", 1, [121.0] * 4),
        run_line("lever", "meshwright", 1, [60.5] * 4),
    ]
    dense.show("tiny", ["base", "lever"], lines, {"base": None, "lever": "base"})
    printed = capsys.readouterr().out.splitlines()
    base, lever = (next(line for line in printed if line.startswith(name)) for name in ("base", "lever"))
    assert "110 (100–110)" in base and base.split()[-1] == "1.100", (
        "the median of five is 110, and of the pass alone 100"
    )
    assert lever.split()[-1] == "0.500"


def test_the_chart_has_three_bars_a_row(dense: Any, tmp_path: Path) -> None:
    import draw_dense

    work = step_work(SMALL, TRAIN, PLAN)
    roofline_line = to_plain(roofline(work, profile_for(work), breakdown(kernels_of(two_steps().events)), 100e-6))
    lines = [
        line
        for side in ("torchtitan", "meshwright")
        for line in (
            run_line("base", side, 1, [1000.0]),
            {"kind": "roofline", "row": "base", "side": side, **roofline_line},
        )
    ]
    ((comparison, bars),) = draw_dense.bars_of(lines)
    assert comparison == "base" and [bar.label for bar in bars] == ["needed", "meshwright", "torchtitan"]
    assert sum(bars[1].parts.values()) == pytest.approx(1e6 / 1000), "microseconds a token"
    picture = draw_dense.chart_svg({comparison: bars}, "a & b")
    assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg") and "a &amp; b" in picture


@pytest.mark.slow
def test_a_run_of_ours_and_its_device_side_by_side(
    dense: Any, options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.only = "base"
    breakdown_line = to_plain(breakdown(kernels_of(two_steps().events)))
    monkeypatch.setattr(
        "dense_runs.read_breakdown", lambda trace, comparison, options_given: breakdown_line if trace.exists() else {}
    )
    dense.run_missing(
        [comparison for comparison in dense.read_comparisons(options) if comparison.name == "base"],
        options,
        dense.ResultFile(options.out),
    )
    lines = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["session", "run", "breakdown", "rates", "roofline"]
    session, run, _, rates, roofline_line = lines
    assert session["torchtitan"] is None and session["environment"]["torch"]
    assert len(run["rates"]) == 3 and len(run["losses"]) == 9 and "error" not in run and run["mfu_causal"] is None
    assert {matmul["format"] for matmul in rates["profile"]["products"]} == {"fp32"}
    assert sum(line["took"] for line in roofline_line["lines"]) == pytest.approx(run["step_seconds"], rel=1e-3)
    dense.show("tiny", ["base"], lines, {"base": None})


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "dense").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_tables_load(dense: Any, options: Namespace, file: Path) -> None:
    options.table, options.set = file, ["cluster.gpu=H200"]
    comparisons = list(dense.read_comparisons(options))
    assert all(comparison.last - comparison.skip >= 20 for comparison in comparisons), "a figure needs twenty steps"
    names = {comparison.name for comparison in comparisons}
    assert all(comparison.against is None or comparison.against in names for comparison in comparisons)
    assert all(
        comparison.peer
        or comparison.against
        or comparison.name in {other_comparison.against for other_comparison in comparisons}
        for comparison in comparisons
    ), "nothing to compare with"
    assert all(comparison.spec.cluster.gpus_per_node == comparison.gpus for comparison in comparisons)


def test_the_harness_needs_no_peer_to_be_imported(dense: Any) -> None:
    assert "torchtitan" not in sys.modules
