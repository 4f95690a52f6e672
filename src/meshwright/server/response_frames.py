"""Finds where an HTTP/1.1 answer ends while its bytes pass through the router. It does not change or keep the bytes."""

from __future__ import annotations

MOST_HEAD_BYTES = 64 << 10
"""Maximum number of bytes of an answer's head."""
_LONGEST_SIZE_LINE = 1024
"""Maximum number of bytes of the line with a chunk's size."""
_WITHOUT_CONTENT = (204, 304)
"""Statuses of answers that never have a body."""


class BadAnswer(Exception):
    """The bytes are not an HTTP/1.1 answer."""


class ResponseFrames:
    """Follows the bytes of one answer, and of interim answers (status 1xx) before it."""

    def __init__(self, method: bytes = b"GET") -> None:
        """`method` is the request's method. The answer to HEAD has no body."""
        self._method = method
        self.status = 0
        """The status; 0 until the head is complete."""
        self.complete = self.chunked = False
        """`complete`: whether the answer has ended. `chunked`: whether its body comes in chunks, as streams do."""
        self.keeps_open = False
        """Whether the server can be sent another request on this connection after the answer."""
        self.head = b""
        """The part of the head that has been received; empty once the head is complete."""
        self._left = 0
        """Bytes of the body, or of the current chunk and its line end, that are still to come.

        -1: the body has no length and ends when the connection does.
        """
        self._line = b""
        """The received part of a chunk's size line."""
        self._trailer = False
        """Whether the last chunk has been received, and only the trailer is missing."""

    @property
    def ends_with_connection(self) -> bool:
        """Whether the body ends only when the server closes the connection."""
        return bool(self.status) and not self.chunked and self._left < 0

    @property
    def between_chunks(self) -> bool:
        """Whether the bytes so far end at the border between two chunks."""
        return self.chunked and not (self._left or self._line or self._trailer)

    def add(self, data: bytes) -> None:
        """Process the next bytes. Raises BadAnswer if they are not HTTP/1.1, or come after the end of the answer."""
        while not self.status:
            data = self._take_head(data)
            if not self.status and not data:
                return
        if self.complete:
            if data:
                raise BadAnswer("bytes after the end of an answer")
        elif self.chunked:
            self._take_chunks(data)
        elif self._left >= 0:
            self._left -= len(data)
            if self._left < 0:
                raise BadAnswer("a body that is longer than announced")
            self.complete = self._left == 0

    def _take_head(self, data: bytes) -> bytes:
        """Add bytes to the head, and return the bytes after it once it is complete.

        After an interim answer `status` stays 0, and the returned bytes begin the next head.
        """
        head = self.head + data
        end = head.find(b"\r\n\r\n")
        if end < 0:
            if len(head) > MOST_HEAD_BYTES:
                raise BadAnswer("a head that is too long")
            self.head = head
            return b""
        self.head = b""
        lines = head[:end].split(b"\r\n")
        try:
            version, status = lines[0].split(b" ", 2)[:2]
            number = int(status)
            if 100 <= number < 200:
                return head[end + 4 :]
            self.status = number
            headers = {
                name.strip().lower(): value.strip().lower()
                for name, _, value in (line.partition(b":") for line in lines[1:])
            }
            length = headers.get(b"content-length")
            self._left = -1 if length is None else int(length)
        except ValueError:
            raise BadAnswer("a head that is no HTTP") from None
        self.chunked = headers.get(b"transfer-encoding") == b"chunked"
        if self._method == b"HEAD" or self.status in _WITHOUT_CONTENT:
            self.chunked = False
            self._left = 0
        closes = headers.get(b"connection") == b"close" or version != b"HTTP/1.1"
        self.keeps_open = not closes and (self.chunked or self._left >= 0)
        self.complete = not self.chunked and self._left == 0
        if self.chunked:
            self._left = 0
        return head[end + 4 :]

    def _take_chunks(self, data: bytes) -> None:
        """Follow the chunks in the received bytes.

        A chunk is a line with its size in hexadecimal digits, its content, and a line break. A chunk of size 0 ends the
        body. After it comes the trailer: lines of headers, and an empty line.
        """
        position = 0
        size = len(data)
        while position < size:
            if self._left:
                step = min(self._left, size - position)
                self._left -= step
                position += step
                continue
            end = data.find(b"\n", position)
            if end < 0:
                self._line += data[position:]
                if len(self._line) > _LONGEST_SIZE_LINE:
                    raise BadAnswer("a line that is too long")
                return
            line = (self._line + data[position:end]).rstrip(b"\r")
            self._line = b""
            position = end + 1
            if self._trailer:
                if not line:
                    self.complete = True
                    if position < size:
                        raise BadAnswer("bytes after the end of an answer")
                continue
            try:
                length = int(line.partition(b";")[0], 16)
            except ValueError:
                raise BadAnswer("a chunk without its size") from None
            if length:
                # The chunk, and the line break after it.
                self._left = length + 2
            else:
                self._trailer = True
