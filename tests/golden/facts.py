"""Facts of models, plans, messages and gradients that a change of the model description must not change.

`python -m tests.golden.facts` (`make golden`) writes them as JSON beside this file; `test_golden.py` compares them. Each function takes a
case's name and returns its facts. Long tables are digests; numbers of the cost model are whole, since sums may be ordered otherwise.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import yaml

from meshwright.calibration.record_predictions import predict_records
from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.plan_costs import plan_time
from meshwright.costs.serve_work import device_work as serving_work
from meshwright.families.folder import HFTensor, export_obstacle, hf_tensors, to_hf_config
from meshwright.models.initial_values import initial_values
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.schedules.collective_counts import collective_counts
from meshwright.schedules.in_flight import NAMES
from meshwright.schedules.plan_schedule import training_schedule
from meshwright.schedules.registry import refusal
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import (
    STAGES_PER_RANK,
    AxisPart,
    Division,
    Layout,
    balanced_stages,
    check_context,
    check_tensor,
    local_boxes,
    token_exchanges,
)
from meshwright.spec.model import (
    ModelSpec,
    ParameterSpec,
    active_parameter_count,
    flops_per_token,
    parameter_count,
    parameters,
)
from meshwright.spec.plan import (
    RECOMPUTE_MODES,
    AxisName,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Precision,
    SchedulePlan,
)
from meshwright.spec.run import ModelSection, RunSpec
from meshwright.workload.activations import elements_per_token, saved_elements
from meshwright.workload.cache_size import cache_bytes_per_block
from meshwright.workload.cross_node_bytes import cross_node_bytes
from meshwright.workload.device_work import step_work
from meshwright.workload.layer_matmuls import layer_matmuls
from meshwright.workload.layer_messages import layer_messages
from meshwright.workload.layout_bytes import layout_memory
from meshwright.workload.layouts import layout_of
from meshwright.workload.model_shape import shape_of
from meshwright.workload.plan_bytes import formats, memory_by_rank
from meshwright.workload.step_shape import step_shape
from meshwright.workload.unit_parameters import block_unit, end_units
from tests.golden.wrong_inputs import WRONG, message_of
from tests.models.tiny import ALL, LATENT, PARALLEL, built, some_tokens

FOLDER = Path(__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLANS = 300
SEED = 57
Facts = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One golden file: its cases by name and the function that computes a case's facts."""

    cases: tuple[str, ...]
    facts: Callable[[str], Any]
    quick: int
    """Cases that `make test` compares."""
    packed: bool = False
    """Whether the file is compressed."""


def spec_of(name: str) -> ModelSpec:
    """A preset with a vocabulary, or a small model of the tests."""
    if name in SMALL:
        return SMALL[name]
    spec = from_plain(ModelSpec, MODEL_PRESETS[name])
    return replace(spec, vocab_size=spec.vocab_size or 4096)


SMALL = {
    **ALL,
    **LATENT,
    "parallel shared": replace(PARALLEL, experts=4, experts_per_token=2, expert_hidden=40, shared_expert_hidden=16),
}
"""Models for everything that presets do not have."""
DRAWN_PRESETS = (
    "gpt2-124m",
    "gpt3-13b",
    "gpt3-175b",
    "gpt-530b",
    "gpt-1t",
    "llama3-1b",
    "llama3-3b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "qwen3-0.6b",
    "qwen3-8b",
    "pangu-alpha-200b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "llama-nano",
)
"""The presets from which plans are drawn: a further preset must not change the plans."""
MODELS = (*reversed(SMALL), *reversed(DRAWN_PRESETS), *(name for name in MODEL_PRESETS if name not in DRAWN_PRESETS))


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def folder_tensor(tensor: HFTensor) -> str:
    """A tensor of a folder, in words that are older than tensors which stack experts, and those of one row."""
    text = str(tensor).replace(", one_row=False", "")
    return text if tensor.stacked else text.replace(", stacked=False, interleaved=False", "")


def row_of(parameter: ParameterSpec) -> list[Any]:
    fused = [list(block) for block in parameter.blocks]
    return [
        parameter.name,
        list(parameter.shape),
        parameter.fill,
        parameter.std,
        fused,
        parameter.decay,
        parameter.trained,
    ]


