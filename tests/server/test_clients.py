"""OpenAI's own client against a server: completions, chats, streams, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.helpers import NAME, RunningServer, running_server, write_folder

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
KEY = "a key of this test"
PROMPT = "def read"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_folder(tmp_path_factory.mktemp("server") / NAME)
    with running_server(folder, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def expected(server: RunningServer, prompt: str, count: int) -> str:
    """The greedy continuation by an engine of its own."""
    from meshwright.serve.engine import Engine, EngineOptions
    from tests.serve.helpers import greedy, tiny  # noqa: F401

    tokenizer = server.api.files.tokenizer
    raise NotImplementedError


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    print(answer)
    pieces = list(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stream=True))
    print(pieces)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
