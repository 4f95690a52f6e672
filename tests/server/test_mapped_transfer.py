"""Engines that map each other's cache: texts of one engine, no leak, and staging memory where a mapping fails.

Devices are emulated by files; `tests/gpu/test_mapped_memory.py` has those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.serve.mapped_blocks import Integers, OwnBlocks
from meshwright.serve.prefix_blocks import PrefixBlocks
from tests.server.emulated_mapping import EmulatedMapping
from tests.server.helpers import RunningServer, running_server
from tests.server.test_roles import (
    LONG_PROMPT,
    all_prompts,
    connected,
    engines,
    figures,
    next_message,
    texts,
    unused_address,
    wait_for_peers,
)
from tests.slow import quick_first


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedMapping]:
    emulated = EmulatedMapping(monkeypatch)
    yield emulated
    emulated.close()


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[list[str]]:
    """The texts of one engine of both roles."""
    return texts(server)


def forbid(*_: Any) -> None:
    raise AssertionError("blocks go through staging memory")


@pytest.mark.parametrize("damaged", quick_first(1, [True, False]))
@pytest.mark.parametrize("address", quick_first(1, ["unix:{}/a", "port"]))
def test_texts_with_blocks_copied_from_a_mapped_cache(
    folder: Path,
    tmp_path: Path,
    expected: list[list[str]],
    mapping: EmulatedMapping,
    monkeypatch: pytest.MonkeyPatch,
    damaged: bool,
    address: str,
) -> None:
    """With `damaged` some blocks change between their checksum and the copy."""
    true_sums, calls = OwnBlocks.sums, iter(range(10**6))

    def sums(blocks: OwnBlocks, tables: Sequence[Sequence[int]]) -> Integers:
        found = true_sums(blocks, tables)
        if damaged and next(calls) % 2:
            found[len(found) // 2, -1] ^= 1
        return found

    monkeypatch.setattr(OwnBlocks, "sums", sums)
    monkeypatch.setattr(PrefixBlocks, "read", forbid)
    address = address.format(tmp_path) if "unix" in address else unused_address()
    with engines(folder, [address], transfer_key="key") as (prefill, decode):
        wait_for_peers(decode)
        assert mapping.mapped == 1
        found = decode.run(all_prompts(decode))
        assert [[choice["text"] for choice in choices] for choices in found] == expected
        assert figures(decode).received_blocks > 3 and not figures(decode).lost_prompts
        assert bool(figures(decode).damaged_blocks) == damaged
        assert figures(prefill).sent_blocks > 20
    assert mapping.mapped == 0


def test_a_mapping_that_fails_leaves_staging_memory(
    folder: Path, tmp_path: Path, expected: list[list[str]], mapping: EmulatedMapping
) -> None:
    mapping.refused = True
    with engines(folder, [f"unix:{tmp_path}/a"]) as (_, decode):
        wait_for_peers(decode)
        assert texts(decode) == expected and figures(decode).received_blocks > 20


@pytest.mark.parametrize("way", quick_first(1, ["returns nothing", "leaves", "returns other blocks"]))
def test_a_receiver_that_fails_leaves_no_unreturned_blocks(
    folder: Path, tmp_path: Path, mapping: EmulatedMapping, way: str
) -> None:
    address = f"unix:{tmp_path}/a"
    with running_server(folder, role="prefill", transfer_address=address, transfer_seconds=0.3) as prefill:
        blocks = prefill.engine.prefix_blocks()
        assert blocks.own_blocks is not None
        receiver = connected(address, "", blocks.identity(), host=blocks.own_blocks.host)
        assert "cache" in next_message(receiver)
        receiver.send({"mapped": True})
        receiver.send({"prefill": LONG_PROMPT})
        while "mapped_blocks" not in next_message(receiver):
            pass
        assert not prefill.all_free, "unreturned blocks are kept"
        if way == "leaves":
            receiver.close()
        else:
            if way == "returns other blocks":
                receiver.send({"returned": 77})
            with pytest.raises(EOFError):
                while next_message(receiver):
                    pass
        prefill.settle()
        receiver.close()
