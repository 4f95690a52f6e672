from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.manifest import MANIFEST, held_out_beside, locate, open_directory
from meshwright.data.prepare import prepare
from meshwright.data.source import DataSource, has_validation, open_data
from meshwright.data.tokenizer import load_tokenizer
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec
from tests.data import megatron
from tests.data.conftest import story


def opened(path: Path, **other: object) -> DataSource:
    mask = bool(other.pop("document_mask", False))
    spec = DataSpec(mix={str(path): 1.0}, document_mask=mask)
    return open_data(spec, **{"seq_len": 32, "seed": 0, **other})  # type: ignore[arg-type]  # the test's own arguments


def test_out_of_prepare_works_with_and_without_held_out(
    prepared: Path, corpus: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    prepare([str(corpus)], str(tokenizer_file), tmp_path / "plain")
    assert locate(prepared) == (prepared / "train", ())
    assert locate(tmp_path / "plain") == (tmp_path / "plain", ())
    for path in (prepared, prepared / "train"):
        assert held_out_beside(path) == prepared / "held_out"
        assert has_validation(DataSpec(mix={str(path): 1.0}), 32)
        assert not has_validation(DataSpec(mix={str(path): 1.0}), 1 << 20), (
            "it fills no sequence, and nobody asked for it"
        )
    assert has_validation(DataSpec(mix={str(prepared): 1.0}, validation=str(prepared)), 1 << 20), (
        "opening it says what is wrong"
    )
    assert not has_validation(DataSpec(mix={str(tmp_path / "plain"): 1.0}), 32)


def test_a_sample_is_made_of_the_documents_it_says(prepared: Path) -> None:
    """Decode, and compare with the very text of the corpus."""
    source = opened(prepared, document_mask=True)
    tokenizer = load_tokenizer(prepared / "train").tokenizer
    batch = source.samples(range(source.windows))
    for index in range(source.windows):
        described = source.describe(index)
        assert (described["global_index"], described["source"], described["tokens"]) == (index, str(prepared), 32)
        tokens: list[int] = []
        for part in described["documents"]:
            document_tokens = [*tokenizer.encode(story(int(part["id"][1:]))).ids, 0]
            assert part["file"].endswith(f"part-{int(part['id'][1:]) // 60}.jsonl")
            tokens += document_tokens[part["start"] : part["end"]]
        assert tokens == batch.tokens[index].tolist()
        numbers = [n for n, part in enumerate(described["documents"]) for _ in range(part["start"], part["end"])]
        assert numbers == batch.documents[index].tolist()


def test_an_epoch_reads_every_token_of_every_whole_window(prepared: Path) -> None:
    source = opened(prepared)
    directory = open_directory(prepared)
    stream = np.concatenate([shard.file.read(0, shard.file.tokens) for shard in directory.shards])
    expected = sorted(tuple(stream[w * 32 : w * 32 + 33].tolist()) for w in range(source.windows))
    for epoch in (0, 1):
        batch = source.samples(range(epoch * source.windows, (epoch + 1) * source.windows))
        assert (
            sorted((*t, y[-1]) for t, y in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)) == expected
        )
        assert np.array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_validation_is_the_held_out_set_in_its_own_order(prepared: Path) -> None:
    source = opened(prepared, split="validation", seed=7)
    stream = np.concatenate([s.file.read(0, s.file.tokens) for s in open_directory(prepared / "held_out").shards])
    batch = source.samples(range(source.windows))
    assert source.windows == (len(stream) - 1) // 32
    left_out = Counter(stream.tolist()) - Counter(batch.tokens.reshape(-1).tolist())
    assert left_out.total() == len(stream) - 32 * source.windows, (
        "every token is in one window, but for those behind the last"
    )
    named = open_data(
        DataSpec(mix={str(prepared / "train"): 1.0}, validation=str(prepared)), seq_len=32, seed=0, split="validation"
    )
    assert named.samples(range(source.windows)).tokens.tolist() == batch.tokens.tolist()


def test_no_validation_says_how_to_get_some(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], str(tokenizer_file), tmp_path / "plain")
    with pytest.raises(BadInput, match=r"prepare with --held-out FRACTION, or set data.validation"):
        opened(tmp_path / "plain", split="validation")


