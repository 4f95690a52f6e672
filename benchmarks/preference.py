"""DPO beside SFT on one GPU: Llama-3-8B with random weights, LoRA of rank 16, pairs of 2,048 tokens, two a sequence of 4,096.

    python benchmarks/preference.py --out preference.jsonl

makes answers of random letters, prepares them as chats and as pairs, and trains on both with the same adapters and sizes. It prints and
appends a JSON line for each run, and one that compares them: the tokens per second that DPO's FLOPs allow at the rate of SFT's, and how
much of them the run reaches. DPO needs one forward of the reference for each answer, and the head once more. Predicted and measured time
and memory are beside each other. OVERRIDES such as `plan.micro_batch=1` go to both runs. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import LOG_TAIL, MESHWRIGHT, lines_of, our_figures, run_ours

from meshwright.families.registry import MODEL_PRESETS
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, flops_per_token

TEMPLATE = """{%for m in messages%}{%if m.role=='assistant'%}
{%generation%}{{m.content}}<|endoftext|>{%endgeneration%}
{%else%}{{m.content}}: {%endif%}{%endfor%}"""
VOCABULARY = 384
"""Rows of the embedding of a model without a vocabulary of its own, for the tokenizer of this data."""
PROMPT_SHARE = 0.25
"""Share of a document that is its prompt."""


def main() -> None:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="preference-"))
    prepare_data(folder, options)
    lines = {side: a_run(side, folder, options) for side in ("sft", "dpo")}
    if not any("error" in line for line in lines.values()):
        lines["compared"] = compared(lines["sft"], lines["dpo"], options)
    for side, line in lines.items():
        shown = {key: value for key, value in line.items() if key not in ("environment", "start", "plan", "predicted")}
        print(json.dumps({"side": side, **shown}))
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"side": side, "model": options.model, "rank": options.rank, **line}) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of both runs")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--pair", type=int, default=2048, help="tokens of the two answers of a pair, their prompts included"
    )
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=5, help="steps that are not counted")
    parser.add_argument("--limit", type=float, default=280, help="seconds of a run")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def prepare_data(folder: Path, options: argparse.Namespace) -> None:
    """Prepare `chats` and `pairs` with as many tokens as the steps read; a letter is a token."""
    draw = random.Random(0)
    count = options.steps * options.sequences * (options.seq_len // options.pair)
    room = options.pair // 2 - 8  # the template's own tokens
    asked = round(room * PROMPT_SHARE)

    def text(length: int) -> str:
        return "".join(draw.choices(string.ascii_letters, k=length))

    base = folder / "base"
    base.mkdir()
    (base / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with (folder / "chats.jsonl").open("w") as chats, (folder / "pairs.jsonl").open("w") as pairs:
        for _ in range(count):
            prompt, chosen, rejected = text(asked), text(room - asked), text(room - asked)
            pairs.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
            for answer in (chosen, rejected):
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                chats.write(json.dumps({"messages": turns}) + "\n")
    (folder / "letters.txt").write_text("\n".join(string.ascii_letters + ": "), encoding="utf-8")
    meshwright("data", "prepare", folder / "letters.txt", "--tokenizer", "train:257", "--out", folder / "letters")
    (base / "tokenizer.json").write_bytes(next((folder / "letters").rglob("tokenizer.json")).read_bytes())
    for name, form in (("chats", "--chat"), ("pairs", "--preferences")):
        meshwright("data", "prepare", folder / f"{name}.jsonl", form, "--tokenizer", base, "--out", folder / name)


def meshwright(*words: object) -> None:
    subprocess.run([*MESHWRIGHT, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def a_run(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run, and for DPO the rate of the reference's forward."""
    settings = {
        "extends": options.model,
        "model": {
            "max_seq_len": options.seq_len,
            "adapter": {"rank": options.rank, "alpha": 2 * options.rank, "targets": ["all-linear"]},
        },
        "data": {"mix": {str(folder / ("chats" if side == "sft" else "pairs")): 1}},
        "train": {
            "steps": options.steps,
            "global_batch": options.sequences,
            "seq_len": options.seq_len,
            "learning_rate": 1e-5,
            "warmup_steps": 2,
            "validate_every": 0,
        },
        "checkpoint": {"every": 0, "at_end": False},
        **({"preference": {"loss": "dpo"}} if side == "dpo" else {}),
    }
    file, log = folder / f"{side}.yaml", folder / f"{side}.log"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    began = time.monotonic()
    run = run_ours([*MESHWRIGHT, "train", str(file)], options.overrides, side, folder / "runs", log, {}, options.limit)
    if run.folder is None or len(run.records) <= options.skip:
        tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return {"error": f"exit code {run.code} after {len(run.records)} steps: {tail}"}
    found = our_figures(run.folder, run.records, options.skip)
    found["wall_seconds"] = round(time.monotonic() - began, 1)
    predicted = found["predicted"]
    allocated = found["memory_allocated_peak_gib"]
    # What tensors take has no part of the framework's memory; on a CPU the whole process is measured.
    framework = predicted["memory_bytes"].get("framework", 0) if allocated else 0
    found["predicted_memory_gib"] = (predicted["memory_peak_bytes"] - framework) / 2**30
    peak = allocated or found["memory_reserved_peak_gib"]
    found["memory_over_predicted"] = round(peak / found["predicted_memory_gib"], 4)
    if predicted["step_seconds"] is not None:  # else the device has no known rates
        found["predicted_step_seconds"] = predicted["step_seconds"]
        found["time_over_predicted"] = round(found["step_seconds"] / predicted["step_seconds"], 4)
    notes = [record["text"] for record in lines_of(run.folder, "event") if "reference log" in record["text"]]
    if notes:
        found["reference"] = notes[0]
        rate = re.search(r"([\d,]+) tokens/s", notes[0])
        found["reference_tokens_per_second"] = None if rate is None else float(rate[1].replace(",", ""))
    return found


