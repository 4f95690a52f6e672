"""Reinforcement learning on one GPU beside its parts alone: the engine on the same requests, and training on rows of the same shape.

    python benchmarks/rl.py --model llama3-1b --out rl-1b.json
    python benchmarks/rl.py --model llama3-8b --rank 16 --micro-batch 8 --sides rl,offline,train --out rl-8b.json

A step has 64 questions with 8 answers. Weights are random, and one token of `--mean-length` ends an answer, so the lengths are long-tailed:
the longest of 512 is about six times the mean. The sides, each in a process of its own:

- `rl`: `meshwright rl`;
- `exact`: the same with `rl.exact`, without adapters only;
- `offline`: an engine of serve_offline.py, which gets the requests of the last steps of `rl`, with the lengths that their answers had;
- `train`: `meshwright train` with the same plan on chats of such lengths.

Prints the figures and their comparison, and writes them as one JSON object. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from sides import LOG_TAIL, MESHWRIGHT, NOT_STORED, OurRun, lines_of, run_ours

from meshwright.config.presets import MODEL_PRESETS
from meshwright.data.conversations import best_fit

SIDES = ("rl", "exact", "offline", "train")
TEMPLATE = (
    "{%for m in messages%}{%if m.role=='assistant'%}{%generation%}{{m.content}} <|endoftext|>{%endgeneration%}"
    "{%else%}{{m.content}} {%endif%}{%endfor%}"
)
REWARD = """\
import zlib


def reward(prompt, answer, record):
    return zlib.crc32(answer.encode()) / 2**32
"""
TRAINING = ("forward", "backward", "reduce", "optim", "host")
"""Phases of a step other than reading its batch, which contains hand-over, rollout and rewards."""
OFFLINE_BATCHES = 4
"""Steps of `rl` whose requests the engine alone gets."""


def main() -> None:
    options = arguments()
    if options.offline_side is not None:
        print(json.dumps(offline_figures(options)))
        return
    folder = Path(tempfile.mkdtemp(prefix="rl-"))
    make_corpus(folder, options)
    result: dict[str, Any] = {"benchmark": "rl", "command": " ".join(sys.argv[1:]), "model": options.model}
    result["date"] = time.strftime("%Y-%m-%d")
    for side in options.sides.split(","):
        began = time.monotonic()
        figures = offline_run(folder, options) if side == "offline" else our_run(side, folder, options)
        result[side] = {**figures, "wall_seconds": round(time.monotonic() - began, 1)}
        print(
            json.dumps({side: {k: v for k, v in result[side].items() if k not in ("plan", "environment")}}), flush=True
        )
    result["compared"] = comparison(result)
    print(json.dumps(result["compared"]))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of all runs")
    parser.add_argument("--model", default="llama3-1b", choices=list(MODEL_PRESETS))
    parser.add_argument("--rank", type=int, default=0, help="of adapters; 0 trains all weights")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mean-length", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=768)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--limit", type=float, default=280, help="seconds of a side")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--offline-side", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_corpus(folder: Path, options: argparse.Namespace) -> None:
    """Chats of words that are tokens, in `folder/data`; every `mean_length`-th word ends an answer."""
    base, vocab = folder / "base", vocabulary(options.model)
    base.mkdir()
    words = [f"w{number}" for number in range(vocab - 1)] + ["<|endoftext|>"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocab - 1, "content": words[-1], "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "w0"},
    }
    tokenizer |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (base / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    ends = [vocab - 1, *range(options.mean_length, vocab - 1, options.mean_length)]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    (base / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    draws = random.Random(0)
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(2 * options.prompts * options.steps):
            length = min(max(round(draws.expovariate(1 / options.mean_length)), 1), options.new_tokens)
            texts = (" ".join(draws.choices(words[:-1], k=count)) for count in (draws.randint(4, 40), length))
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    command = [*MESHWRIGHT, "data", "prepare", str(folder / "chats.jsonl"), "--chat", "--tokenizer", str(base)]
    subprocess.run([*command, "--out", str(folder / "data")], check=True, stdout=subprocess.DEVNULL)


def vocabulary(model: str) -> int:
    """Entries of a preset's vocabulary; 4,096 of one that takes that of the data."""
    return MODEL_PRESETS[model]["vocab_size"] or 4096


