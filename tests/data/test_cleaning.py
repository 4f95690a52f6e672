"""Filters, texts of evaluations and duplicates are removed as asked, counted and shown; mistakes in the options are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.cli.data import _sentences, _summary
from meshwright.data import prepare as prepare_module
from meshwright.data.cleaning import Cleaning
from meshwright.data.manifest import Manifest
from meshwright.data.prepare import PreparedCorpus, prepare
from meshwright.data.request import ChatRequest
from meshwright.spec.errors import BadInput
from tests.data.conftest import story
from tests.data.test_prepare import Killed, break_at, contents

FILTERS = """
def short(text: str) -> bool:
    print("a filter may print")
    return len(text) < 250

def no_answer(text):
    return "maybe"

def breaks(text):
    return 1 / (text.count("Story 3.") - 1) != 5

LIMIT = 3
"""


@pytest.fixture
def filters(tmp_path: Path) -> str:
    (tmp_path / "filters.py").write_text(FILTERS)
    return str(tmp_path / "filters.py")


def ids(out: Path) -> list[str]:
    return [json.loads(line)[1] for path in sorted(out.glob("shard-*.jsonl")) for line in path.open()]


@pytest.mark.parametrize("divided", [False, True])
def test_a_filter_keeps_the_texts_for_which_it_says_true(
    corpus: Path,
    tokenizer_file: Path,
    tmp_path: Path,
    filters: str,
    divided: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if divided:
        monkeypatch.setattr(prepare_module, "READ_HERE", 0)
    cleaning = Cleaning(filters=(f"{filters}:short",))
    prepared = prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", cleaning=cleaning, workers=1)
    expected = [i for i in range(120) if len(story(i)) < 250]
    gone = [i for i in range(120) if len(story(i)) >= 250]
    assert 10 < len(expected) < 110 and ids(tmp_path / "out") == [f"s{i}" for i in expected]
    reason = f"filter {filters}:short"
    counts = {reason: {"documents": len(gone), "text_bytes": sum(len(story(i)) for i in gone)}}
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.removed == prepared.manifests["train"].removed == _summary(prepared)["removed"] == counts
    report = json.loads((tmp_path / "out" / "removed.json").read_bytes())
    assert len(report[reason]["examples"]) == 20
    assert report[reason]["examples"][0] == {
        "document": f"{corpus}/part-{gone[0] // 60}.jsonl [s{gone[0]}]",
        "text": story(gone[0])[:300],
    }
    assert f"removed: {reason}: {len(gone)} documents" in _sentences(prepared)


def test_without_cleaning_nothing_is_written_about_it(prepared: Path) -> None:
    assert "removed" not in json.loads((prepared / "train" / "manifest.json").read_bytes())
    assert not list(prepared.rglob("removed.json"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("{}:shorter", r"filters\.py has no function shorter \(nearest: short\); it has breaks, no_answer, short"),
        ("{}:LIMIT", "has no function LIMIT"),
        ("{}", r"expected FILE\.py:FUNCTION, for example filters\.py:keep"),
        ("{}:two words", r"expected FILE\.py:FUNCTION"),
        ("{}x.py:short", r"filters\.pyx\.py: no such file \(nearest: .*/filters\.py\)"),
        ("{}:no_answer", r"part-0\.jsonl \[s0\]: expected True to keep the text or False, got 'maybe'"),
        ("{}:breaks", r"part-0\.jsonl \[s3\]: ZeroDivisionError: "),
    ],
)
def test_filters_that_cannot_be_used_are_named(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, filters: str, option: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(
            [str(corpus)], str(tokenizer_file), tmp_path / "o", cleaning=Cleaning(filters=(option.format(filters),))
        )
    assert not (tmp_path / "o").exists()


def test_a_file_of_filters_that_does_not_import_is_named(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_this_name")
    cleaning = Cleaning(filters=(f"{tmp_path}/bad.py:keep",))
    with pytest.raises(BadInput, match=r"bad\.py cannot be imported: ModuleNotFoundError: .*nothing_of_this_name"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "o", cleaning=cleaning)


def test_a_changed_filter_is_another_corpus(corpus: Path, tokenizer_file: Path, tmp_path: Path, filters: str) -> None:
    cleaning = Cleaning(filters=(f"{filters}:short",))
    prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", cleaning=cleaning)
    assert prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", cleaning=cleaning).reused
    Path(filters).write_text(FILTERS.replace("250", "240"))
    with pytest.raises(BadInput, match="work of a different command .*filters: "):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", cleaning=cleaning)
    with pytest.raises(BadInput, match="filters: .* before, None now"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "out")


def test_filters_that_remove_all_are_named(corpus: Path, tokenizer_file: Path, tmp_path: Path, filters: str) -> None:
    Path(filters).write_text("def none(text): return False")
    with pytest.raises(BadInput, match=r"no usable document for train\nremoved: filter .*:none: 120 documents"):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "o", cleaning=Cleaning(filters=(f"{filters}:none",)))
    assert not (tmp_path / "o").exists()


def evaluation(folder: Path, form: str) -> Path:
    """A file with 13 words of story 5 and of story 70, in other case and with other marks; of story 9 there are only 12."""
    words = [story(number).split() for number in (5, 70, 9)]
    texts = [
        "Question: " + ", ".join(words[0][3:16]).upper() + "?",
        " - ".join(words[1][8:21]),
        " ".join(words[2][3:15]),
    ]
    path = folder / f"evaluation.{form}"
    if form == "txt":
        path.write_text("\n===\n".join(texts))
    elif form == "parquet":
        table = pyarrow.table({"question": [texts[0], "x"], "choices": [[texts[1], "a"], ["b", texts[2]]]})
        pyarrow.parquet.write_table(table, path)
    else:
        records = [{"question": texts[0], "choices": {"text": [texts[1], "a"], "label": 3}}, {"question": texts[2]}]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet", "txt"])
def test_documents_with_text_of_an_evaluation_are_removed(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, form: str
) -> None:
    path = evaluation(tmp_path, form)
    cleaning = Cleaning(evaluations=(str(path),))
    prepared = prepare([str(corpus)], str(tokenizer_file), tmp_path / "out", cleaning=cleaning)
    plain = [story(number).lower().replace(".", "").split() for number in range(120)]
    runs = [{tuple(words[i : i + 13]) for i in range(len(words) - 12)} for words in plain]
    asked = {tuple(plain[5][3:16]), tuple(plain[70][8:21])}
    expected = [number for number in range(120) if runs[number] & asked]
    assert {5, 70} <= set(expected) and 9 not in expected
    left = ids(tmp_path / "out")
    assert [number for number in range(120) if f"s{number}" not in left] == expected
    figures = prepared.removed.reasons["text of an evaluation"]
    first = min(word for word in range(len(plain[expected[0]])) if tuple(plain[expected[0]][word : word + 13]) in asked)
    assert figures["examples"][0]["why"] == f"13 words of {path}, from word {first + 1} on"


def test_evaluations_that_cannot_be_used_are_named(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text('{"question": "too short to compare"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\nno JSON\n')
    for name, message in (
        ("short.jsonl", r"--evaluation .*short\.jsonl: has no text of 13 words or more"),
        ("bad.jsonl", r"bad\.jsonl:2: not JSON"),
        ("shirt.jsonl", r"shirt\.jsonl: no such file or directory \(nearest: .*short\.jsonl\)"),
    ):
        with pytest.raises(BadInput, match=message):
            cleaning = Cleaning(evaluations=(str(tmp_path / name),))
            prepare([str(corpus)], str(tokenizer_file), tmp_path / "o", cleaning=cleaning)
        assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "nearly",
            r"--deduplicate nearly: expected exact, near, or near:SIMILARITY from 0\.7 to 1.* \(nearest: near\)",
        ),
        ("near:0.5", r"near:0\.5: expected exact, near"),
        ("near:x", "near:x: expected"),
        ("near:nan", "near:nan: expected"),
    ],
)
def test_other_kinds_of_duplicates_are_refused(
    corpus: Path, tokenizer_file: Path, tmp_path: Path, option: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        prepare([str(corpus)], str(tokenizer_file), tmp_path / "o", cleaning=Cleaning(duplicates=option))


def test_cleaning_is_for_text(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--filter, --evaluation and --deduplicate: are for text"):
        prepare(
            [str(corpus)],
            str(tokenizer_file.parent),
            tmp_path / "o",
            chat=ChatRequest(),
            cleaning=Cleaning(duplicates="exact"),
        )


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty unlike texts; then eight of them again, and eight with one word in sixty changed."""
    folder = tmp_path_factory.mktemp("repeated")
    texts = [" ".join(f"word{(number * 997 + i * i) % 4001}" for i in range(120)) for number in range(30)]
    texts += texts[3:11] + [text.replace(text.split()[60], "changed", 1) for text in texts[20:28]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"id": f"t{i}", "text": t}) + "\n" for i, t in enumerate(texts)))
    return folder


