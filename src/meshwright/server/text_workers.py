"""The HTTP process's text processes: which process reads a body, and what a request gets whose body takes too long."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from meshwright.events.parent import PARENT
from meshwright.server.background import guarded
from meshwright.server.errors import NO_RETRY, RequestError
from meshwright.server.model_files import ModelFiles
from meshwright.server.request_reader import RequestReader
from meshwright.server.text_frames import TextFrame, TextFrameReader, frame_head
from meshwright.server.text_process import RENDERS, Setup, Work, memory_error
from meshwright.server.text_request import CheckedTextRequest
from meshwright.spec.fields import to_plain
from meshwright.spec.serve import ServeSpec

T = TypeVar("T")
log = logging.getLogger("meshwright.server")
SHORT_BODY = 64 << 10
"""A body of more bytes goes to the process for long bodies."""
SHORT_SECONDS = 5.0
"""Longest time to read a short body. Without an endless template it takes a few milliseconds."""
LONG_SECONDS = 20.0
"""Longest time to read a long body."""
LONG_NICE = 5
"""Nice value of the process for long bodies: the system prefers the HTTP process and the engine."""
WAITING_BYTES = 64 << 20
"""Most bytes of bodies that wait for one process."""
SHORT_SENT = 4
"""Short bodies that a process has at a time, so that it can begin the next one while an answer is on its way."""
START_SECONDS = 120.0
"""Longest time that a process may take to load the tokenizer."""
FIRST_PAUSE = 0.1
"""Seconds before a process that could not load is started again. They double each time."""
LONGEST_PAUSE = 10.0
"""Longest of these pauses, seconds."""
FAILED_STARTS = 3
"""After so many failed starts in a row requests are refused instead of waiting for the next start."""
END_SECONDS = 5.0
"""Longest time that a process may take to end once it has closed its connection."""
RETRY_SECONDS = 1
ENVIRONMENT = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "SYSTEMROOT",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUSERBASE",
    "PYTHONNOUSERSITE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
)
"""Variables that a text process inherits: where Python finds its packages, the language and the time zone."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the engine's model."""

    context: int
    vocab: int


class TextWorkers:
    """Reads requests in processes of their own: one for short bodies, one for long ones.

    An endless template or a long text delays only requests for the same process, and these only until the time limit.
    """

    def __init__(self, spec: ServeSpec, model: str, files: ModelFiles) -> None:
        """Processes start at their first use, or by `start`."""
        packed = files.pack()
        self._short = _Lane("short", Setup.of(spec, model, 0), packed, SHORT_SECONDS, SHORT_SENT)
        self._long = _Lane("long", Setup.of(spec, model, LONG_NICE), packed, LONG_SECONDS, 1)

    def start(self) -> None:
        """Start the process for short bodies; the event loop runs."""
        self._short.start()

    async def read(self, work: Callable[[RequestReader, bytes], T], body: bytes, sizes: Sizes) -> T:
        """The result of `work`, one of `WORK`, for a body. Raises RequestError. If it is cancelled before its turn, it is not begun."""
        lane = self._short if len(body) <= SHORT_BODY else self._long
        return cast(T, await lane.read(cast("Work", work), body, sizes))

    @property
    def unfinished(self) -> int:
        """Requests that are being read or wait."""
        return self._short.unfinished + self._long.unfinished

    def close(self) -> None:
        """End the processes, and refuse the requests that they have not read."""
        self._short.close()
        self._long.close()


