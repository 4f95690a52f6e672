"""Token files of datatrove and Megatron become the corpus that `data prepare` makes of the same text; foreign end tokens are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshwright.data import shards
from meshwright.data.manifest import verify
from meshwright.data.prepare import prepare
from meshwright.data.token_files import import_tokens
from meshwright.data.tokenizer import load_tokenizer
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from tests.data.conftest import story
from tests.data.test_prepare import FULL_DISK, Killed, break_at, contents, fill_disk


def documents(tokenizer_file: Path, end: int | None = 0) -> list[list[int]]:
    tokenizer = load_tokenizer(tokenizer_file).tokenizer
    return [[*tokenizer.encode(story(i)).ids, *([] if end is None else [end])] for i in range(60)]


def write_datatrove(path: Path, texts: list[list[int]], form: str = "H") -> None:
    """A pair as datatrove 0.10.1 writes it: tokens, and the ends of documents."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(struct.pack(f"<{len(text)}{form}", *text) for text in texts))
    ends = np.cumsum([len(text) for text in texts]).tolist()
    path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    path.with_name(path.name + ".metadata").write_text(f"tokenizer\n{ends[-1]}\n{ends[-1]} T")


@pytest.mark.parametrize("form", ["H", "I"])
def test_pairs_of_datatrove_are_the_corpus_of_their_texts(tokenizer_file: Path, tmp_path: Path, form: str) -> None:
    texts = documents(tokenizer_file)
    write_datatrove(tmp_path / "ds" / "00000_shuffled.ds", texts[:25], form)
    write_datatrove(tmp_path / "ds" / "00001_shuffled.ds", texts[25:], form)
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": story(i)}) + "\n" for i in range(60)))
    right = prepare([str(source)], str(tokenizer_file), tmp_path / "prepared", shard_tokens=700)
    taken = import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "out", shard_tokens=700)
    ours, theirs = taken.manifests["train"], right.manifests["train"]
    for one, other in zip(ours.shards, theirs.shards, strict=True):
        assert (one.digest["bin"], one.digest["idx"]) == (other.digest["bin"], other.digest["idx"])
    assert (ours.tokens, ours.documents, ours.text_bytes) == (theirs.tokens, theirs.documents, theirs.text_bytes)
    assert ours.text_format == theirs.text_format and verify(tmp_path / "out") == []
    assert import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "out", shard_tokens=700).reused


def test_pairs_of_megatron_are_taken_over(tokenizer_file: Path, corpus: Path, tmp_path: Path) -> None:
    right = prepare([str(corpus)], str(tokenizer_file), tmp_path / "prepared", shard_tokens=2000).manifests["train"]
    taken = import_tokens([tmp_path / "prepared"], str(tokenizer_file), tmp_path / "out", shard_tokens=2000)
    ours = taken.manifests["train"]
    assert [shard.digest["bin"] for shard in ours.shards] == [shard.digest["bin"] for shard in right.shards]
    assert ours.text_bytes == right.text_bytes


@pytest.mark.parametrize("kill_at", ["document 30", "shard 2", "manifest"])
def test_a_killed_import_continues_to_the_same_bytes(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: str
) -> None:
    write_datatrove(tmp_path / "ds" / "a.ds", documents(tokenizer_file))
    options: dict[str, Any] = {"shard_tokens": 500, "held_out": 0.2}
    import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        break_at(patch, kill_at)
        with pytest.raises(Killed):
            import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "killed", **options)
    import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "killed", **options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_full_disk_is_named(tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_datatrove(tmp_path / "ds" / "a.ds", documents(tokenizer_file))
    with monkeypatch.context() as patch:
        patch.setattr(shards.SplitWriter, "finish_shard", fill_disk)
        with pytest.raises(OutOfResources, match=FULL_DISK):
            import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "out")
    assert import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "out").manifests["train"].documents == 60


