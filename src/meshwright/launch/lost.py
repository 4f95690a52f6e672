"""Ranks that could not say themselves how they ended: killed, or silent while the others waited for them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE

_STEP = re.compile(rb"'kind': 'step', 'step': (\d+)")
"""A finished step's record in a rank's log (`train.reporting`)."""
_TAIL = 1 << 20
_WAITED = (EXIT_COMMUNICATION, -signal.SIGABRT)
"""How a rank ends that waited for another in vain: by itself, or by NCCL's watchdog."""


class RankLogs:
    """The logs of a start's ranks, from where they stand now."""

    def __init__(self, logs: Path, ranks: int) -> None:
        self._logs = logs
        self._files = [logs / f"rank-{rank:05d}.log" for rank in range(ranks)]
        self._starts = [file.stat().st_size if file.exists() else 0 for file in self._files]

    def of_lost(self, codes: Sequence[int | None]) -> Iterator[str]:
        """A line about each rank that was killed (its code is a signal's negative number), and about each that still ran (None) when all
        that had ended gave up waiting."""
        ended = [code for code in codes if code not in (None, EXIT_DONE)]
        gave_up = bool(ended) and all(code in _WAITED for code in ended)
        for rank, code in enumerate(codes):
            if code is None and gave_up:
                how = "did not answer while others waited for it"
            elif code is not None and code < 0:
                often = ", often because the host ran out of memory" if code == -signal.SIGKILL else ""
                how = f"was killed by signal {-code} ({signal.strsignal(-code)}){often}"
            else:
                continue
            yield f"rank {rank} {how}; {self._progress(rank)}; what the ranks said is in {self._logs}"

    def _progress(self, rank: int) -> str:
        if not self._files[rank].exists():
            return "it had said nothing"
        with self._files[rank].open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._starts[rank], size - _TAIL))
            steps = _STEP.findall(file.read())
        return f"the last step it finished is {int(steps[-1])}" if steps else "it had not finished a step"
