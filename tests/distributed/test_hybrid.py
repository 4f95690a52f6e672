"""Hybrid ranks equal one device that sees each document alone: loss, gradient norm and every gradient, in float64.

Samples have random lengths. Some are divided over several ranks, ranks run different numbers of slots, and some have none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from meshwright.data.slots import SampleSlot, slot_arrays, slots_to_run
from meshwright.events.span import NullRecorder
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime
from meshwright.spec.hybrid import schedules_of, slot_numbering
from meshwright.spec.layout import STAGES_PER_RANK
from meshwright.spec.model import KindSpec, ModelSpec
from meshwright.spec.plan import (
    RECOMPUTE_MODES,
    AxisName,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Precision,
    SchedulePlan,
)
from tests.distributed.drawn import FAMILIES, QWEN2_MOE
from tests.distributed.pool import Pool
from tests.distributed.test_equality import CLIP, GPT, LLAMA, assemble_whole, compare, trained_weights
from tests.distributed.test_experts import SHARED
from tests.distributed.test_schedules import named
from tests.distributed.test_training import trained
from tests.slow import examples, quick_first
from tests.training.tiny import make_tiny

LONGEST = 64
TIME = SampleTime(1e-3, 1.0, 2.0)
Z_LOSS, ROUTER_Z_LOSS, BALANCE_LOSS = 0.02, 0.03, 0.05
LLAMA64, GPT64 = replace(LLAMA, max_seq_len=LONGEST), replace(GPT, max_seq_len=LONGEST, tied=True)
DEEP = replace(LLAMA64, layers=4)
WIDE = replace(LLAMA64, kv_heads=4)
EXPERTS = replace(SHARED, max_seq_len=LONGEST)


@dataclass(frozen=True)
class Samples:
    """The samples of a step: a random number of them, most of them short, and some of the longest that the ranks hold."""

    seed: int
    ranks: int
    capacity: int = 16

    @property
    def lengths(self) -> np.ndarray:
        draw, longest = random.Random(900 + self.seed), min(self.ranks * self.capacity, LONGEST)
        short = draw.randint(0, 4 * self.ranks) if self.seed % 3 else 0
        lengths = [draw.randint(1, self.capacity) for _ in range(short)]
        return np.array([*lengths, *(draw.randint(1, longest) for _ in range(draw.randint(1, 3)))])

    def read(self, sample: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of a sample and their targets, `(length,)` each; -1 for a target that is not trained on."""
        draw = torch.Generator().manual_seed(1000 * self.seed + sample)
        tokens = torch.randint(vocabulary, (int(self.lengths[sample]) + 1,), generator=draw)
        ignored = torch.rand(len(tokens) - 1, generator=draw) < 0.2
        return tokens[:-1], tokens[1:].masked_fill(ignored, -1)


@dataclass(frozen=True)
class Case:
    ranks: int
    schedule: str = "1f1b"
    recompute: str = "none"
    offload: str = "none"
    tensor: int = 1
    pipeline: int = 1
    expert: int = 0
    copies: int = 0
    capacity: int = 16
    compile: bool = False
    exchange: float | None = None
    """Seconds per token to exchange heads, beside a ring that takes 0.7: `SampleTime.exchange`."""
    slot_unit: int | None = None

    @property
    def time(self) -> SampleTime:
        return TIME if self.exchange is None else replace(TIME, ring=0.7, exchange=self.exchange)

    @property
    def plan(self) -> Plan:
        kept = self.schedule != "breadth_first"
        strategy = LayerStrategy(
            reshard=not kept, gradients="whole" if kept else "shard", recompute=self.recompute, offload=self.offload
        )
        sizes: dict[AxisName, int] = {"pipeline": self.pipeline, "hybrid": self.ranks, "tensor": self.tensor}
        return Plan(
            mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in sizes.items() if size > 1 or axis == "hybrid"),
            batch=BatchPlan(global_batch=self.ranks, micro_batch=1, accumulate=1),
            schedule=SchedulePlan(name=self.schedule),
            layers=(strategy,),
            precision=Precision(compute="fp64", reduce="fp64"),
            compile=self.compile,
            experts=self.expert_plan if self.expert else None,
        )

    @property
    def expert_plan(self) -> ExpertPlan:
        policy = "fixed" if self.copies else "none"
        return ExpertPlan(expert=self.expert, expert_shard=self.ranks // self.expert, policy=policy, slots=self.copies)

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in vars(self).items() if value != getattr(Case(0), key))


