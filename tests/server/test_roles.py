"""Engines of several roles: their texts are those of one engine, whatever is lost between them, and no block leaks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import JSON, RunningServer, call, running_server

PROMPTS = ["a" * 40, "the quick brown fox jumps over the lazy dog " * 3, "x", "the quick brown fox jumps over it"]


async def completion(server: RunningServer, prompt: str, **options: Any) -> Any:
    body = json.dumps({"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **options}).encode()
    answer = await call(server.app, "POST", "/v1/completions", body, JSON)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["choices"]


def texts(server: RunningServer, **options: Any) -> list[list[str]]:
    return [[choice["text"] for choice in server.run(completion(server, prompt, **options))] for prompt in PROMPTS]


@contextmanager
def engines(folder: Path, addresses: Sequence[str], decoders: int = 1, **settings: Any) -> Iterator[list[RunningServer]]:
    """Servers of the role prefill at `addresses`, and then those of the role decode."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_server(folder, role="prefill", transfer_address=address, **settings))
            for address in addresses
        ]
        for _ in range(decoders):
            decoder = running_server(folder, role="decode", prefill_engines=",".join(addresses), **settings)
            servers.append(stack.enter_context(decoder))
        yield servers
        for server in servers:
            server.settle()


def test_texts_with_prompts_from_another_engine(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    expected = texts(server)
    with engines(folder, [f"unix:{tmp_path}/a"]) as (prefill, decode):
        assert texts(decode) == expected
        assert decode.api.client.transfers.received_blocks > 40
