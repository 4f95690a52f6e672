"""The record of a text's format: derived from the files of a folder, written, read and compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors

from meshwright.data.text_format import (
    TEXT_FORMAT,
    Token,
    derive,
    read_text_format,
    tokenizer_file,
    tokenizer_identity,
)
from meshwright.spec.errors import BadInput, Damaged
from tests.data.chats import CHATML, HEADERS, INSTRUCT, byte_level, plain, sentence_piece

NAMES = ["a", "<|endoftext|>", "<|im_end|>", "</s>", "<|eot_id|>", "<pad>"]
TEXT, TURN, CLOSE, EOT, PAD = range(1, 6)
CONFIG, GENERATION, TOKENIZER, SPECIAL = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def words(*names: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="a"))


def folder_of(folder: Path, tokenizer: Tokenizer, files: dict[str, Any], template: str | None = None) -> Path:
    """A folder with a tokenizer and files of JSON."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def with_bos(tokenizer: Tokenizer, *, suffix: str = "") -> Tokenizer:
    """The tokenizer with a post-processor that begins each text with <s>, and ends it with `suffix`."""
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", suffix) if name]
    processor: Any = processors.TemplateProcessing(
        single=f"<s> $A {suffix}".strip(), pair="<s> $A $B", special_tokens=special
    )
    tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize(
    ("files", "document", "stops"),
    [
        ({}, TEXT, [TEXT]),
        ({TOKENIZER: {"eos_token": "<|im_end|>"}}, TURN, [TURN]),
        ({TOKENIZER: {"eos_token": {"content": "</s>"}}, SPECIAL: {"eos_token": "<|im_end|>"}}, CLOSE, [CLOSE, TURN]),
        ({SPECIAL: {"eos_token": {"content": "<|im_end|>"}}}, TURN, [TURN]),
        ({CONFIG: {"eos_token_id": [3, 4]}}, CLOSE, [CLOSE, EOT]),
        ({CONFIG: {"eos_token_id": 3}, TOKENIZER: {"eos_token": "<|eot_id|>"}}, EOT, [EOT, CLOSE]),
        ({GENERATION: {"eos_token_id": [4, 2]}, CONFIG: {"eos_token_id": 3}}, CLOSE, [CLOSE, EOT, TURN]),
        ({GENERATION: {"eos_token_id": 4}}, TEXT, [TEXT, EOT]),
        # A token for padding is no end, unless a file says that it is one.
        ({TOKENIZER: {"pad_token": "<|endoftext|>"}}, CLOSE, [CLOSE]),
        ({SPECIAL: {"pad_token": {"content": "<|endoftext|>"}}}, CLOSE, [CLOSE]),
        ({CONFIG: {"pad_token_id": 1}}, CLOSE, [CLOSE]),
        ({TOKENIZER: {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}, TURN, [TURN]),
        ({TOKENIZER: {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}}, TEXT, [TEXT]),
        ({GENERATION: {"eos_token_id": [2, 1], "pad_token_id": 1}}, TEXT, [TEXT, TURN]),
        # What the tokenizer does not have ends nothing.
        ({TOKENIZER: {"eos_token": "<|no_such|>"}, CONFIG: {"eos_token_id": 99}}, TEXT, [TEXT]),
        ({CONFIG: {"eos_token_id": [2**70, -1, True, None, "3", 2]}}, TURN, [TURN]),
        ({TOKENIZER: [], CONFIG: {"eos_token_id": None}}, TEXT, [TEXT]),
    ],
)
def test_the_files_name_the_ends(tmp_path: Path, files: dict[str, Any], document: int, stops: list[int]) -> None:
    folder_of(tmp_path, words(*NAMES), files)
    derived = derive(tmp_path, words(*NAMES))
    assert derived.document_end == Token(document, NAMES[document])
    assert [token.id for token in derived.stops] == stops
    assert derived.stop_ids == tuple(sorted(stops))


def test_a_tokenizer_may_have_no_end(tmp_path: Path) -> None:
    derived = derive(tmp_path, words("a", "b"))
    assert (derived.document_end, derived.stops) == (None, ())


def test_the_flag_names_the_end_of_a_document(tmp_path: Path) -> None:
    folder_of(tmp_path, words(*NAMES), {TOKENIZER: {"eos_token": "</s>"}})
    derived = derive(tmp_path, words(*NAMES), eos="<|eot_id|>")
    assert derived.document_end == (EOT, "<|eot_id|>")
    assert [token.id for token in derived.stops] == [EOT, CLOSE]
    with pytest.raises(BadInput, match=r"no token '<\|eotid\|>' \(nearest: '<\|eot_id\|>'\)"):
        derive(tmp_path, words(*NAMES), eos="<|eotid|>")


@pytest.mark.parametrize(
    ("template", "files", "end"),
    [
        # The form of Llama 3: <|eot|> ends a turn, and the configuration names another end too.
        (HEADERS, {TOKENIZER: {"eos_token": "<|eot|>"}, CONFIG: {"eos_token_id": ["</s>", "<|eot|>"]}}, "</s>"),
        # That of Qwen's chat models: only generation_config.json names the other.
        (
            CHATML,
            {
                TOKENIZER: {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
                GENERATION: {"eos_token_id": ["<|im_end|>", "<|endoftext|>"]},
            },
            "<|endoftext|>",
        ),
        # A base model with the template of chats.
        (CHATML, {TOKENIZER: {"eos_token": "<|endoftext|>"}}, "<|endoftext|>"),
        # Nothing else is named: the end of a turn also ends a document.
        (CHATML, {TOKENIZER: {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        (INSTRUCT, {TOKENIZER: {"eos_token": "</s>", "bos_token": "<s>"}}, "</s>"),
        # The last message only: it ends a text.
        (
            CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
            {TOKENIZER: {"eos_token": "</s>"}, GENERATION: {"eos_token_id": ["<|header|>", "</s>", "<|im_end|>"]}},
            "</s>",
        ),
        # A template that cannot be rendered names no turn.
        (
            "{{ raise_exception('no') }}",
            {TOKENIZER: {"eos_token": "<|eot|>"}, CONFIG: {"eos_token_id": "</s>"}},
            "<|eot|>",
        ),
        ("{% if %}", {TOKENIZER: {"eos_token": "<|eot|>"}, CONFIG: {"eos_token_id": "</s>"}}, "<|eot|>"),
    ],
)
def test_a_turn_end_does_not_end_documents_where_a_file_names_another(
    tmp_path: Path, template: str, files: dict[str, Any], end: str
) -> None:
    tokenizer = byte_level()
    for name in (CONFIG, GENERATION):
        ids = files.get(name, {}).get("eos_token_id")
        if ids is not None:
            named = [tokenizer.token_to_id(text) for text in ([ids] if isinstance(ids, str) else ids)]
            files = {**files, name: {"eos_token_id": named}}
    folder_of(tmp_path, tokenizer, files, plain(template))
    derived = derive(tmp_path, tokenizer)
    assert derived.document_end is not None and derived.document_end.text == end
    assert derived.stops[0] == derived.document_end
    named = files[TOKENIZER]["eos_token"]
    assert named in [token.text for token in derived.stops]
    assert any("ends a turn" in note for note in derived.notes) == (named != end)


@pytest.mark.parametrize("suffix", ["", "</s>"])
def test_the_post_processor_says_what_begins_a_text(tmp_path: Path, suffix: str) -> None:
    tokenizer = with_bos(sentence_piece(), suffix=suffix)
    derived = derive(folder_of(tmp_path, tokenizer, {}), tokenizer)
    assert derived.begin == (Token(tokenizer.token_to_id("<s>"), "<s>"),)
    assert any("behind each text" in note for note in derived.notes) == bool(suffix)
    assert derived.begun([5, 6]) == [*derived.begin_ids, 5, 6]
    assert derived.begun([*derived.begin_ids, 5]) == [*derived.begin_ids, 5]
    assert derived.begun([]) == list(derived.begin_ids)
    assert "each text begins with <s>" in derived.sentences()


@pytest.mark.parametrize(("begins", "said"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_tokenizer_json_decides_what_begins_a_text_as_in_transformers(
    tmp_path: Path, begins: bool, said: bool
) -> None:
    tokenizer = with_bos(byte_level()) if begins else byte_level()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": said}
    folder_of(tmp_path, tokenizer, {TOKENIZER: config})
    derived = derive(tmp_path, tokenizer)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("one two")["input_ids"] == derived.begun(tokenizer.encode("one two", add_special_tokens=False).ids)
    assert any("add_bos_token" in note for note in derived.notes) == (begins != said)


def test_contradictions_between_files_are_named_once(tmp_path: Path) -> None:
    files = {TOKENIZER: {"eos_token": "</s>", "pad_token": "<pad>"}, SPECIAL: {"eos_token": "<|eot_id|>"}}
    folder_of(tmp_path, words(*NAMES), {**files, CONFIG: {"eos_token_id": [4, 3]}})
    derived = derive(tmp_path, words(*NAMES))
    (note,) = derived.notes
    assert note.endswith(f"<|eot_id|> as the end of a text, and {tmp_path / TOKENIZER} </s>; a document ends with </s>")
    assert derived.pad == (PAD, "<pad>")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder_of(tmp_path, words(*NAMES), {TOKENIZER: {"eos_token": "</s>", "pad_token": "<pad>"}}, CHATML)
    derived = replace(derive(tmp_path, words(*NAMES)), begin=(Token(0, "a"),), notes=("one", "two"))
    derived = derived.with_answer_ends([Token(TURN, "<|im_end|>")])
    assert derived.stop_ids == (TURN, CLOSE)
    derived.write(tmp_path)
    assert read_text_format(tmp_path) == derived
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    assert read_text_format(checkpoint) == derived
    assert tokenizer_file(checkpoint) == tmp_path / "tokenizer.json"
    replace(derived, begin=()).write(checkpoint)
    assert read_text_format(checkpoint).begin == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begins": []}, r"unknown key 'begins' \(nearest: 'begin'\)"),
        ({"version": 2}, "of version 2; this release reads version 1"),
        ({"stops": [[1]]}, "not a record of a text format"),
        ({"stops": [["1", "a"]]}, r"expected \[id, text\] of a token"),
        ({"tokenizer": None}, "tokenizer: expected text, got None"),
        ({"document_end": "a"}, "not a record"),
    ],
)
def test_other_records_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    record = derive(folder_of(tmp_path, words(*NAMES), {}), words(*NAMES)).to_plain()
    (tmp_path / TEXT_FORMAT).write_text(json.dumps({**record, **change}))
    with pytest.raises(Damaged, match=message):
        read_text_format(tmp_path)
    (tmp_path / TEXT_FORMAT).write_text("{")
    with pytest.raises(Damaged, match="not JSON"):
        read_text_format(tmp_path)


def test_a_folder_without_tokenizer_has_no_format(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no tokenizer.json; expected the folder of a run"):
        read_text_format(tmp_path)


def test_layouts_of_a_file_are_one_tokenizer() -> None:
    tokenizer = byte_level()
    value = json.loads(tokenizer.to_str())
    identity = tokenizer_identity(tokenizer.to_str().encode())
    model = dict(reversed(value["model"].items()))
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    others = [
        value,
        {**value, "model": {**model, "merges": pairs}},
        {**value, "model": {**model, "merges": [" ".join(pair) for pair in pairs], "ignore_merges": False}},
        {**value, "truncation": {"max_length": 8}, "padding": {"pad_id": 0}},
    ]
    for other in others:
        for indent in (None, 2):
            assert tokenizer_identity(json.dumps(other, indent=indent).encode()) == identity
    assert tokenizer_identity(with_bos(byte_level()).to_str().encode()) != identity
    assert tokenizer_identity(json.dumps({**value, "model": {**model, "merges": pairs[:-1]}}).encode()) != identity
