"""Costs of offload to host memory: exposed copies, host link shares, and layers that stay on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions
from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.compute import layer_times
from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import HOST_SHARE, exposed_updates, host_optimizer, host_share, rate_both_ways
from meshwright.costs.plan_costs import number, pricing
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.costs.step import step_cost
from meshwright.simulator.units import UnitCosts
from meshwright.simulator.update_timeline import StepWork, step_seconds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision, Recompute
from meshwright.workload.activations import offloaded_bytes, saved_elements
from meshwright.workload.layouts import FULL, Layouts

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
MODEL = shape_from_dimensions(dimensions_by_name("Llama-3-8B"))
MACHINE = machine_of(ClusterSpec(gpu="H100", nodes=1, gpus_per_node=8))
K = constants("hopper", "torchtitan")
ON_DEVICE = Layouts(
    tensor=1.0,
    pipeline=1.0,
    virtual=1.0,
    context=1.0,
    expert=1.0,
    data=8.0,
    zero=3.0,
    shards=8.0,
    micro_batch=1.0,
    global_batch=32.0,
    seq=8192.0,
    recompute=0.0,
)
OFFLOADED = replace(ON_DEVICE, offload_activations=1.0)


def seconds(plan: Layouts, host: float) -> float:
    return float(step_cost(MODEL, replace(MACHINE, host=host), plan, K).seconds)


def test_a_fast_host_link_hides_all_copies() -> None:
    assert seconds(OFFLOADED, 1e13) == pytest.approx(seconds(ON_DEVICE, 1e13), rel=1e-12)


def test_a_slow_host_link_exposes_copy_time_minus_compute_time() -> None:
    times = layer_times(MODEL, MACHINE, OFFLOADED, K)
    copy_seconds = 32 * float(offloaded_bytes(MODEL, OFFLOADED)) / (1e9 * HOST_SHARE)
    exposed = OFFLOADED.micro_batches * (2 * copy_seconds - float(times.forward) - float(times.backward))
    assert float(exposed) > 0
    assert seconds(OFFLOADED, 1e9) - seconds(ON_DEVICE, 1e9) == pytest.approx(float(exposed), rel=1e-6)
    assert float(step_cost(MODEL, replace(MACHINE, host=1e9), OFFLOADED, K).exposed["host link"]) == pytest.approx(
        exposed
    )


def test_offloaded_bytes_equal_a_sum_by_hand_and_the_memory_account() -> None:
    """2 bytes per element and token of Llama-3-8B, equal to the memory model in every recompute mode.

    Elements per token: inputs and outputs of two norms (4 × 4096); queries, rotated queries and the output of attention (3 × 4096);
    keys and values together (2048); rotated keys (1024); two results of the feed-forward's first matmul and their gated
    product (3 × 14336).
    """
    assert float(offloaded_bytes(MODEL, OFFLOADED)) == 2 * 8192 * (4 * 4096 + 3 * 4096 + 2048 + 1024 + 3 * 14336)
    spec = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    for code, mode in enumerate(RECOMPUTE):
        copied = float(offloaded_bytes(MODEL, replace(OFFLOADED, recompute=float(code))))
        assert copied == 2 * 8192 * saved_elements(spec, 0, mode)
    assert float(offloaded_bytes(MODEL, replace(OFFLOADED, recompute=FULL, tensor=2.0))) == 2 * 8192 * 4096 / 2


def test_host_link_share_grows_with_fewer_devices() -> None:
    assert [round(float(host_share(devices)), 3) for devices in (1, 3, 4, 8, 16)] == [1.0, 0.97, 0.727, 0.364, 0.364]


def test_copies_in_both_directions_at_once_are_slower() -> None:
    rates = [float(rate_both_ways(replace(MACHINE, per_node=devices))) / 1e9 for devices in (1.0, 2.0, 4.0, 8.0)]
    assert rates == pytest.approx([48.9, 48.9, 25.8, 12.9])


def test_an_optimizer_in_host_memory_costs_what_the_forward_does_not_hide_of_its_transfers() -> None:
    """A rank owns an eighth of 8.03e9 parameters; 12 bytes of state each move in both directions at 12.9 GB/s.

    Hidden are the forwards of all but two of 33 units; with fp8 weights none.
    """
    forward = float(layer_times(MODEL, MACHINE, ON_DEVICE, K).forward)
    owned_parameters = (float(MODEL.dense_params) + 2 * float(MODEL.table_params)) / 8
    launches = K.step_layer_us * 1e-6 * 32

    def optimizer(**columns: float) -> float:
        return float(step_cost(MODEL, MACHINE, replace(ON_DEVICE, offload=1.0, **columns), K).optimizer) - launches

    exposed = optimizer()
    assert exposed == pytest.approx(owned_parameters * 12 / 12.9e9 - forward * 31 / 33)
    assert optimizer(state_bytes=8.0) == pytest.approx(exposed - owned_parameters * 4 / 12.9e9)
    assert optimizer(gathered_bytes=1.0) == pytest.approx(owned_parameters * 12 / 12.9e9)
    seconds = [step_cost(MODEL, MACHINE, replace(ON_DEVICE, offload=float(offload)), K) for offload in (0, 1)]
    assert float(seconds[1].seconds - seconds[0].seconds) == pytest.approx(
        float(seconds[1].optimizer - seconds[0].optimizer)
    )
    sweep = float(seconds[0].optimizer) - launches
    assert optimizer(state_bytes=0.01) == pytest.approx(sweep), "the kernels take their time beside the forward"


@pytest.mark.parametrize(("copy", "forward"), [(2.0, 6.0), (0.1, 6.0), (1.0, 5.0)])
def test_exposed_updates_equal_the_timeline(copy: float, forward: float) -> None:
    """Twelve units of ten chunks, but for the chunks that were fetched before the norm was known, and the kernels."""
    work = StepWork(units=12, chunks=10, copy=copy, update=1e-6, forward=forward, backward=20.0, buffers=6)
    exposed = step_seconds(work, "update_stream") - 12 * (forward + 20.0)
    assert exposed_updates([10 * copy] * 12, [forward] * 12) == pytest.approx(exposed + 5 * copy, abs=1e-4)


def test_staging_leaves_the_update_fewer_copies_but_the_step_all() -> None:
    rate = float(rate_both_ways(MACHINE))
    arguments = MACHINE, 1e9, 10.0, 0.001, 0.0, 12.0

    def exposed(staging: float, compute: float) -> float:
        return float(host_optimizer(*arguments, staging=staging, compute=compute))

    copies = 1e10 / rate
    assert exposed(0.0, 10 * copies) == pytest.approx(copies) == float(host_optimizer(*arguments))
    assert exposed(4e9, 10 * copies) == pytest.approx(0.6 * copies)
    assert exposed(1e10, 10 * copies) == 0.001, "the sweep"
    assert exposed(1e10, 0.7 * copies) == pytest.approx(0.3 * copies)


def test_updates_of_unequal_units() -> None:
    """The second of three waits for the last update, 9 seconds after the begin; without copies nothing waits."""
    assert exposed_updates([1.0, 2.0, 6.0], [4.0, 5.0, 1.0]) == (9 + 5 + 1) - 10
    assert exposed_updates([0.0, 0.0], [4.0, 5.0]) == 0
    assert exposed_updates([3.0], [4.0]) == 3


def test_launches_of_updates_delay_the_forward_where_all_state_is_staged() -> None:
    """A block of Llama-3-3B has 100.7e6 parameters, at six bytes 13.96e6 a chunk; the embedding 394e6. Its forward is shorter."""
    words = [
        "model=llama3-3b",
        "train.global_batch=1",
        "train.seq_len=8192",
        "cluster.gpu=H200",
        "cluster.gpus_per_node=1",
    ]
    run = load_run(None, words)
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        offload_staging=64.0,
        layers=(LayerStrategy(recompute="full", offload="optimizer", reshard=False),),
        precision=Precision(moments="bf16"),
    )
    priced = pricing(run.model, run.train, plan, run.cluster)
    assert priced is not None
    costs, units = UnitCosts(run.model, plan, priced), ("embed", *range(28), "head")
    forwards = [costs.compute(unit).forward for unit in units]
    launches = 1e-3 * (28 * (3.1 + 0.455 * 100.67e6 / 13.96e6) + 0.455 * 394e6 / 13.96e6)
    step_launches = 28 * number(priced.constants.step_layer_us) * 1e-6
    # The last two blocks and the head run when all updates were launched: a unit waits for those of the next one.
    assert costs.optimizer(units) - step_launches == pytest.approx(launches - sum(forwards[:-3]), rel=0.01)


def test_offload_keeps_two_layers_on_the_device() -> None:
    """Activations of two of 32 layers, without terms that do not grow with the number of layers (`live`, `slack`)."""
    constants_by_hand = MemoryConstants(
        held=6.0,  # bytes per parameter of weights and gradients, with their copies
        owned=12.0,  # bytes per parameter of master weights and moments
        sharding=0.0,  # further bytes per parameter of a shard of the optimizer
        wide=3.0,  # saved elements per token, layer and hidden element that only sequence parallelism divides over tensor ranks
        hidden=0.0,  # the same for elements that tensor parallelism always divides
        narrow=1.0,  # saved elements per token, layer and element of attention inputs and feed-forward
        live=0.0,  # undivided elements per token and hidden element of the layer that computes
        logits=8.0,  # bytes per logit of one micro-batch
        gathered=2.0,  # fully sharded layers whose whole weights exist at once
        slack=0.0,  # memory lost to fragmentation, as a share of activations
        base=0.0,  # GiB of the framework, kernels and communicators
        base_rank=0.0,  # GiB of communicators per axis in use
    )
    all_layers, two_layers = (
        float(footprint(MODEL, plan, constants_by_hand)["activations"]) for plan in (ON_DEVICE, OFFLOADED)
    )
    assert two_layers == pytest.approx(all_layers * 2 / 32)
    pipelined = replace(ON_DEVICE, pipeline=4.0, data=2.0, shards=2.0)
    assert float(
        footprint(MODEL, replace(pipelined, offload_activations=1.0), constants_by_hand)["activations"]
    ) == pytest.approx(two_layers)
