"""Addresses of engines that exchange frames."""

from __future__ import annotations

import os
import select
import stat
from contextlib import closing
from pathlib import Path

import pytest

from meshwright.server.frames import FrameSocket, listen, start_connecting
from meshwright.spec.errors import BadInput


@pytest.mark.parametrize("length", [107, 108, 600])
def test_engines_of_one_host_meet_in_folders_with_long_names(tmp_path: Path, length: int) -> None:
    file = tmp_path
    while length - len(str(file)) > 102:
        file = file / ("f" * 100)
    file = file / ("s" * max(1, length - len(str(file)) - 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptors = os.listdir("/proc/self/fd")
    with closing(listen(f"unix:{file}")) as listening:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        end = start_connecting(f"unix:{file}")
        assert end is not None
        with closing(FrameSocket(end)) as one, closing(FrameSocket(listening.accept()[0])) as other:
            one.send({"text": "hello"})
            select.select([other], [], [], 60)
            assert [frame.message for frame in other.receive()] == [{"text": "hello"}]
    assert os.listdir("/proc/self/fd") == descriptors
    assert start_connecting(f"unix:{file}") is None


@pytest.mark.parametrize("name", ["missing/a", "missing/" + "a" * 150, "a" * 300])
def test_sockets_that_cannot_be_made_are_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="transfer_address: cannot listen at unix:"):
        listen(f"unix:{tmp_path}/{name}")
    assert start_connecting(f"unix:{tmp_path}/{name}") is None


def test_only_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    file, socket_file = tmp_path / "weights", tmp_path / "a"
    file.write_text("precious")
    with pytest.raises(BadInput, match="a file that is no socket is there; choose another"):
        listen(f"unix:{file}")
    assert file.read_text() == "precious"
    listen(f"unix:{socket_file}").close()
    assert socket_file.is_socket()
    with closing(listen(f"unix:{socket_file}")):
        with pytest.raises(BadInput, match="^address: cannot listen at unix:.*: another process listens there"):
            listen(f"unix:{socket_file}", "address")
        end = start_connecting(f"unix:{socket_file}")
        assert end is not None
        end.close()
