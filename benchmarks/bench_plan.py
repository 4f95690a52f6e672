"""Measures the accuracy of `meshwright predict` on published runs: `make bench-plan` (CPU only, about ten minutes).

Prints errors by source, in the fit and with each source left out of it; the regret of the layout that the model would choose; memory errors
and refusals; and each acceptance criterion with its figure. Writes them to benchmarks/results/plan-accuracy.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from criteria import Criterion, print_criteria
from fit_costs import (
    MIN_RECORDS,
    RunArrays,
    arrays_of,
    cross_validated_memory_gib,
    cross_validated_seconds,
    left_out,
    random_fifths,
    read_runs,
    source_of,
    usable_runs,
    with_memory,
)
from stragglers import expected_slowest

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions
from meshwright.calibration.published_records import PublishedCase, failed, fully_specified, measured_seconds
from meshwright.calibration.record_predictions import Prediction, predict_records, price
from meshwright.costs.bands import MIN_RUNS, RunClass, band_of, fitted_bands
from meshwright.costs.constants import constants, table
from meshwright.costs.device_rates import Machine
from meshwright.costs.step import step_cost
from meshwright.spec.chips import CHIPS
from meshwright.workload.layouts import Layouts

RESULTS = Path(__file__).parent / "results" / "plan-accuracy.json"
Record = tuple[int, dict[str, str], PublishedCase, float]


def main() -> None:
    runs = read_runs()
    predictions = predict_records(runs)
    records = usable_runs(runs)
    arrays = arrays_of(records)
    fitted = np.array([predictions[index].seconds for index, *_ in records], dtype=np.float64)
    folds = cross_validated_seconds(arrays, random_fifths(len(records)))
    sources, classes = left_out(arrays)
    criteria = [
        *error_criteria(runs, predictions, records, fitted, folds, sources),
        *scale_criteria(records, arrays, predictions),
        *regret_criteria(records, fitted, folds),
        *memory_criteria(runs, predictions),
        *source_criteria(arrays, sources, classes),
        *band_criteria(arrays, sources, classes),
        *speed_criteria(),
    ]
    print_criteria(criteria)
    results = {
        "lines": [criterion.entry for criterion in criteria],
        "fitted_on": table()["fitted_on"],
    }
    results["errors"] = error_table(records, fitted, folds, sources)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RESULTS}", file=sys.stderr)


def noisy(record: dict[str, str]) -> bool:
    """Whether the run is of a group whose repeats differ up to five-fold."""
    return "playbook" in record["source"] and float(record["gpus"]) >= 128


def label(record: dict[str, str]) -> str:
    return record["source"] + (" [≥128 GPUs]" if noisy(record) else "")


def error_table(records: list[Record], *columns: np.ndarray) -> list[dict[str, Any]]:
    """Errors by source: in sample, with fifths of the runs left out, with whole sources left out."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (_, record, _, _) in enumerate(records):
        if fully_specified(record):
            groups[label(record)].append(index)
    measured = np.array([seconds for *_, seconds in records])
    entries = []
    for source, indices in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        entry: dict[str, Any] = {"source": source, "rows": len(indices)}
        for name, column in zip(("fit", "fifth", "source"), columns, strict=True):
            ratio = column[indices] / measured[indices]
            if np.isfinite(ratio).all():
                error = np.abs(ratio - 1)
                entry |= {f"{name}_median": float(np.median(error)), f"{name}_p90": float(np.quantile(error, 0.9))}
                entry |= {f"{name}_bias": float(np.median(ratio) - 1)}
        entries.append(entry)
    return entries


