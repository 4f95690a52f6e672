from __future__ import annotations

from dataclasses import replace

import pytest
from tests.slow import quick_first

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.planner.candidate import HEADROOM, fits, memory_budget, offloads, peak_bytes, untrainable
from meshwright.planner.finalists import SAME_TIME_TOLERANCE, plan_at, simplest
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search, with_untrainable
from meshwright.planner.space import points
from meshwright.planner.strategies import Strategy, StrategyEnd
from meshwright.planner.sweep import smallest
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import parameter_count
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import LayerStrategy, MeshAxis, Plan, ScheduleName, SchedulePlan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import ModelSection, RunSpec

H100 = ClusterSpec(gpu="H100", gpus_per_node=8)


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


def chosen(question: RunSpec, *, trainable: bool = True) -> Plan:
    return search(question, trainable=trainable).best.plan


def test_8b_on_one_node_keeps_everything() -> None:
    plan = chosen(run(), trainable=False)
    assert [(axis.axis, axis.size) for axis in plan.mesh] == [("shard", 8)]
    assert (plan.batch.micro_batch, plan.batch.accumulate) == (2, 1)
    assert (plan.layers[0].recompute, plan.layers[0].reshard, plan.layers[0].offload) == ("none", False, "none")
    assert plan.precision.compute == "bf16"
    assert plan.compile


def test_less_memory_recomputes_as_few_layers_as_fit() -> None:
    plan = chosen(run(cluster=H100))
    low_memory = next(layer for layer in plan.layers if layer.recompute != "none")
    assert peak_bytes(plan) <= HEADROOM * 80 * 2**30
    assert len(plan.layers) == 2 and low_memory.range != "all"
    last = int(low_memory.range.split("-")[-1])
    fewer = tuple(
        replace(layer, range=text) for layer, text in zip(plan.layers, (f"0-{last - 1}", f"{last}-31"), strict=True)
    )
    assert not fits(run(cluster=H100), replace(plan, layers=fewer), memory_budget(run(cluster=H100), None))


def test_everything_predicted_adds_up() -> None:
    answer = search(run(), trainable=True)
    for candidate in (answer.best, *answer.others):
        predicted = candidate.plan.predicted
        assert predicted is not None and predicted.step_seconds is not None and predicted.breakdown is not None
        parts = predicted.breakdown
        assert parts.compute + sum(parts.exposed.values()) + parts.bubble + parts.host == pytest.approx(
            predicted.step_seconds
        )
        assert predicted.low_seconds is not None and predicted.high_seconds is not None
        assert predicted.low_seconds < predicted.step_seconds < predicted.high_seconds
        assert predicted.tokens_per_second == pytest.approx(16 * 8192 / predicted.step_seconds)
        assert sum(predicted.memory_bytes.values()) == predicted.memory_peak_bytes
    seconds = [candidate.seconds for candidate in answer.others if candidate.simulated]
    assert seconds == sorted(seconds)


def test_a_slow_network_gets_a_pipeline_and_a_fast_one_does_not() -> None:
    slow = chosen(run(batch=64, cluster=ClusterSpec(gpu="H200", gpus_per_node=8, emulate_nodes=2)))
    fast = chosen(run(batch=64))
    assert (slow.axis_size("pipeline"), fast.axis_size("pipeline")) == (2, 1)
    assert slow.mesh[0].axis == "pipeline" and [axis.crosses for axis in slow.mesh] == ["node", "device"]


def test_pins_are_kept() -> None:
    plan = chosen(
        run(plan=PlanKeys(micro_batch=1, recompute="full", reshard=True, replicate=2, schedule="1f1b", pipeline=1))
    )
    assert (plan.batch.micro_batch, plan.batch.accumulate) == (1, 2)
    assert (plan.axis_size("replicate"), plan.axis_size("shard")) == (2, 4)
    assert (plan.layers[0].recompute, plan.layers[0].reshard) == ("full", True)


def test_a_pinned_field_is_not_explained_by_memory() -> None:
    plan = chosen(run(plan=PlanKeys(recompute="full", reshard=True)))
    assert not any("does not fit" in reason for reason in plan.why)
    assert plan.why[-1] == "pinned by the run file: reshard, recompute"


def test_pinned_layers_are_taken_as_they_are() -> None:
    layers = (LayerStrategy(range="0-3", recompute="full"), LayerStrategy(range="4-31", reshard=False))
    assert chosen(run(plan=PlanKeys(layers=layers))).layers == layers


@pytest.mark.parametrize("pins", [PlanKeys(micro_batch=3), PlanKeys(shard=3), PlanKeys(replicate=8, shard=8)])
def test_impossible_pins_are_refused(pins: PlanKeys) -> None:
    with pytest.raises(BadInput, match="global_batch 16"):
        search(run(plan=pins))


