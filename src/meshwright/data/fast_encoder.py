"""Encodes texts with `gigatoken`, which takes a small fraction of the time of `tokenizers`, if both give the same ids.

`tokenizers` remains the reference. It encodes a sample of the corpus before the work begins, and an excerpt of every batch during the work,
and the ids are compared. It also encodes every text with a character that the two libraries treat differently (`unicode_14.py`).
"""

from __future__ import annotations

import ctypes
import json
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from meshwright.data.unicode_14 import treated_alike
from meshwright.spec.errors import shorten

WORD_MEMORY = 128 << 20
"""An encoder is loaded anew when memory has grown by this many bytes for each worker: `gigatoken` keeps every word that it has seen.

English documents in which one word in fifty is random reach this after some 270 MB.
"""
LEAST_TEXT = 16 << 20
"""Characters that an encoder must have encoded before it is loaded anew, because loading takes as long as encoding some 50 MB of text."""
EXCERPTS = 4
EXCERPT = 128
"""Excerpts of a batch that `tokenizers` encodes too, and characters in each: 0.05% of the text, which takes some 1% of the time."""
HARD_TEXTS = (
    "I'd've said it's THEIRS, wouldn't you?  We'LL see.",
    "  leading and trailing  ",
    "a\n\n\nb\r\n\tc\n \n  d\t\t\te",
    "1234567890 12 3.14159 1,000,000 ⅔ ²",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    "Größe naïve façade Ångström ﬁ ǅ İstanbul ß ẞ e\u0301",
    "日本語のテキスト、中文文本。한국어 텍스트 ภาษาไทย नमस्ते दुनिया",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם مرحبا بالعالم",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u200d\ufeff\u00a0\u3000x",
    "x" * 300 + " " * 40 + "=" * 77 + "\n" * 12,
    "\x00\x07\x1b[0m \ufffd \U0010fffd",
)
"""Texts for which tokenizers differ. Every encoder is checked with them."""


class EncodersDiffer(Exception):
    """`gigatoken` gives other ids than `tokenizers`, or cannot be used. The message says where, or why."""


class FastEncoder:
    """Encodes texts with `gigatoken` like the `tokenizers` object `oracle`, for which special tokens must be ordinary text.

    Any number of threads may call it, but only `workers` calls run at the same time. Each call uses an encoder that no other call uses.
    """

    def __init__(self, content: bytes, oracle: Tokenizer, workers: int) -> None:
        """`content` is the `tokenizer.json` of `oracle`. Raises EncodersDiffer if `gigatoken` cannot read it."""
        described = json.loads(content)
        special = [token for token in described.get("added_tokens") or () if token["special"]]
        described["added_tokens"] = [token for token in described.get("added_tokens") or () if not token["special"]]
        for step in ("truncation", "padding", "post_processor"):
            described[step] = None
        self._content = json.dumps(described)
        self._oracle = oracle
        self._idle: list[_Encoder] = []
        """Encoders that no call is using."""
        self._workers = workers
        self._turn = threading.Semaphore(workers)
        """Limits the number of encoders to that of workers, because each encoder takes some 0.1 GB and half a second to load."""
        self._idle.append(self._load())
        self.check([*HARD_TEXTS, *(f"a {token['content']}b" for token in special)])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32. Raises EncodersDiffer if `tokenizers` gives other ids for an excerpt."""
        step = max(len(texts) // EXCERPTS, 1)
        excerpts = [_middle(text) for text in texts[::step][:EXCERPTS]]
        rows = self.ids(
            [*texts, *excerpts]
        )  # in one call, because the overhead of a call is as large as encoding some 50 kB
        self._compare(excerpts, rows[len(texts) :])
        return rows[: len(texts)]

    def check(self, texts: Iterable[str]) -> None:
        """Raise EncodersDiffer if `tokenizers` gives other ids for any of these texts."""
        asked = list(texts)
        self._compare(asked, self.ids(asked))

    def _compare(self, texts: list[str], rows: Sequence[np.ndarray]) -> None:
        for text, ids, right in zip(texts, rows, self._right(texts), strict=True):
            if ids.tolist() != right:
                raise EncodersDiffer(f"the ids of gigatoken are not those of tokenizers at {shorten(repr(text))}")

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32, without comparing excerpts."""
        known = [is_known(text) for text in texts]
        with self._turn:
            encoder = self._idle.pop() if self._idle else self._load()
            with _as_difference():
                rows = iter(_rows(encoder.backend.encode_batch(list(compress(texts, known)), parallel=False)))
            encoder.encoded += sum(map(len, texts))
            if encoder.encoded < LEAST_TEXT or resident() < encoder.most_resident:
                self._idle.append(encoder)
            else:
                del encoder
                return_memory()
        others = iter(self._right([text for text, kept in zip(texts, known, strict=True) if not kept]))
        return [next(rows) if kept else np.array(next(others), dtype=np.uint32) for kept in known]

    def _right(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return [encoding.ids for encoding in self._oracle.encode_batch_fast(texts, add_special_tokens=False)]

    def _load(self) -> _Encoder:
        try:
            import gigatoken
        except ImportError as error:
            reason = f"gigatoken cannot be imported ({error}), `pip install 'meshwright[data]'` installs it"
            raise EncodersDiffer(reason) from None
        with _as_difference():
            backend = gigatoken.Tokenizer.from_json(self._content)
        return _Encoder(backend, resident() + self._workers * WORD_MEMORY)


@dataclass
class _Encoder:
    """An encoder of `gigatoken`, to be dropped when the process uses `most_resident` bytes.

    `encoded` counts the characters it has encoded.
    """

    backend: Any
    most_resident: int
    encoded: int = 0


def is_known(text: str) -> bool:
    """Whether `gigatoken` and `tokenizers` treat every character of a text in the same way."""
    if text.isascii():
        return True
    return bool(treated_alike()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)].all())


def _middle(text: str) -> str:
    start = max((len(text) - EXCERPT) // 2, 0)
    return text[start : start + EXCERPT]


def _rows(encoded: Any) -> list[np.ndarray]:
    """The ids of each text in the result of `encode_batch`, which is a list of arrays if `awkward` is not installed."""
    if isinstance(encoded, list):
        return encoded
    offsets = encoded.layout.offsets.data
    ids = encoded.layout.content.data
    return [ids[start:stop] for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


@contextmanager
def _as_difference() -> Iterator[None]:
    """Within a `with` block, raise anything that `gigatoken` raises, including Rust panics, as EncodersDiffer."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().split("\n")[0]
        raise EncodersDiffer(f"gigatoken does not encode this ({shorten(reason)})") from None


def return_memory() -> None:
    """Return freed memory to the system. The C library would keep it otherwise. Has an effect only with glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of memory that this process uses now. If the system does not say, the most that it has used."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
