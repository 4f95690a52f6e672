"""A start checks that the corpus has the tokenizer of the weights; a resumed run, that it has the text of the checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.tiny import make_tiny, prepared, tiny_run

from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.prepare import prepare
from meshwright.launch import prepare as launching
from meshwright.launch.corpus import check_tokenizer
from meshwright.launch.prepare import check_init, open_run_data
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.run import RunSpec


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


def starting(file: Path, init: str, *overrides: str) -> RunSpec:
    """A run from the weights that `init` names."""
    run = tiny_run(file, "model.vocab_size=384", *overrides)
    return replace(run, model=replace(run.model, init=init))


def other_tokenizer(path: Path) -> None:
    """The same size, with two tokens exchanged."""
    tokenizer = json.loads(path.read_bytes())
    names = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["vocab"] |= {names[100]: 101, names[101]: 100}
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("source", ["hf", "checkpoint"])
def test_weights_of_another_tokenizer_are_refused_or_accepted(
    file: Path, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.checkpoint.models.initial.check_initial", lambda model, init, key: None)
    folder, notes = tmp_path / "weights", list[str]()
    folder.mkdir()
    shutil.copy(file.parent / "data" / "train" / "tokenizer.json", folder)
    CheckpointStore(folder / "checkpoints").save(1, {"model.a": torch.zeros(1)}, {}, {})
    init = f"{source}:{folder}"
    check_init(starting(file, init), notes.append)
    other_tokenizer(folder / "tokenizer.json")
    with pytest.raises(
        BadInput, match=r"digest \w+\) differ: token 100 is .*data.tokenizer_mismatch=accept"
    ) as refused:
        check_init(starting(file, init), notes.append)
    assert str(folder / "tokenizer.json") in str(refused.value) and str(file.parent / "data") in str(refused.value)
    assert notes == []
    check_init(starting(file, init, "data.tokenizer_mismatch=accept"), notes.append)
    assert len(notes) == 1 and "differ: token 100" in notes[0]


def test_weights_without_tokenizer_are_not_compared_and_that_is_noted(file: Path, tmp_path: Path) -> None:
    notes = list[str]()
    run = starting(file, f"hf:{tmp_path}")
    check_tokenizer(run, open_run_data(run), notes.append)
    assert notes == [
        f"model.init hf:{tmp_path} has no tokenizer.json, so the tokenizers of weights and corpus are not compared"
    ]


def resume(file: Path, *overrides: str) -> list[str]:
    notes = list[str]()
    launching.prepare_run(tiny_run(file, *overrides), file.parent / "runs", profile=None, note=notes.append)
    return notes


def stopped_run(file: Path, *, recorded: bool = True) -> Path:
    """A run's folder with a checkpoint of step 1."""
    prepared_run = prepared(file, file.parent / "runs")
    state = {"step": 1} | ({"data": open_run_data(prepared_run.assignment.run).record()} if recorded else {})
    CheckpointStore(prepared_run.folder / "checkpoints").save(1, {"model.a": torch.zeros(1)}, state, {})
    return prepared_run.folder


def prepare_other_text(file: Path) -> None:
    """Prepare the corpus again under its name, with the same tokenizer and one word exchanged."""
    text, data = file.parent / "source" / "7.txt", file.parent / "data"
    text.write_text(text.read_text().replace("wizards", "lizards"))
    tokenizer = shutil.copy(data / "train" / "tokenizer.json", file.parent)
    shutil.rmtree(data)
    prepare([str(file.parent / "source")], str(tokenizer), data, held_out=0.2)


def prepare_other_tokenizer(file: Path) -> None:
    shutil.rmtree(file.parent / "data")
    prepare([str(file.parent / "source")], "train:299", file.parent / "data", held_out=0.2)


@pytest.mark.parametrize(
    ("change", "difference"),
    [(prepare_other_text, r"content \(digest"), (prepare_other_tokenizer, r"content .*tokenizer \(digest")],
)
def test_a_corpus_that_changed_since_the_checkpoint_is_refused_or_accepted(
    file: Path, change: Callable[[Path], None], difference: str
) -> None:
    folder = stopped_run(file)
    assert not any("data.mix" in note for note in resume(file))
    tokenizer = (folder / "tokenizer.json").read_bytes()
    change(file)
    with pytest.raises(
        BadInput, match=rf"data.mix: .*/data: changed since .*step-00000001: {difference}.*data.changed=accept"
    ):
        resume(file)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer
    notes = resume(file, "data.changed=accept")
    assert any("changed since" in note and "data.changed is accept" in note for note in notes)


def test_a_corpus_that_moved_or_was_prepared_again_is_the_same(file: Path) -> None:
    stopped_run(file)
    data = file.parent / "data"
    tokenizer = shutil.copy(data / "train" / "tokenizer.json", file.parent)
    shutil.rmtree(data)
    prepare([str(file.parent / "source")], str(tokenizer), data, held_out=0.2)
    assert not any("data.mix" in note for note in resume(file))


def test_a_checkpoint_without_record_resumes_with_a_note(file: Path) -> None:
    stopped_run(file, recorded=False)
    assert [note for note in resume(file) if "record of its corpus" in note]


def test_another_tokenizer_beside_the_shards_is_damage(file: Path) -> None:
    path = file.parent / "data" / "train" / "tokenizer.json"
    other_tokenizer(path)
    with pytest.raises(Damaged, match=rf"{path}: expected digest \w+ \(by the manifest\)"):
        prepared(file, file.parent / "runs")


def moved(file: Path) -> str:
    """Move the corpus to another path; returns the override that names it."""
    (file.parent / "data").rename(file.parent / "elsewhere")
    return f"data.mix={{{file.parent / 'elsewhere'}: 1.0}}"


def test_a_run_resumes_with_its_corpus_under_another_path(file: Path) -> None:
    stopped_run(file)
    assert not any("data.mix" in note for note in resume(file, moved(file)))


def test_another_corpus_under_another_path_is_refused(file: Path) -> None:
    stopped_run(file)
    prepare_other_text(file)
    with pytest.raises(BadInput, match="changed since"):
        resume(file, moved(file))
