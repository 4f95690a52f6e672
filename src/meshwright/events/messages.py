"""Messages between the launcher of a host and the ranks that it has started. A message is a line with a JSON object.

The launcher writes to a rank's standard input. A rank writes to a pipe, whose file descriptor is in the environment
variable `CHANNEL`. Ranks that another launcher has started (torchrun, Slurm) have no pipe; they drop their messages.
This module imports no torch.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CHANNEL = "MESHWRIGHT_CHANNEL_FD"
"""Environment variable with the file descriptor of the pipe to the launcher."""
LINE_BYTES = select.PIPE_BUF
"""Most bytes of a rank's message. A pipe that does not wait takes so many bytes completely or not at all."""
SEND_SECONDS = 2.0
"""Seconds for which the message about a rank's failure waits for space in the pipe. The launcher may be stopped."""


@dataclass(frozen=True)
class BeginMessage:
    """Launcher to rank: train the run whose assignment is in the file `assignment`.

    `environment` has variables that the process sets before it reads its rank (`spec.rank_environment`). They tell a
    process that waited as a warm spare its rank, the number of ranks, and the address of the store.
    """

    assignment: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SelfTest:
    """Launcher to waiting process: run the self-test within `seconds`, then continue to wait.

    `environment` has the variables of a rank, as in `BeginMessage`, because the processes of the test exchange data.
    """

    environment: Mapping[str, str]
    seconds: float


@dataclass(frozen=True)
class SelfTestResult:
    """Waiting process to launcher: the errors that the self-test has found, as empty texts if there were none.

    `failure` is an error of the device. `exchange` is an error in communication with other ranks. `exchanged` is false
    if the communication did not complete.
    """

    failure: str
    exchange: str
    exchanged: bool = True


@dataclass(frozen=True)
class EndMessage:
    """Launcher to rank: another rank has failed for the reason `cause`; close files and end."""

    cause: str


@dataclass(frozen=True)
class CollectivesRequest:
    """Launcher to rank: append the collectives that torch has recorded to the file in memory `path`, as one line of JSON."""

    path: str


@dataclass(frozen=True)
class StepMessage:
    """Rank to launcher: optimizer step `step` is complete.

    Rank 0 adds `figures`, a part of the step's line in metrics.jsonl.
    """

    step: int
    figures: Mapping[str, Any] = field(default_factory=dict)


Phase = Literal["start", "compile", "train", "validate", "save", "end"]
"""Phase of a rank: `start` is before its first step, `compile` is its first step, and `end` is after its last step."""


@dataclass(frozen=True)
class ProgressMessage:
    """Rank to launcher: the rank works on step `step` in `phase`.

    `action` is the index of its last action in its schedule; -1 if unknown. A rank sends this message when its phase
    changes and, if `action` has changed, at most once a second.
    """

    phase: Phase
    step: int
    action: int = -1


@dataclass(frozen=True)
class Validation:
    """Rank 0 to launcher: `loss` on held-out text after step `step`, in nats per token."""

    step: int
    loss: float


@dataclass(frozen=True)
class Checkpoint:
    """Rank 0 to launcher: the checkpoint of step `step` is complete and durable in the folder `path`."""

    step: int
    path: str


@dataclass(frozen=True)
class SkippedSamplesMessage:
    """Rank 0 to launcher: from now on, the run skips the global samples from `first` up to, but not including, `end`."""

    first: int
    end: int


@dataclass(frozen=True)
class Corruption:
    """Rank 0 to launcher: the state of `rank` was silently corrupt after `step`. `cause` names the tensors."""

    rank: int
    step: int
    cause: str


@dataclass(frozen=True)
class FailureMessage:
    """Rank to launcher: the rank ends with `exit_code` (`spec.errors`) because of `message`.

    The file `log` has the traceback.
    """

    exit_code: int
    message: str
    log: str = ""


Message = (
    BeginMessage
    | SelfTest
    | SelfTestResult
    | EndMessage
    | CollectivesRequest
    | StepMessage
    | ProgressMessage
    | Validation
    | Checkpoint
    | SkippedSamplesMessage
    | Corruption
    | FailureMessage
)
_MESSAGE_TYPES: dict[str, type[Message]] = {
    message_type.__name__.lower(): message_type
    for message_type in (
        BeginMessage,
        SelfTest,
        SelfTestResult,
        EndMessage,
        CollectivesRequest,
        StepMessage,
        ProgressMessage,
        Validation,
        Checkpoint,
        SkippedSamplesMessage,
        Corruption,
        FailureMessage,
    )
}
"""Types of messages by the value of `kind` in their line."""


def encode(message: Message) -> bytes:
    """Return the line of a message."""
    return json.dumps(_fields(message)).encode() + b"\n"


def _fields(message: Message) -> dict[str, Any]:
    return {"kind": type(message).__name__.lower(), **asdict(message)}


def pipe_line(fields: Mapping[str, Any]) -> bytes:
    """Return `fields` as a line with a JSON object. If it is longer than `LINE_BYTES`, its longest texts are shortened.

    A line whose other values are too long stays too long.
    """
    fields = dict(fields)
    while len(line := json.dumps(fields).encode() + b"\n") > LINE_BYTES:
        lengths = {name: len(value) for name, value in fields.items() if isinstance(value, str)}
        name = max(lengths, key=lengths.__getitem__, default="")
        if lengths.get(name, 0) <= 1:
            return line
        # Shorten the longest text in proportion to the excess, and by 8 characters more, so that few rounds are needed.
        fields[name] = fields[name][: max(0, lengths[name] * LINE_BYTES // len(line) - 8)] + "…"
    return line


def decode(line: bytes) -> Message:
    """Return the message of a line. Raises ValueError if the line is not a message."""
    data = json.loads(line)
    message_type = _MESSAGE_TYPES.get(data.pop("kind", None)) if isinstance(data, dict) else None
    if message_type is None:
        raise ValueError(f"not a message: {line[:100]!r}")
    try:
        return message_type(**data)
    except TypeError as error:
        raise ValueError(f"not a message: {error}") from error


class MessageChannel:
    """A rank's side of the pipe to its launcher."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> MessageChannel:
        """Return the channel to the launcher of this process. Without a launcher it drops every message."""
        return cls(int(env[CHANNEL]) if CHANNEL in env else None)

    @property
    def descriptors(self) -> list[int]:
        """The pipe's file descriptor in a list; empty without a launcher."""
        return [] if self._descriptor is None else [self._descriptor]

    @property
    def connected(self) -> bool:
        return self._descriptor is not None

    def send(self, message: Message) -> None:
        """Write a message if the pipe has space, else drop it. Only a FailureMessage waits for space, up to `SEND_SECONDS`."""
        if self._descriptor is None:
            return
        if isinstance(message, FailureMessage):
            select.select([], [self._descriptor], [], SEND_SECONDS)
        try:
            os.write(self._descriptor, pipe_line(_fields(message)))
        except BlockingIOError:  # the pipe is full because the launcher is stopped; a rank must not wait for it
            return
        except BrokenPipeError:  # the launcher has ended
            self._descriptor = None


class RankMessageReader:
    """The launcher's side of the pipe from one rank."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._incomplete = b""
        self.open = True
        """Whether the rank may still write: false once its side of the pipe is closed."""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> Iterator[Message]:
        """Yield the messages that have arrived since the last call."""
        while self.open:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            *lines, self._incomplete = (self._incomplete + data).split(b"\n")
            yield from map(decode, lines)

    def close(self) -> None:
        os.close(self._descriptor)
