from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meshwright.data import encode
from meshwright.data.corpus import CorpusDocument
from meshwright.data.encode import encode_documents
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer, parse_tokenizer, train_tokenizer
from tests.data.conftest import story


def document(text: str) -> CorpusDocument:
    return CorpusDocument("file", 1, "key", text, len(text))


def expected(tokenizer: LoadedTokenizer, text: str) -> list[int]:
    return [*tokenizer.tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.record.eos]


LONG = "\n".join(story(i) + "\n" * (i % 4) + "  indented\n" for i in range(60)) + "\n"


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_come_out_in_order_each_with_its_end(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 500)
    tokenizer = load_tokenizer(tokenizer_file)
    texts = [story(i) for i in range(40)] + ["ü"]
    encoded = list(encode_documents(map(document, texts), tokenizer, "uint16", workers))
    assert [e.tokens.tolist() for e in encoded] == [expected(tokenizer, text) for text in texts]
    assert [e.text_bytes for e in encoded] == [len(text.encode()) for text in texts]
    assert all(e.tokens.dtype == np.uint16 for e in encoded)


def test_a_long_document_is_cut_without_changing_a_token(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    pieces = list(encode._pieces_of([document(LONG)], tokenizer))
    assert len(pieces) > 10 and "".join(piece.text for piece in pieces) == LONG
    (encoded,) = encode_documents([document(LONG)], tokenizer, "uint16", workers=2)
    assert encoded.tokens.tolist() == expected(tokenizer, LONG)


def test_long_stretches_of_indented_lines_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a tokenizer that knows code, a line end and the indentation behind it are one token: cuts go before it."""
    code = "def f():\n" + "".join(f"    the_fox = {i}\n\n        jumps(over)\n" for i in range(200))
    tokenizer = parse_tokenizer(train_tokenizer([code], 300), "x")
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    pieces = [len(piece.text) for piece in encode._pieces_of([document(code)], tokenizer)]
    assert max(pieces) <= 375, "a cut is looked for up to a quarter of LONGEST_PIECE later"
    (encoded,) = encode_documents([document(code)], tokenizer, "uint16", workers=2)
    assert encoded.tokens.tolist() == expected(tokenizer, code)


def test_a_tokenizer_that_marks_the_start_of_a_text_does_not_mark_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece-like: a mark is put before every text, so pieces would each get one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator([LONG], trainers.BpeTrainer(vocab_size=200, special_tokens=["</s>"]))
    loaded = parse_tokenizer(tokenizer.to_str().encode(), "x")
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    (encoded,) = encode_documents([document(LONG)], loaded, "uint16", workers=1)
    assert encoded.tokens.tolist() == expected(loaded, LONG)


def test_a_long_line_is_cut_between_words_without_changing_a_token(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    line = LONG.replace("\n", "  ")
    longest = max(len(piece.text) for piece in encode._pieces_of([document(line)], tokenizer))
    assert longest <= 375, "a cut is looked for up to a quarter of LONGEST_PIECE later"
    (encoded,) = encode_documents([document(line)], tokenizer, "uint16", workers=2)
    assert encoded.tokens.tolist() == expected(tokenizer, line)


def test_a_text_without_words_is_cut_all_the_same(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    text = "".join(story(i) for i in range(30)).replace(" ", "").replace("\n", "").replace(".", "")
    (encoded,) = encode_documents([document(text)], tokenizer, "uint16", workers=1)
    assert tokenizer.tokenizer.decode(encoded.tokens.tolist()) == text
    assert len(encoded.tokens) - len(expected(tokenizer, text)) <= 2 * len(text) // 300, "two more tokens for each cut"


PEAK = """
import resource, sys
from pathlib import Path
from meshwright.data.prepare import prepare
source, tokenizer, out = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare([source], tokenizer, Path(out), workers=2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["file", "train:300"])
def test_one_line_of_20_mb_is_prepared_in_bounded_memory(tokenizer_file: Path, tmp_path: Path, tokenizer: str) -> None:
    line = " ".join(story(i).strip() for i in range(300))
    source = tmp_path / "line.jsonl"
    source.write_text(json.dumps({"text": line * (20_000_000 // len(line))}) + "\n", encoding="utf-8")
    tokenizer_option = str(tokenizer_file) if tokenizer == "file" else tokenizer
    arguments = [sys.executable, "-c", PEAK, str(source), tokenizer_option, str(tmp_path / "out")]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 400, "MiB; the text itself, its line and its record take 80"


def test_the_environment_is_as_before(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    tokenizer = load_tokenizer(tokenizer_file)
    for before in ("true", None):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        list(encode_documents([document("a")], tokenizer, "uint16", workers=1))
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before


@pytest.mark.parametrize("text", ["".join(map(str, range(2000))), "\n" * 2000, "漢字仮名交じり文" * 300, "-" * 3000])
def test_a_cut_anywhere_adds_no_space(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A tokenizer as of Llama 2 puts a space before every text, so before each piece without a context too."""
    tokenizer: Any = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any = trainers.BpeTrainer
    tokenizer.train_from_iterator([LONG], trainer(vocab_size=400, special_tokens=special, show_progress=False))
    loaded = parse_tokenizer(tokenizer.to_str().encode(), "x")
    monkeypatch.setattr(encode, "LONGEST_PIECE", 300)
    (encoded,) = encode_documents([document(text)], loaded, "uint16", workers=1)
    assert loaded.tokenizer.decode(encoded.tokens.tolist()[:-1], skip_special_tokens=False) == text
