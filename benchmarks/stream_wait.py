"""How long steps wait for text that is streamed from an S3 server with latency and faults.

    python -m benchmarks.stream_wait [--seconds 60] [--ranks 1] [--rate 2] [--delay 0.03] [--faulty 0.01]

Each rank is a process whose steps sleep for as long as `--rate` MB of text a second last. The server is that of the tests (`make
test-storage` installs it), in a process of its own; text comes from the Python files of this environment. A line of JSON for each rank: the
share of the time in which it waited after its first `--warm-up` seconds, the longest wait, and the wait before.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

SEQ_LEN, BATCH, GROUP_BYTES, FILES = 2048, 16, 256 << 10, 8


def texts(most: int) -> list[str]:
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if 1000 < len(text) < 100_000:
            found.append(text)
            size += len(text)
        if size > most:
            return found
    return found


def serve(folder: Path, delay: float, faulty: float, size: int) -> None:
    """Fill a bucket and answer until standard input ends; writes the port of the proxy."""
    from urllib.request import Request, urlopen

    import pyarrow
    import pyarrow.parquet
    from tests.checkpoint.s3 import Server
    from tests.data.streams.answers import AnswerProxy

    from meshwright.data.tokenizer import train_tokenizer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server, all_texts = Server(), texts(size)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(all_texts[:: len(all_texts) // 100], 4096))
    rows = max(len(all_texts) * GROUP_BYTES // sum(map(len, all_texts)), 1)
    for number in range(FILES):
        file = folder / f"part-{number}.parquet"
        table = pyarrow.table({"text": all_texts[number::FILES]})
        pyarrow.parquet.write_table(table, file, row_group_size=rows, compression="zstd", use_dictionary=False)
        url = f"http://127.0.0.1:{server.port}/runs/web/{file.name}"
        headers = {"Content-Type": "application/octet-stream"}
        with urlopen(Request(url, file.read_bytes(), headers, method="PUT"), timeout=60):
            file.unlink()
    proxy = AnswerProxy(server.port)
    proxy.delay, proxy.faulty, proxy.kinds = delay, faulty, ("503", "cut", "short", "reset", "stall")
    print(proxy.port, flush=True)
    sys.stdin.read()
    print(json.dumps({"requests": proxy.requests, "faults": proxy.faults}), flush=True)


def rank(folder: Path, number: int, ranks: int, rate: float, seconds: float, warm_up: float) -> None:
    """Read steps for some seconds, and write the line of a rank."""
    from meshwright.data.loader import Loader, Windows, open_data
    from meshwright.spec.job import DataSpec, StreamSpec

    spec = DataSpec(
        mix={"web": 1.0},
        streams={"web": StreamSpec(files="s3://runs/web/*.parquet")},
        tokenizer=str(folder / "tokenizer.json"),
        cache=str(folder / f"cache-{number}"),
        lanes=BATCH * ranks,
    )
    data = open_data(spec, seq_len=SEQ_LEN, seed=0)
    bytes_per_token = 1 / data.streams["web"].index.tokens_per_byte
    step_seconds = BATCH * SEQ_LEN * bytes_per_token / (rate * 1e6)
    reader = Windows(data, global_batch=BATCH * ranks, data_rank=number, data_ranks=ranks, micro_batch=1)
    waits, started = [], time.monotonic()
    with Loader(reader) as loader:
        while (now := time.monotonic() - started) < seconds:
            next(loader)
            waits.append((now, loader.wait_seconds))
            time.sleep(step_seconds)
    early = [wait for now, wait in waits if now < warm_up]
    late = [wait for now, wait in waits if now >= warm_up]
    line = {
        "rank": number,
        "steps": len(waits),
        "step_seconds": round(step_seconds, 4),
        "text_mb": round(len(waits) * BATCH * SEQ_LEN * bytes_per_token / 1e6, 1),
        "wait_share": round(sum(late) / (len(late) * step_seconds), 5),
        "longest_wait": round(max(late), 4),
        "waits_over_10_ms": sum(wait > 0.01 for wait in late),
        "wait_before": round(sum(early), 2),
        **data.epochs(len(waits) * BATCH * ranks),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--delay", type=float, default=0.03)
    parser.add_argument("--faulty", type=float, default=0.01)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "serve":
        serve(options.folder, options.delay, options.faulty, options.megabytes << 20)
        return
    if options.role:
        rank(options.folder, int(options.role), options.ranks, options.rate, options.seconds, options.warm_up)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.stream_wait", *sys.argv[1:], "--folder", folder, "--role"]
        server = subprocess.Popen([*command, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdin is not None
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}"}
        running = [subprocess.Popen([*command, str(number)]) for number in range(options.ranks)]
        for each in running:
            each.wait()
        server.stdin.close()
        print(server.stdout.read().strip())


if __name__ == "__main__":
    main()
