"""All scenarios of fault injection on a tiny model: promise, observed, verdict. `make test-faults`.

    python benchmarks/faults.py [SCENARIO...] [--out FILE] [--runs DIR] [--steps N] [--patience X]
        [--rate 400mbit] [--latency SECONDS] [--loss SHARE]

Exit code 0 if every promise was kept. `--out` writes the verdicts as JSON with the machine and the version.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__
from meshwright.chaos.hosts import Links
from meshwright.chaos.scenario import PromiseVerdict
from meshwright.chaos.scenarios import SCENARIOS
from meshwright.chaos.suite import Suite, scenario_named, undo_on_sigterm
from meshwright.config.load import load_run
from meshwright.data.prepare import prepare

RUN_FILE = """\
model:
  {{family: llama, layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn_hidden: 32, max_seq_len: 16, init_std: 0.1}}
data: {{mix: {{"{data}": 1}}, validation_tokens: 256}}
train: {{steps: 60, global_batch: 8, seq_len: 16, learning_rate: 1e-2, warmup_steps: 2, timeout_seconds: 60}}
cluster: {{gpu: cpu, gpus_per_node: 2}}
"""


LONGER_COMPUTE = [
    "model.hidden=256",
    "model.head_dim=64",
    "model.ffn_hidden=1024",
    "train.global_batch=64",
    "plan.shard=2",
]
"""A rank whose steps hardly compute cannot be named as a straggler (`chaos.scenario.COMPUTE_SHARE`), nor can one of a tensor group."""
WORDS = {"slow-rank": LONGER_COMPUTE}
"""By scenario, changes of the run."""

VOCABULARY = "the quick brown fox jumps over a lazy dog while wizards mix ink and eat grapes"


def make_run(folder: Path) -> Path:
    """A run file in `folder` with a corpus beside it; its steps take milliseconds."""
    words, generator = VOCABULARY.split(), random.Random(1)
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(60):
        text = " ".join(generator.choice(words) for _ in range(50))
        (source / f"{number}.txt").write_text(f"Story {number}. {text}.\n", encoding="utf-8")
    prepare([str(source)], "train:300", folder / "data", held_out=0.2)
    file = folder / "faults.yaml"
    file.write_text(RUN_FILE.format(data=folder / "data"), encoding="utf-8")
    return file


def print_verdict(verdict: PromiseVerdict, seconds: float) -> None:
    print(f"{verdict.scenario:22}{'kept' if verdict.ok else 'NOT KEPT':10}{seconds:5.0f} s  {verdict.promise}")
    print(f"{'':40}{verdict.observed}", flush=True)


def write_record(file: Path | None, **results: Any) -> None:
    """Write results as JSON with the machine and the version; without a file do nothing."""
    if file is None:
        return
    record = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "torch": torch.__version__,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**record, **results}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--rate", help="limit of the links of emulated hosts, e.g. 400mbit")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds from one emulated host to another")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames between them that are lost")
    arguments = parser.parse_args()
    links = Links(arguments.rate, arguments.latency, arguments.loss)
    undo_on_sigterm()
    began, verdicts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        file = make_run(Path(folder) / "tiny")
        runs = arguments.runs or Path(folder) / "runs"
        suites = {
            tuple(words): Suite(
                load_run(file, words),
                [str(file), *words],
                runs,
                arguments.steps,
                arguments.patience,
                links=links,
            )
            for words in ([], *WORDS.values())
        }
        for name in arguments.scenarios:
            start_time = time.monotonic()
            verdicts.append(suites[tuple(WORDS.get(name, ()))].run(scenario_named(name)))
            print_verdict(verdicts[-1], time.monotonic() - start_time)
    kept_count = sum(verdict.ok for verdict in verdicts)
    print(f"{kept_count} of {len(verdicts)} promises were kept; {time.monotonic() - began:.0f} s")
    plain = [verdict.as_plain() for verdict in verdicts]
    write_record(arguments.out, steps=arguments.steps, patience=arguments.patience, links=asdict(links), verdicts=plain)
    sys.exit(0 if kept_count == len(verdicts) else 1)


if __name__ == "__main__":
    main()
