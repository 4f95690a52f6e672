"""Trains one model four times on the same tokens: by transformers and by this program, each in bf16 and with fp8 linear layers.

    python benchmarks/convergence.py --out convergence.json                # a Llama of 124M, 2,000 steps of 16 × 1,024 tokens, on one GPU
    python benchmarks/convergence.py --cpu --text src --out build/convergence.json             # a tiny model for some steps, in fp32

Prepares the text as fp8_training.py does. transformers draws the initial weights, of which all sides start; this program's reader gives
the order of the tokens, which the sides of transformers read as one array. No token is read twice. AdamW, clipping, warm-up, cosine and
decayed parameters are the same; weights are fp32, computed with in bf16 (transformers: autocast). In fp8 are the linear layers of the
blocks: ours by plan.linear=fp8_tensorwise, those of transformers by peers/transformers_llama.py. Nothing is timed, so the sides run at
the same time on one GPU; `--seconds` stops all in good time. At the end transformers computes the held-out loss of all exported weights.
Writes JSON; draw_convergence.py draws it. Ends with code 1 if the first losses of two sides differ by more than bf16 explains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fp8_training import prepare_corpus
from sides import LOG_TAIL, MESHWRIGHT

from meshwright.data.source import DataSource, open_data
from meshwright.observe.environment import environment
from meshwright.spec.job import DataSpec

PEER = [sys.executable, str(Path(__file__).with_name("peers") / "transformers_llama.py")]
SIZES = {
    "llama-124m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
}
OPTIMIZER = {"betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0, "floor": 0.1}
"""AdamW's constants, the largest gradient norm, and the learning rate at the end as a share of the peak."""
FIRST_LOSS = {"bf16": 2e-3, "fp8": 1e-2}
"""Largest relative difference of a side's first loss from that of transformers in bf16; a bf16 number has 8 bits of mantissa."""
INTERRUPTED = 130
"""Exit code of a side that was interrupted and has written its weights."""
PAIRS = (
    ("meshwright bf16", "transformers bf16"),
    ("meshwright fp8", "transformers fp8"),
    ("transformers fp8", "transformers bf16"),
    ("meshwright fp8", "meshwright bf16"),
)
"""Sides that are compared, the second the reference."""
SEQUENCES_AT_A_TIME = 1024
"""Sequences that are copied together into the array of all."""
MEAN_OVER = 50
"""Steps over which losses are averaged before sides are compared."""
HELD_OUT_TOKENS = 1 << 20
STOPPING = 60.0
"""Seconds of --seconds that are kept for the export of the weights and the held-out losses."""
REPORT_EVERY = 30.0
"""Seconds between lines that say how many steps each side has made."""
GRACE = 30.0
"""Seconds that an interrupted side has to write its weights."""


@dataclass(frozen=True)
class Side:
    """A training in a process of its own; `folder` gets its weights if it is one of transformers, else it is the run's folder."""

    name: str
    command: list[str]
    folder: Path
    log: Path

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("meshwright")

    def losses(self) -> list[float]:
        """The loss of each step so far. A line that is being written does not count."""
        file = self.folder / "metrics.jsonl" if self.is_ours else self.log
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record["loss"] for record in records if record.get("kind", "step") == "step"]