def our_run(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of `meshwright rl` or `meshwright train`."""
    learns = side in ("rl", "exact")
    rows = options.prompts * options.samples * (options.mean_length + 22) // options.seq_len
    rows = -(-rows // options.micro_batch) * options.micro_batch
    settings: dict[str, Any] = {
        "extends": options.model,
        "model": {"max_seq_len": options.seq_len, "vocab_size": vocabulary(options.model)},
        "data": {"mix": str(folder / "data")},
        "train": {
            "steps": options.steps,
            "global_batch": options.prompts if learns else rows,
            "seq_len": options.seq_len,
            "learning_rate": 1e-6,
            "warmup_steps": 1,
            "weight_decay": 0,
            "validate_every": 0,
        },
        "plan": {"micro_batch": options.micro_batch, "recompute": "full"},
        "checkpoint": {"every": 0, "at_end": False},
    }
    if options.rank:
        settings["model"]["adapter"] = {"rank": options.rank, "alpha": 2 * options.rank, "targets": ["all-linear"]}
    if learns:
        reward = {"file": str(folder / "reward.py")}
        settings["rl"] = {"reward": reward, "samples": options.samples, "new_tokens": options.new_tokens}
        settings["rl"]["exact"] = side == "exact"
    file, log = folder / f"{side}.yaml", folder / f"{side}.log"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    command = [*MESHWRIGHT, "rl" if learns else "train", str(file)]
    run = run_ours(command, options.overrides, side, folder / "runs", log, {}, options.limit)
    if run.folder is None or len(run.records) <= options.skip:
        tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return {"error": f"exit code {run.code} after {len(run.records)} steps: {tail}"}
    return {"micro_batches": rows // options.micro_batch, **step_figures(run, options)}


def step_figures(run: OurRun, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the steps after those that are not counted: means, as a step of long answers has more of all phases."""
    assert run.folder is not None
    counted = run.records[options.skip :]
    phases = {name for record in counted for name in record["phases"]}
    means = {name: statistics.fmean(record["phases"].get(name, 0.0) for record in counted) for name in sorted(phases)}
    sums = [sum(record["phases"].values()) / record["step_seconds"] for record in counted]
    figures: dict[str, Any] = {
        "steps": len(counted),
        "step_seconds": statistics.fmean(record["step_seconds"] for record in counted),
        "step_seconds_all": [round(record["step_seconds"], 4) for record in run.records],
        "phases": means,
        "phases_of_step": [min(sums), max(sums)],
        "training_seconds": sum(means.get(name, 0.0) for name in TRAINING),
    }
    for name in ("handover_seconds", "rollout_seconds", "rewards_seconds", "data_wait_seconds", "answer_tokens"):
        if name in counted[0]:
            figures[name] = statistics.fmean(record[name] for record in counted)
    if "rollout_seconds" in counted[0]:
        figures["rollout_seconds_all"] = [round(record["rollout_seconds"], 4) for record in run.records]
    for name in (
        "longest_answer",
        "truncated",
        "entropy",
        "unequal_logprobs",
        "largest_logprob_difference",
        "engine_kl",
    ):
        if name in counted[0]:
            figures[name] = max(record[name] for record in counted)
    lengths = {record["step"]: record["lengths"] for record in lines_of(run.folder, "answers")}
    if lengths:
        counted_lengths = [lengths[record["step"]] for record in counted if record["step"] in lengths]
        figures["micro_batches"] = statistics.fmean(micro_batches(each, options) for each in counted_lengths)
        figures["lengths"] = counted_lengths[-1]
    figures["memory_allocated_peak_gib"] = max(r.get("memory_allocated_peak_bytes", 0) for r in run.records) / 2**30
    figures["loss"] = [run.records[0]["loss"], run.records[-1]["loss"]]
    figures["mfu"] = statistics.fmean(record.get("mfu") or 0.0 for record in counted)
    plan = yaml.safe_load((run.folder / "plan.yaml").read_text(encoding="utf-8"))
    figures["predicted"] = plan.get("predicted")
    figures["plan"] = {key: value for key, value in plan.items() if key not in NOT_STORED}
    figures["environment"] = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))
    return figures