def error_criteria(
    runs: list[dict[str, str]], predictions: list[Prediction], records: list[Record], *columns: np.ndarray
) -> list[Criterion]:
    entries = error_table(records, *columns)
    print(
        f"{'rows':>5} | {'median':>6} {'p90':>6} {'bias':>6} | rows left out: median, p90 | source left out: median | source"
    )
    for entry in entries:
        values = [
            entry.get(key)
            for key in ("fit_median", "fit_p90", "fit_bias", "fifth_median", "fifth_p90", "source_median")
        ]
        text = [f"{value:6.1%}" if value is not None else "     –" for value in values]
        print(
            f"{entry['rows']:5} | {text[0]} {text[1]} {text[2]} | {text[3]} {text[4]} | {text[5]} | {entry['source'][:90]}"
        )
    complete = [index for index, record in enumerate(runs) if fully_specified(record)]
    predicted_share = np.mean([predictions[index].seconds is not None for index in complete])
    criteria = [Criterion("fully specified rows expressed", float(predicted_share), 0.9, at_least=True)]
    large = [entry for entry in entries if entry["rows"] >= 20 and "[≥128" not in entry["source"]]
    is_not_noisy = np.array([fully_specified(record) and not noisy(record) for _, record, _, _ in records])
    measured = np.array([seconds for *_, seconds in records])
    for name, sample_text, column in zip(("fit", "fifth"), ("in sample", "rows left out"), columns, strict=False):
        medians = [entry[f"{name}_median"] for entry in large]
        error = np.abs(column / measured - 1)[is_not_noisy]
        criteria += [
            Criterion(f"median of the sources' medians, {sample_text}", float(np.median(medians)), 0.08),
            Criterion(f"largest median of a source, {sample_text}", max(medians), 0.15),
            Criterion(f"90th percentile of all rows, {sample_text}", float(np.quantile(error, 0.9)), 0.22),
        ]
    return criteria


PAPERS = ("SC21", "Korthikanti", "MT-NLG", "MegaScale (arXiv")


def scale_criteria(records: list[Record], arrays: RunArrays, predictions: list[Prediction]) -> list[Criterion]:
    """Criteria for the papers' tables, and for the largest runs under constants fitted on at most 2,048 GPUs."""
    measured = arrays.measured
    from_papers = np.array(
        [record["source"].startswith(PAPERS) or "sc21" in record["source"].lower() for _, record, _, _ in records]
    )
    is_large_model = np.array([float(record["params"] or 0) >= 170e9 for _, record, _, _ in records])
    fitted = np.array([predictions[index].seconds for index, *_ in records], dtype=np.float64)
    error = np.abs(fitted / measured - 1)
    ranks = np.array([float(record["gpus"]) for _, record, _, _ in records])
    predicted_beyond = cross_validated_seconds(arrays, [ranks > 2048])
    largest = np.array(
        [
            float(record["gpus"]) >= 8192
            and (
                "mlcommons" in record["source"] or ("MegaScale" in record["source"] and case.stack == "megatron_tuned")
            )
            for _, record, case, _ in records
        ]
    )
    extrapolation_error = np.abs(predicted_beyond / measured - 1)[largest]
    baseline = [
        (index, seconds)
        for index, record, case, seconds in records
        if record["source"].startswith("MegaScale (") and case.stack == "megatron_lm" and float(record["gpus"]) >= 8192
    ]
    inside = [predictions[index].low <= seconds <= predictions[index].high for index, seconds in baseline]  # type: ignore[operator]  # priced rows have bands
    even_seconds, straggler_seconds = straggler_band(
        [
            case
            for _, record, case, _ in records
            if record["source"].startswith("MegaScale (")
            and case.stack == "megatron_lm"
            and float(record["gpus"]) >= 8192
        ]
    )
    print(
        f"\nMegaScale's Megatron-LM rows: predicted for equal ranks, measured, predicted at {SPREAD:.0%} spread of speed"
    )
    for (_, seconds), low, high in zip(baseline, even_seconds, straggler_seconds, strict=True):
        print(f"  {low:6.2f} {seconds:6.2f} {high:6.2f}")
        inside.append(bool(low <= seconds <= high))
    print("\n≥ 8,192 GPUs, fitted on ≤ 2,048 (predicted / measured)")
    for (_, record, _, seconds), value, is_largest in zip(records, predicted_beyond, largest, strict=True):
        if is_largest:
            print(f"  {value / seconds:6.3f}  {record['gpus']:>6} {record['model']:>16}  {record['source'][:80]}")
    return [
        Criterion(
            "Megatron's and MegaScale's 175B/530B/1T tables, median",
            float(np.median(error[from_papers & is_large_model])),
            0.05,
        ),
        Criterion("≥ 8,192 GPUs fitted on ≤ 2,048, median", float(np.median(extrapolation_error)), 0.05),
        Criterion("≥ 8,192 GPUs fitted on ≤ 2,048, worst", float(np.max(extrapolation_error)), 0.10),
        Criterion(
            "MegaScale's Megatron-LM rows ≥ 8,192 GPUs inside both bands", float(np.mean(inside)), 1.0, at_least=True
        ),
    ]


