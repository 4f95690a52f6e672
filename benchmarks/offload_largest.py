"""Trains the largest models that fit one device with the optimizer in host memory, and the published 20B GPT; a JSON line for each.

    python benchmarks/offload_largest.py cluster.gpu=H200 cluster.host_memory_gib=128 --out largest.json
    python benchmarks/offload_largest.py cluster.gpu=H200 cluster.host_memory_gib=128 --only gpt-20b
    python benchmarks/offload_largest.py model=llama-nano train.seq_len=32 cluster.gpu=cpu plan.compute=bf16 --only int8   # a trial

`fp32`, `bf16` and `int8` are forms of AdamW's moments. For each, the planner names the largest model of Llama-3-8B's family with sequences
of 2048 tokens; if it does not train, models with 2% fewer parameters are tried. On CPUs, for which no largest model is known, it begins
with the given one. Each training is stopped after --limit seconds; if it had ended a step, it counts as trained. gpt-20b has the sizes of
Maurya et al. 2024 (arXiv 2410.21316), bf16 moments and micro-batches of 2048 tokens. Losses are those of a few steps with a clipped norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from bounded import run_for

from meshwright.config.load import load_run
from meshwright.observe.environment import environment
from meshwright.planner.largest import family, largest_models
from meshwright.spec.model import parameter_count
from meshwright.spec.run import ModelSection

BASE = ["model=llama3-8b", "train.global_batch=1", "train.seq_len=2048", "cluster.gpus_per_node=1"]
GPT = {
    "family": "gpt2",
    "layers": 44,
    "hidden": 6144,
    "heads": 64,
    "kv_heads": 64,
    "head_dim": 96,
    "ffn_hidden": 24576,
    "max_seq_len": 2048,
    "vocab_size": 50432,
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "bias": True,
    "tied": True,
}
SMALLER = 0.98
RATE = 2e-5
"""Learning rate at the end of the warm-up, which is the whole run: models this wide diverge at a usual rate without a long one."""
WARM_UP = 2
"""Steps before those that are timed; of a training that was stopped with fewer the last step is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="the cluster, as in `meshwright train`")
    parser.add_argument("--only", default="fp32,bf16,int8,gpt-20b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tries", type=int, default=5, help="models to try for each form")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a training is stopped")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "benchmark": "offload_largest",
        "words": options.words,
        "environment": environment(),
        "results": [],
    }
    for name in options.only.split(","):
        moments = "bf16" if name == "gpt-20b" else name
        models = gpt_arguments() if name == "gpt-20b" else largest_arguments(options.words, moments, options.tries)
        record["results"].append({"name": name, **first_that_trains(models, moments, options)})
        print(json.dumps(record["results"][-1]), flush=True)
        if options.out:  # after each model, so that a run that is stopped leaves the others
            options.out.write_text(json.dumps(record, indent=1) + "\n")


def gpt_arguments() -> Iterator[list[str]]:
    """The overrides of the 20B GPT."""
    yield [f"model.{key}={str(value).lower()}" for key, value in GPT.items()]


def largest_arguments(words: Sequence[str], moments: str, tries: int = 5) -> Iterator[list[str]]:
    """The overrides of the largest model that fits by prediction, or of the given one on CPUs, then of smaller ones."""
    run = load_run(None, [*BASE, *words, "plan.offload=optimizer", f"plan.moments={moments}"])
    limit = float(parameter_count(run.model))
    if not run.cluster.is_cpu:
        (entry,) = largest_models(run)
        limit = float(entry.parameters)
    models = family(run.model, limit)
    name = next((word for word in words if word.startswith("model=")), BASE[0])
    for _ in range(tries):
        fitting = [model for model in models if parameter_count(model) <= limit]
        if not fitting:
            return
        yield [name, *model_arguments(fitting[-1])]
        limit = SMALLER * parameter_count(fitting[-1])


def model_arguments(model: ModelSection) -> list[str]:
    """The overrides of a model that make it another one of its family."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden")
    return [f"model.{name}={getattr(model, name)}" for name in names]


def first_that_trains(models: Iterator[list[str]], moments: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the first model that trains, with how many did not."""
    failed: list[str] = []
    others = [word for word in options.words if not word.startswith("model=")]
    for model in models:
        print(f"{moments} moments: {' '.join(model)}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            command = [
                sys.executable,
                "-m",
                "meshwright",
                "train",
                "--runs",
                text,
                "name=largest",
                *model,
                *BASE[1:],
                *others,
                "data.mix=stdlib",
                f"train.steps={options.steps}",
                f"train.warmup_steps={options.steps - 1}",
                f"train.learning_rate={RATE}",
                "train.clip_norm=1.0",
                "train.validate_every=0",
                "checkpoint.every=0",
                "checkpoint.at_end=false",
                "supervision.restarts=0",
                "plan.offload=optimizer",
                f"plan.moments={moments}",
            ]
            with (folder / "errors").open("w") as errors:  # steps are printed as they end
                code = run_for(command, options.limit, sys.stderr, errors)
            metrics, plan = folder / "largest" / "metrics.jsonl", folder / "largest" / "plan.yaml"
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            steps = [step for step in map(json.loads, filter(complete, lines)) if step.get("kind") == "step"]
            if code == 0 or (code is None and steps):
                return {"model": model, "failed": failed, "exit_code": code, **planned(plan), **figures(steps)}
            failed.append((folder / "errors").read_text().strip()[-1000:] or f"exit code {code}")
        print(failed[-1], file=sys.stderr, flush=True)
    return {"model": None, "failed": failed}


def complete(line: str) -> bool:
    """Whether a line of metrics was written whole."""
    return line.endswith("}")


def planned(file: Path) -> dict[str, Any]:
    """What the plan of a run leaves in host memory, and what it predicts."""
    plan = yaml.safe_load(file.read_text())
    predicted = plan.get("predicted") or {}
    return {
        "offload_fraction": plan["offload_fraction"],
        "offload_staging": plan["offload_staging"],
        "predicted_step_seconds": predicted.get("step_seconds"),
        "predicted_memory_peak_bytes": predicted.get("memory_peak_bytes"),
    }


def figures(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds and tokens/s of a run's steps, at least one, peak bytes and losses."""
    timed = steps[WARM_UP:] or steps[-1:]
    return {
        **{key: statistics.median(step[key] for step in timed) for key in ("step_seconds", "tokens_per_second")},
        "step_seconds_all": [step["step_seconds"] for step in steps],
        "device_peak_bytes": max(step.get("memory_peak_bytes") or 0 for step in steps),
        "allocated_peak_bytes": max(step.get("memory_allocated_peak_bytes") or 0 for step in steps),
        "losses": [step["loss"] for step in steps],
    }


if __name__ == "__main__":
    main()
