"""The largest model of a family that a cluster trains, for each form of the optimizer's state, by `search`.

A family has the given model's proportions: its width grows in whole groups of heads per key-value head, which stay as many, the
feed-forward in proportion, and layers per width are within a quarter of the given model's. So Llama-3-8B (32 layers, width 4,096)
continues with 30 to 50 layers of width 5,120.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil, floor
from typing import get_args

from meshwright.planner.candidate import memory_budget, pins_of, precision_of
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.model import parameter_count
from meshwright.spec.optimizers import AdamWSpec
from meshwright.spec.plan import Moments, Offload, Plan
from meshwright.spec.run import ModelSection, RunSpec
from meshwright.workload.dtypes import bytes_of

MOST_DEVIATION = 0.25
"""Largest deviation of layers per width from those of the given model."""


@dataclass(frozen=True)
class Largest:
    """The largest model that fits with one choice of offload and optimizer moments, and its plan; both are None if no model fits."""

    offload: Offload
    moments: Moments
    model: ModelSection | None
    plan: Plan | None
    host: Mapping[str, float] = field(default_factory=dict)
    """Bytes of host memory by use, on the node that needs the most."""

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory in total, on the node that needs the most."""
        return sum(self.host.values())

    @property
    def parameters(self) -> int:
        return 0 if self.model is None else parameter_count(self.model)


def family(model: ModelSection, most_parameters: float) -> list[ModelSection]:
    """Return the models of the family of `model` with at most `most_parameters` parameters, the smallest first.

    Raises BadInput for MoE models, for latent attention, and for models whose layers are listed one by one or differ in width.

    In models like GPT-3, heads, hidden size and layers grow together. Each entry is (heads, hidden size, layers):

    >>> from meshwright.config.presets import MODEL_PRESETS
    >>> from meshwright.spec.fields import from_plain
    >>> gpt = from_plain(ModelSection, MODEL_PRESETS["gpt3-13b"])
    >>> [(each.heads, each.hidden, each.layers) for each in family(gpt, 60e6)]
    [(1, 128, 1), (2, 256, 2), (3, 384, 3), (4, 512, 3), (4, 512, 4), (4, 512, 5), (5, 640, 4), (5, 640, 5)]
    """
    if model.sequence or model.first or any(kind.ffn_hidden for kind in model.blocks.values()):
        raise BadInput(
            "--largest extends a pattern of layers of one width; expected no model.sequence, model.first or "
            "model.blocks.NAME.ffn_hidden"
        )
    if model.experts or model.kv_rank:
        raise BadInput(
            f"--largest extends dense models with keys and values by head; expected another model than {model.family}"
        )
    models: list[ModelSection] = []
    per_step = 1 if model.kv_heads == model.heads else model.kv_heads
    for heads in count(per_step, per_step):
        ratio = heads / model.heads
        layers = model.layers * ratio
        least = ceil(layers * (1 - MOST_DEVIATION))
        most = floor(layers * (1 + MOST_DEVIATION))
        wide = replace(
            model,
            heads=heads,
            kv_heads=heads if model.kv_heads == model.heads else model.kv_heads,
            hidden=round(model.hidden * ratio),
            ffn_hidden=round(model.ffn_hidden * ratio),
        )
        for depth in range(max(1, least), most + 1):
            if parameter_count(deep := replace(wide, layers=depth)) > most_parameters:
                break
            models.append(deep)
        if parameter_count(replace(wide, layers=max(1, least))) > most_parameters:
            return sorted(models, key=parameter_count)
    raise AssertionError("widths have no end")


def largest_models(run: RunSpec) -> Iterator[Largest]:
    """Yield the largest model with the optimizer on the device, and with the optimizer in host memory for each format of its moments.

    Full recomputation and micro-batches of one sequence are assumed, because they need the least memory, unless the run pins other values.
    Raises BadInput if the memory of the devices is not known or is the host's memory, and as `family`.
    """
    if run.cluster.is_cpu or memory_budget(run) is None:
        raise BadInput("--largest needs devices with memory of their own: set cluster.gpu, or cluster.memory_gib")
    pins = pins_of(run)
    pins = replace(pins, recompute=pins.recompute or "full", micro_batch=pins.micro_batch or 1)
    offloads: tuple[Offload, ...] = ("none", "optimizer") if pins.offload is None else (pins.offload,)
    for offload in offloads:
        offloaded = offload in ("optimizer", "both") and isinstance(run.train.optimizer, AdamWSpec)
        if offload != "none" and not offloaded:
            continue
        forms: tuple[Moments, ...] = (
            get_args(Moments) if offloaded and pins.moments is None else (pins.moments or "fp32",)
        )
        for moments in forms:
            yield _largest(replace(run, plan=replace(pins, offload=offload, moments=moments)), offload, moments)


def _largest(run: RunSpec, offload: Offload, moments: Moments) -> Largest:
    """Find the largest model that fits, by bisection over the number of parameters.

    This assumes that a model with fewer parameters needs less memory, which is true except for activations.
    """
    weight = bytes_of(precision_of(run).compute)
    models = family(run.model, run.cluster.ranks * (memory_budget(run) or 0) / weight)
    fitting: tuple[ModelSection, Plan] | None = None
    least = 0
    most = len(models)
    while least < most:
        middle = (least + most) // 2
        plan = _plan_of(replace(run, model=models[middle]))
        if plan is None:
            most = middle
        else:
            least = middle + 1
            fitting = (models[middle], plan)
    if fitting is None:
        return Largest(offload, moments, None, None)
    model, plan = fitting
    sizes = host_bytes(model, run.train, plan, run.cluster.nodes)
    by_use = zip(("activations", "optimizer", "gradient sums"), sizes, strict=True)
    return Largest(offload, moments, model, plan, {use: size for use, size in by_use if size})


def _plan_of(run: RunSpec) -> Plan | None:
    """Return the best plan of a run, or None if no plan fits."""
    try:
        return search(run).best.plan
    except (BadInput, OutOfResources):
        return None