def test_validation_data_alone_prepare_no_other_corpus(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `meshwright eval MODEL --data DIR` of a model folder without a record of its training data."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no folder can be made there
    spec = DataSpec(validation=str(prepared))
    assert has_validation(spec, 32)
    source = open_data(spec, seq_len=32, seed=7, split="validation")
    expected = opened(prepared, split="validation", seed=7).samples(range(3)).tokens
    assert source.samples(range(3)).tokens.tolist() == expected.tolist()
    with pytest.raises(BadInput, match="/dev/null/meshwright/.*: Not a directory; .* set XDG_CACHE_HOME to a folder"):
        open_data(spec, seq_len=32, seed=7)


def test_figures_for_bits_per_byte_and_the_unigram_baseline(prepared: Path) -> None:
    source = opened(prepared, split="validation", document_mask=True)
    manifest = json.loads((prepared / "held_out" / MANIFEST).read_text())
    tokens = np.concatenate([s.file.read(0, s.file.tokens) for s in open_directory(prepared / "held_out").shards])
    assert source.token_bytes is not None
    assert source.token_bytes[tokens].sum() == manifest["text_bytes"], "the end of a document is no text"
    counts = Counter(t for t in source.samples(range(4)).targets.reshape(-1).tolist() if t >= 0)
    assert {token: count for token, count in enumerate(source.target_counts(range(4))) if count} == counts
    assert (source.vocab_size, source.eos, source.tokenizer_file) == (300, 0, prepared / "held_out" / "tokenizer.json")


def test_two_sources_are_mixed_by_weight(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    names = []
    for part in range(2):
        names.append(str(tmp_path / f"part{part}"))
        prepare([str(corpus / f"part-{part}.jsonl")], str(tokenizer_file), Path(names[-1]))
    source = open_data(DataSpec(mix={names[1]: 1.0, names[0]: 3.0}), seq_len=32, seed=0)
    drawn = Counter(source.describe(i)["source"] for i in range(400))
    assert 260 < drawn[names[0]] < 340


def copy_of(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared / "train", tmp_path / "copy"))


def test_a_truncated_shard_is_refused_with_file_and_sizes(prepared: Path, tmp_path: Path) -> None:
    folder = copy_of(prepared, tmp_path)
    path = folder / "shard-00001.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-6])
    message = rf"shard-00001.bin: expected {size} bytes \(by the manifest\), found {size - 6}; `data.damaged: skip`"
    with pytest.raises(Damaged, match=message):
        opened(folder)


@pytest.mark.parametrize("harm", ["truncated", "missing", "other idx"])
def test_a_damaged_shard_is_left_out_with_one_warning(
    prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    folder = copy_of(prepared, tmp_path)
    if harm == "truncated":
        (folder / "shard-00001.bin").write_bytes(b"1234")
    elif harm == "missing":
        (folder / "shard-00001.idx").unlink()
    else:
        index = bytearray((folder / "shard-00001.idx").read_bytes())
        index[18] -= 1
        (folder / "shard-00001.idx").write_bytes(index)
    spec = DataSpec(mix={str(folder): 1.0}, damaged="skip")
    with caplog.at_level(logging.WARNING):
        source = open_data(spec, seq_len=32, seed=0)
    assert len(caplog.records) == 1 and "shard-00001" in caplog.text
    directory = source.sources[str(folder)].directory
    assert directory.left_out == ("shard-00001",)
    names = [shard.record.name for shard in directory.shards if shard.record]
    assert "shard-00001" not in names and names[:2] == ["shard-00000", "shard-00002"]
    again = open_data(spec, seq_len=32, seed=0)
    assert again.samples(range(9)).tokens.tolist() == source.samples(range(9)).tokens.tolist()
    for index in range(source.windows):
        source.describe(index)


def test_when_every_shard_is_damaged_there_is_nothing_to_skip_to(prepared: Path, tmp_path: Path) -> None:
    folder = copy_of(prepared, tmp_path)
    for path in folder.glob("*.bin"):
        path.write_bytes(b"")
    with pytest.raises(Damaged, match="no usable shard is left"):
        open_data(DataSpec(mix={str(folder): 1.0}, damaged="skip"), seq_len=32, seed=0)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9}', '{"version": 1, "shards": [{"name": "../x"}]}'])
def test_a_broken_manifest_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(Damaged, match=r"manifest.json: not a readable manifest"):
        opened(tmp_path)


def test_a_manifest_cannot_point_outside_its_directory(prepared: Path, tmp_path: Path) -> None:
    folder = copy_of(prepared, tmp_path)
    data = json.loads((folder / MANIFEST).read_text())
    data["shards"][0]["name"] = "../shard-00000"
    (folder / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(Damaged, match="leaves the directory"):
        opened(folder)


def test_foreign_pairs_are_read_and_their_documents_numbered(tmp_path: Path) -> None:
    megatron.write(tmp_path / "a.text_document", [[[1, 2], [3]], [[4, 5, 6]]], code=5)
    megatron.write(tmp_path / "b.text_document", [[[7, 8, 9]]], code=8)
    source = open_data(DataSpec(mix={str(tmp_path): 1.0}, document_mask=True), seq_len=4, seed=0, split="train")
    assert source.windows == 2 and source.vocab_size is None and source.token_bytes is None
    by_start = {tuple(source.samples([i]).tokens[0].tolist()): source.describe(i)["documents"] for i in range(2)}
    a, b = f"{tmp_path}/a.text_document.bin", f"{tmp_path}/b.text_document.bin"
    assert by_start == {
        (1, 2, 3, 4): [{"file": a, "id": 0, "start": 0, "end": 3}, {"file": a, "id": 1, "start": 0, "end": 1}],
        (5, 6, 7, 8): [{"file": a, "id": 1, "start": 1, "end": 3}, {"file": b, "id": 0, "start": 0, "end": 2}],
    }
    for name in ("a.text_document", "a.text_document.bin"):
        assert open_data(DataSpec(mix={str(tmp_path / name): 1.0}), seq_len=4, seed=0).windows == 1


@pytest.mark.parametrize(("vocab_size", "expected"), [(9, "below model.vocab_size 9"), (None, "that is not negative")])
def test_a_token_outside_the_vocabulary_is_named_by_file_and_offset(
    tmp_path: Path, vocab_size: int | None, expected: str
) -> None:
    wrong = 9 if vocab_size else -3
    megatron.write(tmp_path / "a", [[[1, 2, 3, 4]]], code=4)
    megatron.write(tmp_path / "b", [[[5, 6, wrong]]], code=4)
    source = open_data(DataSpec(mix={str(tmp_path): 1.0}), seq_len=6, seed=0, vocab_size=vocab_size)
    with pytest.raises(Damaged, match=rf"b.bin: offset 8: expected an id {expected}, found token {wrong}"):
        source.samples([0])


def test_a_tokenizer_larger_than_the_model_is_refused(prepared: Path) -> None:
    opened(prepared, vocab_size=300)
    with pytest.raises(BadInput, match=r"its tokenizer has 300 tokens, expected at most model.vocab_size 299"):
        opened(prepared, vocab_size=299)


def test_sources_with_different_tokenizers_are_refused(prepared: Path, corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], "train:270", tmp_path / "other")
    with pytest.raises(BadInput, match="have different tokenizers"):
        open_data(DataSpec(mix={str(prepared): 1.0, str(tmp_path / "other"): 1.0}), seq_len=32, seed=0)


def test_too_little_text_for_one_window(prepared: Path) -> None:
    with pytest.raises(BadInput, match=r"has \d+ tokens, train.seq_len 100000 needs 100001"):
        opened(prepared, seq_len=100_000)


def test_a_wrong_path_names_the_nearest_and_the_command(prepared: Path) -> None:
    with pytest.raises(BadInput, match=rf"no prepared data here \(nearest: {prepared}\).*meshwright data prepare"):
        opened(prepared.parent / "dta")


def test_unfinished_data_says_how_to_finish(tmp_path: Path) -> None:
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(BadInput, match="preparation was not finished; run the same"):
        opened(tmp_path)


def test_a_lost_document_list_matters_only_to_show(prepared: Path, tmp_path: Path) -> None:
    folder = copy_of(prepared, tmp_path)
    for path in folder.glob("*.documents.jsonl"):
        path.unlink()
    source = opened(folder)
    source.samples([0])
    with pytest.raises(Damaged, match=r"documents.jsonl: missing"):
        source.describe(0)


def order(source: DataSource) -> list[tuple[str, int]]:
    """Content and window of each sample of two epochs."""
    names = {name: opened.directory.order_digest for name, opened in source.sources.items()}
    draws = source.order.draws(np.arange(2 * source.windows))
    return [(names[source.order.names[s]], int(w)) for s, w in zip(draws.source, draws.window, strict=True)]


def test_the_order_of_samples_depends_on_contents_and_not_on_paths(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    assert order(opened(prepared)) == order(opened(tmp_path / "copy"))
    for name, documents in (("x", [[[1, 2, 3] * 30]]), ("y", [[[4, 5, 6] * 50]])):
        (tmp_path / name).mkdir()
        megatron.write(tmp_path / name / "data", documents, 4)
    mixes = [{"x": 1.0, "y": 2.0}, {"moved-y": 1.0, "a": 2.0}]
    shutil.copytree(tmp_path / "x", tmp_path / "moved-y")
    shutil.copytree(tmp_path / "y", tmp_path / "a")
    specs = [DataSpec(mix={str(tmp_path / name): weight for name, weight in mix.items()}) for mix in mixes]
    first, second = (open_data(spec, seq_len=8, seed=3) for spec in specs)
    assert order(first) == order(second)
    megatron.write(tmp_path / "a" / "data", [[[4, 5, 6] * 25], [[7] * 75]], 4)  # other documents, as many tokens
    assert order(open_data(specs[1], seq_len=8, seed=3)) != order(first)
