"""One whole training step of rank 0 of several ranks, on one device: its shards are those of a rank, collectives are local copies.

    python benchmarks/rank_of_many.py --ranks 8 --model llama3-8b --seq-len 393216 [--steps 3] [--out FILE.json] [OVERRIDE...]

The planner chooses the plan for `ranks` devices; OVERRIDEs are those of `meshwright train`. An all-gather copies this rank's part to every
rank's place, a reduce-scatter adds all parts of its input, an exchange copies what it would send: as many bytes as a rank receives, at the
rate of the device's memory. So memory and compute are those of the rank, and communication takes less time than between devices. Prints
one JSON object with the seconds of each step, tokens per second of one device, the peak of memory, and the plan.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

OVERRIDES = ("plan.gather_transport=nccl", "plan.tensor_transport=nccl", "data.mix=stdlib")
"""Copy engines would map the memory of other devices."""


class Finished(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True


def add_parts(output: Tensor, input: Tensor, *_: Any, **__: Any) -> Finished:
    """Reduce-scatter: the sum of all ranks' parts of `input`, which is read whole."""
    torch.sum(input.view(-1, output.numel()), 0, out=output.view(-1))
    return Finished()


def copy_parts(output: Tensor, input: Tensor, *_: Any, **__: Any) -> Finished:
    """All-to-all of equal parts: what is sent is received."""
    output.view(-1).copy_(input.reshape(-1))
    return Finished()


def copy_messages(operations: Sequence[dist.P2POp]) -> list[Finished]:
    """Point-to-point messages: each receive copies the send before it."""
    sent: list[Tensor] = []
    for operation in operations:
        if operation.op is dist.isend:
            sent.append(operation.tensor)
        else:
            operation.tensor.copy_(sent.pop(0))
    return [Finished() for _ in operations]


def use_local_copies(ranks: int) -> None:
    """Join a job of `ranks` ranks as rank 0, without the others. Call it before the first import of the engine."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())  # its all-gathers copy locally
    copies = {"reduce_scatter_tensor": add_parts, "reduce_scatter_single": add_parts, "all_to_all_single": copy_parts}
    for name, copy in copies.items():
        setattr(dist, name, copy)
    dist.batch_isend_irecv = copy_messages


def measured(ranks: int, words: Sequence[str], steps: int) -> dict[str, Any]:
    """Figures of `steps` steps of the run with these overrides, as rank 0 of `ranks`; the first step is not counted."""
    from meshwright.config.load import load_run
    from meshwright.launch.machine import found_cluster
    from meshwright.planner.search import search

    run = load_run(
        None,
        [
            *OVERRIDES,
            f"cluster.gpu={found_cluster()['gpu']}",
            *words,
            "cluster.nodes=1",
            f"cluster.gpus_per_node={ranks}",
        ],
    )
    plan = search(run).best.plan
    seconds, losses, peak = train(run, plan, steps)
    counted = seconds[1:] or seconds
    tokens = run.train.global_batch * run.train.seq_len
    return {
        "benchmark": "rank_of_many",
        "ranks": ranks,
        "overrides": list(words),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "tokens": tokens,
        "step_seconds": [round(value, 3) for value in seconds],
        "tokens_per_second_per_device": round(tokens / ranks / min(counted), 1),
        "peak_bytes": peak,
        "losses": losses,
        "plan": _plan_words(plan),
    }


def train(run: Any, plan: Any, steps: int) -> tuple[list[float], list[float], int]:
    """Seconds and loss of each step, and the peak of the device's memory in bytes (0 on a CPU)."""
    from meshwright.data.loader import MicroBatch
    from meshwright.events.span import NullRecorder
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.session import open_optimizer
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, lone_rank(plan.ranks))
    engine = build_engine(run.model, plan, mesh, loss_chunk=run.train.loss_chunk, seed=run.seed)
    optimizer = open_optimizer(engine, run.model, run.train, mesh)
    optimizer.start_average()
    optimizer.release_master_weights()
    draw = torch.Generator().manual_seed(0)
    shape = (plan.batch.micro_batch, run.train.seq_len)
    tokens = torch.randint(run.model.vocab_size, (shape[0], shape[1] + 1), generator=draw).to(mesh.device)
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, None, shape[0] * shape[1])
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        figures = train_step(
            engine,
            optimizer,
            mesh,
            [batch] * plan.batch.accumulate,
            learning_rate=1e-4,
            clip_norm=1.0,
            recorder=NullRecorder(),
        )
        losses.append(round(float(figures.values[0]), 4))  # waits for the device
        seconds.append(time.perf_counter() - start)
    return seconds, losses, torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else 0


def lone_rank(ranks: int) -> Any:
    """Rank 0 of `ranks` on one host, whose groups have no other process."""
    from meshwright.parallel.world import World
    from meshwright.spec.rank_environment import RankEnvironment

    class LoneRank(World):
        def split(self, parts: Sequence[Sequence[int]], description: str, options: Any = None) -> dist.ProcessGroup:
            del options
            members = next(list(part) for part in parts if self.rank in part)
            group = dist.new_group(members, backend="fake", use_local_synchronization=True, group_desc=description)
            assert isinstance(group, dist.ProcessGroup), "rank 0 is a member"
            return group

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = dist.group.WORLD
    assert world is not None, "`use_local_copies` joins"
    return LoneRank(RankEnvironment(0, ranks, 0, ranks, "127.0.0.1", 0), device, world)


def _plan_words(plan: Any) -> dict[str, Any]:
    """Return the settings in which plans of long sequences differ."""
    axes = {axis.axis: axis.size for axis in plan.mesh}
    layers = [f"{layer.range}: recompute {layer.recompute}, offload {layer.offload}" for layer in plan.layers]
    predicted = replace(plan, why=()).predicted
    expected = None if predicted is None else {"seconds": predicted.step_seconds, "bytes": predicted.memory_peak_bytes}
    return {"mesh": axes, "layers": layers, "mlp_tile": plan.mlp_tile, "predicted": expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--model", default="llama3-8b", help="preset")
    parser.add_argument("--seq-len", type=int, default=393_216)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    arguments = parser.parse_args()
    use_local_copies(arguments.ranks)
    long = [f"model.max_seq_len={arguments.seq_len}", f"train.seq_len={arguments.seq_len}", "train.global_batch=1"]
    preset = (
        [] if any(word.startswith("model={") for word in arguments.overrides) else [f"model.preset={arguments.model}"]
    )
    words = [*preset, *long, *arguments.overrides]
    text = json.dumps(measured(arguments.ranks, words, arguments.steps), indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
