"""The trainer on several ranks: it resumes bit for bit, reads the same samples on any number of them, stops as one, and
applies no bad step.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.checkpoint.models.convert import export_checkpoint
from meshwright.checkpoint.models.single_device import load_model
from meshwright.config.load import load_resolved
from meshwright.data.loader import MicroBatch, open_data
from meshwright.data.prepare import prepare
from meshwright.observe.metrics import STEP_KEYS, read_metrics
from meshwright.spec.layout import shard_rows
from meshwright.spec.model import parameters
from meshwright.spec.run import Assignment, RunSpec
from meshwright.training.evaluate import HeldOut, evaluate_plain, plain_loss
from meshwright.training.stop import INTERRUPT, PREEMPT
from tests.distributed import cases_training as cases
from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks, staged, tiny_run

BATCH, STEPS = 8, 6
LAYOUT_BOUND = 1e-5
"""Relative difference of an fp32 loss between layouts: the same sums in another order."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def trained(
    pool: Pool,
    tiny: Path,
    runs: Path,
    *overrides: str,
    stop_at: int = 0,
    stop_rank: int = 0,
    flag: int = PREEMPT,
    poison: str = "",
    poison_rank: int = 1,
) -> list[Seen]:
    """Train `runs/tiny` from the state of its folder, and return every rank's records; see `cases_training.run`."""
    assignment = prepared(tiny, runs, *overrides).assignment
    return pool.run(cases.run, assignment.plan.ranks, assignment, stop_at, stop_rank, flag, poison, poison_rank)


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys() and first
    return all(torch.equal(first[name], second[name]) for name in first)


def merge_tensors(results: list[Seen]) -> dict[str, torch.Tensor]:
    """All weights and moments at the end of a run, from the ranks of all stages. What two of them hold must be equal."""
    tensors: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in result.tensors.items():
            assert torch.equal(tensors.setdefault(name, tensor), tensor), name
    return tensors


def steps_on_disk(runs: Path) -> list[int]:
    """The committed, intact checkpoints of the run."""
    checkpoints = list_checkpoints(runs / "tiny")
    return [checkpoint["step"] for checkpoint in checkpoints if checkpoint["committed"] and checkpoint["ok"]]


PLANS = {
    "bf16, recompute, accumulate": [*ranks(2), "plan.compute=bf16", "plan.recompute=selective", "plan.micro_batch=1"],
    "fsdp": ranks(2),
    "pipeline": staged(2, "zbv"),
    "replicas": ranks(2, replicate=2),
    "layered": [*ranks(2), "plan.schedule=breadth_first", "plan.micro_batch=1"],
    "fp8": [*ranks(2), "plan.compute=bf16", "plan.linear=fp8_tensorwise", "plan.micro_batch=1"],
    "fp8 by row, pipeline": [*staged(2, "zbv"), "plan.linear=fp8_rowwise"],
}