def compared(sft: dict[str, Any], dpo: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What DPO's FLOPs allow at the FLOP/s of SFT, with both conventions of attention, and what the run reaches.

    A token of DPO costs that of SFT, the matmul of the head once more, and once, before the first step, a forward of
    the reference.
    """
    dimensions = {**MODEL_PRESETS[options.model], "max_seq_len": options.seq_len}
    dimensions["vocab_size"] = dimensions["vocab_size"] or VOCABULARY
    adapter = {"rank": options.rank, "alpha": 2 * options.rank, "targets": ["all-linear"]}
    base, trained = (from_plain(ModelSpec, dimensions | more) for more in ({}, {"adapter": adapter}))
    head = 2.0 * base.vocab_size * base.hidden
    found: dict[str, Any] = {}
    steps_rate, reference_rate = dpo["tokens_per_second_per_gpu"], dpo["reference_tokens_per_second"]
    whole_rate = 1 / (1 / steps_rate + 1 / reference_rate)
    for convention, causal in (("causal", True), ("full", False)):
        train = flops_per_token(trained, options.pair // 2, causal=causal)
        forward = flops_per_token(base, options.pair // 2, causal=causal) / 3
        allowed = sft["tokens_per_second_per_gpu"] * train / (train + head + forward)
        found |= {
            f"flops_per_token_sft_{convention}": train,
            f"flops_per_token_dpo_{convention}": train + head + forward,
            f"allowed_tokens_per_second_{convention}": round(allowed, 1),
            f"reached_{convention}": round(whole_rate / allowed, 4),
            f"reached_steps_alone_{convention}": round(
                steps_rate / (sft["tokens_per_second_per_gpu"] * train / (train + head)), 4
            ),
        }
    return {"dpo_tokens_per_second_with_reference": round(whole_rate, 1), **found}


if __name__ == "__main__":
    main()
