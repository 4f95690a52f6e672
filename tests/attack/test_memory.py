"""Commands that read files may take little address space: they end with their answer, or with code 3 and one message."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.spec.failures import COMMAND_MEMORY_HINT
from tests.attack.commands import LONGEST_SECONDS, MARKS
from tests.server.helpers import write_folder
from tests.training.tiny import make_tiny

pytestmark = MARKS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, a model `hf`, and texts, one of 24 MB."""
    folder = tmp_path_factory.mktemp("files")
    make_tiny(folder)
    write_folder(folder / "hf")
    (folder / "a.jsonl").write_text('{"text": "' + "hello world " * (2 << 20) + '"}\n')
    return folder


@pytest.mark.parametrize("megabytes", [1000, 300])
@pytest.mark.parametrize(
    "words",
    [
        "check tiny.yaml",
        "plan tiny.yaml",
        "data prepare a.jsonl --tokenizer hf --out corpus",
        "generate hf -p a",
        "checkpoint from-hf hf converted",
        "checkpoint list hf",
        "eval hf",
        "report hf",
    ],
)
def test_little_address_space_is_no_internal_error(files: Path, tmp_path: Path, words: str, megabytes: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 10**6,) * 2)

    arguments = [str(tmp_path / word) if word in ("corpus", "converted") else word for word in words.split()]
    command = [sys.executable, "-m", "meshwright", *arguments]
    answer = subprocess.run(
        command,
        cwd=files,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        preexec_fn=limit,
        env=os.environ,
        check=False,
    )
    if words.startswith("data prepare") and megabytes < 500 and answer.returncode == -signal.SIGABRT:
        assert "memory allocation of" in answer.stderr  # the tokenizer's library cannot do otherwise
        return
    assert answer.returncode in (0, 2, 3, 4), answer.stderr[-2000:]
    assert "internal error" not in answer.stderr and "Traceback" not in answer.stderr
    if answer.returncode == 3:
        assert answer.stderr.count("meshwright: ") == 1 and COMMAND_MEMORY_HINT in answer.stderr
