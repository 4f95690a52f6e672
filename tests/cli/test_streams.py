"""Commands in processes without standard streams, and in locales without Unicode."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ENTRY = "from meshwright.cli.main import main; main()"
PRINT = """
import os, socket, subprocess, sys
from meshwright.cli.streams import complete_streams
complete_streams()
print("1 \\u00d7 2 \\udcff")
print("1 \\u2265 2", file=sys.stderr)
first = socket.socket().fileno()
child = "import os, sys; print('4 \\\\u2248 4'); sys.exit(max(os.fstat(n).st_mode == 0 for n in range(3)))"
code = subprocess.run([sys.executable, "-c", child]).returncode
sys.stdout.flush()
os._exit(10 * (first > 2 and sys.stdin.read() == "") + code)
"""


def run(code: str, *arguments: str, closed: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python code in a process that a shell starts with the file numbers `closed` closed."""
    command = [
        "bash",
        "-c",
        f'exec "$@" {" ".join(f"{number}>&-" for number in closed)}',
        "",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.run(
        [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, env={**os.environ, **env}, check=False
    )


@pytest.mark.parametrize("closed", ["", "0", "1", "2", "02", "012"])
def test_files_do_not_take_the_numbers_of_closed_streams(closed: str) -> None:
    answer = run(PRINT, closed=closed, PYTHONIOENCODING="utf-8")
    assert answer.returncode == 10
    assert answer.stdout.decode() == ("" if "1" in closed else "1 × 2 ?\n4 ≈ 4\n")
    assert answer.stderr.decode() == ("" if "2" in closed else "1 ≥ 2\n")


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}]
)
def test_characters_that_the_locale_lacks_are_replaced(env: dict[str, str]) -> None:
    answer = run(PRINT, **env)
    assert answer.returncode == 10
    assert answer.stdout == b"1 ? 2 ?\n4 ? 4\n"
    assert answer.stderr.startswith(b"1 ") and answer.stderr.isascii()


def test_messages_do_not_go_to_standard_output_when_standard_error_is_closed() -> None:
    answer = run(ENTRY, "plan", "model=nosuch", "--json", closed="2")
    assert answer.returncode == 2 and not json.loads(answer.stdout)["ok"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("plan model=llama3-1b cluster.gpu=H100", 0), ("plan model=nosuch", 2), ("schema", 0)],
)
def test_output_that_nobody_reads_changes_no_exit_code(arguments: str, code: int) -> None:
    command = '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}'
    answer = subprocess.run(["bash", "-c", command, "", sys.executable, "-c", ENTRY, *arguments.split()], check=False)
    assert answer.returncode == code
