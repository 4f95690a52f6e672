"""`meshwright quickstart`: trains a small model from text on this machine's CPU, and exports it for other tools."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import QuickstartArguments, Runs, load, show
from meshwright.cli.train import start_ranks
from meshwright.durable.writes import write_durable

PROMPTS = ["def read_lines(path):\n", "class Queue:\n    def __init__(self", "import os\nimport sys\n\n"]
"""Prompts that the trained model continues."""

NEXT = (
    "generate {folder} -p 'class Stack:' --tokens 80",
    "serve {folder}",
    "eval {folder}",
    "plan model=llama3-8b cluster.gpu=H100 cluster.gpus_per_node=8 \\\n      train.seq_len=8192 train.global_batch=16",
    "data prepare YOUR_TEXT --tokenizer train:16384 --held-out 0.01 \\\n      --out corpus",
)
"""Commands that the user may try next, in lines of at most 80 columns."""


def quickstart(
    arguments: QuickstartArguments = None,
    runs: Runs = Path("runs"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again beside an earlier quick start.")] = False,
) -> None:
    """Train a small language model on Python's own source code, end to end, in a few minutes on two CPU cores.

    Builds a corpus from the standard library, trains a tokenizer on it, plans for two local ranks, trains a small Llama-style model,
    evaluates it on held-out text, writes a checkpoint, samples some code, exports a Hugging Face folder, and writes report.html. Needs no
    GPU and no network. Values can be replaced as for `train`.

    Examples:

        meshwright quickstart

        meshwright quickstart train.steps=50 cluster.gpus_per_node=1
    """
    from meshwright.config.value_sources import QUICKSTART
    from meshwright.launch.folder import renamed

    started = time.perf_counter()
    run = load(arguments, runs, otherwise=QUICKSTART)
    run = renamed(run, runs) if fresh else run
    folder = runs / run.name
    if code := start_ranks(run, runs, None):
        sys.exit(code)
    _finish(folder)
    _closing(folder, time.perf_counter() - started)


def _finish(folder: Path) -> None:
    """Generate samples, export the model, and write the report that shows them."""
    from meshwright.checkpoint.models.convert import export_checkpoint
    from meshwright.cli.generate import sample
    from meshwright.cli.span_findings import span_findings
    from meshwright.observe.report import write_report

    samples = sample(folder, PROMPTS, tokens=60, temperature=0.7, top_k=40, seed=0)
    write_durable(folder / "samples.json", json.dumps(samples, indent=1))
    shutil.rmtree(folder / "hf", ignore_errors=True)
    export_checkpoint(folder, folder / "hf")
    write_report(folder, span_findings(folder))
    print(f"\nsamples of {folder / 'samples.json'}, each behind its prompt:")
    for result in samples:
        print(f"\n{'─' * 60}\n{result['prompt']}{result['text']}")


def _closing(folder: Path, seconds: float) -> None:
    """Print the results, the files that were written, and commands to try next."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    print()
    if "held_out_loss" in summary:
        loss = summary["held_out_loss"]
        entropy = summary["unigram_entropy_nats"]
        side = "below" if loss < entropy else "above"
        bits = summary["bits_per_byte"]
        show(
            f"validation loss {loss:.4f} nats per token, {abs(entropy - loss):.2f} {side} the text's unigram entropy "
            f"({entropy:.3f}){f'; {bits:.4f} bits per byte' if bits else ''} ({summary['held_out_tokens']:,} tokens)"
        )
    if wall := summary.get("wall_seconds"):
        productive = f"{summary['goodput']:.0%} of it productive"
        show(f"the run took {wall:.0f} s of wall time, {productive}")
    show(f"the command took {seconds:.0f} s, with samples, Hugging Face folder and report")
    print(f"  report               {folder / 'report.html'}")
    print(f"  Hugging Face folder  {folder / 'hf'}")
    print(f"  checkpoints          {folder / 'checkpoints'}")
    print("Next:")
    for command in NEXT:
        print(f"  meshwright {command.format(folder=folder)}")