class _Job:
    """A body to be read, and the answer to it."""

    def __init__(self, work: Work, body: bytes, sizes: Sizes) -> None:
        self.work = work
        self.body = body
        self.sizes = sizes
        self.answer: asyncio.Future[CheckedTextRequest | bytes] = asyncio.get_running_loop().create_future()

    def refuse(self, error: RequestError) -> None:
        """Answer by an error; nothing happens if nobody waits any more."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def finish(self, frame: TextFrame) -> None:
        """Answer by a message of the process."""
        message, payload = frame
        if "error" in message:
            self.refuse(RequestError(**message["error"]))
        elif not self.answer.done():
            values = message.get("request")
            # The bytes of a whole answer are sent as they are.
            self.answer.set_result(
                cast(bytes, payload) if values is None else CheckedTextRequest.unpack(values, payload)
            )


class _Lane:
    """A text process, which is replaced when it ends, and the jobs for it, in order of arrival."""

    def __init__(
        self, name: str, setup: Setup, files: tuple[Mapping[str, Any], bytes], seconds: float, most_sent: int
    ) -> None:
        """`files` are packed; `seconds` is the longest time of a job, `most_sent` the number that the process has at a time."""
        self._name = name
        self._setup = setup
        self._files = files
        self._seconds = seconds
        self._most_sent = most_sent
        self._waiting: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._sent: deque[_Job] = deque()
        """Jobs that the process has; it works on the first."""
        self._process: _TextProcess | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends the process if it works too long on the first job that was sent, or on its start."""
        self._failed_starts = 0
        self._closed = False

    @property
    def unfinished(self) -> int:
        """Number of jobs that wait or run, cancelled ones included."""
        return len(self._waiting) + len(self._sent)

    def start(self) -> None:
        """Start a process if there is none."""
        if self._process is None and not self._closed:
            try:
                self._process = _TextProcess(self._take, self._lost)
            except OSError as error:  # no file, memory or process is left
                log.warning("a text process (%s bodies) cannot be started: %s", self._name, error)
                self._start_later()
                return
            values, content = self._files
            self._process.send({"setup": to_plain(self._setup), "files": values}, content)
            self._time(START_SECONDS, self._process.end)

    async def read(self, work: Work, body: bytes, sizes: Sizes) -> CheckedTextRequest | bytes:
        """Return what `work` makes of a body. Raises RequestError."""
        if self._closed:
            raise _stopping()
        if self._failed_starts >= FAILED_STARTS:
            raise _unavailable()
        waiting = len(self._waiting)
        most = self._setup.spec.queue
        if waiting and (waiting >= most or self._waiting_bytes + len(body) > WAITING_BYTES):
            message = f"{waiting} requests wait to be read; try again later"
            raise RequestError(429, message, retry_after=RETRY_SECONDS)
        job = _Job(work, body, sizes)
        self._waiting.append(job)
        self._waiting_bytes += len(body)
        self.start()
        self._send()
        try:
            return await job.answer
        except asyncio.CancelledError:  # the client has gone
            if job in self._waiting:
                self._waiting.remove(job)
                self._waiting_bytes -= len(body)
            raise

    def close(self) -> None:
        """End the process; refuse all jobs."""
        self._closed = True
        self._stop_timer()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for job in self._sent:
            job.refuse(_stopping())
        self._sent.clear()
        self._refuse_waiting(_stopping())

    def _send(self) -> None:
        """Send jobs to the process while it can take some."""
        process = self._process
        while process is not None and process.loaded and self._waiting and len(self._sent) < self._most_sent:
            job = self._waiting.popleft()
            self._waiting_bytes -= len(job.body)
            self._sent.append(job)
            sizes = {"context": job.sizes.context, "vocab": job.sizes.vocab}
            process.send({"work": job.work.__name__, **sizes}, job.body)
            if len(self._sent) == 1:
                self._time(self._seconds, self._end_slow)

    def _take(self, frame: TextFrame) -> None:
        """Take a message of the process."""
        process = self._process
        assert process is not None
        self._stop_timer()
        if not process.loaded:
            process.loaded = True
            self._failed_starts = 0
        else:
            self._sent.popleft().finish(frame)
            if self._sent:
                self._time(self._seconds, self._end_slow)
        self._send()

    def _end_slow(self) -> None:
        """The job takes too long: refuse it, and end the process."""
        process = self._process
        job = self._sent.popleft()
        assert process is not None
        job.refuse(self._too_slow(job))
        log.warning("a request was not read within %g s; its text process %d is ended", self._seconds, process.pid)
        process.kill()
        self._restart()

    def _too_slow(self, job: _Job) -> RequestError:
        if len(job.body) <= SHORT_BODY and job.work in RENDERS:
            message = f"messages: the chat template took longer than {self._seconds:g} s"
            return RequestError(422, message, param="messages", code="text_timeout")
        message = f"the body took longer than {self._seconds:g} s to be read; shorten it"
        return RequestError(422, message, code="text_timeout")

    def _lost(self, process: _TextProcess, status: int) -> None:
        """The process has ended by itself, with this status of `Popen`: start another one.

        The job that it worked on is refused. It may be the cause, and would then end the next process too.
        """
        if process is not self._process or self._closed:
            return
        self._stop_timer()
        log.warning("text process %d (%s bodies) has ended with status %d", process.pid, self._name, status)
        if process.loaded:
            if self._sent:
                self._sent.popleft().refuse(_lost_job(status))
            self._restart()
            return
        self._process = None
        self._start_later()

    def _start_later(self) -> None:
        """Start again after a pause, which grows with each failed start."""
        pause = min(FIRST_PAUSE * 2**self._failed_starts, LONGEST_PAUSE)
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            self._refuse_waiting(_unavailable())
        asyncio.get_running_loop().call_later(pause, self.start)

    def _restart(self) -> None:
        """Start another process, and give it the jobs that the last one had not begun."""
        again = [job for job in self._sent if not job.answer.done()]
        self._waiting.extendleft(reversed(again))
        self._waiting_bytes += sum(len(job.body) for job in again)
        self._sent.clear()
        self._process = None
        self.start()

    def _refuse_waiting(self, error: RequestError) -> None:
        for job in self._waiting:
            job.refuse(error)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _time(self, seconds: float, act: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, act)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _TextProcess(asyncio.Protocol):
    """A process and the connection to it."""

    def __init__(self, take: Callable[[TextFrame], None], lost: Callable[[_TextProcess, int], None]) -> None:
        """Start it. `take` gets its messages; `lost` is called once it has ended, with its status."""
        self._take_frame = take
        self._lost = lost
        self._reader = TextFrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._killed = False
        self.loaded = False
        """Whether it takes jobs."""
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.server.text_process", str(theirs.fileno())],
                env={
                    **{name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                    PARENT: str(os.getpid()),
                    "TOKENIZERS_PARALLELISM": "false",
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the HTTP process, which drains
            )
            unless_started.pop_all()
        ours.setblocking(False)
        self._connecting = asyncio.ensure_future(asyncio.get_running_loop().create_connection(lambda: self, sock=ours))
        self._ending: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def send(self, message: Mapping[str, Any], payload: bytes) -> None:
        """Send a message."""
        parts = [frame_head(message, len(payload)), payload]
        if self._transport is None:
            self._unsent += parts
        else:
            self._transport.writelines(parts)

    def end(self) -> None:
        """End the process; `lost` is called."""
        self._process.kill()

    def kill(self) -> None:
        """End the process, without any further call."""
        self._process.kill()
        self._killed = True
        if self._transport is not None:
            self._transport.abort()

    def wait(self) -> None:
        """Wait until the process, which has been killed, has ended."""
        self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.writelines(self._unsent)
        self._unsent.clear()
        if self._killed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.add(data):
            if not self._killed:
                self._take_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = asyncio.ensure_future(guarded("text process", self._report_end, Counter()))

    async def _report_end(self) -> None:
        """Wait for the end of the process, whose memory the system frees first; a thread does, so that no stream waits."""
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, END_SECONDS)
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        if not self._killed:
            self._lost(self, status)


def _lost_job(status: int) -> RequestError:
    """The error for the request on which a process worked that ended with this status of `Popen`."""
    if status == -signal.SIGABRT:  # the tokenizer could not get memory
        return memory_error()
    # Clients do not send it again either: it would end the next process.
    message = "the process that read the request has ended"
    return RequestError(500, message, code="text_lost", headers=[NO_RETRY])


def _stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="stopping", retry_after=RETRY_SECONDS)


def _unavailable() -> RequestError:
    message = "the process that reads requests cannot start; the server's log has the reason"
    return RequestError(503, message, code="text_unavailable", retry_after=RETRY_SECONDS)
