"""Runs on preferences: the reference without a second model, the same figures on any layout, the same bits after a stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.prepare import open_run_data
from meshwright.training.evaluate import Evaluation
from tests.distributed.cases_training import Seen
from tests.distributed.pool import Pool
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.preferences.corpus import make_preferences
from tests.slow import quick_first
from tests.training.tiny import ranks, staged, tiny_run

LORA = "model.adapter={rank: 8, alpha: 16, targets: [all-linear]}"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preferences(tmp_path_factory.getbasetemp() / "preferences")


def figures(results: list[Seen], name: str) -> list[float]:
    """A figure of each step, which all ranks know alike."""
    seen = [[record[name] for record in result.steps] for result in results]
    assert all(each == seen[0] for each in seen)
    return seen[0]


def judged(results: list[Seen]) -> list[tuple[int, Evaluation]]:
    """The validations of a run, which all ranks know alike."""
    seen = results[0].validations
    assert all(
        [each.preferences for _, each in result.validations] == [e.preferences for _, e in seen] for result in results
    )
    return seen


def stored(pairs: Path) -> list[Path]:
    return sorted(path for path in pairs.parent.rglob("reference-*"))


def forget(pairs: Path) -> None:
    for path in stored(pairs):
        path.unlink()


PLANS = {
    "fsdp": ranks(2),
    "tensor": ["cluster.gpus_per_node=2", "plan.tensor=2"],
    "pipeline": staged(2, "zbv"),
    "ring": ["cluster.gpus_per_node=2", "plan.context_ring=2"],
    "ulysses": ["cluster.gpus_per_node=2", "plan.context_ulysses=2"],
}


@pytest.mark.parametrize("name", quick_first(2, PLANS))
def test_layouts_learn_the_same(pool: Pool, pairs: Path, tmp_path: Path, name: str) -> None:
    """From the first loss, ln 2, to the accuracy of held-out pairs; the reference is computed in each layout anew."""
    layers = [each for each in PLANS[name] if each.startswith("model.")]
    seen = []
    for part, plan in (("one", [*ranks(1), *layers]), ("several", PLANS[name])):
        forget(pairs)
        results = trained(pool, pairs, tmp_path / part, *plan)
        assert stored(pairs)
        seen.append([figures(results, figure) for figure in ("loss", "margin", "accuracy", "pairs", "chosen_tokens")])
        (before, first), (after, last) = judged(results)
        assert (before, after) == (0, 4) and first.preferences["accuracy"] == 0.5
        assert first.loss == pytest.approx(math.log(2), rel=1e-5) and last.preferences["accuracy"] > 0.9
    assert seen[0][0][0] == pytest.approx(math.log(2), rel=1e-5) and seen[0][1][0] == pytest.approx(0, abs=1e-5)
    for one, several in zip(*seen, strict=True):
        assert several == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_a_stopped_run_goes_on_with_the_same_bits(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """Also without the stored log-probabilities: they are of the first weights, not of the checkpoint's."""
    forget(pairs)  # another layout rounds otherwise
    whole = trained(pool, pairs, tmp_path / "whole", *ranks(2))
    first = trained(pool, pairs, tmp_path / "parts", *ranks(2), stop_at=2)
    forget(pairs)
    second = trained(pool, pairs, tmp_path / "parts", *ranks(2))
    assert [result.began for result in second] == [2, 2]
    assert same_bits(merge_tensors(second), merge_tensors(whole))
    for figure in ("loss", "margin", "reference_distance"):
        assert figures(first, figure) + figures(second, figure) == figures(whole, figure)


