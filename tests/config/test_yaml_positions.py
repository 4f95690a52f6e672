"""The reader follows the YAML 1.2 core schema, gives exact positions, and rejects hostile files with an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.yaml_positions import MAX_DEPTH, Position, dump_yaml, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5E+3", -1500.0),
        ("1_000.5", 1000.5),
        ("010", 10),
        ("1_000", 1000),
        ("-7", -7),
        ("+7", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1__0", "1__0"),
        ("_1", "_1"),
        ("e5", "e5"),
        ("0b1", "0b1"),
        ("=", "="),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("none", "none"),
        ('"3e-4"', "3e-4"),
        ("!!str 5", "5"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ("9" * 5000, "9" * 5000),
        (".inf", float("inf")),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    document = parse_yaml(f"key: {text}", "f")
    assert not document.mistakes
    assert document.data == {"key": value}
    assert type(document.data["key"]) is type(value)


def test_every_key_and_value_has_its_position() -> None:
    text = "a: 1\nbig:\n  list: [x, {deep: 2}]\n  'quoted key':   text\n"
    document = parse_yaml(text, "f")
    lines = text.splitlines()

    def token(position: Position) -> str:
        assert position.file == "f"
        assert position.line is not None
        assert position.column is not None
        return lines[position.line - 1][position.column - 1 :]

    assert token(document.keys["a",]).startswith("a:")
    assert token(document.values["a",]).startswith("1")
    assert token(document.keys["big", "quoted key"]).startswith("'quoted key'")
    assert token(document.values["big", "quoted key"]).startswith("text")
    assert token(document.values["big", "list", 0]).startswith("x")
    assert token(document.keys["big", "list", 1, "deep"]).startswith("deep")
    assert token(document.values["big", "list", 1, "deep"]).startswith("2")


def test_an_absent_key_has_the_position_of_its_section() -> None:
    document = parse_yaml("a:\n  b: {c: 1}\n", "f")
    assert document.key_position(("a", "b", "missing")) == Position("f", 2, 3)
    assert document.value_position(("a", "missing")) == Position("f", 1, 1)
    assert document.key_position(("missing",)) == Position("f", 1, 1)


def test_a_duplicate_key_names_both_lines() -> None:
    document = parse_yaml("a: 1\nb: 2\na: 3\n", "f")
    (mistake,) = document.mistakes
    assert (mistake.line, mistake.column, mistake.key) == (3, 1, "a")
    assert "line 1" in mistake.expected
    assert document.data == {"a": 1, "b": 2}


def test_anchors_expand() -> None:
    assert parse_yaml("a: &x {q: 1}\nb: *x\n", "f").data == {"a": {"q": 1}, "b": {"q": 1}}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: [1\nb: 2\n", 2, 2, "flow"),
        ("a: b: c", 1, 5, "mapping values"),
        ("\ta: 1", 1, 1, "indent with spaces"),
        ("x: 1\na: *nope", 2, 4, "undefined alias"),
        ("a: 1\n---\nb: 2", 2, 1, "document"),
        ("a: 1\nb: \x07", 2, 4, "U+0007"),
        ("a: !!python/object:os.system {}", 1, 4, "python/object:os.system"),
        ("a: !x 3", 1, 4, "!x"),
        ("a: !!int x", 1, 4, "!!int"),
        ("a: &x [*x]", 1, 4, "anchor inside itself"),
        ("? [a]\n: 1", 1, 3, "as key"),
        ("a: " + "[" * 5000, 1, 4 + MAX_DEPTH - 1, "levels of nesting"),
    ],
)
def test_invalid_yaml_is_one_mistake_with_a_position(text: str, line: int, column: int, message: str) -> None:
    (mistake,) = parse_yaml(text, "f").mistakes
    assert (mistake.file, mistake.line, mistake.column) == ("f", line, column)
    assert message in mistake.got


def test_a_billion_laughs_stop_early() -> None:
    aliases = [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]" for i in range(9)]
    document = parse_yaml("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "\n".join(aliases), "f")
    assert len(document.mistakes) == 1
    assert document.partial
    assert len(document.values) < 50_000


def test_files_that_are_not_utf8_yaml_mappings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"a: 1\nb: \xff\n")
    (mistake,) = read_yaml(file).mistakes
    assert (mistake.line, mistake.column, mistake.got) == (2, 4, "the byte 0xff")
    file.write_text("- 1\n- 2\n")
    (mistake,) = read_yaml(file, "shown").mistakes
    assert (mistake.file, mistake.line, mistake.got) == ("shown", 1, "a list")
    (mistake,) = read_yaml(tmp_path / "rum.yaml").mistakes
    assert mistake.nearest == "run.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(file).data == {"a": 1}


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(["3e-4", "010", "no", "~", "none", "1_000", "- a", "a: b", "#x", "<<", "0x1", "true", ".5", "|"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), PLAIN, max_size=4))
def test_dumped_data_reads_back_equal(data: dict[str, Any]) -> None:
    document = parse_yaml(dump_yaml(data), "f")
    assert not document.mistakes
    assert document.data == data


@given(st.text(alphabet="ab: {}[]&*!\n-,'\"#|>?%@\t0", max_size=60))
def test_no_text_raises(text: str) -> None:
    parse_yaml(text, "f")
