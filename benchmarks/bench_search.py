"""Measures the planner's search time and memory against limits: `make bench-search` (CPU only, two minutes).

Times are processor seconds of one thread (user and system), the least of three runs, so that other programs matter little. Each search runs
in a process of its own, whose peak memory is reported; `plan --help` is timed as a whole process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from meshwright.config.load import load_run
from meshwright.planner.search import search

LARGE = "model=llama3-405b cluster.gpu=H100 cluster.nodes=2048 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=2048"
PINNED = (
    "model=gpt-1t cluster.gpu=A100 cluster.nodes=384 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=3072 "
    "plan.tensor=8 plan.pipeline=64"
)
EXPERTS = "model=qwen3-235b-a22b cluster.gpu=GB200 cluster.nodes=64 cluster.gpus_per_node=4 train.seq_len=8192 train.global_batch=1024"
ETHERNET = (
    "model=llama3-70b cluster.gpu=H100 cluster.nodes=16 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=256 "
    "cluster.network.fabric=tcp cluster.network.port_gb_per_s=1.25"
)
PORTS = (
    "model=llama3-70b cluster.gpu=H100 cluster.nodes=16 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=256 "
    "cluster.network.port_gb_per_s=15"
)
EIGHT = "model=llama3-8b cluster.gpu=H200 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=64"
DEEPSEEK = "model=deepseek-v3 cluster.gpu=H800 cluster.nodes=256 train.seq_len=4096 train.global_batch=15360"
REPEATS = 3
"""Runs of each search; the fastest counts."""


@dataclass(frozen=True)
class Line:
    description: str
    reached: float
    limit: float
    unit: str


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(time_search(sys.argv[1:])))
        return
    large, eight = answer_of(LARGE), answer_of(EIGHT)
    two = answer_of(f"{EIGHT} cluster.emulate_nodes=2")
    lines = [
        Line(f"405B on 16,384 GPUs, {large['considered']:,} layouts", large["seconds"], 2.5, "s"),
        Line("  peak memory of that search", large["bytes"] / 1e9, 1.0, "GB"),
        Line(f"8B on 8 GPUs, {eight['considered']:,} layouts", eight["seconds"], 0.5, "s"),
        Line(f"8B on 8 GPUs as 2 nodes over TCP, {two['considered']:,} layouts", two["seconds"], 0.5, "s"),
        Line("1T on 3,072 A100, tensor 8 × pipeline 64 pinned", answer_of(PINNED)["seconds"], 5.0, "s"),
        Line("qwen3-235b on 256 GB200", answer_of(EXPERTS)["seconds"], 10.0, "s"),
        Line("70B on 128 H100 over 10 GbE", answer_of(ETHERNET)["seconds"], 5.0, "s"),
        Line("70B on 128 H100, ports of 15 GB/s", answer_of(PORTS)["seconds"], 5.0, "s"),
        Line("deepseek-v3 on 2,048 H800", answer_of(DEEPSEEK)["seconds"], 5.0, "s"),
        Line("meshwright plan --help", min(help_seconds() for _ in range(REPEATS)), 0.3, "s"),
    ]
    for line in lines:
        verdict = "pass" if line.reached <= line.limit else "FAIL"
        print(f"{verdict}  {line.reached:6.3f} ≤ {line.limit:<4g} {line.unit:3} {line.description}")
    sys.exit(any(line.reached > line.limit for line in lines))


def answer_of(question: str) -> dict[str, float]:
    """Seconds, peak bytes and considered layouts of a search, in the fastest of `REPEATS` single-threaded processes."""
    command = [sys.executable, __file__, *question.split()]
    outputs = (
        subprocess.run(command, env=single_thread_environment(), capture_output=True, check=True).stdout
        for _ in range(REPEATS)
    )
    return min(map(json.loads, outputs), key=lambda result: result["seconds"])


def time_search(overrides: list[str]) -> dict[str, float]:
    """Processor seconds of the search, peak memory of this process, and layouts considered."""
    run, start = load_run(None, overrides), time.process_time()
    considered, seconds = search(run).considered, time.process_time() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": peak_bytes, "considered": considered}


def help_seconds() -> float:
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "plan", "--help"],
        env=single_thread_environment(),
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_utime + usage.ru_stime


def single_thread_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