SPREAD = 0.05
"""Relative standard deviation of a rank's compute time in the straggler band."""


def straggler_band(cases: list[PublishedCase]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each case with equal ranks, and with all ranks waiting for the slowest one at `SPREAD`."""
    slow = [
        replace(
            case, layout=replace(case.layout, slowest_rank_ratio=float(expected_slowest(case.layout.ranks, SPREAD)))
        )
        for case in cases
    ]
    return price(cases).seconds, price(slow).seconds


PLAN_KEY = ("tp", "pp", "dp", "cp", "ep", "vpp", "zero/fsdp", "micro_batch", "recompute")


def regret_criteria(records: list[Record], fitted: np.ndarray, folds: np.ndarray) -> list[Criterion]:
    """Criteria for regret: measured time of the layout predicted fastest over the best measured, the mean over groups."""
    groups = {
        "vTrain": (lambda record: "vTrain data" in record["source"], 1.10, 1.03),
        "playbook to 64 GPUs": (lambda record: "playbook" in record["source"] and not noisy(record), 1.15, 1.05),
        "playbook from 128 GPUs": (noisy, 1.40, 1.20),
    }
    criteria = []
    print("\nregret: groups, first, best of three (in sample); with rows left out of the fit; Spearman mean, least")
    for name, (in_group, first_limit, best_of_three_limit) in groups.items():
        indices = [index for index, (_, record, _, _) in enumerate(records) if in_group(record)]
        in_sample = _regrets([records[index] for index in indices], fitted[indices])
        left_out_regrets = _regrets([records[index] for index in indices], folds[indices])
        print(
            f"  {name:24} {len(in_sample):4} {_mean(in_sample, 0):.3f} {_mean(in_sample, 1):.3f}"
            f"   {_mean(left_out_regrets, 0):.3f} {_mean(left_out_regrets, 1):.3f}"
            f"   {_mean(in_sample, 2):.3f} {min(regret[2] for regret in in_sample):.3f}"
        )
        criteria += [
            Criterion(f"regret {name}", _mean(in_sample, 0), first_limit),
            Criterion(f"regret {name}, best of three", _mean(in_sample, 1), best_of_three_limit),
        ]
        if name == "playbook from 128 GPUs":
            criteria.append(
                Criterion(
                    "least Spearman of a group, playbook from 128 GPUs",
                    min(regret[2] for regret in in_sample),
                    0.9,
                    at_least=True,
                )
            )
    return criteria


def _mean(regrets: list[tuple[float, float, float]], column: int) -> float:
    return float(np.mean([entry[column] for entry in regrets]))


def _regrets(records: list[Record], predicted: np.ndarray) -> list[tuple[float, float, float]]:
    """(regret of the first, of the best of three, Spearman correlation) of each group with at least five layouts."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for (_, record, _, seconds), predicted_seconds in zip(records, predicted, strict=True):
        key = tuple(
            record[column] for column in ("source", "model", "layers", "hidden", "seq", "gpu", "gpus", "global_batch")
        )
        groups[key][tuple(record[column] for column in PLAN_KEY)].append((seconds, predicted_seconds))
    regrets = []
    for layouts in groups.values():
        if len(layouts) < 5:
            continue
        pairs = np.array([np.median(np.array(repeats), axis=0) for repeats in layouts.values()])
        order = np.argsort(pairs[:, 1])
        best = pairs[:, 0].min()
        regrets.append(
            (pairs[order[0], 0] / best, pairs[order[:3], 0].min() / best, _spearman(pairs[:, 0], pairs[:, 1]))
        )
    return regrets


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def memory_criteria(runs: list[dict[str, str]], predictions: list[Prediction]) -> list[Criterion]:
    measured_and_predicted = [
        (float(record["mem_gb"]), prediction)
        for record, prediction in zip(runs, predictions, strict=True)
        if record["mem_gb"] and prediction.memory_gib
    ]
    error = [
        abs(prediction.memory_gib / measured - 1)
        for measured, prediction in measured_and_predicted
        if prediction.memory_gib
    ]
    key = ("model", "gpus", *PLAN_KEY)
    layouts_that_ran = {
        tuple(record[column] for column in key) for record in runs if measured_seconds(record) and not failed(record)
    }
    failed_predictions = [
        prediction
        for record, prediction in zip(runs, predictions, strict=True)
        if failed(record) and tuple(record[column] for column in key) not in layouts_that_ran
    ]
    ran_predictions = [
        prediction
        for record, prediction in zip(runs, predictions, strict=True)
        if measured_seconds(record) and not failed(record)
    ]
    refused_share = np.mean([prediction.fits is False for prediction in failed_predictions])
    wrongly_refused_share = np.mean(
        [prediction.fits is False for prediction in ran_predictions if prediction.fits is not None]
    )
    errors_by_source: dict[str, list[float]] = defaultdict(list)
    for record, prediction in zip(runs, predictions, strict=True):
        if record["mem_gb"] and prediction.memory_gib:
            errors_by_source[record["source"]].append(abs(prediction.memory_gib / float(record["mem_gb"]) - 1))
    print("\nmemory: rows, median error, source")
    for source, errors in errors_by_source.items():
        print(f"  {len(errors):5} {np.median(errors):6.1%}  {source}")
    with_measured_memory = with_memory(runs)
    ratio = cross_validated_memory_gib(with_measured_memory) / np.array(
        [float(record["mem_gb"]) for record, _ in with_measured_memory]
    )
    print(
        f"  all {len(with_measured_memory)} with their layouts left out of the fit, by fifths: {np.median(np.abs(ratio - 1)):.1%}"
    )
    return [
        Criterion("memory, median error", float(np.median(error)), 0.04),
        Criterion("failed rows refused", float(refused_share), 0.85, at_least=True),
        Criterion("rows that ran refused", float(wrongly_refused_share), 0.02),
    ]


def source_criteria(arrays: RunArrays, seconds: np.ndarray, classes: list[RunClass]) -> list[Criterion]:
    """Criteria for the errors on sources that were left out of the fit, by what remains known of their software.

    A source's runs of one software count as a source; those with less than `MIN_RECORDS` runs are left out. Software is unknown if the
    other sources have less than `costs.bands.LEAST_RUNS` runs of it, and it has no related one: no fact of the row then says what it takes
    to launch kernels, for example. These sources are listed, and have no limit but in the median over all.
    """
    names = np.array(
        [f"{source_of(name)} / {stack}" for name, (_, stack) in zip(arrays.names, arrays.pairs, strict=True)]
    )
    error = np.abs(seconds / arrays.measured - 1)
    moe, hybrid = np.asarray(arrays.shape.moe_layers) > 0, np.asarray(arrays.shape.mixer_layers) > 0
    is_known = np.array([run.software != "unknown" for run in classes])

    def medians(selected: np.ndarray) -> dict[str, float]:
        counts = Counter(names[selected].tolist())
        return {
            name: float(np.median(error[selected & (names == name)]))
            for name, count in counts.items()
            if count >= MIN_RECORDS
        }

    groups = {
        "dense": medians(~moe & ~hybrid & is_known),
        "mixtures": medians(moe & ~hybrid & is_known),
        "unknown software": medians(~hybrid & ~is_known),
    }
    for group, by_source in groups.items():
        middle = np.median(list(by_source.values()))
        print(f"\nsources left out, {group}: {len(by_source)} sources, median {middle:.1%}; the worst medians")
        for name, median in sorted(by_source.items(), key=lambda entry: -entry[1])[:6]:
            print(f"  {median:6.1%}  {name[:110]}")
    known_medians = [*groups["dense"].values(), *groups["mixtures"].values()]
    return [
        Criterion(
            "median of the sources' medians, sources left out", float(np.median(list(medians(~hybrid).values()))), 0.04
        ),
        Criterion("the same, without sources of unknown software", float(np.median(known_medians)), 0.04),
        Criterion("worst dense source of known software, left out", max(groups["dense"].values()), 0.12),
        Criterion(
            "MoE models, median of the sources' medians, left out",
            float(np.median(list(groups["mixtures"].values()))),
            0.1,
        ),
        Criterion(
            "worst source of MoE models without Mamba and of known software, left out",
            max(groups["mixtures"].values()),
            0.25,
        ),
    ]


def band_criteria(arrays: RunArrays, seconds: np.ndarray, classes: list[RunClass]) -> list[Criterion]:
    """Criteria for the coverage of the bands on sources left out of the fit, by class.

    The band of a source's runs comes from the errors of all other left-out sources.
    """
    residual = np.log(arrays.measured / seconds)
    names = np.array([source_of(name) for name in arrays.names])
    inside = np.zeros(len(residual), dtype=bool)
    for name in dict.fromkeys(names.tolist()):
        others = np.flatnonzero(names != name)
        bands = fitted_bands([classes[index] for index in others], names[others].tolist(), residual[others])
        for index in np.flatnonzero(names == name):
            low, high = band_of(classes[index], bands)
            inside[index] = low <= residual[index] <= high
    used = table()["bands"]
    criteria = []
    print(
        "\nbands of sources left out: rows, sources, share inside, mean of the sources' shares, share without the source, band, class"
    )
    for label in sorted({run.name for run in classes}):
        members = np.array([run.name == label for run in classes])
        low, high = band_of(next(run for run in classes if run.name == label), used)
        in_band = (residual[members] >= low) & (residual[members] <= high)
        share, sources = float(np.mean(in_band)), list(dict.fromkeys(names[members].tolist()))
        by_source = np.mean([in_band[names[members] == name].mean() for name in sources])
        print(
            f"  {members.sum():5} {len(sources):3} {share:6.1%} {by_source:6.1%} {inside[members].mean():6.1%}  "
            f"{np.expm1(low):+.0%} to {np.expm1(high):+.0%}  {label}"
        )
        if members.sum() >= MIN_RUNS:
            criteria += [
                Criterion(f"share inside the band: {label}", share, 0.75, at_least=True),
                Criterion(f"share inside the band: {label}", share, 0.85),
            ]
    return criteria


def speed_criteria() -> list[Criterion]:
    """Criteria for the time of a prediction, and of a sweep for a 175B model on 16,384 GPUs."""
    model = shape_from_dimensions(dimensions_by_name("GPT-175B"))
    chip = CHIPS["H100"]
    machine = Machine(
        peak=chip.peak_flops["bf16"],
        half_peak=chip.peak_flops["bf16"],
        matmul_format=0.0,
        hbm=chip.hbm,
        memory=chip.memory_bytes,
        link=chip.link,
        nic=chip.nic,
        domain=8.0,
        per_node=8.0,
    )
    k = constants("hopper", "bridge")
    grid = sweep(16384.0)
    start = time.perf_counter()
    step_cost(model, machine, grid, k)
    layouts_per_second = len(grid.tensor) / (time.perf_counter() - start)
    small_layout = Layouts(
        tensor=2.0,
        pipeline=1.0,
        virtual=1.0,
        context=1.0,
        expert=1.0,
        data=4.0,
        zero=3.0,
        shards=4.0,
        micro_batch=1.0,
        global_batch=16.0,
        seq=8192.0,
        recompute=0.0,
    )
    times = []
    for _ in range(20):
        start = time.perf_counter()
        step_cost(model, machine, small_layout, k)
        times.append(time.perf_counter() - start)
    return [
        Criterion("milliseconds of one prediction on 8 GPUs", float(np.median(times)) * 1e3, 5.0),
        Criterion("layouts a second, 175B on 16,384 GPUs", layouts_per_second, 100_000, at_least=True),
    ]


def sweep(ranks: float) -> Layouts:
    """A grid of at least 100,000 layouts of `ranks` GPUs."""
    axes = np.meshgrid(
        [1, 2, 4, 8],
        [1, 2, 3, 4, 6, 8, 12, 16, 24, 32],
        [1, 2, 3, 4, 6],
        [1, 2, 4, 8],
        [0, 1, 3],
        [1, 2, 4, 8],
        [0, 1, 2],
        np.arange(8),
        indexing="ij",
    )
    tensor, pipeline, virtual, context, zero, micro, recompute, _ = (axis.ravel().astype(np.float64) for axis in axes)
    data = ranks / tensor / pipeline / context
    ones = np.ones_like(tensor)
    return Layouts(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        context=context,
        expert=ones,
        data=data,
        zero=zero,
        shards=data * context,
        micro_batch=micro,
        global_batch=2048 * ones,
        seq=4096 * ones,
        recompute=recompute,
    )


if __name__ == "__main__":
    main()
