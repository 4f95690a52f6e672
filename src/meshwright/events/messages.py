"""Messages between the launcher of a host and the ranks that it started: one JSON object per line.

The launcher writes to a rank's standard input; a rank writes to a pipe whose file descriptor is in the environment
variable `CHANNEL`. Ranks started by another launcher (torchrun, Slurm) have no channel; sending does nothing there.
Torch-free.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CHANNEL = "MESHWRIGHT_CHANNEL_FD"
LINE_BYTES = select.PIPE_BUF
"""Longest message: a pipe writes this many bytes in one piece or not at all, so lines never mix."""
SEND_SECONDS = 2.0
"""Seconds that the message about a rank's end waits for space in the pipe, whose reader may be stopped."""


@dataclass(frozen=True)
class BeginMessage:
    """Launcher to rank: train the run whose assignment is in the file `assignment`.

    `environment` has variables that the process sets before it reads its rank (`spec.rank_environment`). A process that
    waited as a warm spare learns its rank, the number of ranks and the store's address from them.
    """

    assignment: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SelfTest:
    """Launcher to a process that waits: run the self-test within `seconds`, then wait on.

    `environment` has the variables of a rank, as those of `BeginMessage`: the ranks of the test exchange data.
    """

    environment: Mapping[str, str]
    seconds: float


@dataclass(frozen=True)
class SelfTestResult:
    """Waiting process to launcher: the errors that the self-test found; empty without any.

    `failure` is about the device, `exchange` about exchanges with other ranks. Not `exchanged`: they ended with an error.
    """

    failure: str
    exchange: str
    exchanged: bool = True


@dataclass(frozen=True)
class EndMessage:
    """Launcher to rank: another rank failed for the reason `cause`; close files and exit."""

    cause: str


@dataclass(frozen=True)
class CollectivesRequest:
    """Launcher to rank: append the collectives that torch has recorded to the memory file `path`, as one line of JSON."""

    path: str


@dataclass(frozen=True)
class StepMessage:
    """Rank to launcher: optimizer step `step` is complete. The first rank adds `figures`, a part of the step's metrics record."""

    step: int
    figures: Mapping[str, Any] = field(default_factory=dict)


Phase = Literal["start", "compile", "train", "validate", "save", "end"]
"""Phase of a rank: `start` until its first step, `compile` in its first step, `end` after its last."""


@dataclass(frozen=True)
class ProgressMessage:
    """Rank to launcher: the rank works on step `step` in `phase`; `action` is the index in its schedule, -1 if unknown.

    A rank sends it at each change of phase, and at most once a second when `action` has changed.
    """

    phase: Phase
    step: int
    action: int = -1


@dataclass(frozen=True)
class Validation:
    """First rank to launcher: `loss` on held-out text after step `step`, in nats per token."""

    step: int
    loss: float


@dataclass(frozen=True)
class Checkpoint:
    """First rank to launcher: the checkpoint of step `step` is complete and durable in the folder `path`."""

    step: int
    path: str


@dataclass(frozen=True)
class SkippedSamplesMessage:
    """First rank to launcher: from now on the run leaves out the global samples from `first` up to, but not including, `end`."""

    first: int
    end: int


@dataclass(frozen=True)
class Corruption:
    """First rank to launcher: state of `rank` was silently corrupt after `step`; `cause` names the tensors."""

    rank: int
    step: int
    cause: str


@dataclass(frozen=True)
class FailureMessage:
    """Rank to launcher: the rank ends with `exit_code` (spec.errors) because of `message`; `log` has the traceback."""

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


def encode(message: Message) -> bytes:
    """The line of a message. If it exceeds `LINE_BYTES`, the longest text is cut."""
    fields = asdict(message)
    line = _line(type(message), fields)
    while len(line) > LINE_BYTES:
        name = max(
            (name for name, value in fields.items() if isinstance(value, str)), key=lambda name: len(fields[name])
        )
        fields[name] = fields[name][: len(fields[name]) * LINE_BYTES // len(line) - 8] + "…"
        line = _line(type(message), fields)
    return line


def decode(line: bytes) -> Message:
    """The message of a line. Raises ValueError if the line is not a message."""
    data = json.loads(line)
    message_type = _MESSAGE_TYPES.get(data.pop("kind", None)) if isinstance(data, dict) else None
    if message_type is None:
        raise ValueError(f"not a message: {line[:100]!r}")
    try:
        return message_type(**data)
    except TypeError as error:
        raise ValueError(f"not a message: {error}") from error


def _line(message_type: type[Message], fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": message_type.__name__.lower(), **fields}).encode() + b"\n"


class MessageChannel:
    """A rank's end of the pipe to its launcher."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> MessageChannel:
        """The channel to the launcher of this process; without a launcher it drops every message."""
        return cls(int(env[CHANNEL]) if CHANNEL in env else None)

    @property
    def descriptors(self) -> list[int]:
        """The pipe's descriptor; empty without a launcher."""
        return [] if self._descriptor is None else [self._descriptor]

    @property
    def connected(self) -> bool:
        return self._descriptor is not None

    def send(self, message: Message) -> None:
        """Write a message if the pipe has space. Only a Failure waits for space, up to `SEND_SECONDS`."""
        if self._descriptor is None:
            return
        if isinstance(message, FailureMessage):
            select.select([], [self._descriptor], [], SEND_SECONDS)
        try:
            os.write(self._descriptor, encode(message))
        except BlockingIOError:  # the launcher is stopped; a rank must not wait for it
            return
        except BrokenPipeError:  # the launcher is gone
            self._descriptor = None


class RankMessageReader:
    """The launcher's end of one rank's pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._incomplete = b""
        self.open = True
        """Whether the rank may still write."""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> Iterator[Message]:
        """The messages that have arrived since the last call."""
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
