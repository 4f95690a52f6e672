"""Parts of a corpus that hosts prepare by themselves join to the corpus that one host makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import disk_space, shards
from meshwright.data import parts as parts_module
from meshwright.data import prepare as prepare_module
from meshwright.data.cleaning import Cleaning
from meshwright.data.inputs import list_inputs
from meshwright.data.parts import CorpusPart, PreparedPart, merge, prepare_part, read_part
from meshwright.data.prepare import prepare
from meshwright.data.request import Preparation
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from tests.data.conftest import story
from tests.data.test_prepare import FULL_DISK, Killed, break_at, contents, fill_disk


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven files of lines and two that are not read."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(7):
        lines = [json.dumps({"text": story(i)}) for i in range(number * 40, number * 40 + 10 * (number + 1))]
        (folder / f"{number}.jsonl").write_text("\n".join([*lines, "no JSON"]) + "\n")
    (folder / "8.bin").write_bytes(b"\0" * 50)
    (folder / ".hidden").write_text("x")
    return folder


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 4000)


def preparation(texts: Path, tokenizer: Path | str, out: Path, **changes: Any) -> Preparation:
    options: dict[str, Any] = {"held_out": 0.1, "shard_tokens": 3000, **changes}
    return Preparation((str(texts),), str(tokenizer), out, **options)


def make_parts(texts: Path, tokenizer: Path | str, folder: Path, count: int, **changes: Any) -> list[PreparedPart]:
    return [
        prepare_part(
            preparation(texts, tokenizer, folder / str(number), **changes), CorpusPart(number, count), workers=1
        )
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_parts_join_to_the_corpus_of_one_host(texts: Path, tokenizer_file: Path, tmp_path: Path, count: int) -> None:
    prepare([str(texts)], str(tokenizer_file), tmp_path / "whole", held_out=0.1, shard_tokens=3000)
    parts = make_parts(texts, tokenizer_file, tmp_path / "parts", count)
    before = contents(tmp_path / "parts")
    prepared = merge([part.out for part in reversed(parts)], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert contents(tmp_path / "parts") == before, "merging changes no part"
    assert prepared.left_out.bad.count == 7 and set(prepared.left_out.not_read) == {"binary", "hidden"}
    assert sum(part.documents for part in parts) == sum(each.documents for each in prepared.manifests.values()) == 280
    assert merge([part.out for part in parts], tmp_path / "merged").reused


def test_each_file_is_in_one_part_and_parts_have_like_sizes(texts: Path) -> None:
    files = list_inputs([str(texts)]).files
    shares = [CorpusPart(number, 3).files(files) for number in (1, 2, 3)]
    assert [file for share in shares for file in share] == files
    sizes = [sum(file.size for file in share) for share in shares]
    assert max(sizes) - min(sizes) < max(file.size for file in files)


def test_a_tokenizer_is_trained_alike_in_each_part(texts: Path, tmp_path: Path) -> None:
    prepare([str(texts)], "train:290", tmp_path / "whole", held_out=0.1, shard_tokens=3000)
    parts = make_parts(texts, "train:290", tmp_path / "parts", 2)
    merge([part.out for part in parts], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_duplicates_in_different_parts_are_found(tokenizer_file: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        lines = [json.dumps({"text": story(i % 50)}) for i in range(number * 30, number * 30 + 30)]
        (texts / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    cleaning = Cleaning(duplicates="near")
    options: dict[str, Any] = {"held_out": 0.1, "shard_tokens": 3000, "cleaning": cleaning}
    whole = prepare([str(texts)], str(tokenizer_file), tmp_path / "whole", workers=1, **options)
    parts = make_parts(texts, tokenizer_file, tmp_path / "parts", 3, cleaning=cleaning)
    merged = merge([part.out for part in parts], tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert merged.removed == whole.removed and set(merged.removed.reasons) == {"exact duplicate", "near-duplicate"}
    assert sum(figures["documents"] for figures in merged.removed.reasons.values()) >= 70


@pytest.mark.parametrize("kill_at", ["document 30", "shard 2", "manifest"])
def test_a_killed_merge_continues_to_the_same_bytes(
    texts: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: str
) -> None:
    folders = [part.out for part in make_parts(texts, tokenizer_file, tmp_path / "parts", 2)]
    merge(folders, tmp_path / "whole")
    with monkeypatch.context() as patch:
        break_at(patch, kill_at)
        with pytest.raises(Killed):
            merge(folders, tmp_path / "killed")
    merge(folders, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_killed_part_continues(
    texts: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.data import parts

    whole = make_parts(texts, tokenizer_file, tmp_path / "whole", 2)
    done: list[int] = []
    run_units = parts.run_units

    def killed(folder: Path, units: list[int], *others: Any) -> Any:
        for number in run_units(folder, units, *others):
            if len(done) == 2:
                raise Killed
            done.append(number)
            yield number

    out = tmp_path / "parts" / "2"
    with monkeypatch.context() as patch:
        patch.setattr(parts, "run_units", killed)
        with pytest.raises(Killed):
            prepare_part(preparation(texts, tokenizer_file, out), CorpusPart(2, 2), workers=1)
    with pytest.raises(BadInput, match=r"2: this part is not finished; run its .* --part.* again"):
        merge([whole[0].out, out], tmp_path / "merged")
    asked: list[int] = []
    monkeypatch.setattr(
        parts, "run_units", lambda folder, units, *others: (asked.extend(units), run_units(folder, units, *others))[1]
    )
    prepare_part(preparation(texts, tokenizer_file, out), CorpusPart(2, 2), workers=1)
    assert asked and not set(done) & set(asked), "units that were done are not done again"
    assert contents(out) == contents(whole[1].out)


def test_a_full_disk_is_named_and_the_same_command_continues(
    texts: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "run_units", fill_disk)
        with pytest.raises(OutOfResources, match=FULL_DISK):
            make_parts(texts, tokenizer_file, tmp_path, 1)
    [part] = make_parts(texts, tokenizer_file, tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shards.SplitWriter, "finish_shard", fill_disk)
        with pytest.raises(OutOfResources, match=FULL_DISK):
            merge([part.out], tmp_path / "merged")
    usage = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr(disk_space.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(OutOfResources, match=r"bytes are needed, 1,000 are free"):
            merge([part.out], tmp_path / "small")
    assert sum(each.documents for each in merge([part.out], tmp_path / "merged").manifests.values()) == 280


def test_the_same_part_again_finds_the_work_done(texts: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    first = prepare_part(preparation(texts, tokenizer_file, tmp_path / "1"), CorpusPart(1, 2), workers=1)
    again = prepare_part(preparation(texts, tokenizer_file, tmp_path / "1"), CorpusPart(1, 2), workers=1)
    assert again.reused and (again.documents, again.tokens) == (first.documents, first.tokens)
    with pytest.raises(BadInput, match=r"work of a different command \(part: 1/2 before, 2/2 now\)"):
        prepare_part(preparation(texts, tokenizer_file, tmp_path / "1"), CorpusPart(2, 2), workers=1)
    with pytest.raises(BadInput, match=r"held_out: 0\.1 before, 0\.2 now"):
        prepare_part(preparation(texts, tokenizer_file, tmp_path / "1", held_out=0.2), CorpusPart(1, 2), workers=1)


def test_parts_that_do_not_belong_together_are_named(texts: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    three = [part.out for part in make_parts(texts, tokenizer_file, tmp_path / "3", 3)]
    two = [part.out for part in make_parts(texts, tokenizer_file, tmp_path / "2", 2)]
    other = prepare_part(
        preparation(texts, tokenizer_file, tmp_path / "o", shard_tokens=99), CorpusPart(3, 3), workers=1
    )
    out = tmp_path / "out"
    with pytest.raises(BadInput, match="part 2/3, 3/3: missing; name the folders of all 3 parts"):
        merge(three[:1], out)
    with pytest.raises(BadInput, match=r"is part 2/2, and .*/3/1 is part 1/3"):
        merge([three[0], two[1]], out)
    with pytest.raises(BadInput, match=r"o: was prepared by another command \(shard_tokens: 3000 in .*, 99 in .*\)"):
        merge([*three[:2], other.out], out)
    shutil.copytree(three[1], tmp_path / "copy")
    with pytest.raises(BadInput, match="is part 2/3, as is "):
        merge([*three, tmp_path / "copy"], out)
    with pytest.raises(BadInput, match=r"parts: no prepared part here.*data prepare --part I/N"):
        merge([tmp_path / "parts"], out)
    with pytest.raises(BadInput, match=r"no prepared part here \(nearest: .*/3/3\)"):
        merge([tmp_path / "3" / "3a"], out)
    begun = three[2] / "unfinished.json"
    begun.write_text("{}")
    with pytest.raises(BadInput, match=r"3: this part is not finished"):
        merge(three, out)
    begun.unlink()
    next((three[2] / "units").glob("*.tokens")).unlink()
    with pytest.raises(
        Damaged, match=r"files of unit \d are missing or have other sizes; remove .*/3/3 and prepare this part again"
    ):
        merge(three, out)
    assert not out.exists()


def test_parts_whose_encoders_differ_are_prepared_again_by_tokenizers(
    texts: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    folders = [part.out for part in make_parts(texts, tokenizer_file, tmp_path / "parts", 2)]
    assert read_part(folders[0]).fast
    prepare_part(preparation(texts, tokenizer_file, folders[1]), CorpusPart(2, 2), workers=1, encoder="tokenizers")
    assert not read_part(folders[1]).fast
    record = json.loads((folders[1] / "part.json").read_bytes())
    (folders[1] / "part.json").write_text(json.dumps({**record, "differs": True}))
    with pytest.raises(BadInput, match=r"other ids than tokenizers here; .* --encoder tokenizers: 1/2"):
        merge(folders, tmp_path / "merged")
    prepare_part(preparation(texts, tokenizer_file, folders[0]), CorpusPart(1, 2), workers=1, encoder="tokenizers")
    prepare([str(texts)], str(tokenizer_file), tmp_path / "whole", held_out=0.1, shard_tokens=3000)
    merge(folders, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2"])
def test_a_part_is_two_numbers(text: str) -> None:
    with pytest.raises(BadInput, match=f"--part {text}: expected I/N"):
        CorpusPart.parse(text)


def test_a_damaged_record_is_named(texts: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    out = make_parts(texts, tokenizer_file, tmp_path, 1)[0].out
    (out / "part.json").write_text("{}")
    with pytest.raises(Damaged, match=r"part\.json: no record of a part"):
        merge([out], tmp_path / "merged")
