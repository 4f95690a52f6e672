"""Processor seconds of a validation of a small model, of this tree and of another one, over as many tokens.

    git worktree add /tmp/before COMMIT
    python benchmarks/validation.py --before /tmp/before/src --out build/validation.json

Each tree prepares the same generated texts once and then evaluates in turn with the other, each in a process of its own. `choose` is the
choice of the samples, `evaluate` reading them and their losses, with sequences of equal length and with single documents. The model is
small, so that reading counts. Trees before `data.validation_tokens` read the first samples, later ones some of every document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prepare_inputs import PREPARE, SOURCE, write_records, write_tokenizer

SEQ_LEN = 256
EVALUATE = """
import inspect, json, sys, time
import torch
from meshwright.data.source import open_data
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.spec.job import DataSpec
from meshwright.spec.model import ModelSpec
from meshwright.training.evaluate import HeldOut, evaluate_plain
corpus, tokens, seq_len, packing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 32}
spec = ModelSpec(family="llama", vocab_size=128, max_seq_len=seq_len, **sizes)
model = Decoder(spec, reference=True)
initialise(model, spec, seed=0)
data = open_data(DataSpec(validation=corpus, packing=packing), seq_len=seq_len, seed=0, vocab_size=128, split="validation")
began = time.process_time()
if "tokens" in inspect.signature(HeldOut.of).parameters:
    held_out = HeldOut.of(data, tokens, 4096 if packing == "none" else None)
elif packing == "none":
    held_out = HeldOut.of_documents(data, 4096, tokens // 4096)
else:
    held_out = HeldOut.of(data, tokens // seq_len)
chosen = time.process_time()
result = evaluate_plain(model, held_out, micro_batch=8, device=torch.device("cpu"))
ended = time.process_time()
print(json.dumps({"choose": chosen - began, "evaluate": ended - chosen, "tokens": result.tokens}))
"""


def answer(source: Path, code: str, *arguments: object) -> dict[str, Any]:
    """What `code` prints when it runs with the package in `source`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(source)}, check=True, capture_output=True, text=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other tree's src")
    parser.add_argument("--tokens", type=int, default=1 << 19)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = {"before": options.before, "now": SOURCE}
    results: dict[str, Any] = {"tokens": options.tokens, "seq_len": SEQ_LEN, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tokenizer(root / "tokenizer.json")
        write_records(root / "large", options.megabytes * 10**6)
        for side, source in sources.items():
            answer(source, PREPARE, root / "large", root / "tokenizer.json", root / side, "large")
        for packing in ("stream", "none"):
            measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sources}
            for repeat in range(options.repeats):
                for side in sources if repeat % 2 == 0 else reversed(sources):
                    arguments = (root / side, options.tokens, SEQ_LEN, packing)
                    measured[side].append(answer(sources[side], EVALUATE, *arguments))
            medians = {
                side: {key: statistics.median(run[key] for run in runs) for key in ("choose", "evaluate", "tokens")}
                for side, runs in measured.items()
            }
            seconds = {
                side: (figures["choose"] + figures["evaluate"]) / figures["tokens"] for side, figures in medians.items()
            }
            results[packing] = {
                "medians": medians,
                "ratio_per_token": seconds["now"] / seconds["before"],
                "runs": measured,
            }
    text = json.dumps(results)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