def micro_batch(slot: SampleSlot, samples: Samples, vocabulary: int) -> Any:
    from meshwright.data.loader import MicroBatch

    def tokens_of(sample: int, start: int, stop: int) -> np.ndarray:
        tokens, targets = samples.read(sample, vocabulary)
        return torch.cat((tokens, targets[-1:])).numpy()[start:stop]

    packed = slot_arrays(slot, tokens_of)
    arrays = (packed.tokens, packed.targets, packed.positions, packed.documents)
    tokens, targets, positions, documents = (torch.from_numpy(array)[None] for array in arrays)
    begin = 0
    for part in slot.parts:
        for inputs in part.ranges:
            targets[0, begin : begin + len(inputs)] = samples.read(part.sample, vocabulary)[1][
                inputs.start : inputs.stop
            ]
            begin += len(inputs)
    valid = int((targets >= 0).sum())
    return MicroBatch(tokens, targets, positions, documents, valid, slot=slot)


def on_ranks(
    world: Any,
    spec: ModelSpec,
    plan: Plan,
    steps: list[Samples],
    factor: float = 1.0,
    time: SampleTime = TIME,
    slot_unit: int | None = None,
) -> list[dict[str, Any]]:
    """Loss, norm and clipped gradients of each step on this rank, as the trainer computes them."""
    from meshwright.data.loader import scheduled_micro_batches
    from meshwright.optim.clip import clip_factor, gradient_norm
    from meshwright.optim.shards import local_gradients
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import count_valid, loss_divisor

    if plan.compile:
        torch._dynamo.reset()  # what other cases compiled counts against a limit
    mesh = build_mesh(plan, world)
    weights = {"z_loss": Z_LOSS, "router_z_loss": ROUTER_Z_LOSS, "balance_loss": BALANCE_LOSS}
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True, **weights)
    results = []
    for samples in steps:
        heads = spec.kv_heads // mesh.axis_size("tensor")
        pool = RankPool(mesh.data_ranks, samples.capacity, time, mesh.axis_size("pipeline"), None, heads, slot_unit)
        slots = slots_to_run(balance_samples(samples.lengths, pool), mesh.data_rank, slot_numbering(plan))
        batches = [micro_batch(slot, samples, spec.vocab_size) for slot in slots]
        divisor = loss_divisor(count_valid(batches, mesh)) * factor
        schedule = engine.training_schedule(scheduled_micro_batches(batches))
        loss = engine.executor.play(schedule, batches, NullRecorder(), divisor)
        loss, z_loss = mesh.sum_over_all(torch.stack([loss, engine.executor.z_loss])).tolist()
        norm = gradient_norm(local_gradients(engine.model, engine.duplicate_rows), mesh.model_copy_group, mesh.device)
        clip = clip_factor(norm, CLIP)
        whole = assemble_whole({name: weight.grad for name, weight in trained_weights(engine.model)}, spec, mesh)
        gradients = {name: gradient * clip for name, gradient in whole.items()}
        figures = {"loss": loss, "z_loss": z_loss, "norm": norm.item(), "gradients": gradients, "weights": {}}
        results.append({**figures, "graphs": compiled_graphs(), "routed": routed_sums(engine, mesh)})
        for weight in engine.model.parameters():
            weight.grad = None
    return results


def routed_sums(engine: Any, mesh: Any) -> torch.Tensor | None:
    """By layer with experts, the sums of balance losses and of squared log-sum-exps and each expert's tokens, over all ranks."""
    routing = engine.executor.rank_model.routing
    return None if routing is None else mesh.sum_over_all(routing.sums.clone())


