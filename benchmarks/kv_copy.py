"""Cache blocks between two engines: rate of the copy kernel, parts of a transfer, and time to first token with a remote prefill.

    python benchmarks/kv_copy.py [--model llama3-8b] [--prompt 4096] [--out FILE]     # two processes on one GPU, or on two
    python benchmarks/kv_copy.py --tiny                                               # a tiny model, seconds on a CPU

First, on GPUs: another process owns the cache of a prompt, and this one maps it and copies it by one kernel, which also computes
checksums. Beside that stand torch's copy of as many bytes on this device, and from the other device where there are two. Rates count the
bytes of the prompt once.

Then two engines with random weights, a prefill and a decode one, on one GPU or on one each. Prompts with one new token are computed by the
decode engine itself and by the prefill engine in turn, first with staging memory (`--staging` leaves it at that), then with mapped caches.
The parts of a transfer are medians: `send` is the sender's work from computed blocks to their message (checksums, or the copy to staging
memory), `copy` the receiver's work with it, `message` the time in between. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve_arrivals import random_prompt

WARM_UP = 3
BUSY_CYCLES = 5_000_000
"""Clock cycles for which the device is busy before work that is timed on it: some milliseconds."""
START_SECONDS = 300.0
Spans = list[tuple[float, float]]
"""Begin and end of each, in seconds of the clock that all processes share."""


def random_blocks(blocks: int, block_bytes: int) -> Any:
    """As many blocks of random bytes on this process's device, `(blocks, bytes)`."""
    import torch

    return torch.randint(0, 256, (blocks, block_bytes), dtype=torch.uint8, device="cuda")


def own(blocks: int, block_bytes: int) -> None:
    """The owner's process: print what it offers, and stay until its input ends."""
    from meshwright.serve.mapped_blocks import OwnBlocks

    owner = OwnBlocks([random_blocks(blocks, block_bytes)])
    sums = owner.sums([[block] for block in range(blocks)]).tolist()
    print(json.dumps({"offer": owner.offer(), "sums": sums, "seconds": sums_seconds(owner, blocks)}), flush=True)
    sys.stdin.read()


def sums_seconds(owner: Any, blocks: int) -> float:
    """Time of the checksums of all blocks, read back."""
    return median_seconds(lambda: owner.sums([[block] for block in range(blocks)]))


def median_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of some work on the device, from its launch to its end."""
    import torch

    times = []
    for _ in range(WARM_UP + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def device_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of some work on the device alone: the host launches it while the device is busy."""
    import torch

    times = []
    for _ in range(WARM_UP + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[WARM_UP:])


