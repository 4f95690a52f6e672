"""The held-out text that a validation reads: documents in an order of their own, evenly spread, whatever the files are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.content_order import ContentOrder
from meshwright.data.manifest import open_directory
from meshwright.data.packing import TokenStream
from meshwright.data.prepare import prepare
from meshwright.data.source import DataSource, open_data
from meshwright.data.validation import equal_shares, validation_samples
from meshwright.spec.job import DataSpec
from tests.data.conftest import story


@pytest.fixture(scope="module")
def orders(corpus: Path, tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One corpus prepared from its files in two orders, in other shards."""
    folder = tmp_path_factory.mktemp("orders")
    files = sorted(map(str, corpus.iterdir()))
    prepare(files, str(tokenizer_file), folder / "a", shard_tokens=2000)
    # The same records in files of other names, so that the order of documents differs.
    for name, numbers in (("0.jsonl", range(60, 120)), ("1.jsonl", range(60))):
        lines = [json.dumps({"id": f"s{number}", "text": story(number)}) for number in reversed(numbers)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    prepare([str(folder / "0.jsonl"), str(folder / "1.jsonl")], str(tokenizer_file), folder / "b", shard_tokens=900)
    return folder / "a", folder / "b"


def streams(path: Path) -> tuple[TokenStream, ContentOrder]:
    files = [shard.file for shard in open_directory(path).shards]
    return TokenStream(files), ContentOrder(files)


def validation(path: Path, *, seq_len: int = 32, packing: str = "stream") -> DataSource:
    spec = DataSpec(validation=str(path), packing=packing)  # type: ignore[arg-type]  # the test's own values
    return open_data(spec, seq_len=seq_len, seed=0, split="validation")


def test_the_order_of_documents_follows_from_their_tokens_alone(orders: tuple[Path, Path]) -> None:
    (by_file, by_content), (other_file, other_content) = map(streams, orders)
    size = len(by_file)
    assert len(other_content) == size and by_content.read(0, size).tolist() == other_content.read(0, size).tolist()
    assert by_file.read(0, size).tolist() != other_file.read(0, size).tolist()

    def documents(stream: TokenStream) -> list[list[int]]:
        ranges = zip(*(part.tolist() for part in stream.document_ranges()), strict=True)
        return [stream.read(start, start + length).tolist() for start, length in ranges]

    assert documents(by_content) != documents(by_file) and sorted(documents(by_content)) == sorted(documents(by_file))


def test_the_stream_tells_where_its_tokens_are(orders: tuple[Path, Path]) -> None:
    _, stream = streams(orders[1])
    first, last = 100, 777
    tokens = stream.read(first, last)
    found = [file.read(token, token + 1)[0] for file, token in map(stream.locate, range(first, last))]
    assert found == tokens.tolist()
    parts, offset = stream.parts(first, last), first
    for part in parts:
        assert part.offset == offset
        start = int(stream.files[part.shard].document_bounds()[part.document])
        there = stream.files[part.shard].read(start + part.start, start + part.stop)
        assert there.tolist() == stream.read(offset, offset + part.stop - part.start).tolist()
        offset += part.stop - part.start
    assert offset == last and len({part.shard for part in parts}) > 1
    used = {part.shard for part in stream.parts(320, 353)}
    assert stream.files_of(np.array([10]), 32) == used == stream.files_at(np.arange(320, 353))


@pytest.mark.parametrize("packing", ["stream", "none"])
def test_a_sample_is_spread_over_all_documents_and_all_are_read_where_they_fit(
    orders: tuple[Path, Path], packing: str
) -> None:
    source = validation(orders[0], packing=packing)
    inputs = source.sources[str(orders[0])].layout.inputs
    (everything,) = validation_samples(source).values()
    assert everything.tolist() == list(range(source.windows))
    assert source.lengths(everything).sum() == inputs
    (chosen,) = validation_samples(source, inputs // 5).values()
    steps = np.diff(chosen)
    assert steps.min() >= 4 and steps.max() <= 6 and chosen[-1] >= source.windows - 6
    assert source.lengths(chosen).sum() == pytest.approx(inputs / 5, rel=0.1)
    (one,) = validation_samples(source, 1).values()
    assert one.tolist() == [0]


def test_sources_give_as_many_tokens_as_each_other_where_they_can(orders: tuple[Path, Path], tmp_path: Path) -> None:
    assert equal_shares({"a": 100, "b": 10, "c": 100}, 90) == {"b": 10, "a": 40, "c": 40}
    assert equal_shares({"a": 5, "b": 6}, 100) == {"a": 5, "b": 6}
    mix = {str(path): weight for path, weight in zip(orders, (9.0, 1.0), strict=True)}
    for path in orders:
        (path / "held_out").symlink_to(path)
    source = open_data(DataSpec(mix=mix), seq_len=32, seed=0, split="validation")
    samples = validation_samples(source, 640)
    assert {name: len(indices) for name, indices in samples.items()} == dict.fromkeys(sorted(mix), 10)
    for name, indices in samples.items():
        assert {source.describe(index)["source"] for index in indices} == {name}
