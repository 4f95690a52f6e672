"""The engine's loop: when it takes messages."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from meshwright.server.engine_process import EngineConnection, EngineLoop, load_engine
from meshwright.server.engine_setup import EngineSetup
from meshwright.server.messages import ServerMessageReader, encode
from meshwright.server.packed_ids import ids_as_text
from tests.server.helpers import SIZES

REQUEST = {
    "tokens": ids_as_text([5, 6, 7] * 9),
    "new_tokens": 100,
    "sampling": {},
    "stop_ids": [],
    "grammar": None,
    "priority": 0,
    "salt": "",
}


def test_a_request_that_is_aborted_in_a_step_has_no_blocks_after_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(EngineSetup(folder=str(folder), tokenizer=None, options={**SIZES, "prefix_cache": False}))
    pools, step, free = engine._policy.cache.pools, engine.step, []
    ours, theirs = socket.socketpair()

    def watched_step() -> Any:
        if len(free) == 2:
            ours.sendall(encode({"abort": [0]}))
        updates = step()
        free.append(all(pool.free == pool.blocks for pool in pools))
        if len(free) == 4:
            ours.shutdown(socket.SHUT_WR)
        return updates

    monkeypatch.setattr(engine, "step", watched_step)
    with ours, theirs:
        ours.sendall(encode({"submit": {"ids": [0], **REQUEST}}))
        EngineLoop(engine, EngineConnection(theirs)).run()
        messages = ServerMessageReader().add(ours.recv(1 << 20))
    assert free == [False, False, False, True]
    assert [entry[2] for message in messages for entry in message["step"] if len(entry) > 2] == [{"reason": "abort"}]
