"""Training step: count the tokens, run the schedule, clip, update.

The number of valid tokens is summed over all ranks before the first backward, and the loss of every micro-batch is divided by it. Gradients
are then summed, never averaged. So the gradient is that of the mean token loss of the global batch, for any number of ranks and
micro-batches, also if ranks have different numbers of valid tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.data.loader import MicroBatch, scheduled_micro_batches
from meshwright.events.span import Recorder
from meshwright.optim.clip import clip_factor, gradient_norm
from meshwright.optim.optimizer import Optimizer
from meshwright.optim.shards import local_gradients
from meshwright.parallel.apply import PlannedModel
from meshwright.parallel.executor import StepEndCallbacks
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.objective import Objective, StepObjective
from meshwright.spec.plan import CONTEXT_AXES, DATA_AXES
from meshwright.training.expert_decisions import ExpertDecisions


@dataclass(frozen=True)
class StepFigures:
    """Figures of a step, on the device.

    `values` is one float64 tensor. Its elements are, in this order:

    1. loss (nats per valid token)
    2. gradient norm: the largest of all replicas, NaN if one is NaN
    3. number of valid tokens
    4. sum of all token ids. It is the same for any number of ranks exactly if they read the same samples.
    5. stop flag
    6. number of replicas that skipped the update
    7. with prediction modules, their mean loss (`parallel.predictions`)
    8. for MoE models, balance loss, load of the busiest expert, router z-loss (`parallel.routing`)
    9. z-loss, not yet multiplied by its weight

    All ranks have the same values.
    """

    values: torch.Tensor
    loads: torch.Tensor | None = None
    """For MoE models: number of tokens of each expert over all ranks, `(layers with experts, experts)`."""
    sums: torch.Tensor | None = None
    """What `take_sums` returned in this step, summed over all ranks; None without `take_sums`."""


def train_step(
    engine: PlannedModel,
    optimizer: Optimizer,
    mesh: Mesh,
    micro_batches: Sequence[MicroBatch],
    *,
    learning_rate: float,
    clip_norm: float | None,
    norm_limit: float = math.inf,
    recorder: Recorder,
    stop_flag: Callable[[], int] = lambda: 0,
    before_update: Callable[[], None] | None = None,
    decisions: ExpertDecisions | None = None,
    objective: Objective | None = None,
    updates: bool = True,
    take_sums: Callable[[], torch.Tensor] | None = None,
) -> StepFigures:
    """Run one step on this rank's micro-batches. Collective; the host does not wait for the device.

    - `norm_limit`: the device skips the update if the gradient norm is above this limit or not finite.
    - `stop_flag`: called at the end of the step; its values are summed over ranks.
    - `before_update`: called before the optimizer's update.
    - `decisions`: receives the expert loads of the step.
    - `objective`: replaces the weighted cross-entropy of the tokens.
    - `updates`: False if no token of the step has a gradient. The optimizer then does nothing.
    - `take_sums`: called after the last micro-batch; its result `(n,)`, fp64, is summed over all ranks. Of the ranks that have the same
      micro-batches only the first is counted.
    """
    recorder.attention_work([batch.attention_work for batch in micro_batches])
    with recorder.waiting("collective_wait"):
        valid = count_valid(micro_batches, mesh, objective)
    norm = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def measure() -> None:
        norm.copy_(
            gradient_norm(local_gradients(engine.model, engine.duplicate_rows), mesh.model_copy_group, mesh.device)
        )

    def update() -> None:
        if before_update is not None:
            before_update()
        if not updates:
            return
        checked = norm if math.isinf(norm_limit) else torch.where(norm > norm_limit, torch.nan, norm)
        optimizer.step(
            learning_rate,
            checked,
            clip_factor(checked, clip_norm),
            recorder.concurrent_span if recorder.detail else None,
        )

    callbacks: StepEndCallbacks = {"norm_barrier": measure, "optim": update}
    schedule = engine.training_schedule(scheduled_micro_batches(micro_batches))
    of_step = None
    counts = [*valid[2:]]
    if objective is not None:
        count = counts.pop()
        of_step = StepObjective(objective, torch.where(count == 0, 1.0, count))
    real = counts[0] if counts else None
    loss = engine.executor.play(schedule, micro_batches, recorder, loss_divisor(valid), callbacks, real, of_step)
    routing = engine.executor.rank_model.routing
    predictions = engine.executor.rank_model.predictions
    # One collective sums all figures of the step. Each value is a vector of this rank.
    flag = torch.full_like(loss, stop_flag())
    own = {"scalars": torch.stack([loss, flag, engine.executor.z_loss]), "norms": _norm_slots(norm, mesh)}
    if predictions is not None:
        own["predictions"] = predictions.loss[None]
    if routing is not None:
        own["routing"] = routing.sums.flatten()
        if decisions is not None:
            own["rank loads"] = decisions.rank_loads(routing.sums[:, 2:])
    if take_sums is not None:
        own["objective"] = counted_once(take_sums(), mesh)
    with recorder.waiting("collective_wait"):
        joined = mesh.sum_over_all(torch.cat([*own.values()]))
    sums = dict(zip(own, joined.split([len(part) for part in own.values()]), strict=True))
    loss, flag, z_loss = sums["scalars"]
    norms = sums["norms"]
    prediction_loss = sums.get("predictions", ())
    skipped = skipping_replicas(norms, norm_limit)
    figures = [loss, norms.max(), *valid[:2], flag, skipped, *prediction_loss]
    if routing is None:
        return StepFigures(torch.stack([*figures, z_loss]), sums=sums.get("objective"))
    routing.sums.copy_(sums["routing"].view_as(routing.sums))
    if decisions is not None:
        decisions.add(sums["rank loads"])
    routing.update_biases(skipped > 0)
    loads = routing.loads() if decisions is None else decisions.by_number(routing.loads())
    return StepFigures(torch.stack([*figures, *routing.figures(), z_loss]), loads, sums.get("objective"))


def counted_once(sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the sums of a rank. Of the ranks with the same micro-batches, all but the first return 0, so that a sum counts them once."""
    return torch.zeros_like(sums) if any(mesh.coordinate(axis) for axis in ("tensor", *CONTEXT_AXES)) else sums


