"""Training step: count the tokens, run the schedule, clip, update.

The number of valid tokens is summed over all ranks before the first backward and every micro-batch's loss is divided by it; gradients
are then summed, never averaged. So the update is that of the global batch's mean token loss for any number of ranks and micro-batches,
also when ranks hold different numbers of valid tokens.
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
    """Figures of a step on the device, as one float64 tensor.

    In order: loss (nats per valid token), gradient norm, valid tokens, sum of all token ids, stop flag, replicas that skipped the
    update. All ranks have the same values: the norm is the largest of all replicas, NaN if one is NaN. The sum of ids is the same
    for any number of ranks exactly when they read the same samples. Prediction modules add their mean loss (`parallel.predictions`),
    MoE models balance loss, busiest expert and router z-loss (`parallel.routing`). The last value is the z-loss before
    its weight.
    """

    values: torch.Tensor
    loads: torch.Tensor | None = None
    """MoE models: tokens of each expert over all ranks, `(layers with experts, experts)`."""
    sums: torch.Tensor | None = None
    """What `take_sums` of the step returned, summed over all ranks."""


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
    """Run one step on this rank's micro-batches. Collective; nothing waits for the device.

    The update is skipped on the device if the gradient norm is not finite or above `norm_limit`.
    `stop_flag` is called at the step's end, and its values are summed over ranks. `before_update` is called before the optimizer's update.
    `decisions`, if any, get the loads of the step. `objective` takes the place of the tokens' weighted cross-entropy.
    Without `updates` the optimizer does nothing: no token of the step has a gradient. `take_sums` is called after the last micro-batch;
    what it returns, `(n,)` fp64, is summed over all ranks. Of ranks that have the same micro-batches only the first counts.
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
    norms = _norm_slots(norm, mesh)
    further = [] if predictions is None else [predictions.loss[None]]
    routed = [] if routing is None else [routing.sums.flatten()]
    if decisions is not None and routing is not None:
        routed.append(decisions.rank_loads(routing.sums[:, 2:]))
    flags = torch.full_like(loss, stop_flag())
    of_objective = [] if take_sums is None else [counted_once(take_sums(), mesh)]
    with recorder.waiting("collective_wait"):
        sums = mesh.sum_over_all(
            torch.cat([torch.stack([loss, flags, engine.executor.z_loss]), norms, *further, *routed, *of_objective])
        )
    objective_sums = None
    if of_objective:
        sums, objective_sums = sums[: -len(of_objective[0])], sums[-len(of_objective[0]) :]
    z_loss, norms, sums_behind = sums[2], sums[3 : 3 + len(norms)], sums[3 + len(norms) :]
    further, routed_sums = sums_behind[: len(further)], sums_behind[len(further) :]
    figures = [sums[0], norms.max(), *valid[:2], sums[1], skipping_replicas(norms, norm_limit)]
    if routing is None:
        return StepFigures(torch.stack([*figures, *further, z_loss]), sums=objective_sums)
    routed_sums, rank_loads = routed_sums[: routing.sums.numel()], routed_sums[routing.sums.numel() :]
    routing.sums.copy_(routed_sums.view_as(routing.sums))
    if decisions is not None:
        decisions.add(rank_loads)
    routing.update_biases(figures[-1] > 0)
    loads = routing.loads() if decisions is None else decisions.by_number(routing.loads())
    return StepFigures(torch.stack([*figures, *further, *routing.figures(), z_loss]), loads, objective_sums)


def counted_once(sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sums of a rank; 0 on all but the first of the ranks that see whole micro-batches of the same samples."""
    return torch.zeros_like(sums) if any(mesh.coordinate(axis) for axis in ("tensor", *CONTEXT_AXES)) else sums


def _norm_slots(norm: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return `(replicas,)`, to be summed over all ranks: a replica's gradient norm, on its first rank; zeros elsewhere.

    Replicas have equal gradients unless an error changes them after their sum. Then their norms differ, and with them what
    each replica decides about its update.
    """
    slots = norm.new_zeros(mesh.axis_size("replicate"))
    if not any(index for axis, index in mesh.coordinates.items() if axis != "replicate"):
        slots[mesh.coordinate("replicate")] = norm
    return slots


def skipping_replicas(norms: torch.Tensor, limit: float) -> torch.Tensor:
    """How many replicas with these gradient norms skip their update, a scalar on the device."""
    return (~norms.isfinite() | (norms > limit)).sum(dtype=norms.dtype)


def loss_divisor(valid: torch.Tensor) -> torch.Tensor:
    """The number of tokens by which a step's losses are divided: those of `count_valid`; 1 if none is trained on."""
    return valid[0].clamp(min=1)


def count_valid(micro_batches: Sequence[MicroBatch], mesh: Mesh, objective: Objective | None = None) -> torch.Tensor:
    """[valid tokens, sum of token ids] summed over all ranks, float64; ranks with the same samples count them once.

    Where micro-batches tell their fillers, the number of other tokens follows. The count of an `objective` is the last.
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
