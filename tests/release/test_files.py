"""Files of a release agree with each other: version, extras, suites of the forge, container file, templates."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.pages import ROOT, text_of

import meshwright

PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(file: Path) -> list[tuple[dict[str, Any], str]]:
    """The commands of a workflow, each with its job."""
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    return [(job, step["run"]) for job in jobs for step in job["steps"] if "run" in step]


def test_the_changelog_begins_with_the_version() -> None:
    versions = re.findall(r"^## (\S+)", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == meshwright.__version__


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_suites_of_the_forge_are_targets_of_make(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = set()
    for job, command in steps(file):
        named |= set(re.findall(r"make ([a-z-]+)", command))
        matrix = job.get("strategy", {}).get("matrix", {})
        named |= {*matrix.get("target", ()), *(row["target"] for row in matrix.get("include", ()))}
    assert named and named <= targets


def test_the_oldest_python_is_tested() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"][
        "include"
    ]
    versions = {row["python"] for row in matrix}
    assert PROJECT["requires-python"] == f">={min(versions)}"
    classified = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert {min(versions), max(versions)} <= classified and max(versions) == max(classified)


def test_the_container_file_copies_what_exists() -> None:
    lines = text_of("Containerfile").splitlines()
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line
    install = next(line for line in lines if "pip install" in line)
    extras = re.search(r"\.\[([\w,-]+)\]", install)
    assert extras and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert PROJECT["readme"] in text_of(".dockerignore") and "!src" in text_of(".dockerignore")


def test_every_extra_is_explained() -> None:
    explained = set(re.findall(r"^\| `([\w-]+)` \|", text_of("docs/getting-started.md"), re.MULTILINE))
    assert {extra for extra in PROJECT["optional-dependencies"] if not extra.startswith("test")} <= explained


def test_templates_are_forms() -> None:
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[bf]*.yml"):
        form = yaml.safe_load(file.read_text(encoding="utf-8"))
        ids = [part["id"] for part in form["body"]]
        assert form["name"] and form["description"] and len(set(ids)) == len(ids)


def test_failed_tests_run_again(tmp_path: Path) -> None:
    """`pytest --lf` needs pytest's cache, with the options of this project."""
    (tmp_path / "pyproject.toml").write_text(text_of("pyproject.toml"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-n", "0"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    again = subprocess.run([*command, "--lf"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in first.stdout and "1 failed" in again.stdout and "passed" not in again.stdout
