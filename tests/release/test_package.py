"""A wheel and a source archive, installed into clean environments, run the quick start outside of the repository."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

SHORT = (
    "train.steps=4",
    "train.global_batch=4",
    "train.seq_len=32",
    "train.warmup_steps=1",
    "data.validation_tokens=128",
)
MINUTES = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * MINUTES * 60)]


def run(*command: str | Path, folder: Path, environment: dict[str, str] | None = None) -> str:
    completed = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
        check=False,
    )
    assert completed.returncode == 0, f"{command}: code {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout + completed.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source archive, built by hatchling in an environment of its own."""
    folder = tmp_path_factory.mktemp("dist")
    venv.create(folder / "build", with_pip=True)
    python = folder / "build" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "hatchling", "--constraint", constraints, folder=folder)
    run(python, "-m", "hatchling", "build", "--directory", folder, folder=ROOT)
    return folder


@pytest.mark.parametrize("form", ["whl", "tar.gz"])
def test_an_archive_runs_the_quick_start(form: str, archives: Path, tmp_path: Path) -> None:
    (archive,) = archives.glob(f"meshwright-*.{form}")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", archive, "--constraint", constraints, folder=tmp_path)
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment = {
        **kept,
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    work = tmp_path / "work"
    work.mkdir()
    shown = run("meshwright", "quickstart", *SHORT, folder=work, environment=environment)
    assert "report runs/quickstart/report.html" in shown
    assert (work / "runs" / "quickstart" / "hf" / "config.json").exists()
    place = run(python, "-c", "import meshwright; print(meshwright.__file__)", folder=work, environment=environment)
    assert str(tmp_path / "venv") in place
