"""The text processes: the HTTP process lets them read request bodies, within a time limit.

They render chat templates and encode text, so that an endless template or a very long text does not block the HTTP process. There is one
process for short bodies and one for long bodies. If a body takes too long, its request is refused and the process is replaced.
"""

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
"""Bodies of more bytes than this are read by the process for long bodies."""
SHORT_SECONDS = 5.0
"""Time limit to read a short body, in seconds. Usually it takes a few milliseconds, unless the chat template never ends."""
LONG_SECONDS = 20.0
"""Time limit to read a long body, in seconds."""
LONG_NICE = 5
"""Nice value of the process for long bodies, so that the operating system prefers the HTTP process and the engine."""
WAITING_BYTES = 64 << 20
"""Largest number of bytes of the bodies that wait for one process."""
SHORT_SENT = 4
"""Number of short bodies that the process has at a time, so that it can begin the next one while its answer is being sent."""
START_SECONDS = 120.0
"""Time limit for a process to load the tokenizer, in seconds."""
FIRST_PAUSE = 0.1
"""Pause after a first failed start, before the process is started again, in seconds. Each further failure doubles the pause."""
LONGEST_PAUSE = 10.0
"""Longest pause between two starts, in seconds."""
FAILED_STARTS = 3
"""After this many failed starts in a row, requests are refused; before, they wait for the next start."""
END_SECONDS = 5.0
"""Time limit for a process to end after it has closed its connection, in seconds."""
RETRY_SECONDS = 1
"""A client whose request was refused because too many requests wait is told to retry after this time, in seconds."""
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
"""Environment variables that a text process inherits: search paths of Python and libraries, language and time zone."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the engine's model."""

    context: int
    """Largest number of tokens of a sequence."""
    vocab: int
    """Number of tokens in the vocabulary."""


class TextWorkers:
    """Reads request bodies in two text processes: one for short bodies, one for long bodies.

    A body that takes long delays only requests for the same process, and only until its time limit.
    """

    def __init__(self, spec: ServeSpec, model: str, files: ModelFiles) -> None:
        """Prepare both processes. Each starts at its first use; `start` can start the first one earlier."""
        packed = files.pack()
        self._short = _Lane("short", Setup.of(spec, model, 0), packed, SHORT_SECONDS, SHORT_SENT)
        self._long = _Lane("long", Setup.of(spec, model, LONG_NICE), packed, LONG_SECONDS, 1)

    def start(self) -> None:
        """Start the process for short bodies. The event loop must be running."""
        self._short.start()

    async def read(self, work: Callable[[RequestReader, bytes], T], body: bytes, sizes: Sizes) -> T:
        """Let a text process call the function `work` on a body, and return the result. Raises RequestError.

        `work` is one of `text_process.WORK`. If the task is cancelled while the body still waits, the body is not read.
        """
        lane = self._short if len(body) <= SHORT_BODY else self._long
        return cast(T, await lane.read(cast("Work", work), body, sizes))

    @property
    def unfinished(self) -> int:
        """Number of requests whose bodies are being read or wait to be read."""
        return self._short.unfinished + self._long.unfinished

    def close(self) -> None:
        """End the processes, and refuse the requests that they have not read."""
        self._short.close()
        self._long.close()