def compiled_graphs() -> int:
    """Graphs that were compiled on this rank so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def one_device(spec: ModelSpec, samples: Samples) -> dict[str, Any]:
    """The same of a plain decoder that sees each sample alone."""
    model = Decoder(spec, reference=True).double()
    initialise(model, spec, seed=0)
    router_logits = collect_router_logits(model)
    logits, targets = [], []
    for sample in range(len(samples.lengths)):
        tokens, sample_targets = samples.read(sample, spec.vocab_size)
        logits.append(model(tokens[None])[0])
        targets.append(sample_targets)
    every, trained = torch.cat(logits), torch.cat(targets) >= 0
    if not trained.any():
        zeros = {name: torch.zeros_like(weight) for name, weight in trained_weights(model)}
        return {
            "loss": 0.0,
            "z_loss": 0.0,
            "norm": 0.0,
            "gradients": zeros,
            "routed": torch.zeros((), dtype=torch.float64),
        }
    loss = cross_entropy(every[trained], torch.cat(targets)[trained])
    z_loss = every[trained].exp().sum(-1).log().square().mean()
    routed = torch.zeros(spec.layers, 2 + spec.experts, dtype=torch.float64)
    router_loss = torch.zeros(())
    for layer, outputs in router_logits.items():
        of_trained = torch.cat(outputs, dim=1)[0, trained]
        squares = of_trained.exp().sum(-1).log().square()
        if spec.router == "sigmoid":  # whose shares in their sum are the probabilities
            outputs = [logsigmoid(each) for each in outputs]
        balance = sum(map(weighted_balance, outputs, targets, repeat(spec.experts_per_token)))
        router_loss = router_loss + ROUTER_Z_LOSS * squares.mean() + BALANCE_LOSS * balance / trained.sum()
        chosen = of_trained.topk(spec.experts_per_token).indices.flatten()
        routed[layer] = torch.cat(
            [torch.stack([balance, squares.sum()]).detach(), chosen.bincount(minlength=spec.experts)]
        )
    (loss + Z_LOSS * z_loss + router_loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    gradients = {name: weight.grad for name, weight in trained_weights(model)}
    figures = {"loss": loss.item(), "z_loss": z_loss.item(), "norm": norm.item()}
    return {**figures, "gradients": gradients, "routed": routed}


def weighted_balance(logits: torch.Tensor, targets: torch.Tensor, copies: int) -> torch.Tensor:
    """A sample's balance loss, experts · Σ share of choices · mean probability, times its trained tokens."""
    of_trained = logits[0, targets >= 0]
    chosen = of_trained.topk(copies).indices.flatten().bincount(minlength=logits.shape[-1]).double()
    return logits.shape[-1] * (chosen / chosen.sum().clamp_min(1) * of_trained.softmax(-1).sum(0)).sum()


def collect_router_logits(model: Decoder) -> dict[int, list[torch.Tensor]]:
    """By layer with experts, a list to which each forward of the model appends its router's output."""
    outputs: dict[int, list[torch.Tensor]] = {}
    for layer, block in model.layers.items():
        if isinstance(block, Block) and block.routed:
            outputs[int(layer)] = []
            block.moe.router.register_forward_hook(lambda *call, layer=int(layer): outputs[layer].append(call[2]))
    return outputs


def check(pool: Pool, spec: ModelSpec, case: Case, seeds: range, factor: float = 1.0) -> list[Any]:
    steps = [Samples(seed, case.ranks, case.capacity) for seed in seeds]
    results = pool.run(on_ranks, case.plan.ranks, spec, case.plan, steps, factor, case.time, case.slot_unit)
    truth = [one_device(spec, samples) for samples in steps]
    compare(results, truth, 1e-9, weights=False)
    if spec.experts:
        for actual, want in zip(results[0], truth, strict=True):
            torch.testing.assert_close(actual["routed"], want["routed"].expand_as(actual["routed"]))
    return results