def copy_rates(blocks: int, block_bytes: int, devices: int) -> dict[str, Any]:
    """Time and rate of the kernel out of another process's blocks, and of torch's copies of as many bytes."""
    import torch

    from meshwright.kernels.range_copies import copy_ranges
    from meshwright.serve.mapped_blocks import OwnBlocks

    command = [sys.executable, __file__, "--own", str(blocks), str(block_bytes)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible(devices - 1)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        owned = json.loads(process.stdout.readline())
        contents, size = random_blocks(blocks, block_bytes), blocks * block_bytes
        target = OwnBlocks([contents])
        mapped = target.map(owned["offer"])
        order = random.Random(0).sample(range(blocks), blocks)
        tables = [[block] for block in order]
        copied = target.copy(mapped, tables, tables)
        assert copied.tolist() == [owned["sums"][block] for block in order], "what was copied has other checksums"
        sources = mapped.addresses(tables)[:, 0].tolist()
        ranges = torch.tensor(
            [(source, contents[block].data_ptr(), block_bytes) for source, block in zip(sources, order, strict=True)]
        )
        device = torch.device("cuda", 0)
        kernel = device_seconds(lambda: copy_ranges(ranges, device))
        whole = median_seconds(lambda: target.copy(mapped, tables, tables))
        local, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        own_copy = device_seconds(lambda: local.copy_(other))
        seconds = {
            "kernel": kernel,
            "kernel_and_checksums_read": whole,
            "sender_checksums": owned["seconds"],
            "device_copy": own_copy,
        }
        if devices > 1:
            remote = torch.empty(size, dtype=torch.uint8, device="cuda:1")
            seconds["peer_copy"] = device_seconds(lambda: local.copy_(remote))
        mapped.close()
        process.stdin.close()
    return {
        "devices": devices,
        "bytes": size,
        "milliseconds": {name: 1000 * value for name, value in seconds.items()},
        "gigabytes_per_second": {name: size / value / 1e9 for name, value in seconds.items()},
        "kernel_over_device_copy": own_copy / kernel,
    }


def visible(device: int) -> str:
    """`CUDA_VISIBLE_DEVICES` of a process for one of this process's devices."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[device] if given else str(device)


def run_engine(end: socket.socket, options: argparse.Namespace) -> None:
    """The process of an engine: serve the other end of the socket, then print the spans of its transfers."""
    from serve_offline import random_model

    from meshwright.parallel import mapped_memory
    from meshwright.serve.engine import Engine
    from meshwright.server.engine_process import EngineConnection, serve_engine
    from meshwright.server.mapped_transfer import MappedReceiver, MappedSender
    from meshwright.server.prefill_jobs import PrefillJobs
    from meshwright.server.remote_prefill import RemotePrefill
    from meshwright.server.transfers import TransferSetup
    from meshwright.spec.engine import EngineOptions

    if options.transport == "staging":
        mapped_memory.mappable = lambda device: False
    spans: dict[str, Spans] = {"send": [], "copy": []}
    for owner, method, name in (
        (MappedSender, "send", "send"),
        (PrefillJobs, "_send_run", "send"),
        (MappedReceiver, "copy", "copy"),
        (RemotePrefill, "_copy", "copy"),
    ):
        if (owner in (MappedSender, MappedReceiver)) == (options.transport == "mapped"):
            setattr(owner, method, timed(getattr(owner, method), spans[name]))
    context = options.prompt + 64
    sizes = EngineOptions(sequences=8, context=context, cache_blocks=4 * -(-context // 16), texts=False)
    engine = Engine(random_model(options.model, context), options=sizes)
    address = f"unix:{options.address}"
    role = options.engine_role
    setup = TransferSetup(
        role=role, address=address if role == "prefill" else None, peers=() if role == "prefill" else (address,)
    )
    serve_engine(engine, EngineConnection(end), setup)
    print(json.dumps(spans))


def timed(work: Callable[..., Any], spans: Spans) -> Callable[..., Any]:
    """Work that notes when it began and ended."""

    def measured(*given: Any) -> Any:
        start = time.perf_counter()
        result = work(*given)
        spans.append((start, time.perf_counter()))
        return result

    return measured


class EngineEnd:
    """One engine's process, and this process's end of its socket."""

    def __init__(self, options: argparse.Namespace, role: str, transport: str, address: str, device: int) -> None:
        from meshwright.server.messages import ServerMessageReader

        self._end, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--model", options.model, "--prompt", str(options.prompt)]
        command += [
            "--engine",
            str(theirs.fileno()),
            "--engine-role",
            role,
            "--transport",
            transport,
            "--address",
            address,
        ]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible(device)},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
            )
        self._reader, self._messages = ServerMessageReader(), deque[dict[str, Any]]()
        self._end.settimeout(START_SECONDS)

    def wait_until_ready(self) -> dict[str, Any]:
        """Sizes of the engine, once it has loaded its model."""
        return self._next("ready")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of the HTTP process."""
        from meshwright.server.messages import encode

        self._end.sendall(encode(message))

    def wait_for_peer(self) -> None:
        """Wait until the engine has a peer that computes prompts."""
        while not self._next("transfers")[5]:
            pass

    def first_token_seconds(self, number: int, prompt: Sequence[int]) -> float:
        """Time from a request to its only token."""
        from meshwright.server.packed_ids import ids_as_text

        request = {
            "ids": [number],
            "tokens": ids_as_text(prompt),
            "sampling": {"temperature": 0.0},
            "new_tokens": 1,
            "stop_ids": [],
            "grammar": None,
            "priority": 0,
            "salt": "",
        }
        start = time.perf_counter()
        self.send({"submit": request})
        while not any(entry[0] == number and entry[1] for entry in self._next("step")):
            pass
        return time.perf_counter() - start

    def _next(self, key: str) -> Any:
        """The value of the next message with a key; messages before it are dropped."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                if "failed" in message:
                    raise RuntimeError(str(message))
                if key in message:
                    return message[key]
            data = self._end.recv(1 << 20)
            if not data:
                raise RuntimeError("an engine has ended")
            self._messages += self._reader.add(data)

    def finish(self) -> dict[str, Any]:
        """End the engine; the spans that it prints."""
        self._end.close()
        out, _ = self._process.communicate()
        return json.loads(out)


def first_tokens(options: argparse.Namespace, transport: str, devices: int) -> dict[str, Any]:
    """Times to first token of prompts that the decode engine computes and of prompts that come from the prefill engine, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            EngineEnd(options, role, transport, f"{folder}/blocks", device)
            for role, device in (("prefill", devices - 1), ("decode", 0))
        ]
        prefill, decode = ends
        vocab = [end.wait_until_ready()["vocab"] for end in ends][-1]
        decode.wait_for_peer()
        draw, seconds = random.Random(0), {"local": [], "remote": []}
        for turn in range(WARM_UP + options.repeats):
            for number, (name, role) in enumerate((("local", "both"), ("remote", "decode"))):
                decode.send({"role": role})
                prompt = random_prompt(draw, options.prompt, vocab)
                seconds[name].append(decode.first_token_seconds(2 * turn + number, prompt))
        received, sent = decode.finish(), prefill.finish()
    kept = {name: values[WARM_UP:] for name, values in seconds.items()}
    medians = {name: 1000 * statistics.median(values) for name, values in kept.items()}
    return {
        "transport": transport,
        "ttft_milliseconds": medians,
        "remote_over_local": medians["remote"] / medians["local"],
        "transfer_milliseconds": parts(sent["send"], received["copy"], options.repeats),
    }


