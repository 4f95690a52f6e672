"""The schedule `paired` in the search: chosen where it hides the exchange of tokens, and never where it cannot run."""

from __future__ import annotations

from meshwright.config.load import load_run
from meshwright.planner.candidate import untrainable
from meshwright.planner.search import search
from meshwright.spec.plan import Plan

QUESTION = """model=qwen3-30b-a3b cluster.gpu=H200 cluster.nodes=2 cluster.gpus_per_node=8 train.seq_len=4096 train.global_batch=256
plan.expert=16 plan.shard=16 plan.pipeline=1 plan.tensor=1 plan.micro_batch=2"""


def best(*pins: str) -> Plan:
    return search(load_run(None, [*QUESTION.split(), *pins])).best.plan


def exposed(plan: Plan) -> float:
    assert plan.predicted is not None and plan.predicted.breakdown is not None
    return plan.predicted.breakdown.exposed["expert"]


def activations(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.memory_bytes["activations"]


def test_pairs_hide_most_of_the_exchange_and_store_two_micro_batches() -> None:
    fixed = ("plan.recompute=none", "plan.reshard=true", "plan.offload=optimizer")
    chosen, in_turn = best(*fixed), best(*fixed, "plan.schedule=1f1b")
    assert chosen.paired and untrainable(chosen) is None
    assert 0.2 * exposed(in_turn) < exposed(chosen) < 0.5 * exposed(in_turn)
    assert 1.8 * activations(in_turn) < activations(chosen) < 2.2 * activations(in_turn)


def test_pins_that_rule_pairs_out_are_obeyed() -> None:
    assert not best("plan.recompute=full").paired
    assert not best("plan.micro_batch=16").paired, "one micro-batch on a rank"