def test_a_foreign_end_token_is_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    """The tokenizer's folder names another end than datatrove's default, `<|endoftext|>`, which it has too."""
    tokenizer: Any = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_special_tokens(["</s>"])
    (tmp_path / "llm").mkdir()
    tokenizer.save(str(tmp_path / "llm" / "tokenizer.json"))
    (tmp_path / "llm" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    write_datatrove(tmp_path / "ds" / "a.ds", documents(tokenizer_file))
    message = r"a\.ds: document 0: ends with '<\|endoftext\|>' \(0\), expected '</s>' \(\d+\); `--eos '<\|endoftext\|>'` accepts it"
    with pytest.raises(BadInput, match=message):
        import_tokens([tmp_path / "ds"], str(tmp_path / "llm"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    taken = import_tokens([tmp_path / "ds"], str(tmp_path / "llm"), tmp_path / "out", eos="<|endoftext|>")
    assert taken.manifests["train"].tokenizer.eos == 0


def test_documents_without_an_end_are_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    write_datatrove(tmp_path / "ds" / "a.ds", [*documents(tokenizer_file)[:3], *documents(tokenizer_file, None)[3:5]])
    with pytest.raises(
        BadInput, match=r"a\.ds: document 3: ends with '.*' \(\d+\), expected .*; its program wrote no end token"
    ):
        import_tokens([tmp_path / "ds"], str(tokenizer_file), tmp_path / "out")


def test_files_that_cannot_be_taken_over_are_named(tokenizer_file: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "ds", tmp_path / "out"
    write_datatrove(folder / "a.ds", [[5, 900, 0]])
    with pytest.raises(
        BadInput, match=r"document 0: has id 900, and .* has 300 tokens; name the tokenizer that made it"
    ):
        import_tokens([folder], str(tokenizer_file), out)
    write_datatrove(folder / "a.ds", [[5, 0], []])
    with pytest.raises(BadInput, match="document 1: has no tokens"):
        import_tokens([folder], str(tokenizer_file), out)
    write_datatrove(folder / "a.ds", [[5, 0], [6, 0]])
    whole = (folder / "a.ds").read_bytes()
    (folder / "a.ds").write_bytes(whole[:-1])
    with pytest.raises(
        Damaged, match=r"a\.ds: expected 2 or 4 bytes for each of 4 tokens \(by its index\), found 7 bytes"
    ):
        import_tokens([folder], str(tokenizer_file), out)
    (folder / "a.ds").write_bytes(whole)
    (folder / "a.ds.index").write_bytes(struct.pack("<3Q", 3, 2, 4))
    with pytest.raises(BadInput, match="document 0: ends with"):
        import_tokens([folder], str(tokenizer_file), out)
    (folder / "a.ds.index").write_bytes(b"\0" * 9)
    with pytest.raises(Damaged, match=r"a\.ds\.index: expected a multiple of 8 bytes, found 9"):
        import_tokens([folder], str(tokenizer_file), out)
    (folder / "a.ds.index").unlink()
    with pytest.raises(BadInput, match=r"a\.ds\.index: no such file; \.ds and \.ds\.index must lie side by side"):
        import_tokens([folder], str(tokenizer_file), out)
    (folder / "a.ds.loss").write_bytes(b"\1\1")
    with pytest.raises(BadInput, match=r"a\.ds\.loss: loss masks are not read"):
        import_tokens([folder], str(tokenizer_file), out)
    with pytest.raises(BadInput, match=r"b\.ds: no token files here \(nearest: .*a\.ds\)"):
        import_tokens([folder / "b.ds"], str(tokenizer_file), out)
    with pytest.raises(BadInput, match="tokens have a tokenizer already"):
        import_tokens([folder], "train:300", out)
    assert not out.exists()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_documents_of_nemo_curator_and_datatrove_are_prepared_as_they_are(
    ending: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    """Records with the keys that their writers add: Curator's numbers for duplicates, datatrove's `metadata`."""
    rows = [
        {"id": f"d{i}", "text": story(i), "_curator_dedup_id": i, "metadata": {"url": "x", "score": 0.5}}
        for i in range(20)
    ]
    path = tmp_path / f"00000.{ending}"
    if ending == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = prepare([str(path)], str(tokenizer_file), tmp_path / "out").manifests["train"]
    assert manifest.documents == 20 and manifest.text_bytes == sum(len(story(i)) for i in range(20))
