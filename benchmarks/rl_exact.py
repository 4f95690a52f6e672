"""Steps of exact reinforcement learning, stopped and continued on the way: how many log-probabilities engine and trainer disagree on.

    python benchmarks/rl_exact.py --out rl-exact.json
    python benchmarks/rl_exact.py --ranks 2 --out rl-exact-ranks.json
    python benchmarks/rl_exact.py --model llama3-1b --gpu --out rl-exact-1b.json

A step has 16 questions with 8 answers. Rewards are arbitrary and answers end at random, so every step has a gradient. Initial weights are
scaled (`--init-std`) so that the model has 1 to 3 nats of entropy a token, and the learning rate is one at which every weight changes: with
almost uniform probabilities or weights that stay as they are, equal bits would show little. Every step's log-probabilities are compared
before its update, by the trainer's own forward. Ctrl-C ends the run after the steps of `--stops`, and the same command continues it.

Prints and writes one JSON object. Its exit code is 1 if a log-probability differs, a weight stays or the entropy is out of its range.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sides import LOG_TAIL, MESHWRIGHT, lines_of, step_records

from meshwright.checkpoint.models.single_device import load_model
from meshwright.config.load import load_run
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from rl import make_corpus, vocabulary

NANO = ["model.layers=2", "model.hidden=128", "model.ffn_hidden=320", "model.head_dim=32"]
"""Sizes of the model on a CPU."""
INTERRUPTED = 130
"""Exit code of a run after Ctrl-C."""


def main() -> None:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="rl-exact-"))
    make_corpus(folder, options)
    file = run_file(folder, options)
    command = [*MESHWRIGHT, "rl", str(file), "--runs", str(folder / "runs"), *options.overrides]
    run, began = folder / "runs" / file.stem, time.monotonic()
    before, stopped = first_weights(file, options), []
    stayed = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in before.items()}
    for stop in (*options.stops, None):
        start(command, run, folder / "log", stop, options.limit)
        after = weights_of(run)
        # Of a million numbers some return to where they were at one stop: one that stays is the same at all.
        stayed = {name: same & (before[name] == after[name]) for name, same in stayed.items()}
        stopped += [] if stop is None else [step_records(run)[-1]["step"]]
        before = after
    weights, unchanged = (sum(int(count(x)) for x in stayed.values()) for count in (torch.numel, torch.sum))
    figures = figures_of(run) | {"stopped_after": stopped, "weights": weights, "unchanged_weights": unchanged}
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    header = {"benchmark": "rl_exact", "command": " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d")}
    result = header | figures | {"wall_seconds": round(time.monotonic() - began, 1), "environment": environment}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}))
    least, most = figures["entropy_range"]
    sys.exit(bool(figures["unequal"] or unchanged or not 1 <= least <= most <= 3))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the run")
    parser.add_argument("--gpu", action="store_true", help="on GPUs of this machine, in bf16; else on CPUs, in fp32")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", help="preset; llama-nano with two layers on a CPU")
    parser.add_argument("--init-std", type=float, help="deviation of initial weights; by default 6 / √hidden")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mean-length", type=int, help="tokens of an answer in the mean; by default half of the most")
    parser.add_argument("--new-tokens", type=int, help="most tokens of an answer; 256 on GPUs, 48 on CPUs")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stops", type=int, nargs="*", default=[37, 71], help="steps after which Ctrl-C ends the run")
    parser.add_argument("--limit", type=float, default=560, help="seconds of a start")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.model is None:
        options.model, options.overrides = "llama-nano", [*NANO, *options.overrides]
    options.new_tokens = options.new_tokens or (256 if options.gpu else 48)
    options.mean_length = options.mean_length or options.new_tokens // 2
    return options


def run_file(folder: Path, options: argparse.Namespace) -> Path:
    """Write the run's file; its sequences have room for a question of 41 tokens and an answer."""
    seq_len = -(-(options.new_tokens + 48) // 16) * 16
    settings: dict[str, Any] = {
        "extends": options.model,
        "model": {"max_seq_len": seq_len, "vocab_size": vocabulary(options.model)},
        "data": {"mix": str(folder / "data")},
        "train": {
            "steps": options.steps,
            "global_batch": options.prompts,
            "seq_len": seq_len,
            "learning_rate": options.learning_rate,
            "warmup_steps": 1,
            "weight_decay": 0,
            "validate_every": 0,
            "loss_chunk": 512,
            # A token that is hardly ever likely has gradients near 1e-12, which the usual 1e-8 would turn into no change.
            "optimizer": {"name": "adamw", "epsilon": 1e-20},
        },
        "rl": {
            "reward": {"file": str(folder / "reward.py")},
            "samples": options.samples,
            "new_tokens": options.new_tokens,
            "exact": True,
        },
        "cluster": {"gpus_per_node": options.ranks},
        "plan": {"compile": False, **({"recompute": "full", "micro_batch": 16} if options.gpu else {})},
        "checkpoint": {"every": 0, "keep": 1},
    }
    if not options.gpu:
        settings["cluster"]["gpu"] = "cpu"
    file = folder / "exact.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    hidden = load_run(file, options.overrides).model.hidden
    settings["model"]["init_std"] = options.init_std or 6 / math.sqrt(hidden)
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


def start(command: list[str], run: Path, log: Path, stop: int | None, limit: float) -> None:
    """Start or continue the run, and interrupt it after step `stop`. Raises RuntimeError if it ends otherwise or not within `limit`."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ, start_new_session=True)
    deadline = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        if stop is not None and any(record["step"] >= stop for record in lines_of(run, "step")):
            process.send_signal(signal.SIGINT)
            break
    try:
        code = process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code != (0 if stop is None else INTERRUPTED):
        raise RuntimeError(f"exit code {code}: {log.read_text(encoding='utf-8', errors='replace')[-LOG_TAIL:]}")


def first_weights(file: Path, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    run = load_run(file, options.overrides)
    model = Decoder(run.model)
    initialise(model, run.model, seed=run.seed)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    model = load_model(run, torch.device("cpu"), torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def figures_of(run: Path) -> dict[str, Any]:
    """The figures of all steps of the run."""
    steps = step_records(run)
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    tokens = [record["tokens"] for record in steps]
    of_step = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    entropies = [record["entropy"] for record in steps]
    return {
        "steps": len(steps),
        "compared": tokens[-1],
        "unequal": round(sum(r["unequal_logprobs"] * count for r, count in zip(steps, of_step, strict=True))),
        "largest_difference": max(record["largest_logprob_difference"] for record in steps),
        "clipped": max(record["clipped"] for record in steps),
        "entropy_range": [min(entropies), max(entropies)],
        "answer_tokens": sum(record["answer_tokens"] for record in steps) / len(steps),
        "truncated": sum(record["truncated"] for record in steps) / len(steps),
        "step_seconds": sum(record["step_seconds"] for record in steps) / len(steps),
        "loss": [steps[0]["loss"], steps[-1]["loss"]],
        "grad_norm": [steps[0]["grad_norm"], steps[-1]["grad_norm"]],
    }


if __name__ == "__main__":
    main()
