"""Rules about experts on ranks of their own, and about copies of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.config.divisors import nearest_divisor
from meshwright.config.run_values import RunValues
from meshwright.spec.errors import Mistake
from meshwright.spec.paired import NO_EXCHANGE, SAMPLES_DIFFER, paired_conflict


def expert_keys(run: RunValues) -> Iterator[Mistake]:
    """Every rank gets the same number of experts; expert ranks divide the shard and context ranks of one model copy."""
    experts, ranks = run("model.experts"), run("plan.expert")
    if experts is None:
        return
    yield from _copy_keys(run, experts)
    yield from _exchange_keys(run, experts)
    yield from _owner_keys(run)
    yield from _paired_keys(run, experts)
    if ranks is None:
        if experts and run.plan_file is not None and run.plan_file.usable(("expert",)):
            yield run.mistake(
                "plan.expert", "the ranks that a layer's experts are spread over, in a plan file", "1", "nothing"
            )
        return
    tensor = run("plan.tensor") or 1
    if not experts:
        yield run.mistake("plan.expert", "no key, as the model is dense (model.experts is 0)")
    elif experts % (ranks * tensor):
        beside = f" ÷ plan.tensor {tensor}" if tensor > 1 else ""
        near = str(nearest_divisor(experts // math.gcd(experts, tensor), ranks))
        yield run.mistake("plan.expert", f"a divisor of model.experts = {experts}{beside}", near)
    elif (shard := run("plan.shard")) is not None and not run("plan.hybrid"):
        size = shard * (run("plan.context_ring") or 1) * (run("plan.context_ulysses") or 1)
        if size % ranks:
            yield run.mistake(
                "plan.expert", f"a divisor of plan.shard × context ranks = {size}", str(math.gcd(size, ranks))
            )


def _copy_keys(run: RunValues, experts: int) -> Iterator[Mistake]:
    """Copies of experts need a policy, and a mixture of experts on several ranks."""
    policy, slots = run("plan.expert_policy"), run("plan.expert_slots")
    if policy not in (None, "none"):
        ranks = (run("plan.expert") or 1) * (run("plan.tensor") or 1)
        if ranks == 1:
            expected = "none, unless plan.expert (or plan.tensor) spreads experts over several ranks"
            yield run.mistake("plan.expert_policy", expected, "none")
        elif (slots is not None or run.plan_file) and (expected := _slots(policy, slots or 0, experts, ranks)):
            yield run.mistake("plan.expert_slots", expected)
        return
    for key in ("expert_slots", "expert_keep", "expert_window"):
        decides_owners = key == "expert_window" and run("plan.expert_owners") == "heterogeneous"
        if run(f"plan.{key}") and not decides_owners:
            yield run.mistake(f"plan.{key}", "no key without plan.expert_policy, which says which experts are copied")


def _exchange_keys(run: RunValues, experts: int) -> Iterator[Mistake]:
    """Kernels exchange tokens between several expert ranks that are GPUs; a bound belongs to them."""
    exchange, ranks = run("plan.expert_exchange"), (run("plan.expert") or 1) * (run("plan.tensor") or 1)
    if exchange in (None, "all_to_all"):
        if run("plan.expert_receive_bound") is not None:
            yield run.mistake("plan.expert_receive_bound", "no key without plan.expert_exchange: peer")
    elif not experts or ranks == 1:
        expected = "all_to_all, unless plan.expert (or plan.tensor) spreads experts over several ranks"
        yield run.mistake("plan.expert_exchange", expected, "all_to_all")
    elif str(run("cluster.gpu")).lower() == "cpu":
        yield run.mistake("plan.expert_exchange", "all_to_all, as the kernels run on GPUs", "all_to_all")


def _paired_keys(run: RunValues, experts: int) -> Iterator[Mistake]:
    """Two micro-batches run together so that the exchange of tokens with other ranks overlaps with compute."""
    if run("plan.schedule") != "paired":
        return
    tensor, expert = run("plan.tensor"), run("plan.expert")
    ranks, slots = (expert or 1) * (tensor or 1), run("plan.expert_slots") or 0
    none_sent = (
        not experts
        or (ranks == 1 and tensor == expert == 1)
        or (expert is not None and _all_fixed(run("plan.expert_policy"), slots, experts, ranks))
    )
    layers = run("plan.layers") or ()
    conflict = (
        NO_EXCHANGE
        if none_sent
        else SAMPLES_DIFFER
        if run("data.packing") == "none"
        else paired_conflict(
            pipeline=run("plan.pipeline") or 1,
            exchange=run("plan.expert_exchange"),
            recompute=[run("plan.recompute"), *(layer.get("recompute") for layer in layers)],
            offload=[run("plan.offload"), *(layer.get("offload") for layer in layers)],
        )
    )
    if conflict is None and (micro_batches := _micro_batches(run)) is not None and micro_batches % 2:
        conflict = f"a rank has {micro_batches} micro-batches in a step, an odd number"
    if conflict is not None:
        yield run.mistake("plan.schedule", f"another schedule than paired, as {conflict}", "1f1b")


def _micro_batches(run: RunValues) -> int | None:
    """Micro-batches of a rank in a step, where batch, data ranks and micro-batch are given."""
    keys = ("train.global_batch", "plan.replicate", "plan.shard", "plan.micro_batch")
    batch, *parts = map(run, keys)
    return batch // math.prod(parts) if batch and all(parts) and batch % math.prod(parts) == 0 else None


def _all_fixed(policy: str | None, slots: int, experts: int, ranks: int) -> bool:
    """Whether each rank has all experts in every step."""
    return policy == "fixed" and slots >= experts - experts // ranks


def _owner_keys(run: RunValues) -> Iterator[Mistake]:
    """Owners that follow the loads need several expert ranks, and free choice of the experts of each."""
    if run("plan.expert_owners") == "heterogeneous":
        ranks = (run("plan.expert") or 1) * (run("plan.tensor") or 1)
        if expected := _owners(run, ranks, run("plan.expert_policy")):
            yield run.mistake("plan.expert_owners", expected, "even")
    elif run("plan.expert_owners_every") is not None:
        yield run.mistake("plan.expert_owners_every", "no key without plan.expert_owners: heterogeneous")


def _owners(run: RunValues, ranks: int, policy: str | None) -> str:
    """The owners that are expected where heterogeneous ones cannot be; empty where they can."""
    if ranks == 1:
        return "even, as every rank has all experts"
    if policy == "fixed":
        return "even, as policy fixed does not depend on loads"
    if (run("model.groups_per_token") or 1) < (run("model.expert_groups") or 1):
        return "even, as tokens choose groups of consecutive experts (model.groups_per_token)"
    return ""


def _slots(policy: str, slots: int, experts: int, ranks: int) -> str:
    """The slots that are expected of a rank that owns `experts` / `ranks` experts; empty if `slots` are."""
    others = experts - experts // ranks
    return "" if 1 <= slots <= others else f"slots: 1 to the {others} experts of other ranks, for policy {policy}"
