"""Validation text from files: a part of it, prepared in the cache when it is first needed."""

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
"""Tokens of text that are prepared without `data.validation_tokens`: twice what a validation then reads at most."""
TEXTS = "texts.jsonl"
DATA = "data"
KEY = "data.validation"


def validation_directory(spec: DataSpec, stream: StreamSpec, tokenizer: StreamTokenizer) -> Path:
    """The prepared data of groups of `stream` in a fixed random order, of so many tokens as a validation reads, or of all.

    Any number of processes may call it at once. Raises as `data.streams.open.open_streams` does.
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
    """The first groups of a fixed random order that together have so many tokens, or all."""
    order = permute(np.arange(index.groups), index.groups, f"validation/{index.digest}")
    totals = np.cumsum(index.group_bytes[order]) * index.tokens_per_byte
    return order[: int(np.searchsorted(totals, tokens)) + 1].tolist()
