"""Tokens per second of hybrid ranks beside static context ranks, on documents of unequal lengths, with CPU ranks on cores of their own.

    python benchmarks/hybrid_ranks.py --out FILE.json      # 8 ranks of 16 cores, two each; about six minutes
    python benchmarks/hybrid_ranks.py --ranks 2 --capacity 128 --layers 2 --hidden 64 --steps 4      # a try

Documents have the lengths of the public mix of data/document-lengths.csv, cut at what all ranks hold with `--capacity` tokens each. Static
ranks pack documents into sequences of that length; c context ranks divide each, and hold its length / c tokens: only with all ranks no
more than the capacity. All layouts train on about as many tokens a step, and attend within documents. Prints one line of JSON for
each layout: the median step time, tokens/s, and the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from length_mixes import length_mix
from sides import MESHWRIGHT, run_ours
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.data.prepare import prepare
from meshwright.observe.environment import environment

WORDS = 510
"""Words of the vocabulary, drawn with the frequencies 1, 1/2, 1/3 …"""
SKIPPED_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=1024, help="tokens of a rank's micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="tokens of a step over the longest document")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one layout")
    parser.add_argument("--only", help="layouts, separated by commas")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepared_corpus(Path(folder), options)
        for name, overrides in layouts(options):
            if options.only and name not in options.only.split(","):
                continue
            results.append({"layout": name, **measure(name, overrides, corpus, options, Path(folder))})
            print(json.dumps(results[-1]), flush=True)
            if options.out:  # after each layout, so that a run that is stopped leaves the others
                record = {
                    "benchmark": "hybrid_ranks",
                    "options": vars(options) | {"out": None},
                    "environment": environment(),
                    "results": results,
                }
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def layouts(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Name and overrides of each layout: hybrid ranks, and every static number of context ranks by ring and by Ulysses."""
    tokens = options.sequences * options.capacity * options.ranks
    yield (
        "hybrid",
        [
            "data.packing=none",
            f"train.global_batch_tokens={tokens}",
            f"plan.hybrid={options.ranks}",
            f"plan.capacity={options.capacity}",
        ],
    )
    context = options.ranks
    while context:
        accumulate = max(1, options.sequences * context // options.ranks)
        batch = [
            f"train.global_batch={accumulate * options.ranks // context}",
            "plan.micro_batch=1",
            "data.document_mask=true",
        ]
        for axis in ("context_ring", "context_ulysses") if context > 1 else ("context_ring",):
            yield f"{axis} {context}", [*batch, f"plan.{axis}={context}", f"plan.shard={options.ranks // context}"]
        context //= 2


def prepared_corpus(folder: Path, options: argparse.Namespace) -> Path:
    """Token shards of documents of random words, one token each."""
    words = [f"w{number}" for number in range(WORDS)]
    vocabulary = {word: number for number, word in enumerate([*words, "<unk>", "<|endoftext|>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(0)
    longest = options.capacity * options.ranks
    lengths = length_mix("public").draw(2 * options.steps * options.sequences * longest, longest - 1, random)
    shares = 1 / np.arange(1, WORDS + 1)
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for length in lengths:
            drawn = random.choice(WORDS, length, p=shares / shares.sum())
            file.write(json.dumps({"text": " ".join(words[number] for number in drawn)}) + "\n")
    prepare([str(folder / "documents.jsonl")], str(folder / "tokenizer.json"), folder / "corpus")
    return folder / "corpus"


def measure(name: str, overrides: list[str], corpus: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one layout; the end of its log if it failed."""
    log, run_name = folder / f"{name}.log", name.replace(" ", "-")
    longest = options.capacity * options.ranks
    common = [
        "model=llama-nano",
        f"name={run_name}",
        f"model.layers={options.layers}",
        f"model.hidden={options.hidden}",
        "model.heads=8",
        "model.kv_heads=8",
        f"model.head_dim={options.hidden // 8}",
        f"model.ffn_hidden={4 * options.hidden}",
        f"model.max_seq_len={longest}",
        f"data.mix={corpus}",
        f"train.seq_len={longest}",
        f"train.steps={options.steps}",
        "train.validate_every=0",
        "train.keep_cores=true",
        "cluster.gpu=cpu",
        f"cluster.gpus_per_node={options.ranks}",
        "plan.compile=false",
        "plan.recompute=none",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
    ]
    threads = str(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    run = run_ours(
        [*MESHWRIGHT, "train"],
        [*common, *overrides],
        run_name,
        folder / "runs",
        log,
        {"OMP_NUM_THREADS": threads},
        options.limit,
    )
    if run.code or len(run.records) <= SKIPPED_STEPS:
        return {"exit_code": run.code, "log": log.read_text(encoding="utf-8", errors="replace")[-1500:]}
    seconds = [record["step_seconds"] for record in run.records]
    counted = run.records[SKIPPED_STEPS:]
    return {
        "step_seconds": [round(value, 3) for value in seconds],
        "tokens_per_second": round(statistics.median(record["tokens_per_second"] for record in counted), 1),
        "losses": [round(record["loss"], 4) for record in run.records],
        "peak_bytes": max(record.get("memory_peak_bytes") or 0 for record in run.records),
    }


if __name__ == "__main__":
    main()
