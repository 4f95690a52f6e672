"""A rank without torch: it "trains" a number that follows from the step before, and commits checkpoints of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from meshwright.checkpoint.format.inventory import choose_newest
from meshwright.checkpoint.write.attempt import Provenance, SaveAttempt, new_attempt
from meshwright.events.messages import BeginMessage, Checkpoint, FailureMessage, MessageChannel, StepMessage, decode
from meshwright.spec.errors import BadInput
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.run import Assignment

VALUE = "value.json"


def main() -> None:
    channel, rank = MessageChannel.from_environment(), int(os.environ["RANK"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGHUP])
    message = decode(sys.stdin.buffer.readline())
    if not isinstance(message, BeginMessage):
        return
    try:
        train(Assignment.read(Path(message.assignment)), rank, channel)
    except Exception as error:
        failure = as_meshwright_error(error)
        channel.send(FailureMessage(failure.exit_code, str(failure)))
        sys.exit(failure.exit_code)


def train(assignment: Assignment, rank: int, channel: MessageChannel) -> None:
    """Take the steps after the newest checkpoint; the first rank saves."""
    folder, spec = Path(assignment.folder), assignment.run
    try:
        chosen = choose_newest(folder)
        step, value = json.loads((chosen.path / VALUE).read_text())
    except BadInput:
        step, value = 0, 1
    for step in range(step + 1, spec.train.steps + 1):  # noqa: B020
        value = (value * 6364136223846793005 + step) % (1 << 64)
        channel.send(StepMessage(step, {"loss": value / (1 << 64)} if rank == 0 else {}))
        if rank == 0 and (step % spec.checkpoint.every == 0 or step == spec.train.steps):
            path = save(folder / "checkpoints", step, value, assignment)
            channel.send(Checkpoint(step, str(path)))


def save(checkpoints: Path, step: int, value: int, assignment: Assignment) -> Path:
    attempt = SaveAttempt(checkpoints, step, new_attempt(assignment.lease), assignment.lease)
    attempt.create()
    state = {"step": step, "samples": step}
    plain = {"state.json": json.dumps(state).encode(), VALUE: json.dumps([step, value]).encode()}
    attempt.commit({}, {}, plain, Provenance(1, "none"))
    return attempt.target


if __name__ == "__main__":
    main()
