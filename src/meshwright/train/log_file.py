"""A rank's log, which ends no run when its disk takes no more of it."""

from __future__ import annotations

import logging
import sys


class LogFile(logging.FileHandler):
    """A log file. The first line that its disk refuses is reported on stderr, once and without a traceback; later ones are dropped."""

    refused = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.refused:
            self.refused = True
            sys.stderr.write(
                f"meshwright: {self.baseFilename}: {error.strerror}; this log is incomplete from here on\n"
            )
