"""The best layout of a run as another training software would run it, by that software's constants: `plan --software NAME`.

The layouts are those of published runs: tensor, pipeline (with virtual stages), context and expert ranks, micro-batch, recomputation, and
the sharding that the software's recipes use. They are priced in closed form, as `meshwright predict` prices published runs, so the same
constants and the same bands apply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from meshwright.costs.bands import RunClass, band_of
from meshwright.costs.constants import OWN, at_release, constants, known_software, table
from meshwright.costs.device_rates import Machine
from meshwright.costs.machine_rates import chip_of, machine_of
from meshwright.costs.plan_costs import as_nodes
from meshwright.costs.software import IMBALANCE, SOFTWARE, TrainingSoftware
from meshwright.costs.stack_footprint import FITTING_SHARE, footprint, memory_constants
from meshwright.costs.step import step_cost
from meshwright.planner.candidate import linear_dtypes
from meshwright.planner.precision_choice import MATMUL_FORMATS, MatmulFormat
from meshwright.spec.chips import Chip
from meshwright.spec.divisors import divisors
from meshwright.spec.errors import BadInput
from meshwright.spec.named_values import values_listed
from meshwright.spec.plan import RECOMPUTE_MODES
from meshwright.spec.run import RunSpec
from meshwright.workload.layouts import FULL, SELECTIVE, Layouts
from meshwright.workload.model_shape import Shape, shape_of

MOST_TENSOR = 8
MOST_CONTEXT = 16
MOST_STAGES = 64
MOST_VIRTUAL = 8
"""Largest numbers of tensor, context and pipeline ranks, and of stages a rank, that the search tries."""
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class SoftwarePlan:
    """The best layout with one software; where there is none, `refused` says why and the figures are None."""

    software: str
    about: str
    constants_of: float
    """Year of the releases that its constants follow."""
    runs: int
    """Published runs that its constants follow."""
    precision: str = "bf16"
    """Format of matmuls, of dense layers and of experts."""
    layout: str = ""
    sizes: dict[str, float] | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_second_per_gpu: float | None = None
    memory_bytes: float | None = None
    refused: str = ""


def software_listed(text: str) -> tuple[TrainingSoftware, ...]:
    """The software of a list such as `torchtitan,megatron-bridge`, or all of it. Raises BadInput for an unknown one."""
    others = {software.name: software for software in SOFTWARE if software.constants != OWN}
    if text == "all":
        return tuple(others.values())
    if OWN in (name.strip().lower() for name in text.split(",")):
        raise BadInput(f"--software {OWN}: that is this program, whose plan the answer has in any case")
    return values_listed(text, others, "--software")


def best_with(run: RunSpec, software: TrainingSoftware, narrowest: MatmulFormat | None = None) -> SoftwarePlan:
    """The layout and the format of matmuls with the shortest step that fits.

    Formats are those of the software's published runs that the chip has, down to `narrowest`; without it to 8 bits for a run whose
    `plan.linear` is fp8, else bf16 alone.
    """
    counts = table()["runs"]
    answer = SoftwarePlan(software.name, software.about, software.date, int(counts.get(software.constants, 0)))
    cluster = as_nodes(run.cluster)
    chip = chip_of(cluster)
    if chip is None or "bf16" not in chip.peak_flops:
        return replace(answer, refused=f"{cluster.gpu} has no bf16 matmuls in the chip table")
    if run.model.adapter is not None:
        return replace(answer, refused="adapters are priced for this program only")
    own_bits = min(16 if linear == "compute" else 8 for linear in linear_dtypes(run))
    bits = narrowest.bits if narrowest else own_bits
    priced = [
        _best_layout(run, software, answer, chip, entry)
        for entry in MATMUL_FORMATS
        if entry.name in ("bf16", *software.formats) and entry.bits >= bits and entry.peak in chip.peak_flops
    ]
    return min(priced, key=lambda entry: entry.seconds or math.inf)


def _best_layout(
    run: RunSpec, software: TrainingSoftware, answer: SoftwarePlan, chip: Chip, matmul_format: MatmulFormat
) -> SoftwarePlan:
    """`answer` with the layout whose step is the shortest with matmuls in this format."""
    cluster = as_nodes(run.cluster)
    machine = replace(machine_of(cluster, matmul_format.peak), matmul_format=matmul_format.kind)
    shape = _published_shape(shape_of(run.model, run.train.seq_len))
    layouts = _layouts(run, shape, machine, software)
    if layouts is None:
        return replace(
            answer, refused=f"no layout divides {run.train.global_batch} sequences over {cluster.ranks} ranks"
        )
    stack = software.constants
    sizes = np.asarray(sum(footprint(shape, layouts, memory_constants([stack])).values()))
    k = at_release(constants(chip.generation, stack), software.date - 2025.0)
    seconds = step_cost(shape, machine, layouts, k, sizes / machine.memory).seconds
    fits = sizes <= FITTING_SHARE * machine.memory
    if not fits.any():
        least = float(sizes.min())
        return replace(answer, refused=f"needs {least / 1e9:.0f} GB a device at least")
    best = int(np.argmin(np.where(fits, seconds, np.inf)))
    low, high = band_of(_run_class(run, software, chip.generation), table()["bands"])
    step = float(seconds[best])
    chosen = {name: float(np.broadcast_to(getattr(layouts, name), seconds.shape)[best]) for name in _SHOWN}
    return replace(
        answer,
        precision=matmul_format.name,
        layout=_words(chosen),
        sizes=chosen,
        seconds=step,
        low=step * math.exp(low),
        high=step * math.exp(high),
        tokens_per_second_per_gpu=run.train.tokens_per_step / step / cluster.ranks,
        memory_bytes=float(sizes[best]),
    )


_SHOWN = (
    "tensor",
    "pipeline",
    "virtual",
    "context",
    "expert",
    "data",
    "shards",
    "zero",
    "micro_batch",
    "micro_batches",
    "recompute",
)


def _published_shape(shape: Shape) -> Shape:
    """The shape with the exchanges of tensor ranks that the constants of other software were fitted with."""
    shared = np.asarray(shape.shared_ffn) > 0
    exchanges = (shape.layers - shape.moe_layers) * 2 + shape.moe_layers * (1.0 + shared)
    return replace(shape, gathers=exchanges, scatters=exchanges, narrow_gathers=0.0, summed_norms=0.0)


def _layouts(run: RunSpec, shape: Shape, machine: Machine, software: TrainingSoftware) -> Layouts | None:
    """Layouts that the software could run, as columns; None if there is none."""
    cluster = as_nodes(run.cluster)
    model = run.model
    ranks = cluster.ranks
    layers = model.layers
    stages = sorted(
        {*divisors(layers), *_powers(min(MOST_STAGES, layers))}
    )  # published runs also divide layers unevenly
    rows = []
    for tensor in _powers(min(MOST_TENSOR, int(machine.domain))):
        for pipeline in (size for size in stages if ranks % (tensor * size) == 0):
            virtuals = _virtual_stages(layers, pipeline) if software.virtual_stages else [1]
            for context in _powers(MOST_CONTEXT):
                data, rest = divmod(ranks, tensor * pipeline * context)
                if rest or not data or run.train.global_batch % data or run.train.seq_len // context < 512:
                    continue
                per_rank = run.train.global_batch // data
                for micro in (size for size in MICRO_BATCHES if per_rank % size == 0):
                    if pipeline > 1 and per_rank // micro < pipeline:
                        continue
                    experts = _expert_ranks(model.experts, tensor * context * data, software)
                    rows += [
                        (tensor, pipeline, virtual, context, data, micro, expert)
                        for expert, virtual in product(experts, virtuals)
                    ]
    if not rows:
        return None
    modes = np.array([0.0, SELECTIVE, FULL])
    columns = np.repeat(np.array(rows, dtype=np.float64), len(modes), axis=0)
    tensor, pipeline, virtual, context, data, micro, expert = columns.T
    zero = 3.0 if software.fully_sharded else float(software.shards_optimizer)
    return Layouts(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        context=context,
        expert=expert,
        data=data,
        zero=np.where(data * context > 1, zero, 0.0),
        shards=data * context,
        micro_batch=micro,
        global_batch=float(run.train.global_batch),
        seq=float(run.train.seq_len),
        recompute=np.tile(modes, len(rows)),
        balanced=float(software.balances_stages),
        **{"imbalance": IMBALANCE if model.experts else 1.0, **software.layout},
    )


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _virtual_stages(layers: int, pipeline: int) -> list[int]:
    """Stages that one pipeline rank may have.

    A rank of 4 has at most 8 of 32 layers, and so at most 8 stages:

    >>> _virtual_stages(layers=32, pipeline=4)
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    if pipeline == 1:
        return [1]
    return [count for count in range(1, MOST_VIRTUAL + 1) if pipeline * count <= layers]


