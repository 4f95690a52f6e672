"""`meshwright profile --serve`: measures steps of the inference engine on this machine, for plans of deployments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.profile_table import flops_text
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput
from meshwright.spec.host_limits import usable_cores

if TYPE_CHECKING:
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.deployment import Quantisation
    from meshwright.spec.model import ModelSpec
    from meshwright.spec.profile import MachineProfile
    from meshwright.spec.serve_profile import EngineProfile

GPU_SECONDS = 75.0
"""Seconds of measurement on a GPU if the command line gives none. The engine may need half a minute to start."""
CPU_SECONDS = 10.0
"""Seconds of measurement on a CPU if the command line gives none."""
SEQUENCES = 256
"""Maximum number of sequences that the measured engine runs at the same time."""


def profile_engine(
    path: Path | None, overrides: Sequence[str], out: Path, seconds: float | None, as_json: bool
) -> None:
    """Measure the engine with the model and the formats of a file or of overrides, and add the figures to the profile `out`."""
    from meshwright.serve.engine_profile import measure_engine
    from meshwright.spec.engine import EngineOptions

    model, formats, cluster = _question(path, overrides)
    if (mistake := formats.release_mistake) is not None:
        raise BadInput(f"serve.quantisation.{mistake[1]}")
    options = EngineOptions(
        sequences=SEQUENCES, weights=formats.served_weights, kv_cache=formats.kv_cache, context=model.max_seq_len
    )
    seconds = seconds or (CPU_SECONDS if cluster.is_cpu else GPU_SECONDS)
    measured = measure_engine(model, options, cluster, seconds, lambda text: print(text, file=sys.stderr))
    from meshwright.config.profile_file import to_json

    write_durable(out, to_json(_with_engine(out, measured, cluster)))
    if as_json:
        from meshwright.spec.fields import to_plain

        print(json.dumps({"file": str(out), "engine": to_plain(measured)}))
    else:
        for line in _table(measured):
            print(line)
    print(f"wrote {out}; name it in a question: cluster.profile={out}", file=sys.stderr)


def _question(path: Path | None, overrides: Sequence[str]) -> tuple[ModelSpec, Quantisation, ClusterSpec]:
    """Return the model, its formats, and the cluster of one device of this machine."""
    from meshwright.config.deployment_file import asks_for_deployment, load_deployment_spec
    from meshwright.config.load import load_run
    from meshwright.families.folder import folder_spec
    from meshwright.launch.machine import found_cluster
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.deployment import Quantisation
    from meshwright.spec.fields import from_plain

    here = from_plain(ClusterSpec, {**found_cluster(), "gpus_per_node": 1})
    if path is not None and asks_for_deployment(path, overrides):
        question = load_deployment_spec(path, overrides, detect=found_cluster, model_reader=folder_spec)
        return _dimensions(question.model), question.serve.quantisation, here
    other = next((word for word in overrides if not word.startswith(("model.", "model="))), None)
    if other is not None:
        raise BadInput(
            f"{other}: profile --serve takes keys of the model only, e.g. model=llama3-8b; it measures this machine"
        )
    if path is None and not overrides:
        raise BadInput("profile --serve needs a model: a file with one, or e.g. model=llama3-8b")
    unused = ["train.seq_len=1"] if path is None else []  # This sequence length fits every model.max_seq_len.
    run = load_run(path, [*overrides, "cluster=auto", *unused], detect=found_cluster, model_reader=folder_spec)
    return _dimensions(run.model), Quantisation(), here


def _dimensions(model: ModelSpec) -> ModelSpec:
    """Return the dimensions of the model only. If the vocabulary is not known, 4096 tokens are assumed."""
    from dataclasses import fields

    from meshwright.spec.model import ModelSpec

    values = {field.name: getattr(model, field.name) for field in fields(ModelSpec)}
    return ModelSpec(**values | {"vocab_size": model.vocab_size or 4096})


def _with_engine(out: Path, measured: EngineProfile, cluster: ClusterSpec) -> MachineProfile:
    """Return the profile in `out`, or a new one, with `measured` added.

    It replaces an earlier measurement of the same model and formats.
    """
    from meshwright.config.profile_file import load_profile

    before = load_profile(out) if out.is_file() else _empty(measured.date, cluster)
    same = measured.model, measured.weights, measured.kv_cache
    others = [entry for entry in before.engine if (entry.model, entry.weights, entry.kv_cache) != same]
    return replace(before, engine=(*others, measured))


def _empty(date: str, cluster: ClusterSpec) -> MachineProfile:
    """Return a profile of this machine without measurements."""
    import torch

    from meshwright.spec.profile import MachineProfile

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cuda = not cluster.is_cpu
    return MachineProfile(
        date=date,
        gpu=cluster.gpu,
        device=torch.cuda.get_device_name() if cuda else "cpu",
        devices=1,
        nodes=1,
        cores=usable_cores(),
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else pages,
    )


def _table(measured: EngineProfile) -> list[str]:
    """Return a table of the measured steps with the times that the fitted constants give, followed by the constants."""
    from meshwright.costs.serve_work import device_work
    from meshwright.costs.step_times import InstanceStepTimes

    k = measured.constants
    item = measured.item_bytes
    work = device_work(measured.model, weights=measured.weights, item=item, cache_item=1 if measured.kv_cache else item)
    times = InstanceStepTimes(work, k)
    lines = ["decodes  positions  prompt tokens  measured ms  modelled ms"]
    for step in measured.steps:
        prompt = sum(chunk.count for chunk in step.chunks)
        modelled = times.seconds(step.decodes, step.positions, step.chunks, step.longest)
        lines.append(
            f"{step.decodes:>7}  {step.positions:>9,}  {prompt:>13,}  {1e3 * step.seconds:>11.3f}  {1e3 * modelled:>11.3f}"
        )
    return [
        *lines,
        f"weights {k.weight_bytes_per_s / 1e9:,.4g} GB/s, matmuls {flops_text(k.flops_per_s)}, keys and values "
        f"{k.cache_bytes_per_s / 1e9:,.4g} GB/s, attention of prompts {flops_text(k.attention_flops_per_s)}",
        f"a step {1e3 * k.decode_seconds:.3f} ms, launch with a prompt {1e3 * k.prompt_seconds:.3f} ms, "
        f"median error of steps left out {100 * measured.median_error:.1f}%",
    ]