def model_facts(name: str) -> Facts:
    """The parameter table, its division over ranks, names in a Hugging Face folder, and initial values."""
    spec = spec_of(name)
    table = parameters(spec)
    facts: Facts = {
        "parameters": len(table),
        "table": digest([row_of(parameter) for parameter in table]),
        "counts": [parameter_count(spec), active_parameter_count(spec)],
        "flops": [flops_per_token(spec, 4096, causal=causal) for causal in (True, False)],
        "first layers": [row_of(parameter) for parameter in table if parameter.name.startswith("layers.0.")],
        "initial": digest(
            [initial_values(7, parameter, 0, min(16, parameter.count), "cpu").tolist() for parameter in table]
        ),
        "tensor": [check_tensor(spec, ranks, 4096) for ranks in (2, 3, 8)],
        "context": [check_context(spec, plan_of({"context_ulysses": 8, "tensor": 2}, spec), 4096)],
        "exchanges": [token_exchanges(spec, layer) for layer in (0, spec.layers - 1)],
        "cache": cache_bytes_per_block(spec, 16, 2),
    }
    for ranks in (2, 4):
        if check_tensor(spec, ranks) is None:
            boxes = [
                str(local_boxes(parameter, Division(tensor=AxisPart(1, ranks)), AxisPart(1, 2))) for parameter in table
            ]
            facts[f"boxes of {ranks}"] = digest(boxes)
    if export_obstacle(spec) is None:
        facts["folder names"] = digest([[folder_tensor(part) for part in parts] for parts in hf_tensors(spec).values()])
        facts["config"] = digest(to_hf_config(spec))
    else:
        facts["obstacle"] = export_obstacle(spec)
    return facts


def work_facts(name: str) -> Facts:
    """Linear layers, saved activations, messages, memory and units of a model, by the functions of `workload`."""
    spec, train = spec_of(name), TrainSpec(steps=1, global_batch=8, seq_len=2048)
    layers = sorted({0, spec.layers - 1})
    facts: Facts = {"saved": [], "temporary": []}
    for layer in layers:
        for mode in RECOMPUTE_MODES:
            facts["saved"].append([saved_elements(spec, layer, mode, low) for low in (1.0, 0.5)])
            for sizes in ({}, {"tensor": 2, "shard": 4}):
                plan = plan_of(sizes, spec, recompute=mode)
                facts["temporary"].append(elements_per_token(spec, plan, 1.25, 4096.0)(layer))
    facts["units"] = [
        to_plain(block_unit(spec, kind=spec.kind(layer), tensor=2, shards=4, expert=2)) for layer in layers
    ]
    facts["ends"] = to_plain(end_units(spec, tensor=2, shards=4, expert=1))
    if spec.heads % 4 == 0:
        facts["serving"] = to_plain(serving_work(spec, 2))
        windows = facts["serving"].pop("windows")
        facts["serving"] |= {"window": windows[0][0]} if len(windows) == 1 else {"windows": windows}
    for sizes in ({}, {"tensor": 2, "context_ulysses": 2, "context_ring": 2}, {"tensor": 2, "shard": 4}):
        plan = plan_of(sizes, spec, recompute="all_but_attention")
        layout, shape = layout_of(spec, train, plan), shape_of(spec, train.seq_len)
        step, label = step_shape(shape, layout), "+".join(f"{axis}{size}" for axis, size in sizes.items())
        linears: dict[Any, float] = defaultdict(float)
        for matmul in layer_matmuls(shape, step, layout.tensor):
            sizes_of = tuple(float(size) for size in (matmul.m, matmul.k, matmul.n, matmul.count))
            linears[matmul.role, *sizes_of] += float(matmul.layers)
        facts[f"linears {label}"] = sorted([*key, count] for key, count in linears.items() if count)
        messages = [
            [message.op, message.axis, *map(float, (message.ranks, message.bytes, message.forward, message.backward))]
            for masked in (False, True)
            for message in layer_messages(shape, layout, step, masked=masked)
        ]
        facts[f"messages {label}"] = sorted(message for message in messages if message[-1] or message[-2])
        number_formats = formats(train, plan.precision, cpu=False, model=spec)
        closed = layout_memory(spec, layout, number_formats)
        facts[f"closed memory {label}"] = {category: float(size) for category, size in closed.items()}
        facts[f"memory {label}"] = list(memory_by_rank(spec, train, plan, cpu=False))
        work = to_plain(step_work(spec, train, plan))
        if len(work["attention"]) == 1:
            (work["attention"],) = work["attention"]
        facts[f"work {label}"] = {
            key: sorted(value, key=str) if isinstance(value, list) else value for key, value in work.items()
        }
        counts = collective_counts(training_schedule(plan, spec.layers))
        facts[f"crossing {label}"] = vars(cross_node_bytes(spec, plan, Layout.of(plan, 2), train.seq_len, counts))
    return facts


