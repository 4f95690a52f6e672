"""How long steps wait for text that is streamed from an S3 server with latency and faults.

    python benchmarks/stream_wait.py [--seconds 60] [--ranks 1] [--rate 2] [--delay 0.03] [--faulty 0.01]

Each rank is a process whose steps sleep for as long as `--rate` MB of text a second last. The server is that of the tests (`make
test-storage` installs it), in a process of its own; text comes from the Python files of this environment. A line of JSON for each rank: the
share of the time in which it waited after its first `--warm-up` seconds, the longest wait, and the wait before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from text_bucket import TOKENIZER, URL, bucket

SEQ_LEN, BATCH = 2048, 16


def rank(folder: Path, number: int, ranks: int, rate: float, seconds: float, warm_up: float) -> None:
    """Read steps for some seconds, and write the line of a rank."""
    from meshwright.data.loader import Loader, Windows, open_data
    from meshwright.spec.job import DataSpec, StreamSpec

    spec = DataSpec(
        mix={"web": 1.0},
        streams={"web": StreamSpec(files=URL)},
        tokenizer=str(folder / TOKENIZER),
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
    if options.role:
        rank(options.folder, int(options.role), options.ranks, options.rate, options.seconds, options.warm_up)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--role"]
        with bucket(Path(folder), options.megabytes, delay=options.delay, faulty=options.faulty) as counts:
            running = [subprocess.Popen([*command, str(number)]) for number in range(options.ranks)]
            for each in running:
                each.wait()
        print(json.dumps(counts))


if __name__ == "__main__":
    main()
