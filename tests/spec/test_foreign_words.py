"""Words of other programs lead to keys and options that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.schema import all_keys
from meshwright.spec.foreign_words import OTHER_OPTIONS, SERVING, TRAINING, no_folder_hint, normalized
from meshwright.spec.run import RunSpec
from meshwright.spec.serve import ServeSpec


@pytest.mark.parametrize(("table", "settings"), [(TRAINING, RunSpec), (SERVING, ServeSpec)])
def test_every_word_is_foreign_and_leads_to_a_key(
    table: dict[str, tuple[str | None, str | None]], settings: type
) -> None:
    paths = list(all_keys(settings))
    keys, last = {".".join(map(str, path)) for path in paths}, {str(path[-1]) for path in paths}
    for word, (key, advice) in table.items():
        assert word == normalized(word) and word not in keys, word
        assert key is None or key in keys, f"{word}: no key {key}"
        assert key or advice, word
        assert word not in last or word == "path", f"{word} is a key of its own, which goes first"


def test_other_options_are_ones_of_a_command() -> None:
    import typer

    from meshwright.cli.main import app_for

    commands = typer.main.get_command(app_for(())).commands  # type: ignore[attr-defined]
    options = {name.lstrip("-") for command in commands.values() for each in command.params for name in each.opts}
    assert set(OTHER_OPTIONS.values()) <= options


def test_a_name_of_a_hub_is_none_where_its_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hf download org/name --local-dir" in no_folder_hint("org/name")
    assert "--repo-type dataset" in no_folder_hint("org/name", dataset=True)
    assert "gguf_file" in no_folder_hint("some/model.GGUF")
    (tmp_path / "org").mkdir()
    for text in ("org/name", "name", "a/b/c", "./org/name", "../name", "/org/name"):
        assert no_folder_hint(text) == ""
