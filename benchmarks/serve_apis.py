"""What each API costs beside chat completions: host time of a token, throughput beside the engine alone, time to the first token.

    python benchmarks/serve_apis.py --out FILE.json    # 256 streams of 400 tokens, three passes: about six minutes
    python benchmarks/serve_apis.py --tiny             # seconds, to try the script

Runs `benchmarks/serve_http.py` for each API and each way in which a model writes; the runs of a pass take turns, and medians of the
passes are compared. The engine only counts, at a fixed number of steps per second. `engine` is its rate where a process only reads its
messages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

HTTP = Path(__file__).with_name("serve_http.py")
CASES = [
    ("chat", "plain"),
    ("chat", "think"),
    ("responses", "plain"),
    ("messages", "plain"),
    *((api, form) for form in ("inside", "tools") for api in ("chat", "responses", "messages")),
]
"""API and way of writing; the first is what the others are compared with, of equal `form` for the time to the first token."""


def run_http(*options: object) -> dict[str, Any]:
    """The figures of one run of `serve_http.py`."""
    command = [sys.executable, str(HTTP), *map(str, options)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def engine_rate(streams: int, tokens: int, steps_per_second: float) -> float:
    """Tokens per second of the engine, from the first step to the last, where this process only reads."""
    from meshwright.server.engine_process import EngineConnection

    ours, theirs = socket.socketpair()
    with theirs:
        options = ["--engine", str(theirs.fileno()), str(streams), "--steps-per-second", str(steps_per_second)]
        engine = subprocess.Popen([sys.executable, str(HTTP), *options], pass_fds=[theirs.fileno()])
    connection = EngineConnection(ours)
    for number in range(streams):
        connection.send({"submit": {"ids": [number], "new_tokens": tokens}})
    times: list[float] = []
    while len(times) < tokens:
        messages = connection.receive(wait=True)
        times += [time.perf_counter() for message in messages if "step" in message]
    ours.close()
    engine.wait(10)
    return streams * (tokens - 1) / (times[-1] - times[0])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The medians of all cases."""
    sizes = ["--streams", options.streams, "--tokens", options.tokens, "--steps-per-second", options.steps_per_second]
    whole: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in CASES}
    alone: dict[tuple[str, str], list[float]] = {case: [] for case in CASES}
    engine: list[float] = []
    for number in range(options.passes):
        order = CASES if number % 2 == 0 else CASES[::-1]
        engine.append(engine_rate(options.streams, options.tokens, options.steps_per_second))
        for api, form in order:
            whole[api, form].append(run_http("--api", api, "--form", form, *sizes))
            ttft = run_http(
                "--api", api, "--form", form, "--alone", options.alone, "--tokens", 4, "--steps-per-second", 5000
            )
            alone[api, form].append(ttft["ttft_ms"])
            print(json.dumps({**whole[api, form][-1], **ttft}), file=sys.stderr, flush=True)
    rate = statistics.median(engine)
    base = statistics.median(run["microseconds_per_token"] for run in whole[CASES[0]])
    rows = []
    for api, form in CASES:
        runs, ttft = whole[api, form], statistics.median(alone[api, form])
        cost = statistics.median(run["microseconds_per_token"] for run in runs)
        # From the first text to the last: the first token of each stream is not in the time.
        found = statistics.median(run["tokens_per_second"] for run in runs) * (options.tokens - 1) / options.tokens
        rows.append(
            {
                "api": api,
                "form": form,
                "microseconds_per_token": cost,
                "cost_ratio": round(cost / base, 3),
                "tokens_per_second": round(found),
                "throughput_ratio": round(found / rate, 4),
                "ttft_ms": ttft,
                "ttft_added_ms": round(ttft - statistics.median(alone["chat", form]), 3),
            }
        )
    return {"engine_tokens_per_second": round(rate), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps-per-second", type=float, default=100.0)
    parser.add_argument(
        "--alone", type=int, default=200, help="requests one after the other, for the time to the first token"
    )
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one pass of 16 streams of 30 tokens")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.streams, options.tokens, options.alone, options.passes = 16, 30, 10, 1
    sizes = {key: getattr(options, key) for key in ("streams", "tokens", "steps_per_second", "alone", "passes")}
    figures = {"benchmark": "serve_apis", "date": date.today().isoformat(), **sizes, **measure(options)}
    figures |= {"python": platform.python_version(), "cores": os.cpu_count()}
    text = json.dumps(figures, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
