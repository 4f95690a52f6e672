"""Sharded training equals one device: loss, gradient norm, every gradient and every updated weight.

The oracle uses nothing of `parallel`, `optim` or `train`: a plain decoder, torch's own AdamW and clipping, and the mean over all
valid tokens of the global batch. Ranks hold different numbers of valid tokens on purpose.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initial_values
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.optimizers import AdamWSpec
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision
from tests.distributed.pool import CaseFailed, Pool, pack
from tests.slow import examples, quick_first

STEPS, BATCH, SEQ = examples(2, 3), 8, 12
RATE, CLIP = 1e-2, 0.5
LLAMA = ModelSpec(
    family="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn_hidden=24,
    vocab_size=37,
    max_seq_len=SEQ,
    init_std=0.2,
)  # 37 rows over 4 ranks: uneven shards
GPT = ModelSpec(
    family="gpt2",
    layers=2,
    hidden=12,
    heads=3,
    kv_heads=3,
    head_dim=4,
    ffn_hidden=20,
    vocab_size=29,
    max_seq_len=SEQ,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    bias=True,
    tied=True,
    init_std=0.2,
)
ADAMW = AdamWSpec()
TRAIN = TrainSpec(
    steps=STEPS,
    global_batch=BATCH,
    seq_len=SEQ,
    learning_rate=RATE,
    clip_norm=CLIP,
    balance_loss=0.3,
    z_loss=0.02,
    router_z_loss=0.03,
)
BF16_BOUND = 0.15
"""Relative error of a bf16 gradient against fp64; largest for query and key weights, whose terms cancel in the softmax."""
BF16_LAYOUT_BOUND = 1e-5
"""Relative error of a bf16 gradient between layouts: the same bf16 matmuls, summed in fp32 in another order."""

BF16_SUM_BOUND = 2**-8
"""Error by norms of a gradient whose parts on replicas, and then their sum, were rounded to bf16.

A rounding changes an element by at most 2^-8 of it, and a gradient by less than half of that by norms.
"""


def batch(step: int, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets, positions, documents `(BATCH, spec.max_seq_len)`; later sequences have fewer valid targets."""
    seq = spec.max_seq_len
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(spec.vocab_size, (BATCH, seq), generator=draw)
    targets = torch.randint(spec.vocab_size, (BATCH, seq), generator=draw)
    targets[torch.rand(BATCH, seq, generator=draw) < torch.linspace(0, 0.9, BATCH)[:, None]] = -1
    documents = (torch.rand(BATCH, seq, generator=draw) < 0.3).long().cumsum(1)
    document_starts = torch.cat([torch.ones(BATCH, 1, dtype=torch.bool), documents[:, 1:] != documents[:, :-1]], 1)
    index = torch.arange(seq).expand(BATCH, seq)
    return tokens, targets, index - torch.where(document_starts, index, 0).cummax(1).values, documents