OPTIONS: dict[str, Any] = {"workers": 1, "shard_tokens": 500}


@pytest.mark.parametrize(("option", "left"), [("exact", [*range(30), *range(38, 46)]), ("near", [*range(30)])])
def test_duplicates_are_removed_and_shown(
    repeated: Path, tokenizer_file: Path, tmp_path: Path, option: str, left: list[int]
) -> None:
    prepared = prepare(
        [str(repeated)], str(tokenizer_file), tmp_path / "out", cleaning=Cleaning(duplicates=option), **OPTIONS
    )
    assert ids(tmp_path / "out") == [f"t{i}" for i in left]
    report = json.loads((tmp_path / "out" / "removed.json").read_bytes())
    source = f"{repeated}/a.jsonl"
    first = report["exact duplicate"]["examples"][0]
    assert (first["document"], first["why"]) == (f"{source} [t30]", f"of {source} [t3]")
    assert first["text"].startswith("word")
    if option == "near":
        why = report["near-duplicate"]["examples"][7]["why"]
        assert why.startswith(f"of {source} [t27], similarity 0.9")
    assert {reason: figures["documents"] for reason, figures in prepared.removed.reasons.items()} == dict.fromkeys(
        report, 8
    )


@pytest.mark.parametrize("kill_at", ["document 5", "shard 2", "manifest"])
def test_a_killed_removal_of_duplicates_continues_to_the_same_bytes(
    repeated: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: str
) -> None:
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", 5000)

    def made(name: str) -> PreparedCorpus:
        cleaning = Cleaning(duplicates="near")
        return prepare(
            [str(repeated)], str(tokenizer_file), tmp_path / name, cleaning=cleaning, held_out=0.2, **OPTIONS
        )

    whole = made("whole")
    with monkeypatch.context() as patch:
        break_at(patch, kill_at)
        with pytest.raises(Killed):
            made("killed")
    assert made("killed").removed == whole.removed
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
