"""Activations in host memory: the longer of compute and copy shows, and two layers stay on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from meshwright.calibration.model_dimensions import by_name, shape
from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.compute import layer_times
from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import HOST_SHARE, host_share, rate_both_ways
from meshwright.costs.stack_footprint import MemoryConstants, footprint
from meshwright.costs.step import step_cost
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Recompute
from meshwright.workload.activations import offloaded_bytes, saved_elements
from meshwright.workload.layouts import FULL, Layouts

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
MODEL = shape(by_name("Llama-3-8B"))
MACHINE = machine_of(ClusterSpec(gpu="H100", nodes=1, gpus_per_node=8))
K = constants("hopper", "torchtitan")
PLAIN = Layouts(tensor=1.0, pipeline=1.0, virtual=1.0, context=1.0, expert=1.0, data=8.0, zero=3.0, shards=8.0, micro_batch=1.0,
                global_batch=32.0, seq=8192.0, recompute=0.0)  # fmt: skip
AWAY = replace(PLAIN, offload_activations=1.0)


def seconds(plan: Layouts, host: float) -> float:
    return float(step_cost(MODEL, replace(MACHINE, host=host), plan, K).seconds)


def test_a_fast_link_hides_all_of_it() -> None:
    assert seconds(AWAY, 1e13) == pytest.approx(seconds(PLAIN, 1e13), rel=1e-12)


def test_a_slow_link_shows_copies_less_compute() -> None:
    times = layer_times(MODEL, MACHINE, AWAY, K)
    each = 32 * float(offloaded_bytes(MODEL, AWAY)) / (1e9 * HOST_SHARE)
    shown = AWAY.micro_batches * (2 * each - float(times.forward) - float(times.backward))
    assert float(shown) > 0
    assert seconds(AWAY, 1e9) - seconds(PLAIN, 1e9) == pytest.approx(float(shown), rel=1e-6)
    assert float(step_cost(MODEL, replace(MACHINE, host=1e9), AWAY, K).exposed["host link"]) == pytest.approx(shown)


def test_bytes_by_hand() -> None:
    """Llama-3-8B: hidden 4096, queries and outputs 4096 each, keys and values 2048, feed-forward 14336 three times, 2 bytes an element; and
    what the memory account says that a block keeps."""
    assert float(offloaded_bytes(MODEL, AWAY)) == 2 * 8192 * (4 * 4096 + 3 * 4096 + 2048 + 1024 + 3 * 14336)
    spec = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
    for number, mode in enumerate(RECOMPUTE):
        copied = float(offloaded_bytes(MODEL, replace(AWAY, recompute=float(number))))
        assert copied == 2 * 8192 * saved_elements(spec, 0, mode)
    assert float(offloaded_bytes(MODEL, replace(AWAY, recompute=FULL, tensor=2.0))) == 2 * 8192 * 4096 / 2


def test_fewer_devices_get_more_of_the_host() -> None:
    assert [round(float(host_share(devices)), 3) for devices in (1, 3, 4, 8, 16)] == [1.0, 1.0, 0.8, 0.4, 0.4]


def test_copies_both_ways_at_once_get_less() -> None:
    rates = [float(rate_both_ways(replace(MACHINE, per_node=devices))) / 1e9 for devices in (1.0, 2.0, 4.0, 8.0)]
    assert rates == pytest.approx([43.5, 43.5, 26, 13])


def test_an_optimizer_in_host_memory_costs_its_transfers() -> None:
    """One rank's share of 8.03e9 parameters: 12 bytes of state come and go, at 13 GB/s each way."""
    here, away = (step_cost(MODEL, MACHINE, replace(PLAIN, offload=float(there)), K) for there in (0, 1))
    share = (float(MODEL.dense_params) + 2 * float(MODEL.table_params)) / 8
    launches = K.step_layer_us * 1e-6 * 32
    assert float(away.optimizer) == pytest.approx(share * 12 / 13e9 + launches)
    assert float(away.seconds - here.seconds) == pytest.approx(float(away.optimizer - here.optimizer))
    masters_stay = step_cost(MODEL, MACHINE, replace(PLAIN, offload=1.0, state_bytes=8.0), K)
    assert float(masters_stay.optimizer) == pytest.approx(share * 8 / 13e9 + launches)


def test_two_layers_stay() -> None:
    keep = MemoryConstants(held=6.0, owned=12.0, sharding=0.0, wide=3.0, hidden=0.0, narrow=1.0, live=0.0, logits=8.0,
                           gathered=2.0, slack=0.0, base=0.0, base_rank=0.0)  # fmt: skip
    whole, away = (float(footprint(MODEL, plan, keep)["activations"]) for plan in (PLAIN, AWAY))
    assert away == pytest.approx(whole * 2 / 32)
    deep = replace(PLAIN, pipeline=4.0, data=2.0, shards=2.0)
    assert float(footprint(MODEL, replace(deep, offload_activations=1.0), keep)["activations"]) == pytest.approx(away)
