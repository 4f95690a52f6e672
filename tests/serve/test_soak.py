"""The short form of `make test-engine-soak`: its checks hold, and they find what they are for."""

from __future__ import annotations

import pytest
import serve_soak
from serve_soak import Soak, SoakError

from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.serve.engine import Engine
from meshwright.serve.generation import Update


def test_random_requests_end_as_they_must() -> None:
    soak = Soak(200, failing=25)
    soak.run()
    assert set(soak.reasons) == {"length", "stop", "deadline", "abort", "failed"}
    policy = soak.engine._policy
    assert policy.preemptions and policy.cached_tokens and soak.failures
    assert [share for share, _ in soak.memory] == [step / 20 for step in range(1, 21)]


def test_a_leaked_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = CacheBlocks.release, []

    def forgetful(blocks: CacheBlocks, tables: list[list[int]]) -> None:
        calls.append(tables)
        release(blocks, [table[:-1] for table in tables] if len(calls) == 5 else tables)

    monkeypatch.setattr(CacheBlocks, "release", forgetful)
    with pytest.raises(SoakError, match="1 cache blocks are not free"):
        Soak(20).run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda update: update._replace(reason="deadline"), "does not explain the reason"),
        (lambda update: update._replace(tokens=(95,) * len(update.tokens)), "an equal request got"),
    ],
)
def test_a_wrong_end_and_a_wrong_text_are_found(change, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def changed(engine: Engine) -> list[Update]:
        updates = step(engine)
        last = engine._next_number > 30
        return [change(update) if last and update.reason == "length" else update for update in updates]

    monkeypatch.setattr(Engine, "step", changed)
    monkeypatch.setattr(serve_soak, "CONTENTS", 3)
    with pytest.raises(SoakError, match=message):
        Soak(60).run()