def parts(sends: Sequence[Sequence[float]], copies: Sequence[Sequence[float]], repeats: int) -> dict[str, float]:
    """Median milliseconds of the parts of a prompt's transfer; a prompt has one or more messages."""
    each = len(copies) // (WARM_UP + repeats)
    transfers = []
    for turn in range(WARM_UP, WARM_UP + repeats):
        sent, copied = (spans[turn * each : (turn + 1) * each] for spans in (sends, copies))
        work = [sum(end - start for start, end in spans) for spans in (sent, copied)]
        whole = copied[-1][1] - sent[0][0]
        transfers.append((work[0], whole - sum(work), work[1], whole))
    names = ("send", "message", "copy", "whole")
    return {
        name: 1000 * statistics.median(values) for name, values in zip(names, zip(*transfers, strict=True), strict=True)
    }


def prompt_blocks(options: argparse.Namespace) -> tuple[int, int]:
    """Blocks of a prompt, and bytes of one."""
    from meshwright.config.presets import MODEL_PRESETS
    from meshwright.spec.engine import EngineOptions

    values, tokens = MODEL_PRESETS[options.model], EngineOptions().tokens_per_block
    head_dim = values.get("head_dim") or values["hidden"] // values["heads"]
    return options.prompt // tokens, tokens * values["layers"] * 2 * values["kv_heads"] * head_dim * 2


def main() -> None:
    """Parse the arguments and print the figures."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help='a preset, or "tiny"')
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=10, help="prompts of each kind")
    parser.add_argument("--devices", type=int, help="1 or 2; else 2 where there are two")
    parser.add_argument("--transports", nargs="*", default=["staging", "mapped"], help="of the engines")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--own", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, metavar="FD", help=argparse.SUPPRESS)
    for name in ("--engine-role", "--transport", "--address"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.model, options.prompt, options.repeats, options.transports = "tiny", 100, 3, ["staging"]
    if options.own:
        own(*options.own)
        return
    if options.engine is not None:
        run_engine(socket.socket(fileno=options.engine), options)
        return
    found = torch.cuda.device_count()
    devices = options.devices or min(2, max(1, found))
    result: dict[str, Any] = {
        "benchmark": "kv_copy",
        "model": options.model,
        "prompt_tokens": options.prompt,
        "devices": devices,
        "device": torch.cuda.get_device_name() if found else "cpu",
        "torch": torch.__version__,
    }
    if found:
        result["copies"] = [copy_rates(*prompt_blocks(options), count) for count in range(1, devices + 1)]
        torch.cuda.empty_cache()
    result["first_tokens"] = [first_tokens(options, transport, devices) for transport in options.transports]
    text = json.dumps(result)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
