"""A tiny corpus of questions and a run that learns to answer them, prepared once per session."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from tests.training.tiny import make_tiny

TEMPLATE = (
    "{%for m in messages%}{%if m.role=='assistant'%}{%generation%}{{m.content}}<|endoftext|>{%endgeneration%}"
    "{%else%}{{m.content}} = {%endif%}{%endfor%}"
)
GENERATION = {"do_sample": True, "temperature": 0.2, "top_k": 1, "top_p": 0.1, "repetition_penalty": 1.3}
"""How a server would draw from the base model. Training reads none of it."""
RUN_FILE = """\
model:
  {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn_hidden: 48, vocab_size: 304, max_seq_len: 64,
   init_std: 0.2}}
data: {{mix: {{"{data}": 1}}}}
train:
  {{steps: 4, global_batch: 8, seq_len: 32, learning_rate: 3e-3, warmup_steps: 1, loss_chunk: 48, timeout_seconds: 60}}
rl: {{reward: {{file: {judge}, function: common, processes: 1}}, samples: 4, new_tokens: 8}}
cluster: {{gpu: cpu, gpus_per_node: 2}}
plan: {{compile: false}}
checkpoint: {{keep: 10}}
"""


def make_questions(folder: Path) -> Path:
    """The run file `tiny.yaml` in `folder`, over chats prepared beside it; made at the first call."""
    file = folder / "tiny.yaml"
    if not file.exists():
        tokens = make_tiny(folder / "text").parent / "data"
        base = folder / "base"
        base.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(tokens.rglob("tokenizer.json")), base)
        (base / "chat_template.jinja").write_text(TEMPLATE)
        (base / "generation_config.json").write_text(json.dumps(GENERATION))
        chats = folder / "chats.jsonl"
        with chats.open("w") as out:
            for number in range(40):
                digits = [number * 7 % 10, number * 3 % 10, number // 10]
                question, answer = (" ".join(map(str, each)) for each in (digits, sorted(digits)))
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                out.write(json.dumps({"messages": turns}) + "\n")
        prepare([str(chats)], str(base), folder / "data", chat=ChatRequest(), held_out=0.2)
        judge = Path(__file__).with_name("judge.py")
        file.write_text(RUN_FILE.format(data=folder / "data", judge=judge), encoding="utf-8")
    return file
