"""One model on one device, its optimizer in host memory: this program beside FSDP2's CPUOffloadPolicy and torchao's CPUOffloadOptimizer.

    python benchmarks/offload_peers.py model=llama3-3b train.seq_len=8192 train.global_batch=1 --out peers.json
    python benchmarks/offload_peers.py model=llama3-8b train.seq_len=8192 train.global_batch=4 --only ours,ours-bf16
    python benchmarks/offload_peers.py model=llama-nano train.seq_len=64 train.global_batch=2 cluster.gpu=cpu --steps 4

Every method trains in a process of its own: the same modules, initial weights and samples, micro-batches of one sequence, all blocks
recomputed. `ours` clips by the norm and has fp32 masters; `ours-bf16` has bf16 moments. `fsdp2` has fp32 masters and moments, updates them
on the host, and clips there. `torchao` has bf16 weights and moments, and does not clip: its fastest form. Prints and writes the median
seconds of a step without the first ones, tokens/s, peak bytes of the device, and the losses. Methods that cannot run say why; of a method
that is stopped (--limit), the steps that had ended count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bounded import run_for
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshwright.config.load import load_run
from meshwright.data.loader import Windows
from meshwright.launch.prepare import open_run_data, resolve_data
from meshwright.models.decoder import Decoder
from meshwright.observe.environment import environment
from meshwright.parallel.apply import initialise_shards
from meshwright.spec.run import RunSpec

OURS = {"ours": (), "ours-bf16": ("plan.moments=bf16",)}
PEERS = ("fsdp2", "torchao")
WARM_UP = 2
"""Steps before those that are timed: compilation, pinning of host memory. Of a stopped method with fewer the last step is timed."""
RATE, CLIP = 1e-4, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="model and batch as in `meshwright train`")
    parser.add_argument("--only", default=",".join([*OURS, *PEERS]), help="methods, separated by commas")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a method is stopped")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    words = [
        *options.words,
        "data.mix=stdlib",
        f"train.steps={options.steps}",
        f"train.learning_rate={RATE}",
        f"train.clip_norm={CLIP}",
        "train.warmup_steps=1",
        "train.validate_every=0",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "cluster.gpus_per_node=1",
        "plan.micro_batch=1",
        "plan.recompute=full",
        "plan.compute=bf16",
        "plan.offload=optimizer",
        "plan.offload_fraction=1",
    ]
    if options.peer:
        train_peer(resolve_data(load_run(None, words), _note), options.peer)
        return
    record: dict[str, Any] = {"benchmark": "offload_peers", "words": words, "environment": environment(), "results": []}
    for name in options.only.split(","):
        print(f"{name}: {options.steps} steps", file=sys.stderr, flush=True)
        start = time.perf_counter()
        result = measure(name, words, options)
        record["results"].append({**result, "seconds": time.perf_counter() - start})
        print(json.dumps(record["results"][-1]), flush=True)
        if options.out:  # after each method, so that a run that is stopped leaves the others
            options.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str, words: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The result of one method, trained in processes of its own."""
    if name == "torchao" and importlib.util.find_spec("torchao") is None:
        return {"method": name, "error": "torchao is not installed"}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        output, errors = folder / "output", folder / "errors"
        command = [sys.executable, __file__, *options.words, "--steps", str(options.steps), "--peer", name]
        if name in OURS:
            command = [sys.executable, "-m", "meshwright", "train", "--runs", text, "name=ours", *words, *OURS[name]]
        with output.open("w") as stdout, errors.open("w") as stderr:
            code = run_for(command, options.limit, stdout, stderr)
        lines = folder / "ours" / "metrics.jsonl" if name in OURS else output
        steps = steps_of(lines.read_text() if lines.exists() else "")
        reason = (errors.read_text().strip().splitlines() or ["no output"])[-1][:300]
    result: dict[str, Any] = {"method": name}
    if code is None:
        result["error"] = (
            f"stopped after {options.limit:g} seconds (--limit), {len(steps)} steps; last message: {reason}"
        )
    elif code:
        return {**result, "error": reason}
    return result | (figures(load_run(None, words), steps) if steps else {})


