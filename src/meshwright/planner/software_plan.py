"""Finds the best layout of a run as if another training software ran it, by that software's constants: `plan --software
NAME`.

The layouts are of the kinds that occur in published runs: tensor, pipeline (with virtual stages), context and expert
ranks, micro-batch size, recomputation, and the sharding that the software's recipes use. Their times are predicted in
closed form, as `meshwright predict` does for published runs, so the same constants and the same bands apply.
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
"""Largest number of tensor ranks that is tried."""
MOST_CONTEXT = 16
"""Largest number of context ranks that is tried."""
MOST_STAGES = 64
"""Largest number of pipeline ranks that is tried, unless more divide the layers evenly."""
MOST_VIRTUAL = 8
"""Largest number of stages on one pipeline rank that is tried."""
MICRO_BATCHES = (1, 2, 4, 8)
"""Sizes of micro-batches that are tried, in sequences."""


@dataclass(frozen=True)
class SoftwarePlan:
    """The best layout with one software. If there is none, `refused` says why, and the predicted values are None."""

    software: str
    """Name of the software."""
    about: str
    """Where its constants and recipes come from."""
    constants_of: float
    """Year of the releases whose runs its constants follow."""
    runs: int
    """Number of published runs to which its constants were fitted."""
    precision: str = "bf16"
    """Number format of the matmuls of dense layers and experts."""
    layout: str = ""
    """The layout as text: "tensor 2, data 8, fully sharded, 4 × 1"."""
    sizes: dict[str, float] | None = None
    """The columns of `Layouts` that describe the layout, by name."""
    seconds: float | None = None
    """Seconds of a step."""
    low: float | None = None
    """Lower end of the 80% band of `seconds`."""
    high: float | None = None
    """Upper end of the band."""
    tokens_per_second_per_gpu: float | None = None
    memory_bytes: float | None = None
    """Memory of the fullest rank."""
    refused: str = ""
    """Why there is no layout; empty if there is one."""


def software_listed(text: str) -> tuple[TrainingSoftware, ...]:
    """Return the software of a list such as `torchtitan,megatron-bridge`; all software for "all".

    Raises BadInput for an unknown name.
    """
    others = {software.name: software for software in SOFTWARE if software.constants != OWN}
    if text == "all":
        return tuple(others.values())
    if OWN in (name.strip().lower() for name in text.split(",")):
        raise BadInput(f"--software {OWN}: that is this program, whose plan the answer has in any case")
    return values_listed(text, others, "--software")


def best_with(run: RunSpec, software: TrainingSoftware, narrowest: MatmulFormat | None = None) -> SoftwarePlan:
    """Return the layout and the matmul format with the shortest step among those that fit into memory.

    Formats occur in the software's published runs, and the chip has them. They have at least as many bits as
    `narrowest`. If `narrowest` is None, they have at least 8 bits for a run whose `plan.linear` is fp8, and only bf16
    otherwise.
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
        if entry.name in ("bf16", *software.formats) and entry.bits >= bits and entry.number_format in chip.peak_flops
    ]
    return min(priced, key=lambda entry: entry.seconds or math.inf)


def _best_layout(
    run: RunSpec, software: TrainingSoftware, answer: SoftwarePlan, chip: Chip, matmul_format: MatmulFormat
) -> SoftwarePlan:
    """Return `answer` with the layout that has the shortest step with matmuls in this format, or with the reason why
    there is none.
    """
    cluster = as_nodes(run.cluster)
    machine = replace(machine_of(cluster, matmul_format.number_format), matmul_format=matmul_format.kind)
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
"""Columns of `Layouts` that `SoftwarePlan.sizes` has."""


def _published_shape(shape: Shape) -> Shape:
    """Return the shape with the numbers of tensor-parallel exchanges with which the constants of other software were
    fitted.
    """
    shared = np.asarray(shape.shared_ffn) > 0
    exchanges = (shape.layers - shape.moe_layers) * 2 + shape.moe_layers * (1.0 + shared)
    return replace(shape, gathers=exchanges, scatters=exchanges, narrow_gathers=0.0, summed_norms=0.0)


def _layouts(run: RunSpec, shape: Shape, machine: Machine, software: TrainingSoftware) -> Layouts | None:
    """Return the layouts that the software could run, as arrays of shape (layouts,); None if there are none."""
    cluster = as_nodes(run.cluster)
    model = run.model
    ranks = cluster.ranks
    layers = model.layers
    # Powers of two are tried too, because published runs also divide layers unevenly.
    stages = sorted({*divisors(layers), *_powers(min(MOST_STAGES, layers))})
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
    """Return the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _virtual_stages(layers: int, pipeline: int) -> list[int]:
    """Return the numbers of stages that one pipeline rank may have.

    Of 32 layers, each of 4 ranks has 8, and so at most 8 stages:

    >>> _virtual_stages(layers=32, pipeline=4)
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    if pipeline == 1:
        return [1]
    return [count for count in range(1, MOST_VIRTUAL + 1) if pipeline * count <= layers]


def _expert_ranks(experts: int, stage_ranks: int, software: TrainingSoftware) -> list[int]:
    """Return the numbers of ranks over which the experts may be divided.

    `stage_ranks` is the number of ranks of a pipeline stage.
    """
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
    """Return the layout as text: its axes, the sharding, number × size of micro-batches, and recomputation."""
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
