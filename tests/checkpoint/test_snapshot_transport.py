"""Snapshots over real sockets: a copy arrives or is refused, and the one before stays until the next is complete."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.checkpoint.memory import transport
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.memory.snapshot_buffer import BUFFER_VARIABLE, SnapshotBuffer, empty_memory
from meshwright.checkpoint.memory.snapshots import SnapshotMemory
from meshwright.checkpoint.memory.source import (
    HostSource,
    RankOffer,
    ServerSource,
    SnapshotLocation,
    newest_complete,
    open_on_host,
)
from meshwright.checkpoint.memory.transport import Pace, SnapshotClient, SnapshotServer, TransportFailure
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.write import background
from meshwright.connections.limits import SNAPSHOTS
from meshwright.spec.errors import Damaged
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.training.partner import missing_copy_bytes

TOKEN = "0123456789abcdef"
ELEMENTS = BLOCK_BYTES // 4 + 300_000
"""Elements of the snapshots' tensor: the file has two blocks."""
HEADERS = [["model.weight", "F32", [ELEMENTS]]]
FAST = 1e12


def name(save: int, rank: int = 0, ranks: int = 2) -> SnapshotName:
    return SnapshotName("run", f"1-1{save:08x}", 10 * save, rank, ranks)


def image(save: int) -> FileImage:
    return FileImage(HEADERS, memoryview(bytearray(bytes([save]) * (4 * ELEMENTS))))


def describe(snapshot: SnapshotName) -> Callable[[FileRecord | None], bytes]:
    return lambda file: SnapshotRecord(
        snapshot.run_id, snapshot.attempt, snapshot.step, snapshot.rank, snapshot.ranks, HEADERS, file, {}, None
    ).encode()