class _Job:
    """A body that a text process is to read, and the future of the result."""

    def __init__(self, work: Work, body: bytes, sizes: Sizes) -> None:
        self.work = work
        self.body = body
        self.sizes = sizes
        self.answer: asyncio.Future[CheckedTextRequest | bytes] = asyncio.get_running_loop().create_future()

    def refuse(self, error: RequestError) -> None:
        """Set an error as the result, unless the future is done or cancelled."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def finish(self, frame: TextFrame) -> None:
        """Set the result from a message of the text process."""
        message, payload = frame
        if "error" in message:
            self.refuse(RequestError(**message["error"]))
        elif not self.answer.done():
            values = message.get("request")
            # Without a `request`, the payload is a complete HTTP answer, which is sent unchanged.
            self.answer.set_result(
                cast(bytes, payload) if values is None else CheckedTextRequest.unpack(values, payload)
            )


class _Lane:
    """A text process with a queue of jobs. If the process ends, another one replaces it."""

    def __init__(
        self, name: str, setup: Setup, files: tuple[Mapping[str, Any], bytes], seconds: float, most_sent: int
    ) -> None:
        """Make a lane without a process.

        - `name`: "short" or "long", for log messages.
        - `files`: the model's files, as `ModelFiles.pack` returns them.
        - `seconds`: time limit of a job.
        - `most_sent`: largest number of jobs that the process has at a time.
        """
        self._name = name
        self._setup = setup
        self._files = files
        self._seconds = seconds
        self._most_sent = most_sent
        self._waiting: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._sent: deque[_Job] = deque()
        """Jobs that were sent to the process and not answered yet. The process works on the first of them."""
        self._process: _TextProcess | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The time limit of the first job in `_sent`, or of the start of the process."""
        self._failed_starts = 0
        """Number of failed starts in a row."""
        self._closed = False

    @property
    def unfinished(self) -> int:
        """Number of jobs that wait or were sent. Cancelled jobs that were sent count too."""
        return len(self._waiting) + len(self._sent)

    def start(self) -> None:
        """Start a process if there is none."""
        if self._process is None and not self._closed:
            try:
                self._process = _TextProcess(self._take, self._lost)
            except OSError as error:  # There are too many open files or processes, or there is not enough memory.
                log.warning("a text process (%s bodies) cannot be started: %s", self._name, error)
                self._start_later()
                return
            values, content = self._files
            self._process.send({"setup": to_plain(self._setup), "files": values}, content)
            self._time(START_SECONDS, self._process.end)

    async def read(self, work: Work, body: bytes, sizes: Sizes) -> CheckedTextRequest | bytes:
        """Queue a body and return the result of `work`. Raises RequestError, also if too many bodies wait."""
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
        except asyncio.CancelledError:  # The client has disconnected.
            if job in self._waiting:
                self._waiting.remove(job)
                self._waiting_bytes -= len(body)
            raise

    def close(self) -> None:
        """End the process and refuse all jobs."""
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
        """Send waiting jobs to the process until it has `most_sent` jobs."""
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
        """Process a message of the text process. The first says that it has loaded; each further one is the result of a job."""
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
        """Refuse the first sent job, which takes too long, and replace the process."""
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
        """Replace a process that has ended by itself. `status` is the exit status as `Popen` gives it.

        The job on which the process worked is refused: it may be the reason why the process ended, and might end the next process too.
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
        """Start the process again after a pause, which doubles with each failed start in a row."""
        pause = min(FIRST_PAUSE * 2**self._failed_starts, LONGEST_PAUSE)
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            self._refuse_waiting(_unavailable())
        asyncio.get_running_loop().call_later(pause, self.start)

    def _restart(self) -> None:
        """Start another process. First it gets the jobs that were sent to the last process and are neither answered nor cancelled."""
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
    """A text process, and the connection to it."""

    def __init__(self, take: Callable[[TextFrame], None], lost: Callable[[_TextProcess, int], None]) -> None:
        """Start the process. `take` is called with each of its messages; `lost` when it has ended, with its exit status."""
        self._take_frame = take
        self._lost = lost
        self._reader = TextFrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._killed = False
        self.loaded = False
        """Whether the process has loaded the tokenizer, so that jobs can be sent to it."""
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
                start_new_session=True,  # Ctrl-C must reach only the HTTP process, which then finishes its requests.
            )
            unless_started.pop_all()
        ours.setblocking(False)
        self._connecting = asyncio.ensure_future(asyncio.get_running_loop().create_connection(lambda: self, sock=ours))
        self._ending: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, message: Mapping[str, Any], payload: bytes) -> None:
        """Send a message, or queue it until the connection is made."""
        parts = [frame_head(message, len(payload)), payload]
        if self._transport is None:
            self._unsent += parts
        else:
            self._transport.writelines(parts)

    def end(self) -> None:
        """Kill the process. `lost` is called when it has ended."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process and close the connection. `take` and `lost` are not called any more."""
        self._process.kill()
        self._killed = True
        if self._transport is not None:
            self._transport.abort()

    def wait(self) -> None:
        """Wait until the process has ended, after `kill`."""
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