@pytest.mark.parametrize("name", quick_first(1, PLANS))
def test_k_and_k_steps_equal_2k_bit_for_bit(pool: Pool, tiny: Path, tmp_path: Path, name: str) -> None:
    uninterrupted = trained(pool, tiny, tmp_path / "whole", *PLANS[name])
    first = trained(pool, tiny, tmp_path / "parts", *PLANS[name], stop_at=3)
    assert steps_on_disk(tmp_path / "parts") == [3]
    second = trained(pool, tiny, tmp_path / "parts", *PLANS[name])
    assert [result.began for result in second] == [3, 3]
    for rank in range(2):
        assert first[rank].losses + second[rank].losses == uninterrupted[rank].losses
        norms = [[record["grad_norm"] for record in result[rank].steps] for result in (uninterrupted, first, second)]
        assert norms[1] + norms[2] == norms[0]
    assert same_bits(merge_tensors(second), merge_tensors(uninterrupted))
    assert not same_bits(merge_tensors(first), merge_tensors(uninterrupted))
    lines = [line for line in read_metrics(tmp_path / "parts" / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
    assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(uninterrupted[0].losses, start=1))


@pytest.mark.slow
@pytest.mark.parametrize("linear", ["fp8_tensorwise", "fp8_rowwise"])
def test_matmuls_in_fp8_train_as_well(pool: Pool, tiny: Path, tmp_path: Path, linear: str) -> None:
    longer = [*ranks(2), "train.steps=40"]
    bf16_run = trained(pool, tiny, tmp_path / "wide", *longer)[0]
    low = trained(pool, tiny, tmp_path / "low", *longer, "plan.compute=bf16", f"plan.linear={linear}")[0]
    fp8_loss, wide_loss = low.validations[-1][1].loss, bf16_run.validations[-1][1].loss
    assert wide_loss < 0.5 * bf16_run.losses[0]
    assert fp8_loss == pytest.approx(wide_loss, rel=0.01)
    assert low.losses != bf16_run.losses


@pytest.fixture(scope="module")
def one_rank(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The run on one rank: what every other layout is compared with."""
    return trained(pool, tiny, tmp_path_factory.mktemp("one"), *ranks(1))[0]


def compare(attempts: list[list[Seen]], truth: Seen) -> None:
    """Assert that the attempts together equal the run `truth`: samples, token sums, losses, final weights."""
    read = [samples_by_step(ranks_seen) for ranks_seen in attempts]
    assert [step for steps in read for step in steps] == [
        list(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS)
    ]
    steps = [record for ranks_seen in attempts for record in ranks_seen[0].steps]
    for key in ("step", "token_sum", "tokens", "lr"):
        assert [record[key] for record in steps] == [record[key] for record in truth.steps]
    assert [record["loss"] for record in steps] == pytest.approx(truth.losses, rel=LAYOUT_BOUND)
    ours = merge_tensors(attempts[-1])
    assert ours.keys() == truth.tensors.keys()
    weights = {name: tensor for name, tensor in ours.items() if name.startswith("model.")}
    for name, tensor in weights.items():
        # Of the whole tensor: where a gradient is next to nothing, Adam makes of its rounding a step as large as any other.
        expected = truth.tensors[name]
        assert (tensor - expected).norm() <= 1e-3 * expected.norm(), name


def samples_by_step(results: list[Seen]) -> list[list[int]]:
    """The global indices all data ranks together read in each step, sorted. Every pipeline rank reads the same."""
    first, *other_stages = [
        [result for result in results if result.model_rank == rank]
        for rank in sorted({result.model_rank for result in results})
    ]
    for stage in other_stages:
        assert [result.indices for result in stage] == [result.indices for result in first]
    accumulate = len(first[0].indices) // len(first[0].steps)
    steps: list[list[int]] = [[] for _ in first[0].steps]
    for result in first:
        for number, micro_batch in enumerate(result.indices):
            steps[number // accumulate] += micro_batch
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(
    "overrides", quick_first(1, [ranks(4, replicate=2), ranks(2), ranks(4)]), ids=["2x2", "2", "4"]
)
def test_any_number_of_ranks_reads_the_same_samples(
    pool: Pool, tiny: Path, tmp_path: Path, one_rank: Seen, overrides: list[str]
) -> None:
    compare([trained(pool, tiny, tmp_path, *overrides, "plan.micro_batch=1")], one_rank)


def test_a_resize_in_mid_run_changes_nothing(pool: Pool, tiny: Path, tmp_path: Path, one_rank: Seen) -> None:
    attempts = [
        trained(pool, tiny, tmp_path, *ranks(4), stop_at=2),
        trained(pool, tiny, tmp_path, *ranks(1), stop_at=4),
        trained(pool, tiny, tmp_path, *ranks(2)),
    ]
    assert [ranks_seen[0].began for ranks_seen in attempts] == [0, 2, 4]
    compare(attempts, one_rank)


@pytest.mark.parametrize(
    ("count", "flag", "error"),
    quick_first(1, [(4, INTERRUPT, "Interrupted"), (2, PREEMPT, "Preempted")], unpack=True),
)
def test_one_rank_that_is_asked_to_stop_stops_all_after_the_same_step(
    pool: Pool, tiny: Path, tmp_path: Path, count: int, flag: int, error: str
) -> None:
    results = trained(pool, tiny, tmp_path, *ranks(count), stop_at=4, stop_rank=1, flag=flag)
    assert [result.last for result in results] == [4] * count
    assert {result.error and result.error[0] for result in results} == {error}
    assert all(result.error and "after step 4" in result.error[1] for result in results)
    assert steps_on_disk(tmp_path) == [4]


def test_a_step_that_is_not_a_number_is_not_applied(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """From step 2's checkpoint: rank 1's shard gets one NaN, and nothing else may change."""
    healthy = trained(pool, tiny, tmp_path, *ranks(2), stop_at=2)[0].tensors
    name = "layers.1.mlp.down.weight"
    results = trained(pool, tiny, tmp_path, *ranks(2), "checkpoint.every=1", poison=name)
    for result in results:
        assert result.error and result.error[0] == "NumericalFailure" and "step 3" in result.error[1]
        assert [record["step"] for record in result.steps] == [3]
    state_after = results[0].tensors
    poisoned = state_after[f"model.{name}"]
    changed = (poisoned != healthy[f"model.{name}"]).flatten().nonzero().flatten().tolist()
    assert changed == [poisoned.numel() // 2] and poisoned.isnan().sum() == 1
    other_keys = [key for key in healthy if key != f"model.{name}"]
    assert same_bits({key: state_after[key] for key in other_keys}, {key: healthy[key] for key in other_keys})
    assert steps_on_disk(tmp_path) == [2]
    last = read_metrics(tmp_path / "tiny" / "metrics.jsonl")[-1]
    assert last["step"] == 3 and last["loss"] is None and last["nonfinite"]["loss"] == "nan"


@pytest.mark.slow
@pytest.mark.parametrize("ranks_beside", [4, 2])
@pytest.mark.parametrize(
    ("size", "tokens"),
    [(["train.global_batch=128", "train.seq_len=15"], "none"), ([], 256)],
    ids=["less text than one batch", "two batches"],
)
def test_validation_is_the_same_for_any_number_of_ranks(
    pool: Pool, tiny: Path, tmp_path: Path, size: list[str], tokens: int | str, ranks_beside: int
) -> None:
    size = [*size, f"data.validation_tokens={tokens}"]
    precise = ["plan.compute=fp64", "train.steps=2", "train.warmup_steps=0", "train.validate_every=1", *size]
    validations = {}
    for count in (1, ranks_beside):
        results = trained(pool, tiny, tmp_path / str(count), *ranks(count), *precise)
        assert all(result.validations == results[0].validations for result in results)
        validations[count] = results[0].validations
    assert [step for step, _ in validations[1]] == [1, 2]
    assert validations[1][0][1].tokens == validated_tokens(tiny_run(tiny, *size))
    for (_, actual), (_, truth) in zip(validations[ranks_beside], validations[1], strict=True):
        assert actual.loss == pytest.approx(truth.loss, rel=1e-12) and actual.tokens == truth.tokens


@pytest.mark.parametrize(
    "layout", quick_first(1, [[*staged(2, "1f1b"), "plan.micro_batch=2"], ranks(2)]), ids=["stages", "shards"]
)
def test_a_moe_s_validation_names_each_source_s_loss(pool: Pool, tiny: Path, tmp_path: Path, layout: list[str]) -> None:
    mix = {str(tiny.parent / "data"): 2, str(other_data(tiny, tmp_path)): 1}
    overrides = [f"data.mix={json.dumps(mix)}", "data.document_mask=true", "data.validation_tokens=384"]
    overrides += ["plan.compute=fp64", "train.steps=1", "train.warmup_steps=0", *layout]
    results = trained(pool, tiny, tmp_path, *overrides)
    ((_, actual),) = results[0].validations
    assert all(result.validations == results[0].validations for result in results)
    expected = losses_by_source(tmp_path / "tiny", tiny_run(tiny, *overrides))
    assert set(expected) == set(mix)
    assert actual.by_source == pytest.approx(
        {name: loss / tokens for name, (loss, tokens) in expected.items()}, rel=1e-9
    )
    mean = sum(mix[name] * loss / tokens for name, (loss, tokens) in expected.items()) / sum(mix.values())
    assert actual.loss == pytest.approx(mean, rel=1e-9)
    assert actual.tokens == sum(tokens for _, tokens in expected.values())
    (line,) = (record for record in read_metrics(tmp_path / "tiny" / "metrics.jsonl") if record["kind"] == "validation")
    assert line["by_source"] == actual.by_source


def other_data(tiny: Path, folder: Path) -> Path:
    """Another corpus by the tiny run's tokenizer, in which a few words come again and again."""
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text("seven wizards eat blue ink " * (5 + number % 7), encoding="utf-8")
    prepare([str(text)], str(tiny.parent / "data" / "train"), folder / "other", held_out=0.5)
    return folder / "other"


def losses_by_source(folder: Path, run: RunSpec) -> dict[str, tuple[float, int]]:
    """Summed loss and valid tokens of each source's held-out samples, sample by sample by the plain model of a finished run."""
    model = load_model(folder, torch.device("cpu"), torch.float64)
    source = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, split="validation")
    sums: dict[str, tuple[float, int]] = {}
    for index in np.concatenate(list(HeldOut.of(source, run.data.validation_tokens).samples.values())).tolist():
        batch, name = source.samples([index]), source.describe(index)["source"]
        tensors = [torch.from_numpy(array) for array in (batch.tokens, batch.targets, batch.positions, batch.documents)]
        with torch.no_grad():
            loss = plain_loss(model, MicroBatch(*tensors, valid_tokens=0)).item()
        loss_sum, tokens = sums.get(name, (0.0, 0))
        sums[name] = loss_sum + loss, tokens + int((batch.targets >= 0).sum())
    return sums


def valid_tokens(run: RunSpec, samples: int) -> int:
    """Targets to be learned in the first samples, counted from the data itself."""
    source = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed)
    return int((source.samples(range(samples)).targets >= 0).sum())


