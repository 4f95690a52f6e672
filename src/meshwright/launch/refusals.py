"""Makes all checks of a start for `check`, and records every error at the position of its key in the run file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshwright.config.reading import RunReading
from meshwright.launch import prepare
from meshwright.launch.machine import check_devices
from meshwright.spec.errors import BadConfig, BadInput, MeshwrightError, Mistake
from meshwright.spec.failures import as_meshwright_error

T = TypeVar("T")


class Refusals:
    """Makes every check of a start whose keys are valid. Every error is in `refusals`, with the position of its key.

    `reading` is the run file as far as it could be read. `runs` is the folder of all runs. `note` receives lines for
    the user. `known` is an error of this run that has already occurred, so that a failed search for a plan is not
    repeated. A `fresh` run gets another name if its own is in use.
    """

    def __init__(
        self,
        reading: RunReading,
        runs: Path,
        note: Callable[[str], None],
        known: MeshwrightError | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.refusals: list[Mistake] = []
        self.exit_code = 0
        """Highest exit code of the errors; 0 without errors."""
        self._reported: set[str] = set()
        self._reading = reading
        self._known = known
        run = reading.sound_part()
        if run is None:
            return
        if not reading.is_sound("model"):
            run = replace(run, model=replace(run.model, vocab_size=0))
        if reading.is_sound("cluster") and reading.is_sound("plan", "model", "train"):
            run = prepare.on_used_devices(run, note)
        ready = prepare.check_start(run, runs, self._attempt, note, build_stdlib=False, fresh=fresh).run
        if not self.refusals and not reading.mistakes and not prepare.lacks_stdlib(ready):
            for line in prepare.data_lines(ready, prepare.open_run_data(ready)):
                note(line)
        if reading.is_sound("cluster"):
            try:
                check_devices(run.cluster)
            except BadInput as error:
                # Only a note: a run may be checked on another machine than the one that trains it.
                note(f"on this machine `train` would stop: {error}")

    def _attempt(self, key: str, expected: str, work: Callable[[], T], needs: Sequence[str] = ()) -> T | None:
        """Run one check as `launch.prepare.CheckedWork` describes, and record its error."""
        if not self._reading.is_sound(key, *needs):
            return None
        try:
            if self._known is not None and (self._known.key or "").split(".")[0] == key == "plan":
                raise self._known
            return work()
        except (MeshwrightError, OSError) as error:
            failure = as_meshwright_error(error)
            if str(failure) in self._reported:  # an earlier check has met the same error
                return None
            self._reported.add(str(failure))
            if isinstance(failure, BadConfig):  # its mistakes have positions already, for example in a plan file
                self.refusals += failure.mistakes
            else:
                self.refusals.append(self._reading.refusal(failure, key, expected))
            self.exit_code = max(self.exit_code, failure.exit_code)
            return None