def main() -> int:
    options = arguments()
    began = time.monotonic()
    tokens = prepare_tokens(options)
    parameters = write_initial_weights(options)
    sides = [of(precision, options) for of in (peer_side, our_side) for precision in ("bf16", "fp8")]
    prepared = time.monotonic()
    print(f"prepared in {prepared - began:.0f} s", flush=True)
    codes = run_together(sides, began + options.seconds - STOPPING)
    results = {side.name: result_of(side, codes[side.name]) for side in sides}
    trained = time.monotonic()
    judged = judge([side for side in sides if "error" not in results[side.name]], options)
    losses = judged["losses"]
    results = {
        name: result | ({"held_out_loss": losses[name]} if name in losses else {}) for name, result in results.items()
    }
    seconds = {"prepare": prepared - began, "train": trained - prepared, "judge": time.monotonic() - trained}
    keys = ("model", "vocab", "steps", "batch", "seq_len", "learning_rate", "warmup_steps")
    body = {
        "benchmark": "convergence",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
        "configuration": OPTIMIZER | {key: getattr(options, key) for key in keys} | {"parameters": parameters},
        "tokens": tokens,
        "seconds": {name: round(value) for name, value in seconds.items()},
        "environment": environment() | {"transformers": judged["transformers"]},
        "initial_held_out_loss": losses["initial"],
        "sides": results,
        "differences": {
            f"{name} / {reference}": difference(results[name], results[reference])
            for name, reference in PAIRS
            if "error" not in results[name] and "error" not in results[reference]
        },
    }
    options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    show(body)
    problems = too_different(results)
    print(f"{options.out}: {sum(seconds.values()):.0f} s", *problems, sep="\n")
    return min(len(problems), 1)