BATCHES = examples(3, 8)
CASES = [
    (LLAMA64, Case(4, exchange=0.3, recompute="all_but_attention", slot_unit=2)),
    (GPT64, Case(3, schedule="breadth_first")),
    (LLAMA64, Case(2, tensor=2, recompute="all_but_attention", slot_unit=2)),
    (LLAMA64, Case(3, recompute="selective")),
    (GPT64, Case(4, recompute="full", offload="activations")),
    (LLAMA64, Case(8)),
    (WIDE, Case(8, exchange=0.0, recompute="selective")),
    (WIDE, Case(4, tensor=2, exchange=0.0, recompute="full")),
    (WIDE, Case(4, pipeline=2, exchange=0.3, schedule="zb_h1")),
    (LLAMA64, Case(4, tensor=2, schedule="breadth_first", recompute="full")),
    (LLAMA64, Case(3, pipeline=2, recompute="all_but_attention")),
    (GPT64, Case(3, pipeline=2, schedule="breadth_first", offload="activations")),
    (DEEP, Case(2, pipeline=4, recompute="full", offload="activations")),
    (DEEP, Case(2, pipeline=2, tensor=2, schedule="zbv")),
    (DEEP, Case(3, pipeline=2, schedule="interleaved")),
    (GPT64, Case(4, pipeline=2, schedule="zb_h1", recompute="selective")),
    (LLAMA64, Case(4, pipeline=2, schedule="gpipe")),
    (EXPERTS, Case(3, recompute="selective")),
    (EXPERTS, Case(4, expert=2, recompute="full", slot_unit=4)),
    (EXPERTS, Case(4, expert=4, schedule="breadth_first", offload="activations")),
    (EXPERTS, Case(2, expert=2, tensor=2)),
    (EXPERTS, Case(2, pipeline=2, expert=2, schedule="zbv")),
    (EXPERTS, Case(2, pipeline=2, expert=2, copies=2, recompute="full")),
]


@pytest.mark.parametrize(("spec", "case"), quick_first(1, CASES, unpack=True), ids=named)
def test_batches_of_unequal_samples(pool: Pool, spec: ModelSpec, case: Case) -> None:
    check(pool, spec, case, range(BATCHES))


