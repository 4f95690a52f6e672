"""The admin port: pause, drain, newer weights; and a server that follows a run."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.format.inventory import Chosen
from meshwright.data.text_format import Token, read_text_format
from meshwright.server.app import admin_app
from meshwright.server.background import guarded
from meshwright.server.follow import Follower
from meshwright.spec.errors import BadInput
from tests.server.helpers import JSON, NAME, Answer, RunningServer, call, running_server, write_folder

REQUEST = json.dumps({"prompt": "def", "max_tokens": 12, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def own(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, admin_key="admin") as running:
        yield running


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with other weights of the same model."""
    from safetensors.torch import load_file, save_file

    folder = write_folder(tmp_path_factory.mktemp("other") / NAME)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


async def admin(server: RunningServer, method: str, path: str, body: Any = None, key: bytes = b"admin") -> Answer:
    content = b"" if body is None else json.dumps(body).encode()
    return await call(admin_app(server.api), method, path, content, [*JSON, (b"authorization", b"Bearer " + key)])


def text(server: RunningServer) -> str:
    answer = server.run(call(server.app, "POST", "/v1/completions", REQUEST, JSON))
    return json.loads(answer.body)["choices"][0]["text"]


def test_the_admin_port_has_its_own_key(own: RunningServer) -> None:
    assert own.run(admin(own, "GET", "/state")).status == 200
    for path in ("/state", "/pause", "/resume", "/drain", "/role", "/weights"):
        assert own.run(admin(own, "POST", path, {}, b"api")).status == 401


def test_requests_wait_for_the_end_of_a_pause(own: RunningServer) -> None:
    async def paused() -> None:
        assert json.loads((await admin(own, "POST", "/pause")).body)["state"] == "paused"
        task = asyncio.ensure_future(call(own.app, "POST", "/v1/completions", REQUEST, JSON))
        await asyncio.sleep(0.2)
        assert not task.done()
        await admin(own, "POST", "/resume")
        assert (await task).status == 200

    own.run(paused())


def test_a_drained_server_takes_requests_again(own: RunningServer) -> None:
    async def drained() -> list[int]:
        await admin(own, "POST", "/drain")
        refused = await call(own.app, "POST", "/v1/completions", REQUEST, JSON)
        await admin(own, "POST", "/resume")
        return [refused.status, (await call(own.app, "POST", "/v1/completions", REQUEST, JSON)).status]

    assert own.run(drained()) == [503, 200]


def test_newer_weights_without_a_restart(own: RunningServer, folder: Path, other: Path, tmp_path: Path) -> None:
    with running_server(other) as server:
        expected = text(server)
    before = text(own)
    assert expected != before
    assert own.run(admin(own, "POST", "/weights", {"folder": str(other)})).status == 200
    assert text(own) == expected
    for wrong, status in (({"folder": str(tmp_path)}, 422), ({"path": "x"}, 400), ({}, 400)):
        answer = own.run(admin(own, "POST", "/weights", wrong))
        assert answer.status == status and json.loads(answer.body)["error"]["message"]
    assert text(own) == expected  # a refusal changes nothing
    assert own.run(admin(own, "POST", "/weights", {"folder": str(folder)})).status == 200
    assert text(own) == before


def test_weights_for_other_texts_are_refused(own: RunningServer, other: Path, tmp_path: Path) -> None:
    """Their tokens would mean other texts, or texts would end elsewhere: the server's tokenizer and ends stay."""
    before, text_format = text(own), read_text_format(other)
    changed = {
        "different tokenizers": replace(text_format, tokenizer="0" * 16),
        "those of the server with": replace(text_format, stops=(*text_format.stops, Token(7, "h"))),
    }
    for number, (message, record) in enumerate(changed.items()):
        wrong = tmp_path / str(number)
        shutil.copytree(other, wrong)
        record.write(wrong)
        answer = own.run(admin(own, "POST", "/weights", {"folder": str(wrong)}))
        assert answer.status == 422 and message in json.loads(answer.body)["error"]["message"]
        with pytest.raises(BadInput, match=message):
            own.run(own.api.load(wrong))
    assert text(own) == before


def test_each_new_checkpoint_of_a_run_is_served(
    own: RunningServer, folder: Path, other: Path, monkeypatch: Any
) -> None:
    """The newest checkpoint changes from one folder to one that cannot be loaded, then to another.

    For a while no file can be opened: this ends nothing, and is counted.
    """
    last = Chosen(other, 3)
    looks = iter(
        [Chosen(folder, 1), OSError(24, "Too many open files"), Chosen(folder / "missing", 2), ValueError(), last]
    )
    before, served = text(own), list[Path]()

    def newest(run: Path) -> Chosen:
        found = next(looks, last)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("meshwright.server.follow.newest", newest)
    monkeypatch.setattr("meshwright.server.background.FIRST_PAUSE", 0.01)
    load = own.api.client.load

    async def load_and_note(path: Path) -> None:
        served.append(path)
        await load(path)

    monkeypatch.setattr(own.api.client, "load", load_and_note)

    async def following() -> None:
        follower = Follower(own.api, folder, folder, 0.01)
        task = asyncio.ensure_future(guarded("follow", follower.follow, own.api.client.metrics.task_failures))
        while len(served) < 2 or own.api.client._loading:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()

    own.run(following())
    assert served == [folder / "missing", other]
    metrics = own.run(call(own.app, "GET", "/metrics")).body
    assert b'meshwright:task_failures_total{model_name="tiny",task="follow"} 2' in metrics
    assert text(own) != before and own.api.client.weights == {"checkpoint": str(other)}
