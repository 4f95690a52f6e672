"""Slots and times of samples of any length in a plan, and the run of equal lengths that the planner searches with."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.machine_rates import chip_of, machine_of
from meshwright.costs.plan_costs import format_of_products
from meshwright.planner.candidate import pins_of
from meshwright.simulator.sample_times import sample_time
from meshwright.spec.job import planned_sequences
from meshwright.spec.plan import Precision, SamplePlan
from meshwright.spec.run import RunSpec


def searched_run(run: RunSpec) -> RunSpec:
    """The run as the planner searches for its plan: full slots in place of samples, on data ranks; other runs unchanged."""
    tokens = run.train.global_batch_tokens
    if tokens is None:
        return run
    sequences = planned_sequences(tokens, run.train.seq_len, run.cluster.ranks)
    pins = replace(pins_of(run), micro_batch=1, pipeline=1, context_ring=1, context_ulysses=1, tensor=1)
    return replace(run, train=replace(run.train, global_batch=sequences), plan=pins)


def sample_plan(run: RunSpec, precision: Precision) -> SamplePlan | None:
    """Slots that hold the longest sample, and the times of samples by the cost model; None if samples have equal length.

    The times are those of bf16 products on the cluster's device: only their ratios decide where samples go.
    """
    if run.data.packing != "none":
        return None
    capacity = run.train.seq_len + run.train.seq_len % 2
    chip = chip_of(run.cluster)
    machine = machine_of(run.cluster, format_of_products(precision, run.cluster))
    time = sample_time(run.model, machine, chip.generation if chip else "default", capacity)
    return SamplePlan(
        capacity=capacity, alpha=max(time.quadratic, 0.0), beta=max(time.linear, 0.0), gamma=max(time.fixed, 0.0)
    )