@cache
def one_device(spec: ModelSpec, masked: bool = True) -> list[dict[str, Any]]:
    """The reference results of every step, in float64 on one device; unless `masked`, each sequence is one document."""
    model = Decoder(spec, reference=True).double()
    specs = {parameter.name: parameter for parameter in parameters(spec)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parameter = specs[name]
            fills = {"ones": torch.ones(parameter.count), "zeros": torch.zeros(parameter.count)}
            values = fills.get(parameter.fill)
            if values is None:
                values = initial_values(0, parameter, 0, parameter.count, torch.device("cpu"))
            weight.copy_(values.view(parameter.shape))
    decayed = [weight for name, weight in model.named_parameters() if specs[name].decay]
    without_decay = [weight for name, weight in model.named_parameters() if not specs[name].decay]
    groups = [{"params": decayed, "weight_decay": TRAIN.weight_decay}, {"params": without_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.epsilon)
    steps = []
    for step in range(STEPS):
        tokens, targets, *packed = batch(step, spec)
        positions, documents = packed if masked else (None, None)
        optimizer.zero_grad()
        loss, z_loss, others = mean_losses(model, tokens, targets, positions, documents)
        (loss + TRAIN.z_loss * z_loss + others).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        gradients = {name: weight.grad.clone() for name, weight in trained_weights(model)}
        optimizer.step()
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        losses = {"loss": loss.item(), "z_loss": z_loss.item()}
        steps.append({**losses, "norm": norm.item(), "gradients": gradients, "weights": weights})
    return steps


def mean_losses(
    model: Decoder, tokens: torch.Tensor, targets: torch.Tensor, positions: Any, documents: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy, z-loss before its weight, and the weighted losses of the routers, from the logits of head and routers."""
    router_logits: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("moe.router")]
    hooks = [router.register_forward_hook(lambda _, inputs, out: router_logits.append(out)) for router in routers]
    x, balance = model._run_blocks(tokens, positions, documents)
    logits = model.logits_or_loss(x, None)
    for hook in hooks:
        hook.remove()
    trained = targets >= 0
    z_loss = logits[trained].exp().sum(-1).log().square().mean()
    router_z_loss = sum(each.exp().sum(-1).log().square().mean() for each in router_logits)
    others = TRAIN.balance_loss * balance / BATCH + TRAIN.router_z_loss * router_z_loss
    return torch.nn.functional.cross_entropy(logits[trained], targets[trained]), z_loss, others


def sharded(
    world, spec: ModelSpec, plan: Plan, factor: float = 1.0, steps: int = STEPS, masked: bool = True
) -> list[dict[str, Any]]:
    """The same steps as the trainer runs them; `factor` is a deliberate error in the token count."""
    from meshwright.data.loader import MicroBatch
    from meshwright.optim.clip import clip_factor, gradient_norm
    from meshwright.optim.optimizer import Optimizer
    from meshwright.optim.shards import local_gradients
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import count_valid

    if plan.compile:
        torch._dynamo.reset()  # what other cases compiled counts against a limit
    mesh = build_mesh(plan, world)
    is_fp64 = plan.precision.compute == "fp64"
    losses = {"balance_loss": TRAIN.balance_loss, "z_loss": TRAIN.z_loss, "router_z_loss": TRAIN.router_z_loss}
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=is_fp64, **losses)
    model, optimizer = engine.model, Optimizer(engine.model, spec, TRAIN, engine.weights, engine.host_offloaded)
    micro, samples_per_rank = plan.batch.micro_batch, BATCH // mesh.data_ranks
    step_results = []
    for step in range(steps):
        first = mesh.data_rank * samples_per_rank
        micro_batches = [tensor[first : first + samples_per_rank].split(micro) for tensor in batch(step, spec)]
        batches = [
            MicroBatch(*columns, valid_tokens=int((columns[1] >= 0).sum()))
            for columns in zip(*micro_batches, strict=True)
        ]
        if not masked:
            batches = [replace(batch, positions=None, documents=None) for batch in batches]
        valid = count_valid(batches, mesh)[0] * factor
        loss = engine.executor.play(engine.training, batches, NullRecorder(), valid)
        loss, z_loss = mesh.sum_over_all(torch.stack([loss, engine.executor.z_loss])).tolist()
        norm = gradient_norm(local_gradients(model, engine.duplicate_rows), mesh.model_copy_group, mesh.device)
        clip = clip_factor(norm, CLIP)
        whole = assemble_whole({name: weight.grad for name, weight in trained_weights(model)}, spec, mesh)
        gradients = {name: gradient * clip for name, gradient in whole.items()}
        optimizer.step(RATE, norm, clip)
        # The last ones alone: a wrong update shows in them and in the gradients between.
        last = {name: weight.detach() for name, weight in trained_weights(model)} if step + 1 == steps else {}
        weights = assemble_whole(last, spec, mesh)
        losses = {"loss": loss, "z_loss": z_loss}
        step_results.append({**losses, "norm": norm.item(), "gradients": gradients, "weights": weights})
    return step_results


def trained_weights(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters with a gradient: those that balance experts have none, and every rank has them whole."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def assemble_whole(tensors: dict[str, Any], spec: ModelSpec, mesh: Any) -> dict[str, torch.Tensor]:
    """The whole parameters, gathered over shard, tensor and expert ranks; replicated parts must be equal, bit for bit.

    One collective for all tensors of a group: one for each would take a quarter of a test's time.
    """
    parts = join_fsdp_shards(tensors)
    for experts, group in ((True, mesh.experts), (False, mesh.group("tensor"))):
        names = [name for name in parts if (".moe.experts." in name) == experts]
        if group is not None and names:
            gathered = gather_dicts({name: parts[name] for name in names}, group)
            for name in names:
                parts[name] = join_shards(name, [shard[name] for shard in gathered], spec)
    return parts


def join_fsdp_shards(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each DTensor whole, from its shards along the last axis of its mesh; other axes have copies."""
    names_by_mesh: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        assert tensor.placements[-1].is_shard() and not any(other.is_shard() for other in tensor.placements[:-1])
        names_by_mesh.setdefault(tensor.device_mesh, []).append(name)
    whole = {}
    for device_mesh, names in names_by_mesh.items():
        shards = {name: tensors[name].to_local() for name in names}
        gathered = gather_dicts(shards, device_mesh.get_group(device_mesh.ndim - 1))
        for name in names:
            whole[name] = torch.cat([shard[name] for shard in gathered], dim=tensors[name].placements[-1].dim)
    return {name: whole[name] for name in tensors}


def gather_dicts(parts: dict[str, torch.Tensor], group: Any) -> list[dict[str, torch.Tensor]]:
    """The `parts` of all ranks of `group`, in rank order."""
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, pack(parts), group=group)
    return [pickle.loads(packed) for packed in gathered]


def join_shards(name: str, shards: list[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
    """The parameter of which tensor or expert ranks have these parts."""
    if ".moe.experts." in name:
        return torch.cat(shards)
    module, parameter_name = name.split(".")[-2:]
    if module == "adapter":
        return join_adapters(name.split(".")[-3], parameter_name, shards, spec)
    if module == "qkv":
        kv = max(1, spec.kv_heads // len(shards)) * spec.head_dim
        q, k, v = zip(*(shard.split((len(shard) - 2 * kv, kv, kv)) for shard in shards), strict=True)
        return torch.cat([*q, *distinct(k, spec.kv_heads), *distinct(v, spec.kv_heads)])
    if module == "gate_up":
        return torch.cat(
            [
                half
                for halves_of_shards in zip(*(shard.chunk(2) for shard in shards), strict=True)
                for half in halves_of_shards
            ]
        )
    if module in ("q_norm", "k_norm") and spec.qk_norm_whole:
        return torch.cat([*distinct(shards, spec.heads if module == "q_norm" else spec.kv_heads)])
    if module in ("up", "embed", "head", "q", "kv_up") or parameter_name == "sinks":
        return torch.cat(shards)
    latent = name.endswith("attention.down.weight")  # the projection to latents is whole on each rank
    if module in ("out", "down") and parameter_name == "weight" and not latent:
        return torch.cat(shards, dim=1)
    return distinct(shards, 1)[0]


def join_adapters(layer: str, name: str, shards: list[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
    """An adapter's A or B: B is divided as the outputs of its layer are, A as the inputs."""
    if layer in ("out", "down"):
        return torch.cat(shards, dim=1) if name == "a" else distinct(shards, 1)[0]
    if name.endswith("a"):
        return distinct(shards, 1)[0]
    if name[0] in "kv":
        return torch.cat([*distinct(shards, spec.kv_heads)])
    return join_shards(f"{layer}.weight", shards, spec) if name == "b" else torch.cat(shards)


def distinct(tensors: Sequence[torch.Tensor], number: int) -> Sequence[torch.Tensor]:
    """The `number` different parts among `parts`, in which neighbours are copies of each other."""
    copies = max(1, len(tensors) // number)
    assert all(torch.equal(tensor, tensors[index - index % copies]) for index, tensor in enumerate(tensors))
    return tensors[::copies]


def plan(
    replicate: int,
    shard: int,
    micro: int,
    *,
    compute: str = "fp64",
    reshard: bool = True,
    recompute: str = "none",
    layers: Any = None,
) -> Plan:
    axes = [MeshAxis(axis="replicate", size=replicate)] if replicate > 1 else []
    return Plan(
        mesh=(*axes, MeshAxis(axis="shard", size=shard)),
        batch=BatchPlan(global_batch=BATCH, micro_batch=micro, accumulate=BATCH // (replicate * shard * micro)),
        layers=layers or (LayerStrategy(reshard=reshard, recompute=recompute),),
        precision=Precision(compute=compute, reduce="fp64" if compute == "fp64" else "fp32"),
        compile=False,
    )


def worst(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm().clamp_min(1e-30))


def compare(
    results: list[list[dict[str, Any]]], truth: list[dict[str, Any]], bound: float, *, weights: bool = True
) -> None:
    """Assert that loss and norm of every rank, and every gradient and weight, equal the reference; each is on some rank."""
    compared = set()
    for steps in results:
        assert steps[-1]["weights"] or not weights, "a run tells the weights it ends with"
        for actual, want in zip(steps, truth, strict=True):
            for loss in {"loss", "z_loss"} & actual.keys() & want.keys():
                assert actual[loss] == pytest.approx(want[loss], rel=bound)
            assert actual["norm"] == pytest.approx(want["norm"], rel=bound)
            for quantity in ("gradients", "weights") if weights and actual["weights"] else ("gradients",):
                errors = {name: worst(value, want[quantity][name]) for name, value in actual[quantity].items()}
                assert max(errors.values()) < bound, (
                    quantity,
                    max(errors, key=errors.__getitem__),
                    max(errors.values()),
                )
                compared.update(errors)
    assert compared == set(truth[0]["gradients"])


MIXED = (LayerStrategy(range="0", reshard=False, recompute="full"), LayerStrategy(range="1", recompute="selective"))
WHOLE = (LayerStrategy(reshard=False, gradients="whole", recompute="all_but_attention"),)
PLANS = {
    "one rank": plan(1, 1, 4),
    "fsdp 2, accumulate 4": plan(1, 2, 1),
    "fsdp 4, keep gathered": plan(1, 4, 1, reshard=False),
    "hsdp 2x2, accumulate 2": plan(2, 2, 1),
    "fsdp 2, recompute selective": plan(1, 2, 4, recompute="selective"),
    "fsdp 2, by layer range, in tiles": replace(plan(1, 2, 2, layers=MIXED), mlp_tile=5),
    "fsdp 2": plan(1, 2, 4),
    "hsdp 2x1": plan(2, 1, 2),
    "fsdp 2, recompute full": plan(1, 2, 4, recompute="full"),
    "fsdp 2, whole gradients, in tiles": replace(plan(1, 2, 2, layers=WHOLE), mlp_tile=7),
    "fsdp 2, recompute all_but_attention": plan(1, 2, 4, recompute="all_but_attention"),
}


@pytest.mark.parametrize("name", quick_first(6, PLANS))
@pytest.mark.parametrize("spec", [LLAMA, pytest.param(GPT, marks=pytest.mark.slow)], ids=["llama", "gpt2-tied"])
def test_float64_equals_one_device(pool: Pool, spec: ModelSpec, name: str) -> None:
    tested_plan = PLANS[name]
    compare(pool.run(sharded, tested_plan.ranks, spec, tested_plan), one_device(spec), 1e-9)


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 2)])
def test_bf16_stays_within_its_bound(pool: Pool, replicate: int, shard: int) -> None:
    """First-step gradients only: after an update bf16 and fp64 weights differ by Adam's sign-like steps."""
    tested_plan = plan(replicate, shard, 2, compute="bf16")
    results = pool.run(sharded, tested_plan.ranks, LLAMA, tested_plan, 1.0, 1)
    compare(results, one_device(LLAMA)[:1], BF16_BOUND, weights=False)
    one_rank = pool.run(sharded, 1, LLAMA, plan(1, 1, 2, compute="bf16"), 1.0, 1)[0]
    compare(
        results,
        [{**step, "gradients": {n: g.double() for n, g in step["gradients"].items()}} for step in one_rank],
        BF16_LAYOUT_BOUND,
        weights=False,
    )


def with_bf16_sums(fp32_plan: Plan) -> Plan:
    """The plan with sums over replicas in bf16."""
    return replace(fp32_plan, precision=replace(fp32_plan.precision, reduce_replicas="bf16"))


WIDE = {shard: plan(2, shard, 2, compute="fp32") for shard in (1, 2)}


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sums_over_replicas_in_bf16_round_and_are_the_same_on_all(pool: Pool, shard: int) -> None:
    """First-step gradients of the plan's option, against those of a run that sums its replicas in fp32."""
    fp32_plan, bf16_plan = WIDE[shard], with_bf16_sums(WIDE[shard])
    exact = pool.run(sharded, fp32_plan.ranks, LLAMA, fp32_plan, 1.0, 1)[0][0]["gradients"]
    first, *other_ranks = (
        steps[0]["gradients"] for steps in pool.run(sharded, bf16_plan.ranks, LLAMA, bf16_plan, 1.0, 1)
    )
    for name, gradient in first.items():
        assert all(torch.equal(gradient, gradients_of_rank[name]) for gradients_of_rank in other_ranks), name
        assert 1e-4 < worst(gradient, exact[name].double()) < BF16_SUM_BOUND, name


@pytest.mark.parametrize("tested_plan", [plan(1, 2, 4), plan(1, 2, 4, compute="bf16")], ids=["fp64", "bf16"])
def test_a_wrong_factor_is_noticed(pool: Pool, tested_plan: Plan) -> None:
    """A factor of 2, which Adam and clipping hide from the weights, must fail the same comparison."""
    results = pool.run(sharded, 2, LLAMA, tested_plan, 2.0, 1)
    with pytest.raises(AssertionError):
        compare(
            results,
            one_device(LLAMA)[:1],
            1e-9 if tested_plan.precision.compute == "fp64" else BF16_BOUND,
            weights=False,
        )


def boom(world) -> None:
    if world.rank == 1:
        raise ValueError("planned")


def test_the_pool_reports_a_failing_rank(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match="planned"):
        pool.run(boom, 2)
