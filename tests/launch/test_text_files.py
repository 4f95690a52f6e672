"""What begins and ends a text goes from the corpus and the initial weights into the run's folder, its checkpoints and its export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.data.chats import CHATML, HEADERS, byte_level, plain, sentence_piece, turns, write_chats
from tests.data.test_text_format import with_bos
from tests.training.tiny import RUN_FILE, SENTENCE, prepared
from tokenizers import Tokenizer

from meshwright.checkpoint.models.convert import export_checkpoint, import_checkpoint
from meshwright.checkpoint.models.hf import export_hf
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.evaluate import check_format
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.text_format import TEXT_FORMAT, derive, read_text_format, recorded_text_format
from meshwright.server.model_files import read_model_files
from meshwright.server.request_reader import RequestReader
from meshwright.spec.errors import BadInput
from meshwright.spec.job import DataSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.serve import ServeSpec

LENGTHS = ("model.max_seq_len=64", "train.seq_len=64")


class Form(NamedTuple):
    """The files of a model's folder, and what they mean."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    ends: Sequence[str]
    """Tokens that end a generated text, that of a document first."""
    chat_ends: Sequence[str] = ()
    """Tokens that end a generated text after training on chats."""
    template: str | None = None
    generation: Sequence[str] = ()
    special: dict[str, Any] = {}
    begin: Sequence[str] = ()


FORMS = {
    "pad is not the end": Form(byte_level(), {"eos_token": "</s>", "pad_token": "<|endoftext|>"}, ["</s>"]),
    "two ends": Form(byte_level(), {"eos_token": "</s>"}, ["</s>", "<|eot|>"], generation=["<|eot|>", "</s>"]),
    "begins with <s>": Form(
        with_bos(sentence_piece()), {"eos_token": "</s>", "bos_token": "<s>"}, ["</s>"], begin=["<s>"]
    ),
    "ChatML on a base model": Form(
        byte_level(), {"eos_token": "<|endoftext|>"}, ["<|endoftext|>"], ["<|endoftext|>", "<|im_end|>"], plain(CHATML)
    ),
    "Llama 3": Form(
        with_bos(byte_level()),
        {"eos_token": "<|eot|>", "bos_token": "<s>"},
        ["</s>", "<|eot|>"],
        ["</s>", "<|eot|>"],
        plain(HEADERS),
        generation=["</s>", "<|eot|>"],
        begin=["<s>"],
    ),
    "special_tokens_map": Form(byte_level(), {}, ["<|eot|>"], special={"eos_token": {"content": "<|eot|>"}}),
}


def spec_of() -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=2,
        hidden=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        ffn_hidden=32,
        vocab_size=512,
        max_seq_len=64,
        init_std=0.1,
    )


def model_folder(folder: Path, form: Form) -> Path:
    """A Hugging Face folder with weights, and with the files of `form`."""
    source = folder.with_name(folder.name + "-files")
    source.mkdir(parents=True)
    form.tokenizer.save(str(source / "tokenizer.json"))
    weights = {parameter.name: torch.randn(parameter.shape) for parameter in parameters(spec_of())}
    export_hf(folder, spec_of(), weights.__getitem__, tokenizer=None, run_note="", dtype="fp32")
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(form.config))
    ids = [form.tokenizer.token_to_id(text) for text in form.generation]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "top_k": 7, "temperature": 0.5}))
    if form.special:
        (folder / "special_tokens_map.json").write_text(json.dumps(form.special))
    if form.template is not None:
        (folder / "chat_template.jinja").write_text(form.template)
    return folder


def texts(folder: Path) -> str:
    folder.mkdir()
    (folder / "a.txt").write_text("\n".join([SENTENCE] * 20))
    return str(folder)


