"""A text process: reads and tokenizes request bodies for the HTTP process, which goes on with its streams meanwhile.

So a long prompt, or a chat template with an endless loop, does not delay other requests. The HTTP process starts a text
process, gives it one job at a time, and kills it if a job takes too long. A text process gets everything over its
socket: it has no keys and opens no files or connections.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.events.parent import end_with_parent
from meshwright.server.errors import RequestError
from meshwright.server.model_files import ModelFiles
from meshwright.server.process_memory import keep_loaded
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.server.text_frames import TextFrame, TextFrameReader, frame_head
from meshwright.server.text_request import CheckedTextRequest
from meshwright.spec.fields import from_plain
from meshwright.spec.serve import ServeSpec

Work = Callable[[RequestReader, bytes], CheckedTextRequest | bytes]
"""A job's work: reads a body, and returns a checked request or directly the answer."""
WORK: Mapping[str, Work] = {
    work.__name__: work
    for work in (
        RequestReader.completion,
        RequestReader.chat,
        RequestReader.responses,
        RequestReader.messages,
        RequestReader.count_tokens,
        RequestReader.score,
        RequestReader.tokenize,
        RequestReader.detokenize,
    )
}
"""All kinds of work, by the name that a job gives."""
RENDERS: Sequence[Work] = [
    work for work in WORK.values() if work not in (RequestReader.completion, RequestReader.detokenize)
]
"""Kinds of work that may render a chat template."""
LEAST_LIMIT_BYTES = 4 << 30
"""Smallest memory limit, in bytes."""
LIMIT_PER_BODY_BYTE = 400
"""The memory limit has this many bytes for each byte of the longest allowed body. Tokenizing takes about 200 of them."""
_RECEIVE_BYTES = 1 << 20
"""Maximum number of bytes of one read from the socket."""


@dataclass(frozen=True)
class Setup:
    """What a text process needs to know."""

    spec: ServeSpec
    """Settings of the server, without keys."""
    model: str
    """Name of the model for clients."""
    nice: int
    """Niceness: how much the operating system prefers other processes; 0 for none."""
    memory_bytes: int
    """Bytes of memory that may be used in addition to those in use after loading."""

    @classmethod
    def of(cls, spec: ServeSpec, model: str, nice: int) -> Setup:
        """Return the setup for a server's settings. `model` is the model's name in the API, and `nice` the niceness."""
        memory = max(LEAST_LIMIT_BYTES, LIMIT_PER_BODY_BYTE * spec.max_body_bytes)
        return cls(replace(spec, api_key=None, admin_key=None, transfer_key=None), model, nice, memory)


class TextConnection:
    """The text process's side of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = TextFrameReader()
        self._frames: list[TextFrame] = []

    def receive(self) -> TextFrame:
        """Wait for the next message. Raises EOFError if the HTTP process has closed the socket."""
        while not self._frames:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError
            self._frames += self._reader.add(data)
        return self._frames.pop(0)

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a message with its payload."""
        self._socket.sendall(frame_head(message, len(payload)))
        self._socket.sendall(payload)


def answer(work: Work, reader: RequestReader, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Do a job, and return the answer's message and payload. What `work` raises becomes an error message."""
    try:
        result = work(reader, body)
        if isinstance(result, bytes):
            return {}, result
        values, ids = result.pack()
        return {"request": values}, ids
    except RequestError as error:
        refusal = error
    except MemoryError:
        refusal = memory_error()
    except BaseException as error:  # a panic in the tokenizers library is not an Exception
        traceback.print_exc()
        refusal = RequestError(500, f"internal error: {type(error).__name__}", code="request_failed")
    values = {name: getattr(refusal, name) for name in ("status", "message", "param", "code")}
    return {"error": values}, b""


def memory_error() -> RequestError:
    """Return the error for a request that needs more memory than a text process may use."""
    return RequestError(422, "the request takes too much memory to be read; shorten it", code="text_memory")


def run(connection: TextConnection) -> None:
    """Load the tokenizer, tell the HTTP process so, and answer jobs until that process closes the socket."""
    message, content = connection.receive()
    setup = from_plain(Setup, message["setup"])
    files = ModelFiles.unpack(message["files"], bytes(content))
    del content
    template = chat_template(setup.spec, files)
    os.nice(setup.nice)
    # The limit is relative to the memory in use now, after the tokenizer has been loaded.
    limit_memory(setup.memory_bytes)
    keep_loaded()
    connection.send({})
    reader = None
    sizes = None
    while True:
        job, body = connection.receive()
        if reader is None or sizes != (job["context"], job["vocab"]):
            sizes = job["context"], job["vocab"]
            reader = RequestReader(setup.spec, setup.model, files, template, *sizes)
        connection.send(*answer(WORK[job["work"]], reader, bytes(body)))
        del body


def limit_memory(further_bytes: int) -> None:
    """Limit this process's address space to its present size plus `further_bytes`, and disable core dumps.

    A core dump would contain prompts. On systems without /proc, memory is not limited.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/statm")
    if status.exists():
        most = int(status.read_text().split()[0]) * resource.getpagesize() + further_bytes
        _, largest = resource.getrlimit(resource.RLIMIT_AS)
        most = most if largest == resource.RLIM_INFINITY else min(most, largest)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Run a text process. Its argument is the file descriptor of the inherited socket."""
    end_with_parent()
    with suppress(EOFError, ConnectionError):  # the HTTP process has ended
        run(TextConnection(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
