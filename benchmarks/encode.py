"""MB of text per second of processor time that gigatoken and `tokenizers` encode, as `data prepare` calls them with one worker.

    python benchmarks/encode.py --tokenizer DIR [DIR …] --files '/usr/lib/python3*/**/*.py' [--megabytes 40]

The files are read in the order of their names, up to so many megabytes. `tokenizers` encodes every twelfth of them; the ids of these are
compared. Loading an encoder is timed apart. Prints one JSON object per tokenizer.
"""

from __future__ import annotations

import argparse
import glob
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshwright.data.corpus import CorpusDocument
from meshwright.data.encode import encode_documents
from meshwright.data.fast_encoder import FastEncoder
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer

COMPARED = 12
"""Of so many documents one is encoded by `tokenizers` too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--files", nargs="+", required=True, help="patterns of text files")
    parser.add_argument("--megabytes", type=float, default=40.0)
    options = parser.parse_args()
    documents = read_documents(options.files, options.megabytes)
    for folder in options.tokenizer:
        tokenizer = load_tokenizer(folder)
        start = time.process_time()
        fast = FastEncoder(tokenizer.content, tokenizer.tokenizer, 1)
        loading = time.process_time() - start
        rate, ids = encoded(documents, tokenizer, fast)
        plain_rate, plain_ids = encoded(documents[::COMPARED], tokenizer, None)
        equal = all(map(np.array_equal, ids[::COMPARED], plain_ids))
        figures = {"megabytes": round(megabytes(documents), 1), "load_seconds": loading, "equal": equal}
        print(json.dumps({"tokenizer": folder.name, **figures, "gigatoken": rate, "tokenizers": plain_rate}))


def read_documents(patterns: Sequence[str], most: float) -> list[CorpusDocument]:
    """The files with UTF-8 text, up to `most` megabytes."""
    found: list[CorpusDocument] = []
    size = 0
    for name in sorted(name for pattern in patterns for name in glob.glob(pattern, recursive=True)):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            found.append(CorpusDocument(name, 0, name, text, 0))
            size += len(text.encode())
        if size > most * 1e6:
            break
    return found


def encoded(
    documents: Sequence[CorpusDocument], tokenizer: LoadedTokenizer, fast: FastEncoder | None
) -> tuple[float, list[np.ndarray]]:
    """Megabytes per second of processor time, and the ids of each document."""
    start = time.process_time()
    ids = [document.tokens for document in encode_documents(documents, tokenizer, "int32", 1, fast)]
    return megabytes(documents) / (time.process_time() - start), ids


def megabytes(documents: Sequence[CorpusDocument]) -> float:
    """Size of the texts in UTF-8."""
    return sum(len(document.text.encode()) for document in documents) / 1e6


if __name__ == "__main__":
    main()