def run_on(tmp_path: Path, corpus: Path, *overrides: str) -> Path:
    """The folder of a run on a corpus, with a checkpoint; the run has the name of the corpus."""
    file = tmp_path / f"{corpus.name}.yaml"
    file.write_text(RUN_FILE.format(data=corpus))
    folder = prepared(file, tmp_path / "runs", "cluster.gpus_per_node=1", *LENGTHS, *overrides).folder
    weights = {f"model.{parameter.name}": torch.randn(parameter.shape) for parameter in parameters(spec_of())}
    files = {"config.yaml": (folder / "config.yaml").read_text(), TEXT_FORMAT: (folder / TEXT_FORMAT).read_text()}
    CheckpointStore(folder / "checkpoints").save(6, weights, {"step": 6}, files)
    return folder


def ends_of(folder: Path) -> list[str]:
    return [token.text for token in read_text_format(folder).stops]


@pytest.mark.parametrize("name", FORMS)
def test_a_run_and_its_export_begin_and_end_texts_alike(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    form = FORMS[name]
    model = model_folder(tmp_path / "model", form)
    inputs, corpora = texts(tmp_path / "texts"), {"text": form.ends}
    prepare([inputs], str(model), tmp_path / "text")
    if form.template is not None:
        corpora["chat"] = form.chat_ends
        prepare(
            [str(write_chats(tmp_path / "c.jsonl", [turns("Hi", "Yes.")] * 9))],
            str(model),
            tmp_path / "chat",
            chat=ChatRequest(),
        )
    for corpus, ends in corpora.items():
        folder = run_on(tmp_path, tmp_path / corpus, f"model.init=hf:{model}")
        assert (
            ends_of(tmp_path / corpus) == ends_of(folder) == ends_of(folder / "checkpoints" / "step-00000006") == ends
        )
        assert read_model_files(folder).stop_ids == read_text_format(folder).stop_ids
        out = tmp_path / f"{corpus}-export"
        export_checkpoint(folder, out)
        tokenizer = AutoTokenizer.from_pretrained(out)
        record, again = read_text_format(folder), read_text_format(out)
        assert (again.document_end, again.begin, again.pad) == (record.document_end, record.begin, record.pad)
        assert set(again.stops) == set(record.stops) and again.tokenizer == record.tokenizer
        assert again.template == record.template
        ids = tokenizer.convert_tokens_to_ids(list(ends))
        generation = GenerationConfig.from_pretrained(out)
        config = json.loads((out / "config.json").read_text())
        assert generation.eos_token_id == config["eos_token_id"] == (ids if len(ids) > 1 else ids[0])
        assert generation.top_k == 7, "sampling values of the initial weights"
        assert tokenizer.eos_token == (form.config.get("eos_token") or form.ends[0])
        prompt = Tokenizer.from_file(str(out / "tokenizer.json")).encode("one two", add_special_tokens=False).ids
        assert tokenizer("one two")["input_ids"] == record.begun(prompt)
        assert [token.text for token in record.begin] == list(form.begin)


def test_the_flag_reaches_the_export(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = model_folder(tmp_path / "model", FORMS["special_tokens_map"])
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    prepare([texts(tmp_path / "texts")], str(model), tmp_path / "corpus", eos="<|header|>")
    folder = run_on(tmp_path, tmp_path / "corpus", "model.vocab_size=512")
    assert ends_of(folder) == ["<|header|>", "</s>", "<|eot|>"]
    export_checkpoint(folder, tmp_path / "out")
    assert ends_of(tmp_path / "out")[0] == "<|header|>"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|header|>"
    assert not (folder / "generation_config.json").exists(), "sampling values belong to weights, not to a tokenizer"


def test_a_checkpoint_alone_knows_the_ends(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", FORMS["two ends"])
    imported = import_checkpoint(model, tmp_path / "base")
    assert ends_of(imported) == ends_of(tmp_path / "base") == ["</s>", "<|eot|>"]
    alone = tmp_path / "alone"
    shutil.copytree(imported, alone)
    assert ends_of(alone) == ["</s>", "<|eot|>"] and recorded_text_format(alone) == read_text_format(tmp_path / "base")
    export_checkpoint(alone, tmp_path / "out")
    ids = [FORMS["two ends"].tokenizer.token_to_id(text) for text in ("</s>", "<|eot|>")]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == ids


def test_a_run_from_other_files_than_its_corpus_keeps_what_the_weights_say(tmp_path: Path) -> None:
    """The corpus was prepared from the tokenizer.json alone: its documents end as a known name says."""
    model = model_folder(tmp_path / "model", FORMS["Llama 3"])
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "tokenizer.json", tmp_path / "bare")
    prepare([texts(tmp_path / "texts")], str(tmp_path / "bare"), tmp_path / "corpus")
    folder = run_on(tmp_path, tmp_path / "corpus", f"model.init=hf:{model}")
    assert ends_of(folder) == ["<|endoftext|>", "</s>", "<|eot|>"]
    assert any("end with <|endoftext|>, those of" in note for note in read_text_format(folder).notes)
    assert read_model_files(folder).chat_template == plain(HEADERS)
    assert derive(folder, FORMS["Llama 3"].tokenizer).template == derive(model, FORMS["Llama 3"].tokenizer).template


def test_validation_of_another_format_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", FORMS["two ends"])
    inputs = texts(tmp_path / "texts")
    prepare([inputs], str(model), tmp_path / "corpus")
    (tmp_path / "texts" / "a.txt").write_text("\n".join([SENTENCE] * 30))
    prepare([inputs], str(model), tmp_path / "other", eos="<|eot|>")
    with pytest.raises(
        BadInput, match=r"data.validation: documents of .*corpus end with </s>, those of .*other with <\|eot\|>"
    ):
        run_on(tmp_path, tmp_path / "corpus", f"data.validation={tmp_path / 'other'}")


def test_evaluation_refuses_data_of_another_format(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", FORMS["begins with <s>"])
    inputs = texts(tmp_path / "texts")
    other = model_folder(tmp_path / "other", FORMS["two ends"])
    for name, source, eos in (("same", model, None), ("ends", model, "<|eot|>"), ("tokens", other, None)):
        prepare([inputs], str(source), tmp_path / name, eos=eos)
    folder = run_on(tmp_path, tmp_path / "same", f"model.init=hf:{model}")
    for each in (folder, folder / "checkpoints" / "step-00000006", model):
        check_format(each, DataSpec(validation=str(tmp_path / "same")), 8)
        for name, message in (
            ("ends", r"end with </s>, those of .*ends with <\|eot\|>"),
            ("tokens", "different tokenizers"),
        ):
            with pytest.raises(BadInput, match=rf"--data .*{name}: .*{message}"):
                check_format(each, DataSpec(validation=str(tmp_path / name)), 8)


def test_prompts_begin_as_texts_do(tmp_path: Path) -> None:
    form = FORMS["begins with <s>"]
    files = read_model_files(model_folder(tmp_path / "model", form))
    reader = RequestReader(ServeSpec(), "model", files, None, 64, 512)
    plain_ids, bos = form.tokenizer.encode("one two", add_special_tokens=False).ids, form.tokenizer.token_to_id("<s>")
    for fields, expected in (
        ({"prompt": "one two"}, [bos, *plain_ids]),
        ({"prompt": "one two", "add_special_tokens": False}, plain_ids),
        ({"prompt": "<s>one two"}, form.tokenizer.encode("<s>one two", add_special_tokens=False).ids),
        ({"prompt": ""}, [bos]),
    ):
        assert json.loads(reader.tokenize(json.dumps(fields).encode()))["tokens"] == expected
        assert reader.completion(json.dumps(fields).encode()).prompts == [expected]
    assert files.text.prompt([]) == (bos,)
    without = model_folder(tmp_path / "without", FORMS["two ends"])
    assert read_text_format(without).prompt([]) == (form.tokenizer.token_to_id("</s>"),)
    with pytest.raises(BadInput, match="an empty prompt: the model has no token that begins or ends a text"):
        replace(read_text_format(without), document_end=None).prompt([])