WITHOUT_WINDOWS = {
    name: replace(
        spec, layers=2, max_seq_len=LONGEST, sliding_window=None, longrope=None, blocks={}, first=(), pattern=()
    )
    for name, spec in FAMILIES.items()
}
OF_FAMILIES = {
    **WITHOUT_WINDOWS,
    "qwen2": replace(LLAMA64, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(LLAMA64, family="qwen3", qk_norm=True),
    "qwen3_moe": replace(EXPERTS, family="qwen3_moe", qk_norm=True, shared_expert_hidden=0),
    "qwen2_moe": replace(QWEN2_MOE, layers=2, max_seq_len=LONGEST),
    "deepseek_v3": replace(WITHOUT_WINDOWS["kimi_k2"], family="deepseek_v3"),
    "deepseek_v2": replace(
        WITHOUT_WINDOWS["kimi_k2"], family="deepseek_v2", router="softmax", normalised_routing=False
    ),
    "mixtral": replace(EXPERTS, family="mixtral", shared_expert_hidden=0),
    "smollm3": replace(
        LLAMA64,
        family="smollm3",
        blocks={"rotary": KindSpec(), "bare": KindSpec(positions="none")},
        pattern=("rotary", "bare"),
    ),
}
"""A model of each family whose layers hybrid ranks can have; those with windows, sinks or caps are refused."""


@pytest.mark.parametrize("family", quick_first(0, OF_FAMILIES))
def test_families_equal_one_device(pool: Pool, family: str) -> None:
    check(pool, OF_FAMILIES[family], Case(3, recompute="selective"), range(2))


def drawn_case(seed: int) -> tuple[ModelSpec, Case]:
    """A model, and a plan of at most eight ranks that suits it."""
    draw = random.Random(seed)
    spec = draw.choice([LLAMA64, GPT64, WIDE, DEEP, EXPERTS])
    tensor = 1 if spec is GPT64 else draw.choice([1, 1, 2])
    pipeline = draw.choice([1, 2, 2, 4] if spec.layers > 2 else [1, 2])
    pipeline = min(pipeline, 4 // tensor)
    ranks = draw.randint(1, 8 // (tensor * pipeline))
    fits = [name for name in schedules_of(pipeline) if STAGES_PER_RANK.get(name, 1) * pipeline <= spec.layers]
    return spec, Case(
        ranks,
        schedule=draw.choice(fits),
        recompute=draw.choice(RECOMPUTE_MODES),
        offload=draw.choice(["none", "activations"]),
        tensor=tensor,
        pipeline=pipeline,
        expert=draw.choice([number for number in range(1, ranks + 1) if ranks % number == 0 and 8 % number == 0])
        if spec.experts
        else 0,
        capacity=draw.choice([6, 10, 16, 24]),
        exchange=draw.choice([None, 0.0, 0.3]),
        slot_unit=draw.choice([None, 2]) if pipeline == 1 else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(28))
def test_random_batches_on_random_pools(pool: Pool, seed: int) -> None:
    """`make test-all` runs 224 batches."""
    check(pool, *drawn_case(seed), range(100 * seed, 100 * seed + BATCHES))


def test_the_batches_have_what_the_axis_is_for() -> None:
    """Divided samples, by heads and by rings in one step, ranks with different numbers of slots, and ranks without any."""
    pool = RankPool(4, 16, Case(4, exchange=0.3).time, heads=2)
    balances = [balance_samples(samples.lengths, pool) for samples in map(drawn, range(6))]
    assert any(len(set(balance.by_heads[balance.parts > 1].tolist())) == 2 for balance in balances)
    assert {parts for balance in balances for parts in balance.parts.tolist()} >= {1, 2, 3, 4}
    assert any(len(set(balance.slots.tolist())) > 1 for balance in balances)
    assert any(not balance.slots.all() for balance in balances)


def drawn(seed: int) -> Samples:
    return Samples(seed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_nothing_is_compiled_after_the_first_step(pool: Pool, recompute: str) -> None:
    results = check(pool, LLAMA64, Case(2, compile=True, recompute=recompute), range(6))
    for steps in results:
        graphs = [step["graphs"] for step in steps]
        assert graphs[0] > 0 and graphs == [graphs[0]] * len(steps)


def test_a_wrong_factor_is_noticed(pool: Pool) -> None:
    with pytest.raises(AssertionError):
        check(pool, LLAMA64, Case(2), range(1), factor=2.0)


RUN = """\
model:
  {{family: llama, layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn_hidden: 32, max_seq_len: 64, init_std: 0.1}}
data: {{mix: {{"{data}": 1}}, packing: none, validation_tokens: 300}}
train:
  {{steps: 4, global_batch_tokens: 300, seq_len: 64, learning_rate: 1e-2, warmup_steps: 2, loss_chunk: 24,
   timeout_seconds: 60}}
plan: {{compute: fp64}}
"""


Resources = tuple[int, list[str]]


def overrides(ranks: int, pins: list[str]) -> list[str]:
    return [f"cluster={{gpu: cpu, gpus_per_node: {ranks}}}", *pins]


POOLS = [
    ((3, ["plan.hybrid=3"]), (2, ["plan.hybrid=2", "plan.capacity=40"])),
    ((4, ["plan.hybrid=2", "plan.pipeline=2"]), (3, ["plan.hybrid=3"])),
]
"""CPU ranks and overrides before and after a resume."""


@pytest.mark.parametrize(("before", "after"), quick_first(1, POOLS, unpack=True), ids=["ranks", "pipelines"])
def test_a_run_equals_one_rank_and_goes_on_in_another_pool(
    pool: Pool, tmp_path: Path, before: Resources, after: Resources
) -> None:
    """Weights, losses and samples are those of one rank without divided samples, also after a resume in another pool."""
    make_tiny(tmp_path / "corpus")
    file = tmp_path / "tiny.yaml"
    file.write_text(RUN.format(data=tmp_path / "corpus" / "data"))
    truth = trained(pool, file, tmp_path / "one", *overrides(1, []))
    first = trained(pool, file, tmp_path, *overrides(*before), stop_at=2)
    second = trained(pool, file, tmp_path, *overrides(*after))
    assert [results[0].began for results in (first, second)] == [0, 2]
    steps = first[0].steps + second[0].steps
    for actual, want in zip(steps, truth[0].steps, strict=True):
        assert (actual["token_sum"], actual["tokens"], actual["samples"]) == (
            want["token_sum"],
            want["tokens"],
            want["samples"],
        )
        assert actual["loss"] == pytest.approx(want["loss"], rel=1e-9)
    tensors = second[0].tensors
    assert tensors.keys() == truth[0].tensors.keys()
    for name, tensor in truth[0].tensors.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-7, atol=1e-12)