@contextmanager
def host(ranks: int = 1) -> Iterator[tuple[str, list[str]]]:
    """A snapshot server in threads: its address, and the paths of its slots."""
    buffers, slots = ([f"/proc/self/fd/{empty_memory()}" for _ in range(count)] for count in (ranks, 2 * ranks))
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = SnapshotServer(listener, TOKEN, SnapshotMemory(buffers, slots))

        def serve() -> None:
            while not ended.is_set():
                server.serve(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", slots
        finally:
            ended.set()
            thread.join()
            server.close()


def store(address: str, save: int, **options: object) -> None:
    with closing(SnapshotClient(address, TOKEN)) as client:
        client.store(name(save), image(save), describe(name(save)), **{"bytes_per_second": FAST, **options})  # type: ignore[arg-type]


def names(address: str) -> list[SnapshotName]:
    with closing(SnapshotClient(address, TOKEN)) as client:
        own, copies = client.names()
        assert not own, "the host's own ranks have no snapshots"
        return sorted(copies, key=lambda snapshot: snapshot.order)


def test_a_copy_is_read_as_it_was_stored_and_the_two_newest_stay() -> None:
    with host() as (address, _):
        for save in (1, 2, 3):
            store(address, save)
        assert names(address) == [name(2), name(3)]
        source, expected = ServerSource(address, TOKEN, name(3)), image(3)
        assert source.record.file is not None and source.record.file.bytes == expected.bytes
        for start, count in ((0, BLOCK_BYTES), (BLOCK_BYTES, expected.bytes - BLOCK_BYTES)):
            read, wanted = memoryview(bytearray(count)), memoryview(bytearray(count))
            source.read(start, read)
            expected.read(start, wanted)
            assert read == wanted
            with closing(open_on_host(address, TOKEN, name(3))) as mapped:
                assert isinstance(mapped, HostSource) and mapped.record == source.record
                mapped.read(start, read)
                assert read == wanted
        source.close()
        for open_source in (ServerSource, open_on_host):
            with pytest.raises(Damaged, match="is not here"):
                open_source(address, TOKEN, name(1))


def test_memory_for_copies_is_checked_at_the_start_without_what_the_slots_already_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(background, "available_host_memory", lambda: 10**9)
    rank_bytes, ranks = 250 * 10**6, RankGroup(None)
    assert background.memory_obstacle(rank_bytes, ranks, 2) is None  # 500 of 900 MB
    obstacle = background.memory_obstacle(rank_bytes, ranks, 2, lambda: missing_copy_bytes(rank_bytes, 2))
    assert obstacle is not None
    assert obstacle.startswith(
        "0.5 GB of snapshot buffers and 1.0 GB for a partner host's snapshots (checkpoint.partner) on a host"
    )
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(TOKEN)
    with host() as (address, _):
        monkeypatch.setenv(transport.SERVER_VARIABLE, address)
        monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
        assert missing_copy_bytes(rank_bytes, 2) == 4 * rank_bytes
        store(address, 1)
        left = 4 * rank_bytes - missing_copy_bytes(rank_bytes, 2)
        assert image(1).bytes <= left < image(1).bytes + 10**6
    assert missing_copy_bytes(rank_bytes, 2) == 4 * rank_bytes, "the server has ended"


def test_a_rank_without_a_file_has_a_copy_of_its_record() -> None:
    with host() as (address, _), closing(SnapshotClient(address, TOKEN)) as client:
        empty = SnapshotRecord("run", name(1).attempt, 10, 0, 2, [], None, {"tensor": 1}, "{}")
        client.store(name(1), FileImage([], memoryview(b"")), lambda file: empty.encode(), bytes_per_second=FAST)
        assert client.open(name(1)) == empty


@pytest.mark.parametrize("position", [1000, BLOCK_BYTES + 1000, None], ids=["first block", "last block", "record"])
def test_what_is_corrupted_on_the_wire_is_refused_and_the_copy_before_stays(
    monkeypatch: pytest.MonkeyPatch, position: int | None
) -> None:
    with host() as (address, _):
        store(address, 1)
        send, sent = transport._Stream.send, [0]

        def corrupt(stream: transport._Stream, data: bytes | memoryview) -> None:
            if threading.current_thread() is threading.main_thread():
                before, sent[0] = sent[0], sent[0] + len(data)
                is_record = bytes(data[:11]) == b'{"version":'
                if is_record if position is None else len(data) > 1000 and before <= position < sent[0]:
                    data = bytearray(data)
                    data[len(data) // 2] ^= 1
                    data = bytes(data)
            send(stream, data)

        monkeypatch.setattr(transport._Stream, "send", corrupt)
        with pytest.raises(TransportFailure, match="does not agree with its digest"):
            store(address, 2)
        monkeypatch.undo()
        assert names(address) == [name(1)]
        store(address, 3)
        assert names(address) == [name(1), name(3)]


def test_a_sender_that_dies_or_whose_memory_changes_leaves_the_copies_before() -> None:
    with host() as (address, _):
        store(address, 1)
        store(address, 2)
        pieces = iter([True] * 7)
        with pytest.raises(TransportFailure, match="the next save began"):
            store(address, 3, unchanged=lambda: next(pieces, False))
        assert names(address)[-1] == name(2), "the older copy gave its slot to the one that failed"
        with closing(SnapshotClient(address, TOKEN)) as client:
            client._request("store", name=name(4).__dict__, header_bytes=0, data_bytes=1 << 20)
            client._stream.send(b"x" * 1000)
        assert name(2) in names(address)
        store(address, 5)  # waits until the server has noticed that the sender of 4 is gone
        assert names(address) == [name(2), name(5)]


def test_a_copy_that_is_not_newer_or_meets_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.memory.snapshots.BUSY_SECONDS", 0.1)
    with host() as (address, _):
        store(address, 2)
        for save in (1, 2):
            with pytest.raises(TransportFailure, match="that is as new is here"):
                store(address, save)
        with closing(SnapshotClient(address, TOKEN)) as client:
            client._request("store", name=name(3).__dict__, header_bytes=0, data_bytes=1 << 20)
            with pytest.raises(TransportFailure, match="another copy of rank 0 is being received"):
                store(address, 4)


def test_a_copy_without_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.memory.snapshots.available_host_memory", lambda: 1 << 20)
    with host() as (address, _), pytest.raises(TransportFailure, match="host memory has no space"):
        store(address, 1)


def test_a_wrong_token_and_nonsense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SNAPSHOTS", replace(SNAPSHOTS, head_seconds=0.3))
    hello = b'{"nonce": "%b"}\n' % (b"0" * 64)
    with host() as (address, _):
        with pytest.raises(TransportFailure, match="it has another key"):
            SnapshotClient(address, TOKEN + "x")
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * 20_000, b'{"op": "names"}\n', b""):
            assert exchange(address, data) == b"", "and the connection is closed"
        for data in (hello, hello + b'{"op": "names"}\n', hello + b"0" * 64 + b' {"op": "names"}\n', hello[:-1]):
            answer = exchange(address, data)
            assert b"names" not in answer and TOKEN.encode() not in answer
        for request in (
            {"op": "erase"},
            {"op": "read", "start": 0, "bytes": 1},
            {"op": "store", "name": name(1).__dict__, "header_bytes": -1, "data_bytes": 1},
            {"op": "store", "name": {**name(1).__dict__, "rank": 2}, "header_bytes": 0, "data_bytes": 1},
            {"op": "store", "name": {**name(1).__dict__, "attempt": "../x"}, "header_bytes": 0, "data_bytes": 1},
            {"op": "store", "name": {**name(1).__dict__, "attempt": "1--1"}, "header_bytes": 0, "data_bytes": 1},
            {"op": "open", "name": 3},
        ):
            with closing(SnapshotClient(address, TOKEN)) as client, pytest.raises(TransportFailure):
                client._request(**{"operation": request.pop("op"), **request})  # type: ignore[arg-type]
        assert names(address) == []


def test_strangers_keep_no_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SNAPSHOTS", replace(SNAPSHOTS, connections=4))
    with host() as (address, _), closing(SnapshotClient(address, TOKEN)) as client, ExitStack() as stack:
        assert client.names() == ([], [])
        where, _, port = address.rpartition(":")
        for _ in range(20):
            stack.enter_context(socket.create_connection((where, int(port)), timeout=5))
        assert names(address) == [] and client.names() == ([], [])


def test_a_client_believes_no_server_without_the_token() -> None:
    """Nor does it send what a stranger could use."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.extend(connection.recv(1 << 16))
                connection.sendall(b'{"path": "/etc/passwd"}\n' * 2)
                heard.extend(connection.recv(1 << 16))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(TransportFailure, match="does not prove that it knows the key"):
            SnapshotClient(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
        thread.join()
    assert TOKEN.encode() not in heard and b"op" not in heard


def test_names_are_validated_without_assertions_too() -> None:
    code = f"from meshwright.checkpoint.memory.snapshots import parse_name; parse_name({ {**name(1).__dict__, 'attempt': 'x'} })"
    answer = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode and answer.stderr.splitlines()[-1].startswith("ValueError")


def exchange(address: str, data: bytes) -> bytes:
    """Return the server's answer to `data` until it closes the connection."""
    where, _, port = address.rpartition(":")
    answer = b""
    with socket.create_connection((where, int(port)), timeout=5) as connection:
        try:
            connection.sendall(data)
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
    return answer


def test_the_rate_is_at_most_the_bound() -> None:
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    pace = Pace(100.0, lambda: now[0], sleep)
    sent = 0
    for _ in range(50):
        pace.wait(10)
        sent += 10
        assert sent <= 100.0 * now[0] + 10.001, "one piece may be under way"
        now[0] += 0.01
    assert now[0] == pytest.approx(4.91) and waits


def test_a_copy_takes_the_time_of_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that the client sends, by a clock that only its own delays advance."""
    now = [0.0]
    monkeypatch.setattr(
        transport, "Pace", lambda rate: Pace(rate, lambda: now[0], lambda s: now.__setitem__(0, now[0] + s))
    )
    with host() as (address, _):
        store(address, 1, bytes_per_second=1e6)
    assert now[0] == pytest.approx(image(1).bytes / 1e6, abs=transport.PIECE_BYTES / 1e6)


def test_a_slot_whose_snapshot_changes_is_offered_no_more() -> None:
    with host() as (address, slots):
        store(address, 1)
        buffer = SnapshotBuffer.of_last_process({BUFFER_VARIABLE: slots[0]})
        assert buffer is not None
        buffer.begin_snapshot()
        assert names(address) == []


RUN = "run"


@pytest.mark.parametrize(
    ("own", "copies", "expected"),
    [
        ([1, 1], [[], []], [(1, 0, None), (1, 1, None)]),  # all snapshot buffers survive
        (
            [1, None],
            [[(1, 0), (1, 1)], []],
            [(1, 0, None), (1, 0, "a")],
        ),  # host b was replaced; its copies were on host a
        ([1, None], [[(1, 0)], []], None),  # the second rank's snapshot is lost
        (
            [2, None],
            [[(1, 0), (1, 1)], []],
            [(1, 0, "a"), (1, 0, "a")],
        ),  # the newest save is not complete, the one before is
        ([None, None], [[(3, 0)], [(3, 1)]], [(3, 0, "a"), (3, 1, "b")]),  # both snapshot buffers are lost
        ([2, 2], [[(3, 1)], [(3, 0)]], [(3, 1, "b"), (3, 0, "a")]),
        ([2, None], [[(2, 1)], [(2, 1)]], [(2, 0, None), (2, 1, "b")]),  # its own host first
    ],
)
def test_the_newest_save_with_a_snapshot_of_every_rank_is_chosen(
    own: list[int | None],
    copies: list[list[tuple[int, int]]],
    expected: list[tuple[int, int, str | None]] | None,
) -> None:
    """`expected` has the save of each rank's snapshot, the rank that reads it, and the host that has it."""
    offers = [
        RankOffer(
            None if save is None else name(save, rank),
            "ab"[rank],
            copies=tuple(name(other, of_rank) for other, of_rank in copies[rank]),
        )
        for rank, save in enumerate(own)
    ]
    found = newest_complete(offers, RUN)
    wanted = expected and [
        SnapshotLocation(name(save, rank), reader, at, is_copy=at is not None)
        for rank, (save, reader, at) in enumerate(expected)
    ]
    assert found == wanted
    assert newest_complete(offers, "another run") is None


def readers(offers: list[RankOffer]) -> list[tuple[int, str | None, bool]] | None:
    """The rank that reads each rank's snapshot, the server of its host, and whether it is a copy."""
    found = newest_complete(offers, RUN)
    return found and [(location.reader, location.address, location.is_copy) for location in found]


def test_hosts_that_change_places_read_their_own_memory() -> None:
    moved = [RankOffer(name(1, 1)), RankOffer(name(1, 0))]
    assert readers(moved) == [(1, None, False), (0, None, False)]
    two = [
        RankOffer(name(1, 2, 4), "b", (name(1, 2, 4), name(1, 3, 4))),
        RankOffer(name(1, 3, 4), "b"),
        RankOffer(name(1, 0, 4), "a", (name(1, 0, 4), name(1, 1, 4))),
        RankOffer(name(1, 1, 4), "a"),
    ]
    assert readers(two) == [(2, None, False), (3, None, False), (0, None, False), (1, None, False)]


def test_fewer_ranks_read_all_snapshots_in_the_memory_of_their_hosts() -> None:
    """Of three hosts with a rank each the first was excluded; the second, now the first, has its copy."""
    left = [
        RankOffer(name(1, 1, 3), "b", (name(1, 1, 3),), copies=(name(1, 0, 3),)),
        RankOffer(name(1, 2, 3), "c", (name(1, 2, 3),), copies=(name(1, 1, 3),)),
    ]
    assert readers(left) == [(0, "b", True), (0, None, False), (1, None, False)]
    assert readers([replace(left[0], copies=()), left[1]]) is None


def test_a_later_start_wins_over_an_earlier_one_with_a_later_step() -> None:
    """After a return to an older checkpoint the newest save has an earlier step than one of the abandoned steps."""
    later = [SnapshotName(RUN, "2-200000001", 15, rank, 2) for rank in range(2)]
    offers = [RankOffer(later[0], "a", (name(9, 0), name(9, 1), later[1])), RankOffer(None, "b")]
    found = newest_complete(offers, RUN)
    assert found is not None and [location.name for location in found] == later
