"""The program of a process that does units of a preparation, one after another.

    python -m meshwright.data.unit_worker FOLDER

Each line of standard input is the number of a unit. The answer is a line of JSON on standard output: `{"unit":
number}`, with the error as `jobs.failure` describes it if the unit failed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from meshwright.data.jobs import FAILURES, EncodeJob, failure

PARENT_DEATH_SIGNAL = 1
"""The option PR_SET_PDEATHSIG of Linux's prctl: send this process a signal when its parent dies."""


def main(folder: Path) -> None:
    """Do the units that standard input names, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The main process ends its workers.
    with suppress(OSError, AttributeError):  # On other systems than Linux, the worker ends when standard input ends.
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What a filter prints goes to standard error.
    job: EncodeJob | None = None
    for line in sys.stdin:
        number = int(line)
        try:
            job = job or EncodeJob.read(folder)
            job.run(number)
        except FAILURES as error:
            _answer(answers, {"unit": number, **failure(error)})
        else:
            _answer(answers, {"unit": number})


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
