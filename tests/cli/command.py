"""Runs the command line in this process and returns its exit code and output."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which must be one JSON object and nothing else."""
        answer = json.loads(self.out)
        assert isinstance(answer, dict)
        return answer


def meshwright(*arguments: object, env: dict[str, str] | None = None) -> Answer:
    """`meshwright WORDS…` through its real entry; `env` is laid over the environment."""
    from meshwright.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["meshwright", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, env or {}),
        _tidy(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Answer(code, out.getvalue(), err.getvalue())


def train_here(*arguments: object) -> Answer:
    """`meshwright train WORDS…` as a launcher's only rank: the whole trainer, in this process."""
    with mock.patch("meshwright.training.lifecycle.end_process", sys.exit):
        return meshwright("train", *arguments, env={"RANK": "0", "WORLD_SIZE": "1"})


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Give back what a command takes over because its process is its own: signals, the log, the process group."""
    import torch.distributed as dist

    log = logging.getLogger("meshwright")
    previous = log.handlers[:], log.level, log.propagate
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if (pipe := signal.set_wakeup_fd(-1)) >= 0:
            os.close(pipe)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for handler in set(log.handlers) - set(previous[0]):
            handler.close()
        log.handlers[:], log.level, log.propagate = previous
        if dist.is_initialized():
            dist.destroy_process_group()
