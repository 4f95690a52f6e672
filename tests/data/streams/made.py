"""Files of text that a test streams, and ranks that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from meshwright.data.loader import LoadedStep, Windows
from meshwright.data.source import DataSource, open_data
from meshwright.data.streams.source import merge_cursors
from meshwright.spec.job import DataSpec, StreamSpec
from tests.data.conftest import story

SEQ_LEN, BATCH, LANES = 48, 12, 24


def write_parquet(
    folder: Path, files: int = 3, documents: int = 240, *, group: int = 20, text: str = "content"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    each = documents // files
    for number in range(files):
        texts = [story(index) for index in range(number * each, (number + 1) * each)]
        table = pyarrow.table({text: texts, "id": list(range(each))})
        pyarrow.parquet.write_table(
            table, folder / f"part-{number}.parquet", row_group_size=group, write_page_checksum=True
        )
    return folder


def json_lines(first: int, last: int) -> bytes:
    return "".join(json.dumps({"text": story(index)}) + "\n" for index in range(first, last)).encode()


def spec_of(streams: Mapping[str, tuple[str, str]], tokenizer: Path | None, cache: Path, **keys: Any) -> DataSpec:
    """A run's data of these streams: files and key of the text by name."""
    mix = dict.fromkeys(streams, 1.0) | keys.pop("mix", {})
    named = {name: StreamSpec(files=files, text=text) for name, (files, text) in streams.items()}
    settings = {"lanes": LANES, "loaders": 1, "cache": str(cache), "document_mask": True}
    settings |= {} if tokenizer is None else {"tokenizer": str(tokenizer)}
    return DataSpec(mix=mix, streams=named, **{**settings, **keys})


def open_ranks(spec: DataSpec, count: int, seed: int = 3) -> list[tuple[DataSource, Windows]]:
    """The data of each rank, and the reader of its part of each step."""
    ranks = []
    for rank in range(count):
        data = open_data(spec, seq_len=SEQ_LEN, seed=seed)
        ranks.append((data, Windows(data, global_batch=BATCH, data_rank=rank, data_ranks=count, micro_batch=1)))
    return ranks


def whole_steps(ranks: list[tuple[DataSource, Windows]], first: int, last: int) -> Iterator[np.ndarray]:
    """Tokens, targets and documents of the samples of each step [first, last), `(3, batch, seq)`, from all ranks in order."""
    for step in range(first, last):
        parts: list[LoadedStep] = [reader.read(step * BATCH) for _, reader in ranks]
        micros = [micro for part in parts for micro in part.micro_batches]
        columns: list[Callable[[Any], Any]] = [lambda m: m.tokens, lambda m: m.targets, lambda m: m.documents]
        yield np.stack([np.concatenate([column(micro).numpy() for micro in micros]) for column in columns])


def cursors_of(ranks: list[tuple[DataSource, Windows]], sample: int) -> dict[str, Any]:
    """The positions that a checkpoint has when `sample` is the next one."""
    known = [{name: each.tolist() for name, each in data.cursors(sample).items()} for data, _ in ranks]
    return {name: merge_cursors([each[name] for each in known]).tolist() for name in known[0]}