def test_nothing_fits_names_the_largest_kinds() -> None:
    with pytest.raises(OutOfResources, match=r"rank( \d+)? needs .* GB more"):
        search(run("llama3-405b"))


@pytest.mark.parametrize("memory", [20, 24, 32])
def test_what_fits_by_the_exact_account_is_found(memory: float) -> None:
    """The closed form overestimates memory where a few layers have a wide vocabulary's gradients."""
    words = (
        f"model=llama3-1b cluster.gpu=H100 cluster.gpus_per_node=4 cluster.emulate_nodes=2 cluster.memory_gib={memory}"
    )
    pins = "train.seq_len=4096 train.global_batch=64 plan.shard=4 plan.micro_batch=8 plan.recompute=full"
    question = load_run(None, f"{words} {pins}".split())
    assert peak_bytes(search(question, trainable=True).best.plan) <= HEADROOM * memory * 2**30


def test_a_refusal_never_names_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the closed form rejects every plan, the exact memory model decides."""
    question = run("llama3-1b", batch=8, seq=2048)
    monkeypatch.setattr("meshwright.planner.layout_search.MARGINS", (1e-6,))
    result = search(question, trainable=True).best.plan
    assert fits(question, result, memory_budget(question, None))
    tight = replace(question, cluster=replace(question.cluster, memory_gib=4))
    with pytest.raises(OutOfResources, match=r"a rank needs [\d.]+ GB, [\d.]+ GB more than the usable 3.9 GB"):
        search(tight, trainable=True)


def test_training_is_offered_only_what_it_can_do() -> None:
    # What splits the backward has the smaller bubble, and does not go with activations in host memory.
    question = run(plan=PlanKeys(pipeline=2, offload="activations"))
    wide, narrow = search(question, trainable=False), search(question)
    assert all(untrainable(candidate.plan) is None for candidate in (narrow.best, *narrow.others))
    assert any(untrainable(candidate.plan) for candidate in (wide.best, *wide.others))
    assert wide.best.seconds <= narrow.best.seconds * 1.02
    answer, faster = with_untrainable(question, narrow)
    assert answer.best.seconds <= narrow.best.seconds
    assert faster is None or (faster.seconds < narrow.best.seconds and untrainable(faster.plan))


LONG = (
    "model=llama3-8b cluster.gpu=H100 cluster.gpus_per_node=4 train.seq_len=65536 train.global_batch=8 plan.pipeline=2 plan.tensor=1 "
    "plan.context_ring=1 plan.context_ulysses=1"
)


@pytest.mark.parametrize(
    "pins",
    quick_first(
        2,
        [
            "plan.schedule=1f1b plan.recompute=all_but_attention plan.compile=false",
            "plan.schedule=zb_h1 cluster.memory_gib=60",
            "plan.schedule=zbv",
        ],
    ),
)
def test_a_pin_beside_a_free_offload_stays_trainable(pins: str) -> None:
    """Offloaded activations are the fastest here, and cannot be combined with the pin."""
    question = load_run(None, [*LONG.split(), *pins.split()])
    assert untrainable(search(question, trainable=False).best.plan)
    answer = search(question, trainable=True)
    assert all(untrainable(candidate.plan) is None for candidate in (answer.best, *answer.others))


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_what_is_named_where_nothing_fits_is_trainable(schedule: str) -> None:
    question = load_run(None, [*LONG.split(), f"plan.schedule={schedule}"])
    chosen, strategy = smallest(question, points(question, trainable=True), 3)
    assert len(chosen) and strategy.low_memory.offload == ("optimizer" if schedule == "zbv" else "both")


@pytest.mark.slow
def test_pinned_layers_get_a_schedule_that_can_train_them() -> None:
    layers = (LayerStrategy(range="all", recompute="full", offload="activations"),)
    question = run(plan=PlanKeys(pipeline=2, layers=layers))
    wide, narrow = search(question, trainable=False), search(question)
    assert any(untrainable(candidate.plan) for candidate in (wide.best, *wide.others))
    for candidate in (narrow.best, *narrow.others):
        assert candidate.plan.layers == layers and untrainable(candidate.plan) is None


def test_of_equals_the_simplest_is_taken() -> None:
    plain = search(run(), trainable=True).best
    twin = replace(
        plain, plan=replace(plain.plan, mesh=(MeshAxis(axis="replicate", size=2), MeshAxis(axis="shard", size=4)))
    )
    assert simplest([twin, plain]) is plain


@pytest.mark.parametrize(
    ("layers", "batch", "tcp"), quick_first(1, [(3, 4, True), (3, 4, False), (2, 8, True)], unpack=True)
)
def test_the_answer_is_the_fastest_of_all_simulated(layers: int, batch: int, tcp: bool) -> None:
    """The search is compared with a simulation of every plan of a small space."""
    network = NetworkSpec(fabric="tcp", port_gb_per_s=1.0) if tcp else None
    cluster = ClusterSpec(gpu="A100", nodes=2, gpus_per_node=2, memory_gib=40, network=network)
    question = run("llama3-1b", batch=batch, cluster=cluster, seq=2048)
    question = replace(question, model=replace(question.model, layers=layers))
    space, budget = points(question, trainable=True), memory_budget(question, None)
    ends = [StrategyEnd(reshard, "none") for reshard in (False, True)]
    plans = [
        plan_at(question, space, index, Strategy(end, end, gradients), budget)
        for index in range(len(space))
        for end in ends
        for gradients in ("shard", "whole")
    ]
    fastest = min(step_seconds(reprice(question, plan)) for plan in plans if fits(question, plan, budget))
    assert search(question, trainable=True).best.seconds <= fastest * (1 + SAME_TIME_TOLERANCE) * 1.001


def step_seconds(plan: Plan) -> float:
    assert plan.predicted is not None and plan.predicted.step_seconds is not None
    return plan.predicted.step_seconds


def test_what_of_offload_is_not_trained_is_refused_for_any_layer_range() -> None:
    plan = replace(chosen(run()), schedule=SchedulePlan(name="1f1b"), compile=True)

    def refused(plan: Plan = plan, **strategy: str) -> str:
        layers = LayerStrategy(range="0-3"), from_plain(LayerStrategy, {"range": "4-31", **strategy})
        return untrainable(replace(plan, layers=layers)) or ""

    assert not refused(offload="activations") and not refused(offload="activations", recompute="selective")
    assert not refused(offload="optimizer") and not refused(offload="both")
    for value in ("activations", "both"):
        assert "not compiled" in refused(replace(plan, compile=False), offload=value, recompute="selective")
    splitting: tuple[ScheduleName, ...] = ("zb_h1", "zbv")
    for name in splitting:
        late = replace(plan, schedule=SchedulePlan(name=name))
        assert not refused(late) and not refused(late, offload="optimizer")
        for value in ("activations", "both"):
            assert f"offload {value} under {name}" in refused(late, offload=value)


def test_training_moves_activations_where_memory_is_short() -> None:
    """64K tokens on four devices of 80 GB, each with a whole sequence: more recompute takes longer than offload."""
    four = ClusterSpec(gpu="H100", gpus_per_node=4)
    pins = PlanKeys(tensor=1, context_ring=1, context_ulysses=1)
    long = run(batch=4, seq=65536, cluster=four, plan=pins)
    plan = chosen(long)
    assert {layer.offload for layer in plan.layers} <= {"activations", "none"} and offloads(plan)
    assert len({layer.recompute for layer in plan.layers}) == 1 and untrainable(plan) is None
    everywhere = chosen(replace(long, plan=replace(pins, offload="activations")))
    assert step_seconds(plan) <= (1 + SAME_TIME_TOLERANCE) * step_seconds(everywhere)
    assert step_seconds(plan) < step_seconds(chosen(replace(long, plan=replace(pins, offload="none"))))


def test_training_moves_the_optimizer_where_nothing_else_fits() -> None:
    """16 bytes a parameter of an 8B model do not fit on a device of 80 GB; with the optimizer offloaded the plan fits."""
    alone = run(batch=8, seq=4096, cluster=ClusterSpec(gpu="H100", gpus_per_node=1))
    plan = chosen(alone)
    assert {layer.offload for layer in plan.layers} == {"optimizer"} and untrainable(plan) is None
    share = 10 * parameter_count(alone.model) * plan.offload_fraction
    assert any(f"the optimizer takes {share / 1e9:.1f} GB of each host's memory" in sentence for sentence in plan.why)
    with pytest.raises(OutOfResources):
        chosen(replace(alone, plan=PlanKeys(offload="activations")))


def test_a_pinned_offload_gets_a_schedule_that_can_train_it() -> None:
    plan = chosen(run(plan=PlanKeys(pipeline=2, offload="activations")))
    assert plan.layers[0].offload == "activations" and untrainable(plan) is None


def test_time_waited_for_the_host_is_told() -> None:
    """A step has as many launches for a short sequence as for a long one, so their share is larger."""
    shares = []
    for seq in (128, 8192):
        predicted = chosen(run(seq=seq)).predicted
        assert predicted is not None and predicted.breakdown is not None and predicted.step_seconds is not None
        parts = predicted.breakdown
        assert parts.compute + sum(parts.exposed.values()) + parts.bubble + parts.host == pytest.approx(
            predicted.step_seconds
        )
        shares.append(parts.host / predicted.step_seconds)
    assert shares[0] > 5 * shares[1] > 0
