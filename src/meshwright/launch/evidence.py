"""Evidence that an agent collects before it ends its ranks: stacks, collectives, process state and the end of the log.

The agent signals all ranks together and waits until each has answered or no answer comes any more, at most
`HANG_SECONDS` or `CRASH_SECONDS`. Then a thread in each rank writes the collectives that torch's flight recorder has
(`observe.flight_recorder`) into memory of the agent. It is not asked before: the writer of the stacks takes no lock, and reading the
frames of a thread that is starting may end the process.

A rank that a signal or a debugger has stopped cannot write; `py-spy` reads its stacks from outside where it is installed and permitted.
In the agent a thread writes the files, so that the restart does not wait for the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.durable.writes import write_durable
from meshwright.events.stacks import STACK_SIGNAL, read_stacks
from meshwright.events.terminal import write_line
from meshwright.launch.outcome import RankState, death
from meshwright.spec.secrets import without_secrets

HANG_SECONDS = 1.0
"""Longest time to collect evidence after a hang."""
CRASH_SECONDS = 0.3
"""Longest time to collect evidence after a crash."""
SILENT_SECONDS = 0.25
"""Time without more of an answer after which none is awaited: a rank answers within milliseconds, or cannot."""
POLL_SECONDS = 0.005
LARGEST_RECORD = 4 << 20
"""Most bytes of a rank's collectives."""
LOG_BYTES = 4096
"""Bytes kept from the end of a rank's log."""
PROC_FILES = ("status", "wchan", "stack")
"""Files of `/proc/PID`; the kernel's stack is readable by root only."""
PYSPY = ("py-spy", "dump", "--nonblocking", "--pid")


@dataclass
class RankProcess:
    """Process of a rank, its state, and the memory files for its stacks and for its collectives."""

    pid: int
    state: RankState
    stacks: int
    collectives: int | None = None
    request_collectives: Callable[[], object] = lambda: None
    """Asks the process to write its collectives."""

    @property
    def alive(self) -> bool:
        """Whether the process has not ended; it may be stopped."""
        return self.state.code is None


def collect(subjects: Sequence[RankProcess], folder: Path, logs: Path, *, hang: bool) -> threading.Thread:
    """Collect the evidence of all ranks; returns the thread that writes it to `folder`."""
    deadline = time.monotonic() + (HANG_SECONDS if hang else CRASH_SECONDS)
    kernel = {subject.state.rank: _kernel_view(subject.pid) for subject in subjects if subject.alive}
    signalled = [subject for subject in subjects if subject.alive and _request_stacks(subject, kernel)]
    others = [subject for subject in subjects if subject.alive and subject not in signalled]
    spies = {subject.state.rank: spy for subject in others if hang and (spy := _spy(subject.pid)) is not None}
    _await_answers([subject.stacks for subject in signalled], deadline)
    for subject in signalled:
        subject.request_collectives()
    answers = (file for subject in signalled for file in (subject.stacks, subject.collectives))
    _await_answers([file for file in answers if file is not None], deadline)
    recorded = {subject.state.rank: text for subject in subjects if (text := _read_collectives(subject.collectives))}
    seen = {rank: _spy_output(spy, deadline) for rank, spy in spies.items()}
    texts = {s.state.rank: _text(s, kernel.get(s.state.rank, {}), seen.get(s.state.rank, ""), logs) for s in subjects}
    files = {f"stacks/rank-{rank}.txt": text for rank, text in texts.items()}
    thread = threading.Thread(target=_write, args=(folder, files, recorded), name="evidence", daemon=True)
    thread.start()
    return thread


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where the kernel does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def _kernel_view(pid: int) -> dict[str, str]:
    """The readable files of `/proc/PID` by name."""
    files = {}
    for name in PROC_FILES:
        with suppress(OSError):
            files[name] = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    return files


def _request_stacks(subject: RankProcess, kernel: Mapping[int, Mapping[str, str]]) -> bool:
    """Signal a rank and return whether it was signalled.

    Only a rank that handles the signal and is not stopped gets it: without a handler the signal ends a process.
    """
    fields = dict(
        line.split(":", 1) for line in kernel[subject.state.rank].get("status", "").splitlines() if ":" in line
    )
    handled = int(fields.get("SigCgt", "0").strip(), 16) >> (STACK_SIGNAL - 1) & 1
    if not handled or fields.get("State", "").strip()[:1] in ("T", "t", "Z", "X"):
        return False
    with suppress(ProcessLookupError):
        os.kill(subject.pid, STACK_SIGNAL)
        return True
    return False


