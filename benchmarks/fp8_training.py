"""Compares the held-out loss of fp8 and bf16 training: the same model on the same text, for several seeds.

    python benchmarks/fp8_training.py --out fp8-training.json          # Llama-1B on one GPU a run, as many at once as there are GPUs
    python benchmarks/fp8_training.py --set model=llama3-1b model.layers=2 model.hidden=64 … --text folder --steps 4 --cpu

Prepares the text (Python packages of this machine, or --text; at least --least-mb), trains a tokenizer with 32,768 tokens and holds out 3%
of the documents. Each run uses one GPU; the seed decides the order of the text. Prints a line per run, then for each precision the mean
held-out loss relative to bf16, and writes JSON. A run evaluates in its own precision; `meshwright eval` evaluates the same weights in bf16,
as they would be served.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from sides import LOG_TAIL, MESHWRIGHT, our_figures, run_ours

PRECISIONS = {
    "bf16": [],
    "fp8 tensorwise": ["plan.linear=fp8_tensorwise"],
    "fp8 rowwise": ["plan.linear=fp8_rowwise"],
    "fp8 inner": [
        "plan.linear=fp8_tensorwise",
        "plan.layers=[{range: 0-0, linear: compute}, {range: 1-14}, {range: 15-15, linear: compute}]",
    ],
}
VALIDATION_TOKENS = 1 << 20
WORDS = [
    "model=llama3-1b",
    "train.seq_len=2048",
    "train.warmup_steps=30",
    "train.schedule=cosine",
    f"data.validation_tokens={VALIDATION_TOKENS}",
    "data.document_mask=false",
]
HELD_OUT = 0.03


def main() -> None:
    options = arguments()
    corpus = prepare_corpus(options)
    devices: Queue[str] = Queue()
    for device in options.devices:
        devices.put(device)

    def run_one(precision: str, seed: int) -> dict[str, Any]:
        device = devices.get()
        try:
            return train_once(precision, seed, device, corpus, options)
        finally:
            devices.put(device)

    with ThreadPoolExecutor(len(options.devices)) as pool:
        cases = [(precision, seed) for seed in options.seeds for precision in options.kinds]
        results = list(pool.map(run_one, *zip(*cases, strict=True)))
    report(results, corpus, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="files and folders to train on")
    parser.add_argument("--least-mb", type=float, default=25.0, help="refuse to judge by less text than this")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=16, help="sequences a step")
    parser.add_argument("--learning-rate", default="4e-4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=list(PRECISIONS), default=["bf16", "fp8 tensorwise"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further words of all runs")
    parser.add_argument(
        "--cpu", action="store_true", help="one run at a time on the processor, in fp32 and emulated fp8"
    )
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("fp8-training.json"))
    options = parser.parse_args()
    options.devices = [""] if options.cpu else visible_gpus()
    options.text = options.text or [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib")]
    options.logs.mkdir(parents=True, exist_ok=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    return options


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], text=True, capture_output=True, check=True).stdout
    return [str(number) for number in range(len(listed.splitlines()))]


def prepare_corpus(options: argparse.Namespace) -> Path:
    """Prepare the token shards of the text; returns their folder, with `train` and `held_out`."""
    corpus, began = options.runs / "corpus", time.perf_counter()
    files = sources(options.text)
    size = sum(file.stat().st_size for file in files)
    if size < options.least_mb * 1e6:
        sys.exit(
            f"{size / 1e6:.1f} MB of Python text under {', '.join(map(str, options.text))}; --least-mb asks for {options.least_mb:g}"
        )
    names = options.runs / "text"
    names.mkdir(exist_ok=True)
    for number, file in enumerate(files):
        link = names / f"{number:06d}-{file.name}"
        if not link.exists():
            link.symlink_to(file)
    command = [sys.executable, "-m", "meshwright", "data", "prepare", str(names), "--out", str(corpus)]
    subprocess.run([*command, "--tokenizer", f"train:{options.vocab}", "--held-out", str(HELD_OUT)], check=True)
    print(
        f"{size / 1e6:.0f} MB of text in {len(files)} files, prepared in {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return corpus


def sources(folders: Sequence[Path]) -> list[Path]:
    """Python source files without duplicates, as packages contain copies of each other's files."""
    files_by_content: dict[bytes, Path] = {}
    for folder in folders:
        for file in sorted(folder.resolve().rglob("*.py")):
            files_by_content.setdefault(file.read_bytes(), file)
    return list(files_by_content.values())


