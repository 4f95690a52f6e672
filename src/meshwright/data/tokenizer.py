"""Loads any `tokenizer.json` of Hugging Face, and trains a byte-level BPE from text.

A trained tokenizer splits text by the rule of GPT-2. llama.cpp and all servers know this rule, so they can load an
exported model.
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
"""Minimum number of tokens of a vocabulary: 256 bytes and the end of text."""
SAMPLE_BYTES = 64 << 20
"""Bytes of text on which a tokenizer is trained."""
LONGEST_TEXT = 1 << 18
"""Longest text that is given to the trainer at once, in characters."""
SPACE = re.compile(r"\s")
TRAIN_PREFIX = "train:"
"""Beginning of a tokenizer argument that requests training: `train:SIZE`."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer that was loaded."""

    tokenizer: Tokenizer
    """The tokenizer itself."""
    content: bytes
    """The exact bytes of its file."""
    record: TokenizerRecord
    """Its entry in a manifest."""
    text: TextFormat
    """The tokens that begin and end a text, and the chat template."""


def train_tokenizer(texts: Iterable[str], size: int) -> bytes:
    """Train a byte-level BPE of `size` tokens and return the content of its `tokenizer.json`.

    Token 0 is `<|endoftext|>`.

    The same texts give the same bytes. If the texts are too small for `size` merges, there are fewer tokens. Raises
    BadInput if `size` is below 257: the 256 bytes and the end of text. Method: Sennrich et al. 2016, on bytes as in
    GPT-2 (Radford et al. 2019).
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
    """Yield the texts, with long ones divided at spaces.

    The trainer needs several hundred bytes of memory for each character of a text that it is given.
    """
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
    """Load a `tokenizer.json`, or the one in a folder.

    - `eos`: the token that ends a document. None: the files in the folder tell it.
    - `template`: a chat template to use in place of the folder's own.

    Raises BadInput if the file is missing or is not a tokenizer, and if no token ends a document.
    """
    where = str(tokenizer_file(path))
    return parse_tokenizer(read_tokenizer(path), where, eos, folder=tokenizer_folder(path), template=template)


def tokenizer_file(path: Path) -> Path:
    """Return `path`, or the `tokenizer.json` in it if `path` is a folder. Raises BadInput if there is no such file."""
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"{file}: no such tokenizer; expected a tokenizer.json, a folder with one, or `train:SIZE`")
    return file


def tokenizer_folder(path: Path) -> Path:
    """Return the folder with the files that belong to a tokenizer.json, such as its configuration and chat template.

    It is the folder of the file. If that has no such files and the file is a symbolic link, the folder of the link's
    target is tried.
    """
    file = tokenizer_file(path)
    while file.is_symlink() and not any((file.parent / name).is_file() for name in (*TEXT_FILES, CONFIG)):
        file = file.parent / os.readlink(file)
    return file.parent


def read_tokenizer(path: Path) -> bytes:
    """Read the content of a `tokenizer.json`, or of the one in a folder.

    In a folder it may not be a link that leaves the folder.

    Raises BadInput.
    """
    file = tokenizer_file(path)
    return read_folder_file(file if path.is_dir() else Path(os.path.realpath(file)), TOKENIZER_BYTES)


def parse_tokenizer(
    content: bytes, where: str, eos: str | None = None, *, folder: Path | None = None, template: str | None = None
) -> LoadedTokenizer:
    """Load the tokenizer from the bytes of a `tokenizer.json`.

    - `where`: name of the file in messages.
    - `eos`: the token that ends a document. None: the files in `folder` tell it.
    - `folder`: has the files that belong to the tokenizer.
    - `template`: a chat template to use in place of the folder's own.

    Raises BadInput if the content is not a tokenizer, and if no token ends a document.
    """
    tokenizer = tokenizer_in(content, where)
    # If a document contains the spelling of a special token, it is encoded as ordinary text.
    tokenizer.encode_special_tokens = True
    text = derive(folder, tokenizer, eos=eos, content=content, where=where, template=template)
    if text.document_end is None:
        raise BadInput(f"{where}: has none of {', '.join(KNOWN_ENDS)}; name the token that ends a document with --eos")
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    record = TokenizerRecord(TOKENIZER, size, digest(content), text.document_end.id)
    return LoadedTokenizer(tokenizer, content, record, text)


def sample_texts(files: list[InputFile], text_key: str, sample_bytes: int = SAMPLE_BYTES) -> Iterator[tuple[str, str]]:
    """Choose texts on which a tokenizer is trained, about `sample_bytes` of text spread evenly over `files`.

    Yields (key, text).

    A budget of bytes grows at each file by the file's share of the total size. A file is read if the budget covers all
    of it, or at least 1/64 of the sample. Otherwise the budget grows on until the next file. So some of many small
    files are read whole, at even distances, and a large file is read from its beginning until the budget is used.
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
    """Return SIZE if `tokenizer` is `train:SIZE`, None if it names a file. Raises BadInput if SIZE is not a usable number."""
    if not tokenizer.startswith(TRAIN_PREFIX):
        return None
    size = tokenizer.removeprefix(TRAIN_PREFIX).replace("_", "").replace(",", "")
    if not size.isdecimal():
        raise BadInput(f"tokenizer {tokenizer!r}: expected train:SIZE with a number of tokens, for example train:4096")
    return check_size(int(size))


def check_size(size: int) -> int:
    """Return `size`. Raises BadInput if it is too small for a byte-level vocabulary."""
    if size < SMALLEST:
        raise BadInput(f"vocabulary of {size} tokens: expected at least {SMALLEST}, the 256 bytes and {END_OF_TEXT}")
    return size