def _read_collectives(memory: int | None) -> str:
    """The line in a memory file; empty unless it is complete."""
    text = "" if memory is None else os.pread(memory, LARGEST_RECORD, 0).decode(errors="replace")
    return text if text.endswith("\n") else ""


def _await_answers(files: Sequence[int], deadline: float) -> None:
    """Wait until no memory file of the signalled ranks is empty and none has grown between two polls, or until the deadline.

    A file stays empty if its rank has ended, or if another thread keeps the interpreter's lock. Where others have answers, it is
    awaited for `SILENT_SECONDS` after them.
    """
    before = [0] * len(files)
    grown = deadline
    while (now := time.monotonic()) < min(deadline, grown + SILENT_SECONDS):
        sizes = [os.fstat(file).st_size for file in files]
        if sizes != before:
            before = sizes
            grown = now
        elif all(sizes):
            return
        time.sleep(POLL_SECONDS)


def _spy(pid: int) -> subprocess.Popen[str] | None:
    if shutil.which(PYSPY[0]) is None:
        return None
    with suppress(OSError):
        return subprocess.Popen(
            [*PYSPY, str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=without_secrets(),
        )
    return None


def _spy_output(spy: subprocess.Popen[str], deadline: float) -> str:
    try:
        return spy.communicate(timeout=max(0.01, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        spy.kill()
        spy.communicate()
        return "py-spy did not answer in time\n"


def _text(subject: RankProcess, kernel: Mapping[str, str], spy: str, logs: Path) -> str:
    """The evidence of one rank as text."""
    state = subject.state
    status = "it runs" if subject.alive else death(state.code)
    parts = [
        f"rank {state.rank}, process {subject.pid}: {'it is stopped' if state.stopped and subject.alive else status}"
    ]
    if state.progress is not None:
        parts[0] += f"; step {state.progress.step}, {state.progress.phase}, action {state.progress.action}"
    if state.failure is not None:
        parts.append(f"== failure\n{state.failure.message}")
    stacks = read_stacks(subject.stacks).decode(errors="replace")
    missing = "the process did not write them" if subject.alive else "the process has ended"
    parts.append(f"== stacks of all threads\n{stacks or f'none: {missing}'}")
    if spy:
        parts.append(f"== py-spy\n{spy}")
    parts += [f"== /proc/PID/{name}\n{content}" for name, content in kernel.items()]
    log = logs / f"rank-{state.rank:05d}.log"
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        parts.append(f"== end of {log.name}\n{file.read(LOG_BYTES).decode(errors='replace')}")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def unfinished_collectives(record: str) -> Iterator[str]:
    """Yield a line for each unfinished collective of a rank's record: its name, number, group, shapes and state.

    Raises ValueError if the record is no JSON.
    """
    for dump in json.loads(record).values():
        for entry in dump["entries"]:
            if not entry["finished"]:
                group = " ".join(filter(None, entry["process_group"])) or "default"
                number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
                yield f"{entry['profiling_name']} {number} of group {group}, {entry['input_sizes']}, {entry['state']}"


def _write(folder: Path, files: Mapping[str, str], recorded: Mapping[int, str]) -> None:
    """Write the files by name, and each rank's collectives, whose unfinished ones are also listed with its stacks."""
    contents = dict(files)
    for rank, record in recorded.items():
        contents[f"collectives/rank-{rank}.json"] = record
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a release of torch with other keys
            lines = list(unfinished_collectives(record))
            listed = "\n".join(lines or ["none"])
            contents[f"stacks/rank-{rank}.txt"] += f"\n== unfinished collectives\n{listed}\n"
    try:
        for name, text in contents.items():
            (folder / name).parent.mkdir(parents=folder.parents[1].is_dir(), exist_ok=True)
            write_durable(folder / name, text)
    except OSError as error:
        write_line(f"meshwright: evidence of the failure is not kept: {error.filename}: {error.strerror}")
