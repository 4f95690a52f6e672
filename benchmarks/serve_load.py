"""The HTTP server beside the engine in one process, with the same model, requests and times of arrival.

    python benchmarks/serve_load.py --model llama3-8b [--streams 256] [--requests 1024] [--arrivals 400] [--out FILE]
    python benchmarks/serve_load.py --tiny

The model has random weights and is written as a Hugging Face folder under `--folder`, which `meshwright serve` reads. First, `--streams`
requests are kept running until all have ended: new tokens per second. Then requests arrive at random times, at `--share` of the engine's
rate of requests before: time to the first token from a request's due time. Prints one JSON object; `throughput_ratio` and
`added_ttft_milliseconds` compare the server with the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from serve_arrivals import Arrivals, Times, arrivals, percentiles, serve
from serve_offline import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.checkpoint.hf import export_hf
from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine, EngineOptions
from meshwright.serve.sampling import SamplingOptions

TEMPERATURE = 0.6
END = "<|endoftext|>"


def main() -> None:
    options = _arguments()
    if options.clients is not None:
        asyncio.run(_run_clients(options.clients))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = compare(options, Path(folder, "model"))
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of both sides; the engine runs first and leaves the device to the server."""
    context = 2 * (options.prompt + options.new)
    model = random_model("tiny" if options.tiny else options.model, context=context)
    vocab = model.spec.vocab_size
    write_folder(model, folder)
    sizes = EngineOptions(sequences=options.streams, context=context, prefix_cache=False)
    burst = arrivals(options.prompt, options.new, float("inf"), options.requests, vocab)
    engine = Engine(model, options=sizes)
    keep_running(engine, burst, options.streams)
    seconds = keep_running(engine, burst, options.streams)
    rate = options.share * options.requests / seconds
    poisson = arrivals(options.prompt, options.new, rate, options.arrivals, vocab)
    alone = {"tokens_per_second": options.requests * options.new / seconds, "ttft": _first(serve(engine, poisson))}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    del engine, model
    gc.collect()
    torch.cuda.empty_cache()
    server = over_http(options, folder, context, burst, poisson)
    return {
        "benchmark": "serve_load",
        "model": "tiny" if options.tiny else options.model,
        "device": device,
        "torch": torch.__version__,
        "streams": options.streams,
        "prompt_tokens": options.prompt,
        "new_tokens": options.new,
        "requests": options.requests,
        "arrivals_per_second": rate,
        "arrivals": options.arrivals,
        "engine": alone,
        "server": server,
        "throughput_ratio": server["tokens_per_second"] / alone["tokens_per_second"],
        "added_ttft_milliseconds": server["ttft"]["p50"] - alone["ttft"]["p50"],
    }


def write_folder(model: Decoder, folder: Path) -> None:
    """The model as a Hugging Face folder, with a tokenizer of as many tokens."""
    alphabet = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())][: model.spec.vocab_size]
    words = alphabet + [f"Ġw{index}" for index in range(len(alphabet), model.spec.vocab_size)]
    plain: Any = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    plain.decoder = decoders.ByteLevel()
    path = folder.parent / "tokenizer.json"
    plain.save(str(path))
    weights = dict(model.named_parameters())
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[model.embed.weight.dtype]
    source = lambda name: weights[name].detach()  # noqa: E731
    export_hf(folder, model.spec, source, tokenizer=path, run_note="random weights", dtype=dtype, eos=END)


def keep_running(engine: Engine, requests: Arrivals, streams: int) -> float:
    """Seconds of all requests, `streams` of them at a time."""
    start, waiting = time.perf_counter(), enumerate(requests.prompts)
    while True:
        while engine.unfinished < streams and (following := next(waiting, None)) is not None:
            index, prompt = following
            engine.submit(
                prompt, new_tokens=requests.new_tokens, sampling=SamplingOptions(temperature=TEMPERATURE, seed=index)
            )
        if not engine.unfinished:
            return time.perf_counter() - start
        if error := next((update.error for update in engine.step() if update.error is not None), None):
            raise RuntimeError(error)


def over_http(
    options: argparse.Namespace, folder: Path, context: int, burst: Arrivals, poisson: Arrivals
) -> dict[str, Any]:
    """The same requests through `meshwright serve`, from a process of clients."""
    command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", "0", "--context", str(context)]
    command += [
        "--sequences",
        str(options.streams),
        "--queue",
        str(options.requests),
        "--no-prefix-cache",
        "--no-log-requests",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            port = _port(process)
            # Nobody reads what it prints further, and a full pipe would stop it.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return {
                **_clients(folder, {"port": port, "streams": options.streams, **vars(burst)}),
                **_clients(folder, {"port": port, "streams": None, **vars(poisson)}),
            }
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    """The port that the server prints once it is ready."""
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)) is not None:
            return int(found[1])
    raise RuntimeError(f"the server ended: {''.join(lines)[-2000:]}")


def _clients(folder: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Run clients in a process of their own; what they measured."""
    path = folder.parent / "work.json"
    path.write_text(json.dumps(work), encoding="utf-8")
    command = [sys.executable, __file__, "--clients", str(path)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


async def _run_clients(path: Path) -> None:
    work = json.loads(path.read_text(encoding="utf-8"))
    prompts, dues, new, streams = (work[name] for name in ("prompts", "dues", "new_tokens", "streams"))
    while not await _is_ready(work["port"]):
        await asyncio.sleep(0.2)
    slots = asyncio.Semaphore(streams or len(prompts))
    times = [Times(due) for due in dues]
    begin = time.perf_counter()

    async def request(index: int) -> None:
        await asyncio.sleep(max(0.0, begin + dues[index] - time.perf_counter()))
        async with slots:
            body = {"prompt": prompts[index], "max_tokens": new, "temperature": TEMPERATURE, "seed": index}
            received = await read_stream(work["port"], {**body, "ignore_eos": True, "stream": True})
            times[index].tokens += [at - begin for at in received]

    if streams:
        await request(0)
        times[0] = Times(dues[0])
        begin = time.perf_counter()
    await asyncio.gather(*(request(index) for index in range(len(prompts))))
    if streams:
        seconds = max(each.tokens[-1] for each in times)
        print(json.dumps({"tokens_per_second": len(prompts) * new / seconds}))
    else:
        print(json.dumps({"ttft": _first(times)}))


async def read_stream(port: int, body: dict[str, Any]) -> list[float]:
    """Times at which the events of a completion came; raises RuntimeError if it fails or ends early."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    times: list[float] = []
    text = b""
    while b"[DONE]" not in text:
        piece = await reader.read(1 << 16)
        if not piece or (not text and b" 200 " not in piece[:20]):
            raise RuntimeError(f"a stream failed: {(text + piece)[-500:]!r}")
        times += [time.perf_counter()] * piece.count(b"data: {")
        text = (text + piece)[-64:]
    writer.close()
    return times


async def _is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    if b'"failed"' in answer:
        raise RuntimeError("the engine failed")
    return b" 200 " in answer[:20]


def _first(times: list[Times]) -> dict[str, float]:
    return percentiles([1000 * each.first for each in times])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short requests, to try the command")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--arrivals", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.6, help="arrivals, as a share of the requests per second")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.streams, options.requests, options.arrivals, options.prompt, options.new = 8, 16, 8, 12, 8
    return options


if __name__ == "__main__":
    main()