def train_once(precision: str, seed: int, device: str, corpus: Path, options: argparse.Namespace) -> dict[str, Any]:
    name = f"{precision.replace(' ', '-')}-seed{seed}"
    cluster_arguments = (
        ["cluster.gpu=cpu", "cluster.nodes=1", "cluster.gpus_per_node=1"] if options.cpu else ["cluster=auto"]
    )
    overrides = [
        *WORDS,
        f"data.mix={{{corpus}/train: 1}}",
        f"data.validation={corpus}/held_out",
        f"train.steps={options.steps}",
        f"train.validate_every={options.steps // 3}",
        f"train.global_batch={options.sequences}",
        f"train.learning_rate={options.learning_rate}",
        f"seed={seed}",
        f"model.vocab_size={options.vocab}",
        *cluster_arguments,
        *PRECISIONS[precision],
        *options.set,
    ]
    log = options.logs / f"{name}.log"
    env = {"CUDA_VISIBLE_DEVICES": device}
    run = run_ours([*MESHWRIGHT, "train", f"name={name}"], overrides, name, options.runs, log, env, options.limit)
    if run.code or run.folder is None or not run.records:
        log_tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        print(f"{name}: exit code {run.code}\n{log_tail}", flush=True)
        return {"kind": precision, "seed": seed, "error": run.code, "log": log_tail}
    held_out = held_out_losses(run.folder)
    figures = our_figures(run.folder, run.records, min(20, len(run.records) // 2))
    in_bf16 = evaluate(run.folder, env, options)
    shutil.rmtree(run.folder / "checkpoints")
    result = {
        "kind": precision,
        "seed": seed,
        "words": overrides,
        "held_out_loss": held_out,
        "held_out_loss_in_bf16": in_bf16,
        **figures,
    }
    del result["step_seconds_all"]
    result["losses"] = {record["step"]: round(record["loss"], 4) for record in run.records if record["step"] % 10 == 0}
    losses = ", ".join(f"{step}: {loss:.4f}" for step, loss in held_out.items())
    print(
        f"{name:28s} {result['tokens_per_second_per_gpu']:9,.0f} tok/s, held-out loss after {losses}; in bf16 {in_bf16:.4f}",
        flush=True,
    )
    return result


def evaluate(folder: Path, env: dict[str, str], options: argparse.Namespace) -> float:
    """The held-out loss of a run's last weights in the device's default dtype, on the validation sequences of the run."""
    command = [*MESHWRIGHT, "eval", str(folder), "--batch", str(options.sequences), "--json"]
    answer = subprocess.run(command, env=os.environ | env, text=True, capture_output=True, check=True).stdout
    return float(json.loads(answer)["loss"])


def relative_text(loss: float, bf16_loss: float | None) -> str:
    return f" ({loss / bf16_loss - 1:+.3%} of bf16's)" if bf16_loss else ""


def held_out_losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "validation"}


def report(results: list[dict[str, Any]], corpus: Path, options: argparse.Namespace) -> None:
    mean_losses = {}
    for precision in options.kinds:
        own_results = [result for result in results if result["kind"] == precision]
        if any("error" in result for result in own_results):
            continue
        as_trained = statistics.mean(list(result["held_out_loss"].values())[-1] for result in own_results)
        mean_losses[precision] = {
            "as trained": as_trained,
            "in bf16": statistics.mean(result["held_out_loss_in_bf16"] for result in own_results),
        }
    for precision, losses in mean_losses.items():
        text = ", ".join(
            f"{loss:.4f} {loss_dtype}" + relative_text(loss, mean_losses.get("bf16", {}).get(loss_dtype))
            for loss_dtype, loss in losses.items()
        )
        print(f"{precision:16s} held-out loss over seeds {options.seeds}: {text}")
    tokens = {
        split: json.loads((corpus / split / "manifest.json").read_text(encoding="utf-8"))["tokens"]
        for split in ("train", "held_out")
    }
    environment = next((result.pop("environment") for result in results if "environment" in result), {})
    for result in results:
        result.pop("environment", None)
    header = {
        "benchmark": "fp8-training",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "corpus_tokens": tokens,
    }
    body = {**header, "environment": environment, "mean_held_out_loss": mean_losses, "runs": results}
    options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