def test_adapters_begin_as_their_reference(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """The frozen model is the reference, also where the run began from other adapters: those are part of it."""
    results = trained(pool, pairs, tmp_path, *ranks(1), LORA, "train.learning_rate=5e-2", "name=first")
    assert figures(results, "loss")[0] == pytest.approx(math.log(2), rel=1e-5)
    assert figures(results, "margin")[0] == pytest.approx(0, abs=1e-5)
    assert judged(results)[-1][1].preferences["accuracy"] > 0.9
    more = LORA.replace("}", f", init: {tmp_path / 'first'}}}")
    second = trained(pool, pairs, tmp_path, *ranks(1), more, "train.steps=1", "train.warmup_steps=0", "name=second")
    assert figures(second, "loss")[0] == pytest.approx(math.log(2), rel=1e-5)
    assert judged(second)[0][1].preferences["likelier"] > 0.9


def test_a_reference_of_other_weights(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """A run from other weights than the reference's does not begin at margin 0; with the run itself as reference it does."""
    trained(pool, pairs, tmp_path, *ranks(1), "name=base")
    init = f"model.init=checkpoint:{tmp_path / 'base'}"
    short: list[Any] = ["train.steps=1", "train.warmup_steps=0"]
    losses = {}
    for name, reference in {"start": "start", "itself": f"checkpoint:{tmp_path / 'base'}"}.items():
        more = [init, f"preference.reference={reference}", f"name={name}"]
        losses[name] = figures(trained(pool, pairs, tmp_path, *ranks(1), *short, *more), "loss")
    assert losses["start"] == losses["itself"] == [pytest.approx(math.log(2), rel=1e-5)]
    trained(pool, pairs, tmp_path, *ranks(1), "seed=1", "train.steps=1", "train.warmup_steps=0", "name=other")
    other = [init, f"preference.reference=checkpoint:{tmp_path / 'other'}", "name=apart"]
    apart = trained(pool, pairs, tmp_path, *ranks(1), *short, *other)
    assert figures(apart, "margin")[0] > 0.1 and figures(apart, "loss")[0] < 0.69


LOSSES = {"ipo": "preference.beta=0.5", "simpo": "preference.margin=0.3", "orpo": "train.learning_rate=2e-2"}


@pytest.mark.parametrize("loss", quick_first(1, LOSSES))
def test_other_losses_learn(pool: Pool, pairs: Path, tmp_path: Path, loss: str) -> None:
    results = trained(pool, pairs, tmp_path, *ranks(2), f"preference.loss={loss}", LOSSES[loss])
    (_, first), (_, last) = judged(results)
    assert last.loss < first.loss and last.preferences["likelier"] > 0.9
    assert (loss == "ipo") == ("reference_distance" in last.preferences)


@pytest.mark.parametrize("corpus", quick_first(1, ["labels", "data"]))
def test_kto(pool: Pool, pairs: Path, tmp_path: Path, corpus: str) -> None:
    """Of labelled answers, and of pairs as single answers; z is that of all ranks."""
    data = f'data.mix={{"{pairs.parent / corpus}": 1}}'
    runs = [trained(pool, pairs, tmp_path / str(count), *ranks(count), data, "preference.loss=kto") for count in (1, 2)]
    for figure in ("loss", "margin", "accuracy", "answers", "reference_kl"):
        assert figures(runs[0], figure) == pytest.approx(figures(runs[1], figure), rel=1e-3, abs=1e-5)
    assert figures(runs[0], "loss")[0] == pytest.approx(0.5, rel=1e-5)
    assert figures(runs[0], "reference_kl")[0] == pytest.approx(0, abs=1e-5)
    assert judged(runs[0])[-1][1].preferences["accuracy"] > 0.9


OTHERS = {
    "offloaded optimizer": [*ranks(2), "plan.offload=optimizer", "plan.compute=bf16"],
    "frozen in fp8": [*ranks(1), "plan.compute=bf16", "plan.linear=fp8_tensorwise", "plan.micro_batch=1", LORA],
    "experts": [
        *ranks(2),
        *("model.family=mixtral", "model.experts=4", "model.experts_per_token=2", "model.expert_hidden=32"),
        "plan.expert=2",
    ],
    "deterministic": [*ranks(2), "train.deterministic=true"],
    "kto, pipeline": [*staged(2, "1f1b"), "preference.loss=kto"],
    "kto, tensor": ["cluster.gpus_per_node=2", "plan.tensor=2", "preference.loss=kto"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_reference_is_the_model_at_the_start_in_other_plans(
    pool: Pool, pairs: Path, tmp_path: Path, name: str
) -> None:
    forget(pairs)
    results = trained(pool, pairs, tmp_path, *OTHERS[name])
    expected = 0.5 if name.startswith("kto") else math.log(2)
    assert figures(results, "loss")[0] == pytest.approx(expected, rel=1e-3)
    assert figures(results, "margin")[0] == pytest.approx(0, abs=1e-2)
    assert judged(results)[-1][1].preferences["accuracy"] > 0.9


@pytest.mark.slow
def test_figures_of_each_source(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    names = [str(pairs.parent / name) for name in ("data", "more")]
    mix = f'data.mix={{"{names[0]}": 1, "{names[1]}": 1}}'
    results = trained(pool, pairs, tmp_path, *ranks(2), mix)
    for step in results[0].steps:
        by_source = step["preferences_by_source"]
        assert sum(each["pairs"] for each in by_source.values()) == step["pairs"] and by_source.keys() <= {*names}
    (_, first), (_, last) = judged(results)
    assert first.loss == pytest.approx(math.log(2), rel=1e-5)
    assert {
        name: each["accuracy"] > 0.9 for name, each in last.preferences["preferences_by_source"].items()
    } == dict.fromkeys(names, True)


def test_only_the_answers_that_a_run_reads_are_computed(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    import numpy as np

    from meshwright.preferences.reference import read_reference

    forget(pairs)
    short = ["train.steps=1", "train.global_batch=2", "train.warmup_steps=0"]
    trained(pool, pairs, tmp_path / "short", *ranks(1), *short)
    data = open_run_data(tiny_run(pairs))
    documents = sum(len(file.document_bounds()) - 1 for each in data.sources.values() for file in each.stream.files)
    (file,) = [path for path in stored(pairs) if path.parent.name == "train"]
    known = read_reference(file, documents)
    assert known is not None and 0 < np.isfinite(known).sum() < documents
    trained(pool, pairs, tmp_path / "longer", *ranks(1))
    whole = read_reference(file, documents)
    assert whole is not None and np.isfinite(whole).sum() > np.isfinite(known).sum()
    np.testing.assert_array_equal(whole[np.isfinite(known)], known[np.isfinite(known)])
    forget(pairs)
    trained(pool, pairs, tmp_path / "packed", *ranks(1), "train.seq_len=64", "train.steps=1", "train.warmup_steps=0")
    (file,) = [path for path in stored(pairs) if path.parent.name == "train"]
    packed = read_reference(file, documents)
    assert packed is not None  # the same answers, of which a sequence has others beside them
    both = np.isfinite(packed) & np.isfinite(whole)
    assert both.sum() > 10
    np.testing.assert_allclose(packed[both], whole[both], rtol=1e-5)


def test_the_first_margin_is_zero_to_the_last_bit(pool: Pool, pairs: Path, tmp_path: Path) -> None:
    """The reference is computed by the kernels of training: compiled without autograd, a block rounds in other places."""
    forget(pairs)
    short = ["train.steps=1", "train.warmup_steps=0", "plan.compile=true", "plan.compute=bf16"]
    results = trained(pool, pairs, tmp_path, *ranks(1), *short)
    assert figures(results, "margin") == [0.0] and figures(results, "reference_distance") == [0.0]
    assert judged(results)[0][1].preferences["margin"] == 0.0
