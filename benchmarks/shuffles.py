"""How well lanes shuffle, beside a buffer of documents and a full permutation; and the memory of an index.

    python benchmarks/shuffles.py [--out shuffles.json]

A sorted corpus has 400 files of 10 row groups of 1,000 documents. A file has an effect of deviation 1, a row group one of 0.5, a document
one of 1. A figure is the mean square of the errors of 12,000 batches of 256 documents, over that of a full permutation; the error of a
batch is its mean less that of the corpus. Beside it stands the correlation of the errors of neighbours. A buffer gets documents from 8
files at a time, in a random order of the files, and gives a random one for each that it gets. The memory is what the index of 10 TB of
text and the orders of two epochs take in each rank, with objects of 1 GB.
"""

from __future__ import annotations

import argparse
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from meshwright.data.streams.index import SourceIndex
from meshwright.data.streams.source import PART_BYTES
from meshwright.data.streams.stores import StoredFile
from meshwright.policies.lanes import LaneOrder, parts_of

FILES, GROUPS, ROWS = 400, 10, 1000
"""Files, row groups of each, documents of each."""
BATCH, BATCHES = 256, 12_000
READERS = 8
TEXT_BYTES, OBJECT_BYTES = 10**13, 10**9
SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/shuffles.json"))
    options = parser.parse_args()
    values = corpus()
    count = BATCH * BATCHES
    generator = np.random.default_rng(SEED)
    shuffled = errors(values, generator.permutation(values.ravel())[:count])
    figures = {}
    for size in (1_000, 10_000, 100_000):
        figures[f"buffer of {size:,}"] = against(shuffled, errors(values, buffered(values, size, count)))
    for lanes in (256, 1024):
        figures[f"{lanes:,} lanes"] = against(shuffled, errors(values, from_lanes(values, lanes, count)))
    memory = {f"row groups of {size} MB": index_bytes(size * 10**6) for size in (3, 100)}
    result = {"shuffles": figures, "index_bytes": memory}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def corpus() -> np.ndarray:
    """A value of each document: `(row groups, documents)`, sorted by file."""
    generator = np.random.default_rng(SEED)
    of_group = np.repeat(np.sort(generator.normal(size=FILES)), GROUPS) + 0.5 * generator.normal(size=FILES * GROUPS)
    return of_group[:, None] + generator.normal(size=(FILES * GROUPS, ROWS))


def errors(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """The errors of the batches."""
    return drawn.reshape(-1, BATCH).mean(axis=1) - values.mean()


def against(shuffled: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """The mean square of errors over that of a permutation, and the correlation of neighbours."""
    return {
        "ratio": round(float(np.mean(found**2) / np.mean(shuffled**2)), 3),
        "correlation": round(float(np.mean(found[:-1] * found[1:]) / np.mean(found**2)), 3),
    }


def buffered(values: np.ndarray, size: int, count: int) -> np.ndarray:
    """The first documents that a shuffle buffer gives, whose files come in a random order."""
    generator = np.random.default_rng(SEED + 1)
    by_file = values.reshape(FILES, -1)[generator.permutation(FILES)]
    documents = FILES // READERS * by_file.shape[1]
    read = by_file[: FILES // READERS * READERS].reshape(READERS, documents).T.ravel()
    buffer, given = read[:size].copy(), np.empty(count)
    places = generator.integers(size, size=count)
    for number, place in enumerate(places.tolist()):
        given[number] = buffer[place]
        buffer[place] = read[size + number]
    return given


def from_lanes(values: np.ndarray, lanes: int, count: int) -> np.ndarray:
    """The first documents of the lanes, of which each gives one in its turn."""
    order = LaneOrder(np.ones(len(values), dtype=np.int32), lanes, SEED, "sorted")
    each = -(-count // lanes)

    def of_lane(lane: int) -> np.ndarray:
        found, size, window = [], 0, 0
        while size < each:
            documents = np.concatenate([values[part.group] for part in order.window(lane, window)])
            found.append(documents[order.shuffled(lane, window, len(documents))])
            size, window = size + len(documents), window + 1
        return np.concatenate(found)[:each]

    return np.stack([of_lane(lane) for lane in range(lanes)], axis=1).ravel()[:count]


def index_bytes(group_bytes: int) -> int:
    """Bytes of memory of the index of `TEXT_BYTES` with such groups, and of the orders of two epochs."""
    objects = TEXT_BYTES // OBJECT_BYTES
    groups = TEXT_BYTES // group_bytes

    def index() -> SourceIndex:
        files = tuple(
            StoredFile(f"s3://bucket/web/part-{number:05d}.parquet", OBJECT_BYTES, f'"{number:032x}"')
            for number in range(objects)
        )
        numbers = np.arange(groups, dtype=np.int32)
        of_file = (numbers // -(-groups // objects)).astype(np.int32)
        return SourceIndex("s3://bucket/", "parquet", files, of_file, numbers, np.full(groups, group_bytes))

    return traced(lambda: opened(index()))


def opened(index: SourceIndex) -> tuple[SourceIndex, LaneOrder]:
    """The index and its order, which has made two epochs."""
    lanes = 256
    order = LaneOrder(parts_of(index.group_bytes, lanes, PART_BYTES), lanes, SEED, "source")
    parts = int(parts_of(index.group_bytes, lanes, PART_BYTES).sum())
    order.window(0, 0)
    order.window(0, parts // lanes // 4 + 2)
    return index, order


def traced(make: Callable[[], object]) -> int:
    """Bytes that a value takes."""
    tracemalloc.start()
    value = make()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del value
    return taken


if __name__ == "__main__":
    main()
