"""Other clients while one sends the largest bodies: the p99 of /health, and the gaps between the tokens of four streams.

    python benchmarks/serve_large_bodies.py            # 20 s for each kind of body
    python benchmarks/serve_large_bodies.py --tiny     # 2 s each, bodies of 300 KB
    python benchmarks/serve_large_bodies.py --source OTHER/src

Prints one JSON line. `meshwright serve` of a tiny model with a tokenizer of 32,768 tokens, trained on Python's library. `--source` measures
the package of another commit. While four streams run, one client sends one body after the other; gaps are in milliseconds.

- `none`: no such client
- `refused`: a text of the largest body, which cannot fit into the context
- `encoded`: the longest text that could fit; its tokens do not
- `accepted`: a short prompt beside a text of the largest body that has no effect
- `ids`: token ids, more than the context has
- `chat`: a chat of the largest body
- `tokenize`, `detokenize`: bodies of 1 MiB
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODES = ("none", "refused", "encoded", "accepted", "ids", "chat", "tokenize", "detokenize")
VOCAB = 32_768
STREAMS = 4
CONTEXT = 16_384
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def library_text(most: int) -> str:
    """The source of Python's library, up to `most` characters."""
    texts, characters = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts and characters < most:
            texts.append(file.read_text(encoding="utf-8", errors="ignore"))
            characters += len(texts[-1])
    return "".join(texts)[:most]


