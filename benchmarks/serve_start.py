"""Start of a server: seconds from the command to the first token of a request.

    python benchmarks/serve_start.py runs/quickstart
    python benchmarks/serve_start.py FOLDER --repeats 5

Prints one JSON object. The first start reads files that no process has read lately, if so; `first_token_seconds` has one value for each.
`cpu_seconds` are those of the HTTP process and of the engine's up to then: where other jobs share the cores, they say more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def start(folder: Path) -> tuple[float, float, list[float]]:
    """Seconds until a server says that it is ready, and until its first token; CPU seconds of its processes."""
    command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", "0", "--no-log-requests"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        ready = time.perf_counter() - begin
        body = json.dumps({"prompt": "def", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        first = time.perf_counter() - begin
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        cpu = [cpu_seconds(process) for process in (str(server.pid), *children)]
        server.terminate()
    return ready, first, cpu


def cpu_seconds(process: str) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ready, first, cpu = zip(*(start(options.folder) for _ in range(options.repeats)), strict=True)
    figures = {"ready_seconds": ready, "first_token_seconds": first, "cpu_seconds": cpu}
    print(json.dumps({**figures, "median_seconds": statistics.median(first), "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