def _expert_ranks(experts: int, stage_ranks: int, software: TrainingSoftware) -> list[int]:
    """Numbers of ranks that may divide the experts."""
    if not experts or not software.expert_ranks:
        return [1]
    return [size for size in _powers(min(experts, stage_ranks)) if experts % size == 0 and stage_ranks % size == 0]


def _run_class(run: RunSpec, software: TrainingSoftware, generation: str) -> RunClass:
    return RunClass(
        several_hosts=as_nodes(run.cluster).nodes > 1,
        moe=bool(run.model.experts),
        measured_generation=generation in table()["measured_with"],
        software=known_software(software.constants),
    )


def _words(sizes: dict[str, float]) -> str:
    """The layout in words: its axes, the sharding, the micro-batch and recomputation."""
    names = ("tensor", "pipeline", "context", "expert")
    parts = [f"{name} {sizes[name]:.0f}" for name in names if sizes[name] > 1]
    if sizes["virtual"] > 1:
        parts.append(f"{sizes['virtual']:.0f} stages a rank")
    parts.append(f"data {sizes['data']:.0f}")
    kinds = {0: "replicated", 1: "optimizer sharded", 3: "fully sharded"}
    parts += [kinds[int(sizes["zero"])], f"{sizes['micro_batches']:.0f} × {sizes['micro_batch']:.0f}"]
    if sizes["recompute"]:
        parts.append(f"recompute {RECOMPUTE_MODES[int(sizes['recompute'])]}")
    return ", ".join(parts)
