"""Reading of requests in the router: heads and chunks in pieces of any size, and those that servers may read differently."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from meshwright.server.errors import RequestError
from meshwright.server.route_requests import MOST_HEAD_BYTES, MOST_HEADERS, RoutedRequest, RouteRequestReader
from tests.slow import examples

MOST_BODY = 1000
CHUNKED = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


def read(data: bytes, sizes: Iterable[int] = (), most: int = MOST_BODY) -> list[RoutedRequest]:
    """The complete requests in `data`, which comes in pieces of `sizes`, and then the rest."""
    reader, found, pending, position, left = RouteRequestReader(most), [], None, 0, iter(sizes)
    while position < len(data):
        size = next(left, len(data))
        reader.add(data[position : position + size])
        position += size
        while (pending := pending or reader.take_head()) is not None and reader.take_body(pending):
            found.append(pending)
            pending = None
        if pending is not None and pending.chunks is not None:
            assert len(reader) <= 1024
    return found


def test_bodies_are_the_same_however_they_come() -> None:
    source = random.Random(3)
    for _ in range(examples(50, 1000)):
        bodies, data = [], b""
        for _ in range(source.randint(1, 4)):
            body = source.randbytes(source.choice([0, 1, 7, 100, MOST_BODY]))
            bodies.append(body)
            if source.random() < 0.3:
                data += b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
                continue
            data += CHUNKED
            while body:
                size = source.randint(1, len(body))
                extension = source.choice([b"", b";a=b", b' ;a="b"', b";" + b"x" * 500])
                data += b"%b%X%b\r\n%b\r\n" % (b"0" * source.randrange(4), size, extension, body[:size])
                body = body[size:]
            data += b"0\r\n" + source.choice([b"", b"x: y\r\n", b"x: y\r\nz:\r\n"]) + b"\r\n"
        longest = source.choice([1, 3, 50, 2000])
        requests = read(data, (source.randint(1, longest) for _ in data))
        assert [request.body for request in requests] == bodies
        for request in requests:
            assert request.head.endswith(b"\r\ncontent-length: %d\r\n\r\n" % len(request.body))
            assert b"transfer-encoding" not in request.head


@pytest.mark.parametrize(
    "data",
    [
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: identity\r\n\r\n",
        b"transfer-encoding:\r\n\r\n",
        b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
        b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"x: y\r\n transfer-encoding: chunked\r\n\r\n",
        b"x: y\r\n\tz\r\n\r\n",
        b"x: y\ntransfer-encoding: chunked\r\n\r\n",
        b"x: y\rtransfer-encoding: chunked\r\n\r\n",
        b"x: y\r\n" * (MOST_HEADERS + 1) + b"\r\n",
        b"x: " + b"y" * MOST_HEAD_BYTES + b"\r\n\r\n",
    ],
)
def test_heads_that_servers_may_read_differently_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read(b"POST /x HTTP/1.1\r\n" + data)
    assert caught.value.status == 400


def test_an_old_request_has_no_chunks() -> None:
    with pytest.raises(RequestError):
        read(CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n")


@pytest.mark.parametrize(
    "chunks",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1_0\r\n",
        b"\xb2\r\n",
        b"1\na\r\n",
        b"1;\x00\r\na\r\n",
        b"1;a\nb\r\na\r\n",
        b"1;a\rb\r\na\r\n",
        b"1;" + b"x" * 1024,
        b"1\r\nab\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"0" * 16 + b"1\r\na\r\n",
        b"0\r\nx\r\n\r\n",
        b"0\r\nx: y\r\n z\r\n\r\n",
        b"0\r\nx: y\nz: a\r\n\r\n",
        b"0\r\n" + b"x: y\r\n" * 20_000,
        b"1;xxxxxxxxxxxxxxxxxxxx\r\na\r\n" * 900 * 3,
    ],
)
def test_wrong_chunks_are_refused(chunks: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read(CHUNKED + chunks, [1] * 60, most=10_000)
    assert caught.value.status == 400


@pytest.mark.parametrize("chunks", [b"3e9\r\n", b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n", b"f" * 16 + b"\r\n"])
def test_long_bodies_are_refused_before_they_come(chunks: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read(CHUNKED + chunks)
    assert caught.value.status == 413