def validated_tokens(run: RunSpec) -> int:
    """Targets of the samples that a validation reads."""
    source = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, split="validation")
    (indices,) = HeldOut.of(source, run.data.validation_tokens).samples.values()
    return int((source.samples(indices).targets >= 0).sum())


def test_validation_leaves_the_model_sharded(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), "plan.reshard=false").assignment
    for sharded_before, sharded_after in pool.run(cases.validate_and_compare, 2, assignment):
        assert sharded_before and all(sharded_before) and all(sharded_after)


@pytest.mark.slow
def test_validation_does_not_touch_the_training(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    without_validation = trained(pool, tiny, tmp_path / "without", *ranks(2), "train.validate_every=0")[0]
    with_it = trained(pool, tiny, tmp_path / "with", *ranks(2), "train.validate_every=1")[0]
    assert (len(without_validation.validations), len(with_it.validations)) == (1, STEPS)
    assert with_it.losses == without_validation.losses and same_bits(with_it.tensors, without_validation.tensors)


@pytest.fixture(scope="module")
def source(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run to start others from, exported to `hf` in it."""
    runs = tmp_path_factory.mktemp("source")
    trained(pool, tiny, runs, *ranks(2))
    export_checkpoint(runs / "tiny", runs / "tiny" / "hf", dtype="fp32")
    return runs / "tiny"


@pytest.mark.parametrize("init", ["checkpoint:{}", "hf:{}/hf"])
def test_a_run_starts_from_other_weights(
    pool: Pool, tiny: Path, tmp_path: Path, source: Path, one_rank: Seen, init: str
) -> None:
    steps = ["train.steps=1", "train.warmup_steps=0"]
    assignment = prepared(tiny, tmp_path, *ranks(2), f"model.init={init.format(source)}", *steps).assignment
    answers = pool.run(cases.initial, 2, assignment)
    first = answers[0][0].losses[0]
    assert first == pytest.approx(loss_of_first_batch(source, assignment), rel=1e-5)
    assert first < one_rank.losses[0] - 0.1 and answers[1][0].losses == [first]
    for rank, (_, read) in enumerate(answers):
        expected = {
            parameter.name: shard_rows(parameter.shape[0], 2, rank) for parameter in parameters(assignment.run.model)
        }
        assert {name: range(first_row, last) for name, first_row, last in read} == expected


def loss_of_first_batch(source: Path, assignment: Assignment) -> float:
    """By the plain model of the source run on one device, which knows nothing of shards."""
    run = assignment.run
    data = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, vocab_size=run.model.vocab_size)
    model = load_model(source, torch.device("cpu"), torch.float32)
    return evaluate_plain(
        model,
        HeldOut(data, {next(iter(data.sources)): np.arange(BATCH)}),
        micro_batch=BATCH,
        device=torch.device("cpu"),
    ).loss


@pytest.mark.parametrize(
    ("other_sizes", "weight"),
    [({"vocab_size": 256}, "embed"), ({"layers": 1}, "layers.1"), ({"layers": 3}, "layers.2")],
)
def test_weights_of_another_model_are_refused(
    pool: Pool, source: Path, other_sizes: dict[str, int], weight: str
) -> None:
    """Its rows could be read, so only a comparison of shapes tells."""
    for init in (f"checkpoint:{source}", f"hf:{source}/hf"):
        model = replace(load_resolved(source / "config.yaml").model, **other_sizes)
        (answer,) = pool.run(cases.refusal, 1, model, init)
        assert answer.startswith(f"BadInput: model.init {init}: {weight}")


def test_ranks_agree_on_the_first_ones_assignment(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2)).assignment
    assert pool.run(cases.received_assignment, 2, assignment) == [assignment, assignment]
    answers = pool.run(cases.received_assignment, 2, None)
    assert answers[0] == ("BadInput", "planned")
    assert answers[1] == ("BadInput", "rank 0 could not prepare the run: planned")
    full, other_answer = pool.run(cases.received_assignment, 2, None, True)
    assert full[0] == "OSError" and other_answer[0] == "OutOfResources"
    assert "rank 0 could not prepare the run: /runs/x/config.yaml: No space left on device" in other_answer[1]


def test_metrics_have_all_documented_keys(tiny: Path, pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(tiny)
    trained(pool, tiny, tmp_path, *ranks(2), "train.validate_every=3")
    lines = read_metrics(tmp_path / "tiny" / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    promised = [
        "step",
        "loss",
        "tokens",
        "tokens_per_second",
        "mfu",
        "grad_norm",
        "lr",
        "memory_peak_bytes",
        "step_seconds",
    ]
    assert set(promised) <= set(STEP_KEYS) and all(set(promised) <= set(line) for line in steps)
    assert [line["mfu"] for line in steps] == [None] * STEPS  # no peak is known for this processor
    warmup, cosine = [0.5, 1.0], [0.1 + 0.9 * factor for factor in (0.8535533906, 0.5, 0.1464466094, 0.0)]
    assert [line["lr"] for line in steps] == pytest.approx([1e-2 * factor for factor in warmup + cosine])
    assert [line["tokens"] for line in steps] == [valid_tokens(run, BATCH * step) for step in range(1, STEPS + 1)]
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [3, 6]
    for line in steps:
        assert set(line["phases"]) >= {"data", "forward", "backward", "reduce", "optim"}
        assert line["tokens_per_second"] == pytest.approx(BATCH * 16 / line["step_seconds"])


@pytest.mark.slow
def test_each_rank_writes_a_trace_of_the_steps_asked_for(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), profile=(2, 4)).assignment
    names = ["rank-00000.json.gz", "rank-00001.json.gz"]
    assert pool.run(cases.traced, 2, assignment) == [names, names]
    events = [line for line in read_metrics(tmp_path / "tiny" / "metrics.jsonl") if line["kind"] == "event"]
    assert [line["step"] for line in events if line["text"].startswith(f"one trace a rank in {tmp_path}")] == [4]
    for name in names:
        with gzip.open(tmp_path / "tiny" / "traces" / name) as file:
            events = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        groups = 2  # decayed and not decayed
        assert events.count("aten::_fused_adamw_") == 3 * groups
        assert "aten::mm" in events and "aten::scaled_dot_product_attention" in events
        assert any("reduce_scatter" in event for event in events)
