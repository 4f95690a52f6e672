"""One tiny model's folder for all tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from tests.server.helpers import NAME, RunningServer, running_server, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("server") / NAME)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, queue=3000) as running:
        yield running
