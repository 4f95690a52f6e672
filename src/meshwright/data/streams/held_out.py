"""Prepares text for validation from files that are otherwise read without preparation. The result is kept in the cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from meshwright.data.prepare import prepare
from meshwright.data.streams.group_file import texts_digest
from meshwright.data.streams.index import SourceIndex
from meshwright.data.streams.loaders import Loaders
from meshwright.data.streams.open import StreamTokenizer, read_index, settings_of
from meshwright.durable.writes import digest
from meshwright.policies.sample_order import permute
from meshwright.spec.errors import BadInput, attach_key
from meshwright.spec.job import DataSpec, StreamSpec

MOST_TOKENS = 1 << 21
"""Number of tokens to prepare, unless twice `data.validation_tokens` is more. A validation reads at most half of it by default."""
TEXTS = "texts.jsonl"
"""File in the folder with the chosen texts, one JSON object a line."""
DATA = "data"
"""Folder of the prepared data."""
KEY = "data.validation"
"""Key of the run file that errors name."""


def validation_directory(spec: DataSpec, stream: StreamSpec, tokenizer: StreamTokenizer) -> Path:
    """Prepare validation text from the stream and return its directory.

    A directory that was prepared before is used again.

    The text consists of whole groups of the source in a fixed random order. Groups are added until they have about
    twice as many tokens as a validation reads, or until the source has no more. Any number of processes may call this
    at the same time. Raises the errors of `data.streams.open.open_streams`, and BadInput if the chosen groups have no
    usable document.
    """
    settings = settings_of(spec, tokenizer)
    tokens = max(MOST_TOKENS, 2 * (spec.validation_tokens or 0))
    with attach_key(KEY):
        index = read_index(settings, stream)
        named = json.dumps([index.digest, stream.text, texts_digest(tokenizer.loaded), tokens])
        folder = Path(settings.cache) / f"validation-{digest(named.encode('utf-8', 'surrogateescape'))}"
        if not (folder / TEXTS).is_file():
            chosen = _chosen(index, tokens)
            groups = [
                [asdict(index.files[int(index.group_file[each])]), int(index.group_number[each])] for each in chosen
            ]
            request = {"op": "texts", "groups": groups, "text": stream.text, "path": str(folder / TEXTS)}
            with Loaders(settings, 1) as loaders:
                loaders.request(request).result()
        if not (folder / TEXTS).stat().st_size:
            raise BadInput(f"{stream.files}: has no usable documents")
        prepare((str(folder / TEXTS),), settings.tokenizer, folder / DATA, eos=settings.end, workers=1, wait=True)
    return folder / DATA


def _chosen(index: SourceIndex, tokens: int) -> list[int]:
    """Return the numbers of the first groups, in a fixed random order, that have at least about `tokens` tokens together.

    If all groups together have fewer, all are returned.
    """
    order = permute(np.arange(index.groups), index.groups, f"validation/{index.digest}")
    totals = np.cumsum(index.group_bytes[order]) * index.tokens_per_byte
    return order[: int(np.searchsorted(totals, tokens)) + 1].tolist()