def show(body: dict[str, Any]) -> None:
    """Print a line for each side and for each comparison."""
    wanted = body["configuration"]["steps"]
    for name, result in body["sides"].items():
        if "error" not in result:
            steps = f"{result['steps']} steps" + (
                "" if result["steps"] == wanted else f" of {wanted}, then interrupted"
            )
            losses = (
                f"loss {result['loss_first']:.4f} to {result['loss_last']:.4f}, held out {result['held_out_loss']:.4f}"
            )
            print(f"{name:20s} {steps}, {losses}")
    for name, values in body["differences"].items():
        print(f"{name}: " + ", ".join(f"{key} {value:+.3%}" for key, value in values.items()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="files and folders; left out, this Python's packages")
    parser.add_argument("--least-mb", type=float, help="refuse to train on less text than this")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--warmup-steps", type=int, help="left out, a twentieth of the steps")
    parser.add_argument("--held-out-tokens", type=int, default=HELD_OUT_TOKENS)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the processor, in fp32")
    parser.add_argument("--seconds", type=float, default=540.0, help="end of everything; sides stop where they are")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("/dev/shm/meshwright-convergence"),
        help="folder of everything; text prepared in it before is used again",
    )
    parser.add_argument("--out", type=Path, default=Path("convergence.json"))
    options = parser.parse_args()
    sizes = (0.1, 512, 12, 4, 64) if options.cpu else (25.0, 50304, 2000, 16, 1024)
    for key, size in zip(("least_mb", "vocab", "steps", "batch", "seq_len"), sizes, strict=True):
        if getattr(options, key) is None:
            setattr(options, key, size)
    if options.warmup_steps is None:
        options.warmup_steps = max(options.steps // 20, 1)
    options.model = "tiny" if options.cpu else "llama-124m"
    options.text = options.text or [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib")]
    options.device = "cpu" if options.cpu else "cuda"
    options.runs.mkdir(parents=True, exist_ok=True)
    return options


def prepare_tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare the text, unless it is there, and write the tokens of training and of the held-out loss; returns their numbers."""
    corpus = options.runs / "corpus"
    if not (corpus / "train" / "manifest.json").is_file():
        prepare_corpus(options)
    train = open_source(corpus / "train", options.seq_len)
    sequences = options.steps * options.batch
    if sequences > train.order.windows[0]:
        sys.exit(
            f"{sequences:,} sequences are read, once each, and the text has {train.order.windows[0]:,}; add --text"
        )
    held_out = open_source(corpus / "held_out", options.seq_len)
    held_out_sequences = min(options.held_out_tokens // options.seq_len, held_out.order.windows[0])
    write_tokens(options.runs / "order.npy", train, sequences)
    write_tokens(options.runs / "held-out.npy", held_out, held_out_sequences)
    return {
        "corpus": {split: manifest_tokens(corpus / split) for split in ("train", "held_out")},
        "train": sequences * options.seq_len,
        "held_out": held_out_sequences * options.seq_len,
    }


def open_source(folder: Path, seq_len: int) -> DataSource:
    """Prepared text as the sequences that a run with seed 0 reads, in its order."""
    return open_data(DataSpec(mix={str(folder): 1.0}, document_mask=False), seq_len=seq_len, seed=0)


def write_tokens(file: Path, source: DataSource, count: int) -> None:
    """Write the first `count` sequences as an array `(count, seq_len + 1)`: the inputs and one more target."""
    rows = np.empty((count, source.seq_len + 1), np.uint16)
    for first in range(0, count, SEQUENCES_AT_A_TIME):
        samples = range(first, min(first + SEQUENCES_AT_A_TIME, count))
        batch = source.samples(samples)
        rows[samples.start : samples.stop, :-1] = batch.tokens
        rows[samples.start : samples.stop, -1] = batch.targets[:, -1]
    np.save(file, rows)


def manifest_tokens(folder: Path) -> int:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["tokens"]


def write_initial_weights(options: argparse.Namespace) -> int:
    """Let transformers draw the weights; returns their number."""
    config = {
        **SIZES[options.model],
        "num_key_value_heads": SIZES[options.model]["num_attention_heads"],
        "vocab_size": options.vocab,
        "max_position_embeddings": options.seq_len,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    }
    command = [*PEER, "init", str(options.runs / "initial"), "--config", json.dumps(config)]
    answer = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(answer.splitlines()[-1])["parameters"]


def peer_side(precision: str, options: argparse.Namespace) -> Side:
    """Training by transformers."""
    name = f"transformers {precision}"
    folder = options.runs / name.replace(" ", "-")
    settings = OPTIMIZER | {key: getattr(options, key) for key in ("steps", "batch", "learning_rate", "warmup_steps")}
    words = ["--tokens", str(options.runs / "order.npy"), "--settings", json.dumps(settings)]
    words += ["--device", options.device, *(["--fp8"] if precision == "fp8" else [])]
    command = [*PEER, "train", str(options.runs / "initial"), str(folder), *words]
    return Side(name, command, folder, folder.with_suffix(".log"))


def our_side(precision: str, options: argparse.Namespace) -> Side:
    """Training by `meshwright train`."""
    name = f"meshwright {precision}"
    folder = options.runs / name.replace(" ", "-")
    cluster = ["cluster.gpu=cpu", "cluster.nodes=1", "cluster.gpus_per_node=1"] if options.cpu else ["cluster=auto"]
    words = [
        f"name={folder.name}",
        f"model.init=hf:{options.runs}/initial",
        f"data.mix={{{options.runs}/corpus/train: 1}}",
        "data.document_mask=false",
        "data.max_epochs=1",
        f"data.validation={options.runs}/corpus/held_out",
        f"data.validation_tokens={options.batch * options.seq_len}",
        "train.validate_every=0",
        "seed=0",
        f"train.steps={options.steps}",
        f"train.global_batch={options.batch}",
        f"train.seq_len={options.seq_len}",
        f"train.learning_rate={options.learning_rate}",
        f"train.min_learning_rate={OPTIMIZER['floor']}",
        f"train.warmup_steps={options.warmup_steps}",
        "train.schedule=cosine",
        f"train.weight_decay={OPTIMIZER['weight_decay']}",
        f"train.clip_norm={OPTIMIZER['clip_norm']}",
        "train.optimizer={{name: adamw, beta1: {}, beta2: {}, epsilon: {}}}".format(
            *OPTIMIZER["betas"], OPTIMIZER["epsilon"]
        ),
        "checkpoint.every=0",
        "checkpoint.at_end=true",
        *cluster,
        *(["plan.linear=fp8_tensorwise"] if precision == "fp8" else []),
    ]
    command = [*MESHWRIGHT, "train", "--runs", str(options.runs), "--fresh", *words]
    return Side(name, command, folder, folder.with_suffix(".log"))


def run_together(sides: list[Side], deadline: float) -> dict[str, int]:
    """Run all sides at the same time; returns their exit codes.

    Those that are not ready by the deadline, or when another one has failed, are interrupted.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for side in sides:
        shutil.rmtree(side.folder, ignore_errors=True)
    with contextlib.ExitStack() as logs:
        for side in sides:
            log = logs.enter_context(side.log.open("wb"))
            processes[side.name] = subprocess.Popen(side.command, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(sides, processes, deadline)
        finally:
            _interrupt([process for process in processes.values() if process.poll() is None])
    return {name: process.returncode for name, process in processes.items()}


def _wait(sides: list[Side], processes: dict[str, subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait until all have ended, one has failed, or the deadline is there; tell at times how far they are."""
    began = time.monotonic()
    told = began
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes.values()]
        if None not in codes or any(codes):
            return
        time.sleep(0.2)
        if time.monotonic() - told > REPORT_EVERY:
            told = time.monotonic()
            steps = ", ".join(f"{side.name} {len(side.losses())}" for side in sides)
            print(f"{told - began:.0f} s: steps {steps}", flush=True)


def _interrupt(processes: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt processes, and kill those that do not end in time, with all that they started."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    killed_at = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(killed_at - time.monotonic(), 0.1))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def result_of(side: Side, code: int) -> dict[str, Any]:
    """The losses of a side: of every tenth step, and the means of every 50 steps by their last step."""
    losses = side.losses()
    if not losses or code not in (0, INTERRUPTED):
        log = side.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        print(f"{side.name}: exit code {code} after {len(losses)} steps\n{log}", flush=True)
        return {"error": code, "steps": len(losses), "log": log}
    ends = range(MEAN_OVER, len(losses) + 1, MEAN_OVER)
    return {
        "steps": len(losses),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "losses": {step: round(loss, 4) for step, loss in enumerate(losses, 1) if step == 1 or step % 10 == 0},
        "means": {end: round(statistics.fmean(losses[end - MEAN_OVER : end]), 5) for end in ends},
    }


def judge(sides: Sequence[Side], options: argparse.Namespace) -> dict[str, Any]:
    """The held-out losses of the initial weights and of each side's, and the versions of torch and transformers."""
    folders = {"initial": options.runs / "initial"}
    for side in sides:
        folders[side.name] = side.folder
        if side.is_ours:
            folders[side.name] = side.folder.with_name(f"{side.folder.name}-exported")
            shutil.rmtree(folders[side.name], ignore_errors=True)
            export = [*MESHWRIGHT, "checkpoint", "to-hf", str(side.folder), str(folders[side.name]), "--dtype", "fp32"]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    words = ["--tokens", str(options.runs / "held-out.npy"), "--device", options.device]
    command = [*PEER, "judge", *map(str, folders.values()), *words]
    answer = json.loads(subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
    losses = dict(zip(folders, answer.pop("losses"), strict=True))
    return answer | {"losses": losses}


def difference(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """How much the losses of one side are above those of another, relative: the first, means of 50 steps, held out."""
    common = [end for end in result["means"] if end in reference["means"]]
    differences = [result["means"][end] / reference["means"][end] - 1 for end in common]
    answer = {"first": result["loss_first"] / reference["loss_first"] - 1}
    if differences:
        answer |= {"median": statistics.median(map(abs, differences)), "largest": max(differences, key=abs)}
    if result["steps"] == reference["steps"]:
        answer["held_out"] = result["held_out_loss"] / reference["held_out_loss"] - 1
    return {key: round(value, 6) for key, value in answer.items()}


def too_different(results: dict[str, dict[str, Any]]) -> list[str]:
    """What keeps the losses from being a comparison: sides that failed, and first losses that rounding does not explain."""
    failed = [f"{name}: exit code {result['error']}" for name, result in results.items() if "error" in result]
    reference = results["transformers bf16"]
    if failed or "error" in reference:
        return failed
    differences = {name: result["loss_first"] / reference["loss_first"] - 1 for name, result in results.items()}
    return [
        f"{name}: first loss {value:+.2%} of that of transformers in bf16"
        for name, value in differences.items()
        if abs(value) > FIRST_LOSS[name.split()[1]]
    ]


if __name__ == "__main__":
    sys.exit(main())
