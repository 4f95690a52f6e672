"""A run for schedulers, and the published field names and options that rendered files are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from meshwright.config.load import load_run
from meshwright.launch.scheduler_job import SchedulerJob, scheduler_job
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Predicted
from meshwright.spec.run import RunSpec

HERE = Path(__file__).parent
WORDS = (
    "model=llama3-8b",
    "name=nightly_8B",
    "cluster.gpu=H100",
    "cluster.nodes=4",
    "cluster.gpus_per_node=8",
    "train.global_batch=32",
    "train.seq_len=8192",
)
PLAN = Plan(
    mesh=(MeshAxis(axis="shard", size=32),),
    batch=BatchPlan(global_batch=32, micro_batch=1, accumulate=1),
    layers=(LayerStrategy(),),
    predicted=Predicted(step_seconds=4.2, memory_peak_bytes=0),
)


def run_of(*overrides: str) -> RunSpec:
    return load_run(None, [*WORDS, *overrides])


def job_of(*overrides: str) -> SchedulerJob:
    """The job of the run with further values."""
    return scheduler_job(run_of(*overrides), PLAN, [*WORDS, *overrides], Path("runs"))


def without_prediction(job: SchedulerJob) -> SchedulerJob:
    return replace(job, plan=replace(job.plan, predicted=None))


@cache
def slurm_options() -> dict[str, set[str]]:
    """Long options of each Slurm command."""
    options: dict[str, set[str]] = {}
    command = ""
    for line in (HERE / "slurm_options.txt").read_text().splitlines():
        if line.endswith(":"):
            command = line[:-1]
            options[command] = set()
        elif not line.startswith("#"):
            options[command] |= set(line.split())
    return options


@cache
def published_fields() -> dict[str, Any]:
    return yaml.safe_load((HERE / "kubernetes_fields.yaml").read_text())


def mistakes(value: Any, fields: Any, path: str) -> Iterator[str]:
    """Differences between a rendered object and the published fields.

    The format of `fields` is that of kubernetes_fields.yaml: a type name, `one of A|B`, `[item]`, or an object. `=A.b` refers to
    field b of the object A, a number to an item of a list, and a field `name!` is required.
    """
    if isinstance(fields, str) and fields.startswith("="):
        first, *remaining = fields[1:].split(".")
        fields = published_fields()[first]
        for name in remaining:
            fields = fields[int(name)] if isinstance(fields, list) else fields[name]
    if isinstance(fields, list):
        if not isinstance(value, list):
            yield f"{path}: expected a list"
            return
        for index, item in enumerate(value):
            yield from mistakes(item, fields[0], f"{path}[{index}]")
    elif isinstance(fields, dict):
        yield from _mistakes_of_object(value, fields, path)
    elif fields.startswith("one of "):
        if value not in fields.removeprefix("one of ").split("|"):
            yield f"{path}: {value} is not {fields}"
    elif not any(_has_type(value, name) for name in fields.split("|")):
        yield f"{path}: {value!r} is not of type {fields}"


def _mistakes_of_object(value: Any, fields: dict[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: expected an object"
        return
    published = {name.rstrip("!"): inner for name, inner in fields.items()}
    for name in fields:
        if name.endswith("!") and name[:-1] not in value:
            yield f"{path}: {name[:-1]} is missing"
    for name, inner in value.items():
        if name in published or "*" in published:
            yield from mistakes(inner, published.get(name, published.get("*")), f"{path}.{name}")
        else:
            yield f"{path}: there is no field {name}"


def _has_type(value: Any, name: str) -> bool:
    types: dict[str, Any] = {"string": str, "boolean": bool, "integer": int, "object": dict, "array": list}
    return isinstance(value, types[name]) and not (name == "integer" and isinstance(value, bool))
