"""A tiny corpus and run, prepared once per session, for every test that trains: a step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from meshwright.config.load import load_run
from meshwright.config.profile_file import to_json
from meshwright.data.prepare import prepare
from meshwright.launch import prepare as launching
from meshwright.launch.prepare import PreparedRun
from meshwright.spec.profile import MachineProfile, MatmulTime
from meshwright.spec.run import RunSpec

RUN_FILE = """\
model:
  {{family: llama, layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn_hidden: 32, max_seq_len: 16, init_std: 0.1}}
data: {{mix: {{"{data}": 1}}, document_mask: true, validation_tokens: 256}}
train:
  {{steps: 6, global_batch: 8, seq_len: 16, learning_rate: 1e-2, warmup_steps: 2, loss_chunk: 24,
   gc_every: 4, timeout_seconds: 60}}
cluster: {{gpu: cpu, gpus_per_node: 2}}
checkpoint: {{keep: 10}}
"""
SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix blue ink and eat ripe grapes"
WORDS = SENTENCE.split()


def make_tiny(folder: Path) -> Path:
    """The run file `tiny.yaml` in `folder`, over data prepared beside it; made at the first call."""
    file, data = folder / "tiny.yaml", folder / "data"
    if not file.exists():
        source = folder / "source"
        source.mkdir(parents=True)
        for number in range(60):
            words = [WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(30 + number % 40)]
            (source / f"{number}.txt").write_text(f"Story {number}. {' '.join(words)}.\n", encoding="utf-8")
        prepare([str(source)], "train:300", data, held_out=0.2)
        file.write_text(RUN_FILE.format(data=data), encoding="utf-8")
    return file


def cpu_profile(file: Path) -> Path:
    """`file` with a profile of a CPU of two ranks: its times are predicted then."""
    matmul = MatmulTime(format="fp32", m=512, k=512, n=512, seconds=5e-3, burst_seconds=5e-3)
    profile = MachineProfile(
        date="2026-01-02T03:04:05Z",
        gpu="cpu",
        device="a processor",
        devices=2,
        nodes=1,
        cores=4,
        memory_bytes=32 << 30,
        products=(matmul,),
    )
    file.write_text(to_json(profile), encoding="utf-8")
    return file


def ranks(count: int, *, replicate: int = 1) -> list[str]:
    """Overrides for `count` local ranks."""
    return [f"cluster.gpus_per_node={count}", f"plan.replicate={replicate}", f"plan.shard={count // replicate}"]


def staged(count: int, schedule: str, *, pipeline: int = 2) -> list[str]:
    """Overrides for a pipeline on `count` local ranks, over four layers."""
    pins = [f"plan.pipeline={pipeline}", f"plan.schedule={schedule}", "plan.micro_batch=1"]
    return [f"cluster.gpus_per_node={count}", f"plan.shard={count // pipeline}", *pins, "model.layers=4"]


def tiny_run(file: Path, *overrides: str) -> RunSpec:
    return load_run(file, overrides)


def prepared(file: Path, runs: Path, *overrides: str, profile: tuple[int, int] | None = None) -> PreparedRun:
    """The folder of a tiny run, created or reopened as by `meshwright train`, without starting ranks."""
    with patch.object(launching, "is_finished", return_value=False):
        prepared_run = launching.prepare_run(tiny_run(file, *overrides), runs, profile=profile, note=lambda text: None)
    assert prepared_run is not None
    return prepared_run
