from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.costs.memory import memory_by_kind
from meshwright.planner.candidate import HEADROOM
from meshwright.planner.data_parallel import choose
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import PlanPins
from meshwright.spec.presets import MODEL_PRESETS
from meshwright.spec.run import ModelSection, RunSpec


def run(
    preset: str = "llama3-8b", *, batch: int = 16, cluster: ClusterSpec | None = None, plan="auto", seq: int = 8192
) -> RunSpec:
    model = from_plain(ModelSection, {**MODEL_PRESETS[preset], "preset": preset})
    return RunSpec(
        name="x",
        model=model,
        train=TrainSpec(steps=10, global_batch=batch, seq_len=seq),
        cluster=cluster or ClusterSpec(gpu="H200", gpus_per_node=8),
        plan=plan,
    )


def test_8b_on_one_node_keeps_everything() -> None:
    plan, _ = choose(run())
    assert plan.axis_size("shard") == 8
    assert (plan.batch.micro_batch, plan.batch.accumulate) == (2, 1)
    assert (plan.layers[0].recompute, plan.layers[0].reshard) == ("none", False)
    assert plan.precision.compute == "bf16"
    assert plan.compile


def test_less_memory_costs_recompute_last() -> None:
    wide, _ = choose(run())
    tight, _ = choose(run(cluster=ClusterSpec(gpu="H100", gpus_per_node=8)))
    assert tight.predicted is not None and tight.predicted.memory_peak_bytes <= HEADROOM * 80 * 2**30
    assert (tight.layers[0].reshard, tight.batch.micro_batch) != (wide.layers[0].reshard, wide.batch.micro_batch)
    assert tight.layers[0].recompute == "none"


def test_two_nodes_shard_inside_and_replicate_across() -> None:
    plan, _ = choose(run(batch=32, cluster=ClusterSpec(gpu="H200", nodes=2, gpus_per_node=8)))
    assert (plan.axis_size("replicate"), plan.axis_size("shard")) == (2, 8)
    assert [axis.crosses for axis in plan.mesh] == ["node", "device"]


def test_pins_are_kept() -> None:
    plan, _ = choose(run(plan=PlanPins(micro_batch=1, recompute="full", reshard=True, replicate=2)))
    assert (plan.batch.micro_batch, plan.batch.accumulate) == (1, 2)
    assert (plan.axis_size("replicate"), plan.axis_size("shard")) == (2, 4)
    assert (plan.layers[0].recompute, plan.layers[0].reshard) == ("full", True)


def test_a_pinned_field_is_not_explained_by_memory() -> None:
    plan, _ = choose(run(plan=PlanPins(recompute="full", reshard=True)))
    assert not any("does not fit" in reason for reason in plan.why)
    assert plan.why[-1] == "pinned by the run file: reshard, recompute"


@pytest.mark.parametrize("pins", [PlanPins(micro_batch=3), PlanPins(shard=3), PlanPins(replicate=8, shard=8)])
def test_impossible_pins_are_refused(pins: PlanPins) -> None:
    with pytest.raises(BadInput, match="global_batch 16"):
        choose(run(plan=pins))


def test_nothing_fits_names_the_largest_kinds() -> None:
    with pytest.raises(OutOfResources, match="smallest needs .* GB a rank.*optimizer"):
        choose(run("llama3-405b"))


def test_an_unknown_chip_without_memory_is_not_judged() -> None:
    plan, candidates = choose(run(cluster=ClusterSpec(gpu="cpu", gpus_per_node=8)))
    assert all(candidate.fits for candidate in candidates)
    assert plan.precision.compute == "fp32"


def test_state_bytes_are_exact() -> None:
    chosen, _ = choose(run())
    kinds = memory_by_kind(run().model, run().train, chosen, cpu=False)
    assert kinds["weights"] == parameter_count(run().model) * 4 // 8
    assert kinds["optimizer"] == 2 * kinds["weights"]


def test_recompute_and_resharding_lower_memory() -> None:
    chosen, _ = choose(run())
    layer = chosen.layers[0]
    sizes = [
        sum(
            memory_by_kind(
                run().model, run().train, replace(chosen, layers=(replace(layer, **change),)), cpu=False
            ).values()
        )
        for change in ({}, {"reshard": True}, {"recompute": "selective"}, {"recompute": "full"})
    ]
    assert sizes[0] > sizes[1] and sizes[0] > sizes[2] > sizes[3]
