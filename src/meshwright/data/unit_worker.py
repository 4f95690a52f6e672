"""A process that does units of a preparation, one after another.

    python -m meshwright.data.unit_worker FOLDER

Reads the number of a unit from each line of standard input, and answers with a line of JSON on standard output: `{"unit": number}`, or
what it raised, as `jobs.failure` describes it.
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
"""PR_SET_PDEATHSIG of Linux's prctl."""


def main(folder: Path) -> None:
    """Serve units until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends its workers
    with suppress(OSError, AttributeError):  # elsewhere than on Linux the end of standard input ends a worker
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a filter prints goes to standard error
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
