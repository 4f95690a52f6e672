"""Tokenizers: any Hugging Face `tokenizer.json` is loaded, and a byte-level BPE is trained from text.

The trained one splits text by GPT-2's rule, which llama.cpp and every server know, so that an exported model loads
elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.chat_template import TEXT_FILES
from meshwright.data.corpus import CorpusDocument, read_documents
from meshwright.data.inputs import InputFile
from meshwright.data.manifest import TOKENIZER, TokenizerRecord
from meshwright.data.text_format import CONFIG, END_OF_TEXT, KNOWN_ENDS, TextFormat, derive
from meshwright.data.tokenizer_file import tokenizer_in
from meshwright.durable.writes import digest
from meshwright.spec.errors import BadInput
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file

SMALLEST = 257
SAMPLE_BYTES = 64 << 20
LONGEST_TEXT = 1 << 18
SPACE = re.compile(r"\s")
TRAIN_PREFIX = "train:"


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, the exact bytes of its file, its entry in a manifest, and the format of its texts."""

    tokenizer: Tokenizer
    content: bytes
    record: TokenizerRecord
    text: TextFormat


def train_tokenizer(texts: Iterable[str], size: int) -> bytes:
    """Train a byte-level BPE of `size` tokens, the first `<|endoftext|>`; the content of its `tokenizer.json`.

    The same texts give the same bytes. A text too small for `size` merges gives fewer tokens. Raises BadInput when
    `size` is below 257, the 256 bytes and the end of text. Method: Sennrich et al. 2016 on bytes as in GPT-2 (Radford
    et al. 2019).
    """
    check_size(size)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer
    tokenizer.train_from_iterator(
        _bounded(texts),
        trainer(vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer.to_str().encode()


def _bounded(texts: Iterable[str]) -> Iterator[str]:
    """The texts, long ones in pieces that end at a word: the trainer takes some hundred bytes of memory for each character."""
    for text in texts:
        start = 0
        while len(text) - start > LONGEST_TEXT:
            near = start + LONGEST_TEXT
            space = SPACE.search(text, near, near + LONGEST_TEXT // 4)
            end = space.start() if space else near
            yield text[start:end]
            start = end
        yield text[start:]


def load_tokenizer(path: Path, eos: str | None = None, *, template: str | None = None) -> LoadedTokenizer:
    """Load a `tokenizer.json`, or the one in a folder; `eos` names the token that ends a document, else its folder does.

    Raises BadInput when the file is missing or not a tokenizer, or has no such token.
    """
    where = str(tokenizer_file(path))
    return parse_tokenizer(read_tokenizer(path), where, eos, folder=tokenizer_folder(path), template=template)


def tokenizer_file(path: Path) -> Path:
    """`path`, or the `tokenizer.json` in it when it is a folder. Raises BadInput when there is no such file."""
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"{file}: no such tokenizer; expected a tokenizer.json, a folder with one, or `train:SIZE`")
    return file


def tokenizer_folder(path: Path) -> Path:
    """The folder with the files that go with a tokenizer.json: its own, or where that has none, the one to which the file is a link."""
    file = tokenizer_file(path)
    while file.is_symlink() and not any((file.parent / name).is_file() for name in (*TEXT_FILES, CONFIG)):
        file = file.parent / os.readlink(file)
    return file.parent


def read_tokenizer(path: Path) -> bytes:
    """The content of a `tokenizer.json`, or of the one in a folder, out of which it may not be a link. Raises BadInput."""
    file = tokenizer_file(path)
    return read_folder_file(file if path.is_dir() else Path(os.path.realpath(file)), TOKENIZER_BYTES)


def parse_tokenizer(
    content: bytes, where: str, eos: str | None = None, *, folder: Path | None = None, template: str | None = None
) -> LoadedTokenizer:
    """The tokenizer in the bytes of a `tokenizer.json`; `where` is its name in messages, `folder` has the files that go with it.

    `template` stands in for the folder's chat template.
    """
    tokenizer = tokenizer_in(content, where)
    # The spelling of a special token inside a document is encoded as text.
    tokenizer.encode_special_tokens = True
    text = derive(folder, tokenizer, eos=eos, content=content, where=where, template=template)
    if text.document_end is None:
        raise BadInput(f"{where}: has none of {', '.join(KNOWN_ENDS)}; name the token that ends a document with --eos")
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    record = TokenizerRecord(TOKENIZER, size, digest(content), text.document_end.id)
    return LoadedTokenizer(tokenizer, content, record, text)


def sample_texts(files: list[InputFile], text_key: str, sample_bytes: int = SAMPLE_BYTES) -> Iterator[tuple[str, str]]:
    """(key, text) of documents spread evenly over `files`, about `sample_bytes`, to train a tokenizer on.

    The budget grows by each file's share of the total size. A file is read when the budget covers it whole, or a 64th of the sample; so
    some small files are read whole, evenly spread, and large ones from their beginning.
    """
    total = sum(file.size for file in files) or 1
    budget = 0.0
    for file in files:
        budget += file.size / total * sample_bytes
        if budget < min(file.size, sample_bytes // 64):
            continue
        for document in read_documents(file, text_key):
            if not isinstance(document, CorpusDocument):
                continue
            text = document.text[: int(budget) + 1]
            yield document.key, text
            budget -= len(text)
            if budget <= 0:
                break


def parse_train_request(tokenizer: str) -> int | None:
    """SIZE of `train:SIZE`, or None when `tokenizer` names a file. Raises BadInput when SIZE is not a usable number."""
    if not tokenizer.startswith(TRAIN_PREFIX):
        return None
    size = tokenizer.removeprefix(TRAIN_PREFIX).replace("_", "").replace(",", "")
    if not size.isdecimal():
        raise BadInput(f"tokenizer {tokenizer!r}: expected train:SIZE with a number of tokens, for example train:4096")
    return check_size(int(size))


def check_size(size: int) -> int:
    """`size`, or BadInput when a byte-level vocabulary cannot be so small."""
    if size < SMALLEST:
        raise BadInput(f"vocabulary of {size} tokens: expected at least {SMALLEST}, the 256 bytes and {END_OF_TEXT}")
    return size