def plan_of(sizes: dict[str, int], spec: ModelSpec, **strategy: Any) -> Plan:
    """A plan of one micro-batch with these axes, and two expert ranks where shards allow it."""
    mesh = tuple(MeshAxis(axis=axis, size=sizes[axis]) for axis in get_args(AxisName) if axis in sizes)
    shards = sizes.get("shard", 1) * sizes.get("context_ring", 1) * sizes.get("context_ulysses", 1)
    expert = 2 if shards % 2 == 0 else 1
    batch = sizes.get("shard", 1)
    return Plan(
        mesh=mesh,
        batch=BatchPlan(global_batch=batch, micro_batch=1, accumulate=1),
        schedule=SchedulePlan(),
        layers=(LayerStrategy(**strategy),),
        experts=ExpertPlan(expert=expert, expert_shard=shards // expert) if spec.experts else None,
    )


DRAWN_MODELS = (*DRAWN_PRESETS, "parallel", "parallel shared", "sliding", "deepseek v3", "shared expert")


def drawn_plan(number: str) -> tuple[RunSpec, Plan, str]:
    """A plan drawn with the case's number as seed, its run and its description."""
    draw = random.Random(f"{SEED} {number}")
    while True:
        name = draw.choice(DRAWN_MODELS)
        spec = spec_of(name)
        if draw.random() < 0.2 and spec.family == "deepseek_v3":
            spec = replace(spec, prediction_depth=1)
        chip, ranks_per_node = draw.choice((("H200", 8), ("H100", 8), ("A100", 8), ("GB200", 4)))
        sizes = {axis: draw.choice((1, 1, 2, 4)) for axis in get_args(AxisName) if axis != "hybrid"}
        sizes["context_ulysses"], sizes["context_ring"] = draw.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
        plan = _drawn_plan(draw, spec, sizes, fp8=chip != "A100")
        if plan is None or check_tensor(spec, sizes["tensor"]) or check_context(spec, plan, 4096):
            continue
        devices = min(plan.ranks, ranks_per_node)
        cluster = ClusterSpec(gpu=chip, nodes=plan.ranks // devices, gpus_per_node=devices)
        train = TrainSpec(steps=10, global_batch=plan.batch.global_batch, seq_len=4096)
        section = from_plain(ModelSection, to_plain(spec))
        run = replace(load_run(None, ["model=llama-nano"]), model=section, train=train, cluster=cluster)
        return run, plan, f"{name} {chip} {_short(plan)}"


def _drawn_plan(draw: random.Random, spec: ModelSpec, sizes: dict[str, int], *, fp8: bool) -> Plan | None:
    accumulate, micro_batch = draw.choice((1, 2, 4, 8)), draw.choice((1, 2))
    pipeline = sizes["pipeline"]
    names = [name for name in NAMES if not refusal(name, pipeline, accumulate, STAGES_PER_RANK.get(name, 1))]
    schedule = draw.choice([name for name in names if name != "paired"])
    if pipeline * STAGES_PER_RANK.get(schedule, 1) > spec.layers:
        return None
    table = balanced_stages(schedule, pipeline, spec.layers, 1.0)
    stages = tuple(tuple(f"{stage.start}-{stage.stop - 1}" for stage in stages) for stages in table)
    shards = sizes["shard"] * sizes["context_ring"] * sizes["context_ulysses"]
    expert = draw.choice([size for size in (1, 2, 4) if shards % size == 0])
    if spec.experts and spec.experts % (expert * sizes["tensor"]):
        return None
    strategy = LayerStrategy(
        recompute=draw.choice(RECOMPUTE_MODES),
        reshard=draw.random() < 0.5,
        gradients=draw.choice(("shard", "whole")),
        offload=draw.choice(("none", "none", "none", "activations", "optimizer")),
    )
    linear = draw.choice(("compute", "compute", "fp8_tensorwise")) if fp8 else "compute"
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=sizes[axis]) for axis in get_args(AxisName) if axis in sizes),
        batch=BatchPlan(
            global_batch=micro_batch * accumulate * sizes["replicate"] * sizes["shard"],
            micro_batch=micro_batch,
            accumulate=accumulate,
        ),
        schedule=SchedulePlan(name=schedule, stages=() if pipeline == 1 and len(stages[0]) == 1 else stages),
        layers=(strategy,),
        experts=ExpertPlan(expert=expert, expert_shard=shards // expert) if spec.experts else None,
        precision=Precision(linear=linear),
        mlp_tile=draw.choice((0, 0, 0, 1024)),
    )


def _short(plan: Plan) -> str:
    mesh = ".".join(f"{axis.axis}{axis.size}" for axis in plan.mesh if axis.size > 1)
    layer, batch = plan.layers[0], plan.batch
    return " ".join(
        (
            mesh,
            plan.schedule.name,
            f"{batch.micro_batch}x{batch.accumulate}",
            layer.recompute,
            layer.offload,
            plan.precision.linear,
        )
    )


def plan_facts(number: str) -> Facts:
    """Seconds and memory of a drawn plan: simulated by units, by stages, and in closed form."""
    run, plan, description = drawn_plan(number)
    try:
        predicted, rough = reprice(run, plan).predicted, reprice(run, plan, by_units=False).predicted
    except MeshwrightError as error:
        return {"plan": description, "refused": str(error)}
    assert predicted is not None and rough is not None
    formula = plan_time(run.model, run.train, plan, run.cluster)
    return {
        "plan": description,
        "seconds": [predicted.step_seconds, rough.step_seconds, formula and formula.seconds],
        "memory": predicted.memory_bytes,
        "parts": to_plain(predicted.breakdown),
    }


