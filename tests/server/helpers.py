"""A tiny model's folder, and servers in the test's process whose engine runs in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.checkpoint.models.hf import export_hf
from meshwright.serve.engine import Engine
from meshwright.server.app import api_app
from meshwright.server.endpoints import Api
from meshwright.server.engine_client import EngineClient, connect
from meshwright.server.engine_process import EngineConnection, load_engine, serve_engine
from meshwright.server.engine_setup import EngineSetup
from meshwright.server.metrics import ServerMetrics
from meshwright.server.model_files import read_model_files
from meshwright.server.run import transfer_setup, uvicorn_server
from meshwright.spec.model import ModelSpec
from meshwright.spec.serve import ServeSpec
from tests.models.tiny import LLAMA
from tests.serve.helpers import tiny

T = TypeVar("T")
NAME = "tiny"
END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = {"sequences": 8, "step_tokens": 64, "tokens_per_block": 4, "cache_blocks": 400, "context": 192}


def byte_tokenizer(*special: str) -> Tokenizer:
    """A tokenizer whose tokens are the end of text, all bytes, and further special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0} | {char: index + 1 for index, char in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens([END, *special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_folder(folder: Path, spec: ModelSpec = LLAMA) -> Path:
    """A Hugging Face folder with a tiny model, a tokenizer of bytes, and a chat template."""
    spec = replace(spec, vocab_size=257)
    tokenizer = folder.with_suffix(".json")
    byte_tokenizer().save(str(tokenizer))
    model = tiny(spec)
    export_hf(folder, spec, iter(model.named_parameters()), tokenizer=tokenizer, run_note="", dtype="fp32")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Answer:
    """Answer of an application."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def call(
    app: Any, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
) -> Answer:
    """The answer of an ASGI application to one request of a client that stays connected."""
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # the client never disconnects
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Answer(sent[0]["status"], dict(sent[0]["headers"]), body)


JSON = [(b"content-type", b"application/json")]


@dataclass
class RunningServer:
    """A server and its engine, both in this process."""

    url: str
    api: Api
    engine: Engine
    loop: asyncio.AbstractEventLoop

    @property
    def app(self) -> Any:
        """The application, to be called on `loop`."""
        return api_app(self.api, loopback=True)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def settle(self) -> None:
        """Wait until no request is left; then no block of the cache may be in use."""
        deadline = time.monotonic() + 60
        while self.engine.unfinished or self.api.client.unfinished:
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.005)
        while self.api.spec.exchanges and not self.all_free and time.monotonic() < deadline:
            time.sleep(0.005)  # another engine may have to acknowledge some
        assert self.all_free

    @property
    def all_free(self) -> bool:
        """Whether no block of the cache is in use."""
        return all(pool.free == pool.blocks for pool in self.engine._policy.cache.pools)


@contextmanager
def running_server(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    """A server for the model in `folder`, at a free port of this machine."""
    spec = ServeSpec(**{**SIZES, "name": NAME, "log_requests": False, **settings})
    tokenizer = str(read_model_files(folder).tokenizer_file)
    engine = load_engine(EngineSetup(folder=str(folder), tokenizer=tokenizer, options=spec.engine))
    with running_api(folder, spec, partial(serve_engine, engine, transfer=transfer_setup(spec))) as (url, api, loop):
        yield RunningServer(url, api, engine, loop)


@contextmanager
def running_api(
    folder: Path, spec: ServeSpec, engine: Callable[[EngineConnection], None]
) -> Iterator[tuple[str, Api, asyncio.AbstractEventLoop]]:
    """The API for the tokenizer in `folder` at a free port, with its loop; `engine` runs the other end of its socket."""
    files = read_model_files(folder, defaults=spec.generation_config == "auto")
    ours, theirs = socket.socketpair()
    engine_thread = threading.Thread(target=engine, args=(EngineConnection(theirs),))
    engine_thread.start()
    listening = socket.create_server(("127.0.0.1", 0))
    ready, stop = threading.Event(), threading.Event()
    found: list[tuple[str, Api, asyncio.AbstractEventLoop]] = []

    async def run() -> None:
        api = Api(spec, NAME, files, EngineClient(ServerMetrics(NAME)))
        await connect(api.client, ours)
        server = uvicorn_server(api_app(api, loopback=True))
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started or api.client.ready is None:
            await asyncio.sleep(0.005)
        found.append((f"http://127.0.0.1:{listening.getsockname()[1]}", api, asyncio.get_running_loop()))
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        server.should_exit = True
        await task
        api.workers.close()
        api.client.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        stop.set()
        thread.join()
        engine_thread.join()
        theirs.close()