def steps_of(lines: str) -> list[dict[str, Any]]:
    """The steps in the lines of a metrics file or of a peer; the last line may be cut off."""
    records = [json.loads(line) for line in lines.splitlines() if line.startswith("{") and line.endswith("}")]
    return [record for record in records if record.get("kind") == "step"]


def figures(run: RunSpec, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a method from its steps, at least one."""
    timed = [step["step_seconds"] for step in steps[WARM_UP:] or steps[-1:]]
    median = statistics.median(timed)
    return {
        "step_seconds": median,
        "tokens_per_second": run.train.global_batch * run.train.seq_len / median,
        "timed_steps": len(timed),
        "step_seconds_all": [step["step_seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "device_peak_bytes": max(step.get("memory_peak_bytes") or 0 for step in steps),
    }


def train_peer(run: RunSpec, method: str) -> None:
    """Train with a peer's optimizer, and print each step as it ends."""
    device = torch.device("cpu" if run.cluster.is_cpu else "cuda")
    _note(f"{torch.get_num_threads()} threads; building the model")
    model = build_model(run, device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if run.cluster.is_cpu else "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        try:
            _note("building the optimizer")
            step = fsdp2_step(model, device) if method == "fsdp2" else torchao_step(model)
            if device.type == "cuda":  # initial values in fp32 do not count
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            _note("training")
            for record in train(run, model, step, device):
                print(json.dumps({"kind": "step", **record}), flush=True)
        finally:
            dist.destroy_process_group()


def build_model(run: RunSpec, device: torch.device) -> Decoder:
    """The model with the initial values of a run, in fp32 on the device; its blocks recompute, and compile on a GPU."""
    with torch.device("meta"):
        model = Decoder(run.model, loss_chunk=run.train.loss_chunk)
    model.to_empty(device=device)
    initialise_shards(model, run.seed)
    for name, block in model.layers.items():
        if device.type == "cuda":
            block.compile()
        model.layers[name] = checkpoint_wrapper(block)
    return model


def fsdp2_step(model: Decoder, device: torch.device) -> Callable[[], object]:
    """Shard the model on one rank with CPUOffloadPolicy; returns the update: clipping and AdamW on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": dist.init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    model.cpu()
    for block in model.layers.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = adamw(model.parameters(), torch.optim.AdamW, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return update


def torchao_step(model: nn.Module) -> Callable[[], object]:
    """Round the model to bf16; returns the update by CPUOffloadOptimizer."""
    from torchao.optim import CPUOffloadOptimizer  # pyrefly: ignore [missing-import]

    model.to(torch.bfloat16)
    optimizer = adamw(model.parameters(), CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def adamw(parameters: Iterable[nn.Parameter], wrapper: Any, **options: Any) -> Any:
    """AdamW with the coefficients of a run, by torch's class or one that wraps it."""
    return wrapper(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **options)


def train(
    run: RunSpec, model: Decoder, update: Callable[[], object], device: torch.device
) -> Iterator[dict[str, float]]:
    """Seconds, loss per token and peak bytes of the device of each step, once it has ended."""
    source = open_run_data(run)
    windows = Windows(source, global_batch=run.train.global_batch, data_rank=0, data_ranks=1, micro_batch=1)
    sample = 0
    for _ in range(run.train.steps):
        step, start, total = windows.read(sample), time.perf_counter(), torch.zeros((), device=device)
        sample += run.train.global_batch
        valid = sum(batch.valid_tokens for batch in step.micro_batches)
        for batch in step.micro_batches:
            tokens, targets = (column.to(device) for column in (batch.tokens, batch.targets))
            loss: Tensor = model(
                tokens,
                targets=targets,
                positions=moved(batch.positions, device),
                documents=moved(batch.documents, device),
            )
            (loss / valid).backward()
            total += loss.detach() / valid
        update()
        loss = float(total)  # waits for the device
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        yield {"step_seconds": time.perf_counter() - start, "loss": loss, "memory_peak_bytes": peak}


def _note(note: str) -> None:
    """Print what a peer does: the last line says where one that was stopped had arrived. The output has its steps."""
    print(note, file=sys.stderr, flush=True)


def moved(column: Tensor | None, device: torch.device) -> Tensor | None:
    return None if column is None else column.to(device)


if __name__ == "__main__":
    main()