def micro_batches(lengths: Sequence[Sequence[int]], options: argparse.Namespace) -> int:
    """Micro-batches of a step whose questions and answers have these lengths, as `rl.samples` packs them."""
    documents = np.array([question + each - 1 for question, *answers in lengths for each in answers], dtype=np.int64)
    rows = int(best_fit(documents, options.seq_len).max()) + 1
    return -(-rows // options.micro_batch)


def offline_run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the engine alone, in a process of its own."""
    words = ["--model", options.model, "--seq-len", str(options.seq_len), "--offline-side", str(folder / "runs" / "rl")]
    done = subprocess.run(
        [sys.executable, __file__, *words], text=True, capture_output=True, timeout=options.limit, check=False
    )
    if done.returncode:
        return {"error": done.stderr[-LOG_TAIL:]}
    return json.loads(done.stdout.splitlines()[-1])


def offline_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the engine of serve_offline.py for the requests of each of the last steps of a run."""
    from serve_offline import finish, random_model

    from meshwright.serve.engine import Engine
    from meshwright.serve.sampling import SamplingOptions
    from meshwright.spec.engine import EngineOptions

    model = random_model(options.model, options.seq_len + 1)
    engine = Engine(model, options=EngineOptions(context=options.seq_len + 1, prefix_cache=False))
    draws, sampling = random.Random(0), SamplingOptions(temperature=1.0)
    finish(engine, [([1] * 8, 40)] * 300, sampling)  # to warm up
    records = list(lines_of(options.offline_side, "answers"))[-OFFLINE_BATCHES:]
    seconds, steps, tokens = [], [], []
    for record in records:
        requests = [
            ([draws.randrange(engine.spec.vocab_size) for _ in range(question)], answer)
            for question, *answers in record["lengths"]
            for answer in answers
        ]
        count, taken = finish(engine, requests, sampling)
        seconds.append(taken)
        steps.append(count)
        tokens.append(sum(answer for _, answer in requests))
    rates = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
    return {
        "rl_steps": [record["step"] for record in records],
        "seconds": seconds,
        "engine_steps": steps,
        "new_tokens_per_second": statistics.fmean(rates),
    }


def comparison(result: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios that are asked for, of the sides that have figures."""
    sides = {name: result[name] for name in SIDES if name in result and "error" not in result[name]}
    ours, compared = sides.get("rl"), {}
    if ours is None:
        return {}
    compared["handover_seconds"] = ours["handover_seconds"]
    compared["sum_of_phases_of_step"] = ours["phases_of_step"]
    parts = sum(ours[name] for name in ("handover_seconds", "rollout_seconds", "rewards_seconds"))
    compared["sum_of_parts_of_step"] = (parts + ours["training_seconds"]) / ours["step_seconds"]
    if "offline" in sides:
        rollouts = [ours["rollout_seconds_all"][step - 1] for step in sides["offline"]["rl_steps"]]
        compared["rollout_of_offline"] = sum(sides["offline"]["seconds"]) / sum(rollouts)
    if "exact" in sides:
        compared["exact_of_inexact_step"] = sides["exact"]["step_seconds"] / ours["step_seconds"]
    if "train" in sides:
        alone = sides["train"]
        each = sum(alone["phases"].get(name, 0.0) for name in ("forward", "backward"))
        expected = alone["training_seconds"] + each * (ours["micro_batches"] / alone["micro_batches"] - 1)
        compared["training_of_train"] = expected / ours["training_seconds"]
    return compared


if __name__ == "__main__":
    main()