def questions() -> dict[str, str]:
    """Questions for the planner, by name: those of the kept plans and some of a few devices."""
    kept = yaml.safe_load((BENCHMARKS / "plans" / "questions.yaml").read_text(encoding="utf-8"))
    few = {
        "nano": "model=llama-nano cluster.gpu=H200 cluster.gpus_per_node=2 train.seq_len=512 train.global_batch=16",
        "8b": "model=llama3-8b cluster.gpu=H200 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=64",
        "1b": "model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=64",
        "mixtral": "model=mixtral-8x7b cluster.gpu=H100 cluster.nodes=4 cluster.gpus_per_node=8 train.seq_len=4096 train.global_batch=256",
        "30b": "model=qwen3-30b-a3b cluster.gpu=H200 cluster.nodes=2 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=128",
        "v2 lite": "model=deepseek-v2-lite cluster.gpu=H200 cluster.gpus_per_node=8 train.seq_len=4096 train.global_batch=64",
        "v3": "model=deepseek-v3 cluster.gpu=H800 cluster.nodes=256 train.seq_len=4096 train.global_batch=15360",
        "70b tcp": "model=llama3-70b cluster.gpu=H100 cluster.nodes=16 cluster.gpus_per_node=8 train.seq_len=8192 train.global_batch=256 "
        "cluster.network.fabric=tcp cluster.network.port_gb_per_s=1.25",
        "tight": "model=llama3-8b cluster.gpu=A100 cluster.gpus_per_node=2 train.seq_len=8192 train.global_batch=16",
        "predicting": "model=deepseek-v3 model.prediction_depth=1 cluster.gpu=H800 cluster.nodes=64 "
        "train.seq_len=4096 train.global_batch=2048",
    }
    return {**few, **{name: question["ask"] for name, question in kept.items()}}


def chosen_facts(name: str) -> Facts:
    """The plan that the search chooses."""
    answer = search(load_run(None, questions()[name].split()))
    plan = answer.best.plan
    assert plan.predicted is not None
    return {
        "considered": answer.considered,
        "plan": to_plain(replace(plan, predicted=None, why=())),
        "seconds": plan.predicted.step_seconds,
        "others": [_short(candidate.plan) for candidate in answer.others],
    }


def gradient_facts(name: str) -> Facts:
    """Loss and the norm of every gradient of a small model in float64, with documents of two lengths."""
    spec = spec_of(name)
    model, tokens = built(spec), some_tokens(spec)
    documents = (torch.arange(tokens.shape[1]) >= 23).long().expand_as(tokens)
    losses = model.losses(tokens, tokens.roll(-1, 1), documents=documents)
    (losses.tokens + 0.1 * losses.balance + 0.3 * losses.further).backward()
    norms = {key: p.grad.norm().item() for key, p in model.named_parameters() if p.grad is not None}
    return {"losses": [loss.item() for loss in losses], "gradients": norms}


def record_facts(name: str) -> Facts:
    """Predictions of every fourth published run."""
    del name
    with gzip.open(BENCHMARKS / "data" / "published-runs.csv.gz", "rt", encoding="utf-8") as file:
        predictions = predict_records(list(csv.DictReader(file))[::4])
    return {"seconds": [p.seconds for p in predictions], "memory": [p.memory_gib for p in predictions]}


KINDS = {
    "models": Kind(MODELS, model_facts, 14),
    "work": Kind(MODELS, work_facts, 8, packed=True),
    "plans": Kind(tuple(f"{number:03}" for number in range(PLANS)), plan_facts, 5),
    "chosen": Kind(tuple(questions()), chosen_facts, 1),
    "gradients": Kind(tuple(SMALL), gradient_facts, 2),
    "messages": Kind(tuple(WRONG), message_of, 20),
    "records": Kind(("published",), record_facts, 0),
}


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.json{'.gz' * KINDS[name].packed}"


def golden(name: str) -> dict[str, Any]:
    """The golden facts of a kind by case."""
    data = file_of(name).read_bytes()
    return json.loads(gzip.decompress(data) if KINDS[name].packed else data)


def main() -> None:
    for name in sys.argv[1:] or KINDS:
        facts = {case: KINDS[name].facts(case) for case in KINDS[name].cases}
        lines = [f"{json.dumps(case)}: {json.dumps(found)}" for case, found in facts.items()]
        data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
        # Without a time in its header, equal facts give an equal file.
        file_of(name).write_bytes(gzip.compress(data, 9, mtime=0) if KINDS[name].packed else data)


if __name__ == "__main__":
    main()
