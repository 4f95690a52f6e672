"""LoRA beside peft on one GPU: Llama-3-8B with random weights, rank 16 on all linear layers, 2 sequences of 4,096 tokens a step.

    python benchmarks/lora.py --out lora.jsonl

prints and appends a JSON line for each run: ours with adapters, ours with frozen weights and adapters on one narrow layer alone (what the
adapters cost), and peft with transformers, each layer compiled, if both can be imported. Nothing is downloaded. `--model llama3-70b
--sequences 1 --passes 1` and other presets work likewise; OVERRIDES such as `plan.recompute=full` go to our run. The peer trains on random
tokens of the same shape: its loss is not comparable, its time is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import LOG_TAIL, MESHWRIGHT, our_figures, run_ours

ADAPTED = "all-linear"
BASE_ONLY = "k_proj"
"""Adapters of the narrowest layer: a step with frozen weights needs some parameter to train."""


def main() -> None:
    options = arguments()
    if options.peer_side:
        print(json.dumps(peer_figures(options)))
        return
    for number in range(1, options.passes + 1):
        for side in options.sides.split(","):
            line = {"kind": "run", "side": side, "pass": number, "model": options.model, "rank": options.rank}
            line |= {"sequences": options.sequences, "seq_len": options.seq_len}
            began = time.monotonic()
            line |= peer_run(options) if side == "peft" else our_run(side, options)
            line["wall_seconds"] = round(time.monotonic() - began, 1)
            print(json.dumps({key: value for key, value in line.items() if key not in ("environment", "start")}))
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of our run")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=5, help="steps that are not counted")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--sides", default="ours,base,peft")
    parser.add_argument("--limit", type=float, default=280, help="seconds of a run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer-side", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def our_run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of `meshwright train` with the adapters of a side."""
    folder = Path(tempfile.mkdtemp(prefix="lora-"))
    targets = ADAPTED if side == "ours" else BASE_ONLY
    settings = {
        "extends": options.model,
        "model": {
            "max_seq_len": options.seq_len,
            "adapter": {"rank": options.rank, "alpha": 2 * options.rank, "targets": [targets]},
        },
        "data": {"mix": "stdlib", "validation_tokens": 8192},
        "train": {
            "steps": options.steps,
            "global_batch": options.sequences,
            "seq_len": options.seq_len,
            "learning_rate": 2e-4,
            "validate_every": 0,
        },
        "checkpoint": {"every": 0, "at_end": False},
    }
    file = folder / f"lora-{side}.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    log = folder / "log"
    run = run_ours([*MESHWRIGHT, "train", str(file)], options.overrides, f"lora-{side}", folder, log, {}, options.limit)
    if run.folder is None or len(run.records) <= options.skip:
        tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return {"error": f"exit code {run.code} after {len(run.records)} steps: {tail}"}
    return our_figures(run.folder, run.records, options.skip)


def peer_run(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of peft in a process of its own."""
    words = ["--model", options.model, "--rank", str(options.rank), "--sequences", str(options.sequences)]
    words += ["--seq-len", str(options.seq_len), "--steps", str(options.steps), "--skip", str(options.skip)]
    command = [sys.executable, __file__, "--peer-side", *words]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {options.limit:.0f} s"}
    if done.returncode:
        return {"error": done.stderr[-LOG_TAIL:]}
    return json.loads(done.stdout.splitlines()[-1])


def peer_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Train with peft and transformers, each decoder layer compiled, AdamW fused; weights in bf16, adapters in fp32."""
    import peft
    import torch
    import transformers

    from meshwright.families.folder import to_hf_config
    from meshwright.families.registry import MODEL_PRESETS
    from meshwright.spec.fields import from_plain
    from meshwright.spec.model import ModelSpec

    spec = from_plain(ModelSpec, {**MODEL_PRESETS[options.model], "max_seq_len": options.seq_len})
    values = to_hf_config(spec)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    adapters = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=ADAPTED)
    model = peft.get_peft_model(model, adapters).train()
    for layer in model.base_model.model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], fused=True)
    shape, seconds, losses = (options.sequences, options.seq_len), [], []
    for _ in range(options.steps):
        tokens = torch.randint(spec.vocab_size, shape, device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[options.skip :])
    return {
        "tokens_per_second_per_gpu": round(options.sequences * options.seq_len / median, 1),
        "step_seconds": round(median, 4),
        "step_seconds_all": [round(value, 4) for value in seconds],
        "memory_allocated_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "memory_reserved_peak_gib": torch.cuda.max_memory_reserved() / 2**30,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "versions": {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }


if __name__ == "__main__":
    main()
