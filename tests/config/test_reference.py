"""The generated run file reference leaves nothing out, and its example loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tools import run_file

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.config.schema import docs_of, sections_of
from meshwright.spec.fields import hints_of
from meshwright.spec.run import RunSpec

PAGE = run_file.page()


def tables() -> dict[str, list[str]]:
    """The rows of the table under each heading."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.M)
    return {
        head: re.findall(r"^\| `(.*) \|$", body, flags=re.M)
        for head, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def sections(cls: type, key: str) -> list[tuple[str, type]]:
    pairs = [(key, cls)]
    for name, annotation in hints_of(cls).items():
        below, several = f"{key}.{name}".strip("."), sections_of(annotation)
        for section in several:
            pairs += sections(section, f"{below}: {section().name}" if len(several) > 1 else below)
    return pairs


def test_every_field_stands_in_its_table_with_its_meaning() -> None:
    lines_by_heading = {head.replace("`", "").replace("[]", ""): lines for head, lines in tables().items()}
    for key, cls in sections(RunSpec, ""):
        lines = lines_by_heading[key or "Top level"]
        for field in dataclasses.fields(cls):
            (line,) = [line for line in lines if line.startswith(f"{field.name}`")]
            assert docs_of(cls)[field.name].replace("|", "\\|") in line
            assert len(re.split(r"(?<!\\)\|", line)) == 4


def test_presets_have_their_published_sizes() -> None:
    lines = {line.split("`")[0]: line for line in tables()["Model presets"]}
    assert lines.keys() == MODEL_PRESETS.keys()
    sizes = {
        "gpt2-124m": 124.4e6,
        "llama3-8b": 8.03e9,
        "llama3-70b": 70.55e9,
        "qwen3-8b": 8.191e9,
        "gpt-1t": 1.008e12,
    }
    for name, size in sizes.items():
        parameters = lines[name].split(" | ")[2]
        assert int(parameters.replace(",", "")) == pytest.approx(size, rel=5e-4)


def test_the_example_is_a_run(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)
    file = tmp_path / "run.yaml"
    file.write_text(example)
    run = load_run(file, detect=lambda: {"gpu": "H100", "gpus_per_node": 8})
    assert (run.model.layers, run.train.steps, run.cluster.ranks) == (32, 10_000, 8)
