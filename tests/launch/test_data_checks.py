"""Data that a run reads too often, twice, or both to train and to validate; documents that see each other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.chats import CHATML, CHATS, marked, write_chats, write_tokenizer
from tests.data.conftest import corpus, prepared, story, tokenizer_file

from meshwright.config.load import load_run
from meshwright.data.manifest import Manifest, open_directory
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.source import open_data
from meshwright.launch.prepare import (
    check_validation,
    data_line,
    data_lines,
    open_run_data,
    resolve_data,
    steps_of_epochs,
)
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.job import DataSpec
from meshwright.spec.run import RunSpec

__all__ = ["corpus", "prepared", "tokenizer_file"]


def run_on(mix: dict[str, float], *overrides: str) -> RunSpec:
    """A run of 16 tokens a sequence on this mixture."""
    settings = ("train.seq_len=16", "train.global_batch=4", "train.steps=100", "cluster.gpus_per_node=1")
    return load_run(None, ["model=llama-nano", *settings, f"data.mix={json.dumps(mix)}", *overrides])


def test_more_passes_than_four_are_reported_and_refused_on_demand(prepared: Path) -> None:
    run, notes = run_on({str(prepared): 1}), list[str]()
    windows = open_run_data(run).windows
    resolve_data(replace(run, train=replace(run.train, steps=windows)), notes.append)
    assert notes == [], "four samples a step: four passes"
    resolve_data(replace(run, train=replace(run.train, steps=windows + 1)), notes.append)
    assert notes and f"data.mix: {prepared}: {windows + 1:,} steps read it 4.0 times" in notes[0]
    once = run_on({str(prepared): 1}, "data.max_epochs=1.5")
    resolve_data(replace(once, train=replace(once.train, steps=windows // 4)), notes.append)
    with pytest.raises(BadInput, match=r"read it 2.0 times, data.max_epochs is 1.5; train fewer steps or add text"):
        resolve_data(replace(once, train=replace(once.train, steps=windows // 2)), notes.append)


def test_epochs_in_place_of_steps_are_counted_from_the_data(prepared: Path, tmp_path: Path) -> None:
    run = run_on({str(prepared): 1}, "train.steps=none", "train.epochs=2.5")
    windows = open_run_data(run).windows
    resolved = resolve_data(run, lambda text: None)
    assert resolved.train.steps == -(-5 * windows // 8) and resolved.train.epochs is None
    steps = {"train": replace(run.train, steps=resolved.train.steps, epochs=None)}
    assert replace(resolved, **steps) == resolved, "the resolved run has the steps alone"
    with pytest.raises(BadInput, match=r"warmup_steps 9,000: expected fewer than the \d+ steps of train.epochs 2.5"):
        resolve_data(
            run_on({str(prepared): 0.9}, "train.steps=none", "train.epochs=2.5", "train.warmup_steps=9000"), print
        )
    with pytest.raises(BadConfig, match="so many steps or so many epochs"):
        load_run(None, ["train.epochs=2", "train.steps=5"])
    assert load_run(None, ["train.epochs=2"]).train.epochs == 2, "the quick start's own steps give way"


def test_an_epoch_of_documents_ends_with_the_step_that_reads_the_last_one(prepared: Path) -> None:
    tokens = ("train.global_batch=none", "train.global_batch_tokens=64", "data.packing=none")
    run = run_on({str(prepared): 1}, *tokens)
    source = open_run_data(run)
    steps = steps_of_epochs(run, source, 1.0)
    from meshwright.data.step_samples import samples_of_token_step

    assert (
        samples_of_token_step(source, steps, 64)[1] >= source.windows > samples_of_token_step(source, steps - 1, 64)[1]
    )


def test_a_check_says_how_often_each_source_is_read(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright.cli.check import find_mistakes

    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: llama-nano\ndata: {{mix: {prepared}}}\ntrain: {{epochs: 2, global_batch: 4, seq_len: 16}}\n"
    )
    notes: list[str] = []
    assert find_mistakes([str(file), "cluster.gpus_per_node=1"], tmp_path, note=notes.append) == ([], 0)
    assert any(note.startswith(f"data: {prepared} 2 epochs in ") and "steps read all once)" in note for note in notes)


def test_epochs_are_those_of_the_samples_drawn(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(1) * 9)
    prepare([str(tmp_path / "a.txt")], str(tokenizer_file), tmp_path / "small")
    source = open_data(DataSpec(mix={str(prepared): 3, str(tmp_path / "small"): 1}), seq_len=16, seed=5)
    for samples in (0, 1, 70, 70_000):
        drawn = source.order.draws(np.arange(samples)).source
        for number, name in enumerate(source.order.names):
            expected = (drawn == number).sum() / source.sources[name].windows
            assert source.epochs(samples)[name] == pytest.approx(expected)


def test_one_text_under_two_names_is_refused(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(prepared)
    shutil.copytree(prepared / "train", tmp_path / "copy")
    for second in (tmp_path / "link", prepared / "train", prepared / ".." / prepared.name, tmp_path / "copy"):
        with pytest.raises(BadInput, match="are the same text; name it once"):
            open_run_data(run_on({str(prepared): 1, str(second): 1}))


def test_validation_that_is_trained_on_is_refused(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "train", tmp_path / "copy")
    for validation in (prepared / "train", tmp_path / "copy"):
        run = run_on({str(prepared): 1}, f"data.validation={validation}")
        with pytest.raises(BadInput, match=f"data.validation: {validation} is trained on, as {prepared} of data.mix"):
            check_validation(run, print)
    check_validation(run_on({str(prepared): 1}, f"data.validation={prepared}"), print)


def test_chats_do_not_see_each_other_and_texts_keep_their_default(prepared: Path, tmp_path: Path) -> None:
    folder, file = write_tokenizer(tmp_path / "model", marked(CHATML)), write_chats(tmp_path / "chats.jsonl", CHATS * 3)
    prepare([str(file)], str(folder), tmp_path / "chats", chat=ChatRequest())
    for mix, given, masked in [
        (tmp_path / "chats", [], True),
        (tmp_path / "chats", ["data.document_mask=false"], False),
        (prepared, [], False),
        (prepared, ["data.document_mask=true"], True),
    ]:
        run = resolve_data(run_on({str(mix): 1}, "train.seq_len=128", *given), lambda text: None)
        source = open_run_data(run)
        assert (run.data.document_mask, source.document_mask) == (masked, masked)
        assert bool(source.samples(range(source.windows)).documents.any()) == masked
        line = data_line(run, source)
        assert line.startswith(f"data: {mix} ") and " epochs in 100 steps (" in line and "; tokens see " in line
        assert ("their own document" in line) == masked and ("data.document_mask: false" in line) != masked


def test_a_start_on_chats_says_what_fine_tuning_does(prepared: Path, tmp_path: Path) -> None:
    """Packing, trained tokens, learning rate and validation, each in a line; nothing for texts."""
    folder, chats = write_tokenizer(tmp_path / "model", marked(CHATML)), tmp_path / "chats"
    file = write_chats(tmp_path / "chats.jsonl", [*CHATS, {"messages": CHATS[0], "weight": 0.5}])
    prepare([str(file)], str(folder), chats, chat=ChatRequest())
    (shard,) = open_directory(chats).shards
    assert shard.weights is not None and shard.record is not None
    trained, tokens = np.count_nonzero(shard.weights.read(0, shard.file.tokens)), shard.file.tokens
    run = resolve_data(run_on({str(chats): 1}, "train.seq_len=128", "train.warmup_steps=5"), lambda text: None)
    source = open_run_data(run)
    data, packing, rate, validation = data_lines(run, source)
    assert data == data_line(run, source)
    assert packing.startswith(f"SFT: {chats}: {len(CHATS) + 1} conversations fill {source.windows} sequences to ")
    assert packing.endswith(f"{trained} of {tokens} tokens ({trained / tokens:.0%}) are trained on, with weights")
    assert rate == "SFT: learning rate grows for 5 steps to 0.003, then follows a cosine down to 0.0003"
    assert validation == "SFT: no held-out chats; `meshwright data prepare --held-out 0.05` keeps some apart"
    held = tmp_path / "held"
    prepare([str(file)], str(folder), held, chat=ChatRequest(), held_out=0.5)
    run = run_on({str(held): 1}, "train.seq_len=128", "train.validate_every=20", "train.warmup_steps=0")
    *_, rate, validation = data_lines(run, open_run_data(run))
    assert "begins, without warm-up, at 0.003, then follows a cosine down" in rate
    assert validation == "SFT: held-out loss per trained token every 20 steps and at the end"
    for split in ("train", "held_out"):
        (shard,) = open_directory(held / split).shards
        assert shard.weights is not None
        counted = np.count_nonzero(shard.weights.read(0, shard.file.tokens))
        assert Manifest.read(held / split).trained_tokens == counted
    text = run_on({str(prepared): 1})
    assert data_lines(text, open_run_data(text)) == (data_line(text, open_run_data(text)),)


def test_a_least_learning_rate_is_a_fraction() -> None:
    with pytest.raises(
        BadConfig, match=r"train.min_learning_rate: expected a fraction of train.learning_rate.*nearest: 0.1"
    ):
        run_on({"stdlib": 1}, "train.learning_rate=3e-4", "train.min_learning_rate=3e-5")
    assert run_on({"stdlib": 1}, "train.min_learning_rate=0").train.min_learning_rate == 0