def _norm_slots(norm: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return `(replicas,)`, which is to be summed over all ranks: the gradient norm of this replica on its first rank; otherwise zeros.

    Replicas have equal gradients unless an error changes them after they were summed. Then the norms of replicas differ, and one replica
    may skip the update that another one makes.
    """
    slots = norm.new_zeros(mesh.axis_size("replicate"))
    if not any(index for axis, index in mesh.coordinates.items() if axis != "replicate"):
        slots[mesh.coordinate("replicate")] = norm
    return slots


def skipping_replicas(norms: torch.Tensor, limit: float) -> torch.Tensor:
    """Return how many replicas with these gradient norms skip their update, as a scalar on the device."""
    return (~norms.isfinite() | (norms > limit)).sum(dtype=norms.dtype)


def loss_divisor(valid: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens by which a step's losses are divided, from the result of `count_valid`. It is at least 1."""
    return valid[0].clamp(min=1)


def count_valid(micro_batches: Sequence[MicroBatch], mesh: Mesh, objective: Objective | None = None) -> torch.Tensor:
    """Return counts of the step summed over all ranks, float64: [valid tokens, sum of token ids, …].

    Ranks with the same samples count them once. If micro-batches mark filler tokens, the number of other tokens follows. If there is an
    `objective`, its count is the last element.
    """
    fillers = micro_batches[0].real is not None
    sums = torch.zeros(2 + fillers + (objective is not None), dtype=torch.float64, device=mesh.device)
    if not any(index for axis, index in mesh.coordinates.items() if axis not in DATA_AXES):
        sums[0] = sum(batch.valid_tokens for batch in micro_batches)
        for batch in micro_batches:
            sums[1] += batch.tokens.sum()
            if batch.real is not None:
                sums[2] += batch.real.sum()
            if objective is not None:
                sums[-1] += objective.count(batch)
    return mesh.sum_over_all(sums)