def write_model(folder: Path, text: str) -> None:
    """A Hugging Face folder with a tiny model and the tokenizer."""
    import torch

    from meshwright.checkpoint.models.hf import export_hf
    from meshwright.data.tokenizer import train_tokenizer
    from meshwright.models.decoder import Decoder
    from meshwright.models.initial_values import initialise
    from meshwright.spec.model import ModelSpec

    tokenizer = folder.with_suffix(".json")
    tokenizer.write_bytes(train_tokenizer([text], VOCAB))
    vocab = max(json.loads(tokenizer.read_bytes())["model"]["vocab"].values()) + 1
    spec = ModelSpec(
        family="llama",
        layers=1,
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        ffn_hidden=64,
        vocab_size=vocab,
        max_seq_len=CONTEXT,
    )
    model = Decoder(spec)
    initialise(model, spec, 0)
    export_hf(
        folder, spec, iter(model.to(torch.float32).named_parameters()), tokenizer=tokenizer, run_note="", dtype="fp32"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def body_of(mode: str, text: str, most: int) -> tuple[str, bytes]:
    """Path and body of an attacking request."""
    small = min(most, 1 << 20)
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "refused": ("/v1/completions", {"prompt": fitted(text, most)}),
        "encoded": ("/v1/completions", {"prompt": text[: min(most * 9 // 10, CONTEXT * 115)]}),
        "accepted": ("/v1/completions", {"prompt": "x", "max_tokens": 1, "user": fitted(text, most)}),
        "ids": ("/v1/completions", {"prompt": [1000] * (most // 6 - 20)}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": fitted(text, most)}]}),
        "tokenize": ("/tokenize", {"prompt": fitted(text, small)}),
        "detokenize": ("/detokenize", {"tokens": [1000] * (small // 6 - 20)}),
    }
    path, value = bodies[mode]
    return path, json.dumps(value).encode()


def fitted(text: str, most: int) -> str:
    """As much of a text as a body of `most` bytes can have."""
    size = most - 200
    while len(json.dumps(text[:size])) > most - 200:
        size = size * 99 // 100
    return text[:size]


def message(method: str, path: str, body: bytes) -> bytes:
    """The bytes of an HTTP request."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, path: str, body: bytes | None = None) -> int:
    """The status of an answer, once all of it has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message("GET", path, b"") if body is None else message("POST", path, body))
    status = int((await reader.readline()).split()[1])
    while await reader.read(1 << 20):
        pass
    writer.close()
    return status


async def stream(port: int, gaps: list[float], measuring: asyncio.Event, stop: asyncio.Event) -> None:
    """Read one stream after the other, and note the seconds between two events."""
    body = json.dumps({"prompt": "def", "max_tokens": CONTEXT // 2, "ignore_eos": True, "stream": True}).encode()
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(message("POST", "/v1/completions", body))
        last, ending = None, b""
        while not stop.is_set() and b"[DONE]" not in ending:
            data = await reader.read(1 << 16)
            now = time.perf_counter()
            if last is not None and measuring.is_set():
                gaps.append(now - last)
            last, ending = now, (ending + data)[-64:]
            if not data:
                raise RuntimeError(f"a stream ended early: {ending!r}")
        writer.close()


async def measure(port: int, seconds: float) -> dict[str, Any]:
    """The figures of this many seconds."""
    gaps: list[float] = []
    health: list[float] = []
    measuring, stop = asyncio.Event(), asyncio.Event()
    streams = [asyncio.ensure_future(stream(port, gaps, measuring, stop)) for _ in range(STREAMS)]
    await asyncio.sleep(1.0)
    measuring.set()
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        assert await ask(port, "/health") == 200
        health.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    measuring.clear()
    stop.set()
    await asyncio.gather(*streams)
    return {
        "health_p99": milliseconds(health, 0.99),
        "health_max": milliseconds(health, 1.0),
        "gap_p50": milliseconds(gaps, 0.5),
        "gap_p99": milliseconds(gaps, 0.99),
        "gap_max": milliseconds(gaps, 1.0),
        "gaps": len(gaps),
    }


def milliseconds(values: list[float], share: float) -> float:
    """The value below which this share of the values is."""
    return round(1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 1)


async def attack(port: int, path: str, file: str) -> None:
    """Send one body after the other until the parent ends this process; print the status of each."""
    body = Path(file).read_bytes()
    while True:
        print(await ask(port, path, body), flush=True)


async def chat_seconds(port: int, count: int) -> float:
    """Median milliseconds of a small chat with one token."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        assert await ask(port, "/v1/chat/completions", body) == 200
        times.append(time.perf_counter() - began)
    return milliseconds(times, 0.5)


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each kind of body")
    parser.add_argument("--body-bytes", type=int, default=8 << 20)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--source", type=Path, help="folder with the package that serves")
    parser.add_argument("--tiny", action="store_true", help="2 s each, bodies of 300 KB")
    parser.add_argument("--attack", nargs=3, metavar=("PORT", "PATH", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        port, path, file = options.attack
        asyncio.run(attack(int(port), path, file))
        return
    seconds, most = (2.0, 300_000) if options.tiny else (options.seconds, options.body_bytes)
    text = library_text(max(3_000_000, most))
    environment = dict(os.environ)
    if options.source:
        environment["PYTHONPATH"] = str(options.source)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, text[:3_000_000])
        command = [sys.executable, "-m", "meshwright", "serve", str(model), "--port", "0", "--no-log-requests"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            asyncio.run(chat_seconds(port, 20))
            figures["chat_milliseconds"] = asyncio.run(chat_seconds(port, 100))
            for mode in options.modes.split(","):
                sender = None
                if mode != "none":
                    path, body = body_of(mode, text, most)
                    (Path(folder) / "body").write_bytes(body)
                    words = ["--attack", str(port), path, str(Path(folder) / "body")]
                    sender = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
                figures[mode] = asyncio.run(measure(port, seconds))
                if sender is not None:
                    sender.kill()
                    statuses = sender.communicate()[0].split()
                    figures[mode] |= {
                        "body_bytes": len(body),
                        "bodies": len(statuses),
                        "statuses": sorted(set(statuses)),
                    }
            server.terminate()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "streams": STREAMS,
                "context": CONTEXT,
                **figures,
                "python": platform.python_version(),
                "tokenizers": version("tokenizers"),
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
