"""A tiny corpus of pairs and of labelled answers, and a run that learns from it, prepared once per session."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from tests.rl.corpus import TEMPLATE
from tests.training.tiny import make_tiny

RUN_FILE = """\
model:
  {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn_hidden: 48, vocab_size: 304, max_seq_len: 64,
   init_std: 0.1}}
data: {{mix: {{"{data}": 1}}}}
train:
  {{steps: 4, global_batch: 8, seq_len: 48, learning_rate: 1e-2, warmup_steps: 1, loss_chunk: 48, timeout_seconds: 60}}
preference: {{}}
cluster: {{gpu: cpu, gpus_per_node: 2}}
checkpoint: {{keep: 10}}
"""


def question(number: int) -> dict[str, Any]:
    """A question with a good and a bad answer of different lengths."""
    digits = [number * 7 % 10, number * 3 % 10, number // 10 % 10]
    asked, good = (" ".join(map(str, each)) for each in (digits, sorted(digits)))
    return {"prompt": asked, "chosen": good, "rejected": " ".join(["no"] * (1 + number % 3))}


def write_records(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return file


def make_preferences(folder: Path) -> Path:
    """The run file `tiny.yaml` in `folder`, over pairs prepared beside it in `data`; `labels` has the same answers one by one.

    `more` has other pairs.
    """
    file = folder / "tiny.yaml"
    if not file.exists():
        tokens = make_tiny(folder / "text").parent / "data"
        base = folder / "base"
        base.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(tokens.rglob("tokenizer.json")), base)
        (base / "chat_template.jinja").write_text(TEMPLATE)
        pairs = [question(number) for number in range(80)]
        labels = [
            {"prompt": pair["prompt"], "completion": pair[key], "label": key == "chosen"}
            for pair in pairs
            for key in ("chosen", "rejected")
        ]
        more = [question(number) for number in range(80, 120)]
        for name, records in (("data", pairs), ("labels", labels), ("more", more)):
            source = write_records(folder / f"{name}.jsonl", records)
            prepare([str(source)], str(base), folder / name, chat=ChatRequest(preferences=True), held_out=0.2)
        file.write_text(RUN_FILE.format(data=folder / "data"), encoding="utf-8")
    return file
