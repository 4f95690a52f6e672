"""Explains by parts why DeepSeek-V3's published step is shorter than this program's: features that this program lacks.

Each line of the table assumes one more feature of the published run (arXiv 2412.19437) in the cost model and simulates the step again.
No search may choose these features: they are changes of the cost model's inputs here, not of a plan that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import Pricing, pricing
from meshwright.planner.reprice import reprice
from meshwright.simulator.step_simulation import timing_of
from meshwright.spec.plan import Breakdown, LayerStrategy, Plan
from meshwright.spec.run import RunSpec

BLOCK_SCALES = 2.0
"""`Machine.matmul_format` of fp8 matmuls with scales of blocks."""
EXCHANGE_MULTIPROCESSORS, MULTIPROCESSORS = 20, 132
"""Multiprocessors that carry the exchange (section 3.2.2), and those of the device."""
NODES_PER_TOKEN = 4.0
FP8_DISPATCH_BYTES = 1.5
"""Mean bytes per element of a dispatch in fp8 and a combine in bf16 (section 3.3.2)."""


@dataclass(frozen=True)
class Assumed:
    """A run with features that this program lacks: its plan and the cost model's inputs."""

    run: RunSpec
    plan: Plan
    inputs: Pricing

    def with_layout(self, **columns: float) -> Assumed:
        return replace(self, inputs=replace(self.inputs, layout=replace(self.inputs.layout, **columns)))

    def breakdown(self) -> Breakdown:
        """The parts of the simulated step."""
        timing = timing_of(self.run.model, self.run.train, self.plan, self.run.cluster, assumed=self.inputs)
        predicted = reprice(self.run, self.plan, timing=timing).predicted
        assert predicted is not None and predicted.breakdown is not None, "the chip table has rates of this device"
        return predicted.breakdown


Feature = Callable[[Assumed], Assumed]


def steps_to_published(run: RunSpec, plan: Plan) -> Iterator[tuple[str, Breakdown]]:
    """(description, parts of the step) of `plan`, then with each feature of the published run added."""
    inputs = pricing(run.model, run.train, plan, run.cluster)
    assert inputs is not None, "the chip table has rates of this device"
    assumed = Assumed(run, plan, inputs)
    yield "this program", assumed.breakdown()
    for description, feature in FEATURES.items():
        assumed = feature(assumed)
        yield description, assumed.breakdown()


def _fp8_matmuls(assumed: Assumed) -> Assumed:
    machine = replace(machine_of(assumed.run.cluster, "fp8"), matmul_format=BLOCK_SCALES)
    return replace(assumed, inputs=replace(assumed.inputs, machine=machine))


def _even_loads(assumed: Assumed) -> Assumed:
    return assumed.with_layout(imbalance=1.0)


def _selective_recompute(assumed: Assumed) -> Assumed:
    layers = (LayerStrategy(reshard=False, gradients="whole", recompute="selective"),)
    return replace(assumed, plan=replace(assumed.plan, layers=layers))


def _one_copy_per_node(assumed: Assumed) -> Assumed:
    return assumed.with_layout(one_copy=1.0, domains_per_token=NODES_PER_TOKEN)


def _fp8_dispatch(assumed: Assumed) -> Assumed:
    return assumed.with_layout(exchanged_bytes=FP8_DISPATCH_BYTES)


def _exchange_beside_compute(assumed: Assumed) -> Assumed:
    tax = EXCHANGE_MULTIPROCESSORS / (MULTIPROCESSORS - EXCHANGE_MULTIPROCESSORS)
    constants = replace(assumed.inputs.constants, overlap_tax=tax)
    return replace(assumed, inputs=replace(assumed.inputs, constants=constants)).with_layout(exchange_overlaps=1.0)


FEATURES: dict[str, Feature] = {
    "fp8 matmuls with scales of blocks, the experts' too": _fp8_matmuls,
    "even loads, not 1.2 times the mean on the busiest expert rank": _even_loads,
    "activations in fp8, so recompute of element-wise operations suffices": _selective_recompute,
    "a token goes to at most 4 nodes, once to each": _one_copy_per_node,
    "dispatch in fp8": _fp8_dispatch,
    "DualPipe: exchange beside another micro-batch's compute, by 20 of 132 multiprocessors": _exchange_beside_compute,
}
