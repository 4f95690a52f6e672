"""The part of a model that one pipeline rank runs, divided into stages and units.

A stage is a range of consecutive layers. A unit is the part of a stage whose parameters are gathered and reduced together: the embedding,
one block, or the final norm with the head, the loss and the modules that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.data.loader import MicroBatch
from meshwright.kernels.loss import LossSums
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder, HeadLosses, OfLogProbabilities, SharedInputs
from meshwright.models.moe import CountedTokens, RoutedOutput
from meshwright.models.prediction import FurtherTokens, further_tokens
from meshwright.parallel.block_parts import BlockParts
from meshwright.parallel.blocks import predictions_of
from meshwright.parallel.context import SplitSequences
from meshwright.parallel.copied_weights import CopiedParameterGroup
from meshwright.parallel.experts import DistributedExperts
from meshwright.parallel.fsdp import ParameterGroup, UnsharedParameterGroup, unsharded_weights
from meshwright.parallel.hybrid import DividedSamples
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.predictions import PredictionLoss
from meshwright.parallel.routing import RoutingStatistics
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.spec.layout import WHOLE, AxisPart, Division, gradients_final_in_backward, local_shape
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.workload.activations import saved_elements_by_layer


@dataclass(frozen=True)
class LocalBatch(MicroBatch):
    """A rank's tokens of a micro-batch; `further` are those of the prediction modules, None where they do not run.

    `objective` computes the loss of the tokens' log-probabilities; None: the loss is the weighted cross-entropy.
    """

    further: FurtherTokens | None = None
    objective: OfLogProbabilities | None = None


UnitForward = Callable[[Tensor | None, LocalBatch, SharedInputs], Tensor | RoutedOutput | LossSums | HeadLosses]
"""Maps a unit's input (None for the embedding), the micro-batch and the inputs that all blocks share to the unit's output."""


@dataclass(frozen=True)
class StageUnit:
    """Unit of a stage: the function that runs its forward, and its parameters.

    `run` maps the unit's input `(batch, seq, hidden)` (None for the embedding) to its output, or to the sums of the losses for the last
    unit with targets (HeadLosses with further tokens); a block with experts also returns its router's losses and expert loads. `layer` is
    the index of a block in the model, None for the other units. `kept_elements` estimates how many elements per token the forward saves
    for the backward (`workload.activations`); `offloads` tells whether these are offloaded to host memory (`parallel.offload`). `parts` are
    those of a block with experts that runs two micro-batches together, else None.
    """

    run: UnitForward
    sharded: ShardedUnit
    layer: int | None = None
    kept_elements: float = 0.0
    offloads: bool = False
    parts: BlockParts | None = None


@dataclass(frozen=True)
class StageModel:
    """The part of the model that one pipeline rank runs.

    `stages` maps the indices of the rank's virtual stages to their units. Activations between units are divided along the sequence over
    tensor ranks, of which `tensor` is this rank's. `context` divides sequences over context ranks or samples over hybrid ranks, `routing`
    collects the routers' statistics and `predictions` the loss of prediction modules; all three may be None.
    """

    model: Decoder
    stages: Mapping[int, Sequence[StageUnit]]
    pipeline_rank: int
    dtype: torch.dtype
    device: torch.device
    tensor: AxisPart = WHOLE
    context: SplitSequences | DividedSamples | None = None
    routing: RoutingStatistics | None = None
    predictions: PredictionLoss | None = None

    def local_batch(
        self, batch: MicroBatch, *, trains: bool = False, objective: OfLogProbabilities | None = None
    ) -> LocalBatch:
        """This context rank's tokens of a micro-batch of whole sequences; further ones if it `trains` prediction modules."""
        further = None
        depth = len(predictions_of(self.model))
        if trains and depth and batch.targets is not None:
            further = further_tokens(batch.tokens, batch.targets, batch.documents, depth, batch.weights)
        if self.context is not None:
            batch = self.context.local_batch(batch)
        if further is not None and isinstance(self.context, SplitSequences):
            further = further.map(self.context.local_tokens)
        return LocalBatch(**vars(batch), further=further, objective=objective)

    def shared_inputs(self, batch: MicroBatch) -> SharedInputs:
        """The inputs that all blocks of a local micro-batch share: token positions, rotary tables, attention mask."""
        if self.context is None:
            shared = self.model.shared_inputs(
                batch.tokens, batch.positions, batch.documents, self.dtype, batch.document_sizes
            )
        else:
            shared = self.context.shared_inputs(batch, self.dtype)
        if self.routing is None or batch.targets is None or (counted := self._counted_tokens(batch)) is None:
            return shared
        if isinstance(self.context, DividedSamples):
            counted = self.context.counted_tokens(counted, shared)
        return shared._replace(counted=counted)

    def _counted_tokens(self, batch: MicroBatch) -> CountedTokens | None:
        """The tokens that routers count: of a slot those that are trained on, of sequences with fillers the others; None: all."""
        sequences, seq = batch.tokens.shape
        if batch.slot is not None:
            assert batch.documents is not None and batch.targets is not None, "a slot's samples are documents"
            sample = batch.documents.masked_fill(batch.targets < 0, -1)
            samples = seq
        elif batch.real is not None:
            sequence = torch.arange(sequences, device=batch.real.device)[:, None]
            sample = torch.where(batch.real, sequence, -1)
            samples = sequences
        else:
            return None
        return CountedTokens(sample.chunk(self.tensor.count, dim=1)[self.tensor.index], samples)

    def choose_experts(self, unit: StageUnit, number: int | None) -> None:
        """Set the experts of a micro-batch in a block before its forward, where recorded routing is replayed.

        `number` is None in validation.
        """
        if unit.layer is not None and self.routing is not None and self.routing.choose is not None:
            self.routing.choose(unit.layer, number)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Shape of the activation or gradient that stages exchange for a local micro-batch: `(batch, seq, hidden)`."""
        sequences, seq = batch.tokens.shape
        return sequences, seq // self.tensor.count, self.model.spec.hidden

    def whole_logits(self, logits: Tensor) -> Tensor:
        """The logits `(batch, seq, vocab)` of whole sequences, from those of this rank's tokens. Collective over context ranks."""
        return logits if self.context is None else self.context.gather_tokens(logits)


def remove_other_modules(model: Decoder, parameter_names: Iterable[str]) -> None:
    """Remove from a model on the meta device the modules of other pipeline ranks.

    `parameter_names` are the rank's parameters (`spec.layout.rank_parameters`). The names of the remaining parameters do not change.
    """
    modules = {name.rpartition(".")[0] for name in parameter_names}
    layers = {name.split(".")[1] for name in modules if name.startswith("layers.")}
    for name in [name for name in model.layers if name not in layers]:
        del model.layers[name]
    if "positions" not in modules:
        model.positions = None
    if "embed" not in modules:
        model.embed = None  # type: ignore[assignment]
    if "norm" not in modules:  # the head is on the same rank; a tied head has no parameter of its own to test for
        model.norm = model.head = None  # type: ignore[assignment]
        model.predictions = nn.ModuleList()


def shrink_to_local_parts(model: Decoder, division: Division, compute: torch.dtype) -> None:
    """Replace every parameter of a model on the meta device by one with the shape of the rank's part; names do not change.

    `division` tells which part of the weights the tensor and expert ranks have. Frozen weights get the dtype `compute`: as no update is
    added to them, they need no wider one.
    """
    specs = {parameter.name: parameter for parameter in parameters(model.spec)}
    for name, whole in list(model.named_parameters()):
        module, _, attribute = name.rpartition(".")
        narrow = specs[name].frozen and not specs[name].precise
        local = whole.new_empty(local_shape(specs[name], division), dtype=compute if narrow else None)
        setattr(model.get_submodule(module), attribute, nn.Parameter(local, requires_grad=whole.requires_grad))


def make_units(
    model: Decoder, stages: Sequence[range], plan: Plan, mesh: Mesh, parts: Mapping[int, BlockParts]
) -> list[list[StageUnit]]:
    """Shard the rank's parameters over the mesh; returns the units of each stage.

    `stages` are ranges of layers; `parts` are by layer those of blocks in which two micro-batches run together. Collective over all ranks
    of the job.
    """
    # `expert_shards` is collective over all ranks, also over those whose layers have no experts.
    expert_shards = mesh.expert_shards if model.spec.routed_layers and mesh.experts is not None else None
    copy_group = (
        mesh.expert_copies if expert_shards is not None and plan.experts and plan.experts.policy != "none" else None
    )

    kept = saved_elements_by_layer(model.spec, plan)
    strategies = plan.strategies(model.spec.layers)

    def shard(modules: Sequence[nn.Module], layers: Sequence[int], uses: int = 1) -> ShardedUnit:
        rounds_sums = plan.accumulation == "bf16" and all(plan.sums_shards(strategies[layer]) for layer in layers)
        sum_dtype = torch.bfloat16 if rounds_sums else None
        return _shard(modules, model.spec, plan, mesh.shards, expert_shards, copy_group, uses, sum_dtype)

    end_units = _shard_ends(model, shard)
    blocks = {name: shard([block], [int(name)]) for name, block in model.layers.items()}
    units_by_stage = []
    for stage in stages:
        units = [
            StageUnit(
                _block_forward(cast("Block", model.layers[str(layer)])),
                blocks[str(layer)],
                layer,
                kept[layer],
                strategies[layer].activations_offloaded,
                parts.get(layer),
            )
            for layer in stage
        ]
        if stage.start == 0:
            units.insert(0, StageUnit(_embedding_forward(model), end_units["embed"]))
        if stage.stop == model.spec.layers:
            units.append(StageUnit(_head_forward(model), end_units["head"]))
        units_by_stage.append(units)
    return units_by_stage


def _shard_ends(model: Decoder, shard: Callable[..., ShardedUnit]) -> dict[str, ShardedUnit]:
    """Shard the embedding and the head with the prediction modules, if they are on this rank.

    They are one unit if both are here and both use the embedding's weight.
    """
    front = [module for module in (model.embed, model.positions) if module is not None]
    back = [module for module in (model.norm, model.head, *model.predictions) if module is not None]
    if front and back and model.spec.embedding_at_both_ends:
        both = shard([*front, *back], [0, -1], uses=2 if _runs_embedding(model) else 1)
        return {"embed": both, "head": both}
    ends = (("embed", front, [0]), ("head", back, [-1]))
    return {name: shard(modules, layers) for name, modules, layers in ends if modules}


def _shard(
    modules: Sequence[nn.Module],
    spec: ModelSpec,
    plan: Plan,
    shards: DeviceMesh,
    expert_shards: DeviceMesh | None,
    copy_group: dist.ProcessGroup | None,
    uses: int,
    sum_dtype: torch.dtype | None,
) -> ShardedUnit:
    """Shard a unit over `shards`, but distributed experts over `expert_shards`, the ranks with the same experts.

    `copy_group` sends copies of experts, if the plan has any. `sum_dtype` as in `ParameterGroup`.
    """
    experts = [part for module in modules for part in module.modules() if isinstance(part, DistributedExperts)]
    groups: list[ParameterGroup | CopiedParameterGroup] = []
    whole: set[nn.Parameter] = set()
    if experts and expert_shards is not None:
        # The experts first: FSDP2 then excludes them from the group of the whole unit.
        whole = {*unsharded_weights(experts, expert_shards.size())}
        if owned := _parameter_group(experts, plan, expert_shards, sum_dtype, whole):
            groups.append(owned if copy_group is None else _with_copies(owned, copy_group, plan))
    whole |= {*unsharded_weights(modules, shards.size())}
    if group := _parameter_group(modules, plan, shards, sum_dtype, whole):
        groups.append(group)
    return ShardedUnit(groups, uses=uses, final=gradients_final_in_backward(spec, plan))


def _with_copies(owned: ParameterGroup, group: dist.ProcessGroup, plan: Plan) -> CopiedParameterGroup:
    """The group of a unit's experts with their copies, with which the unit then computes."""
    assert plan.experts is not None
    modules = [parameter.module for parameter in owned.parameters]
    copied = CopiedParameterGroup(owned, [module.present for module in modules], group, keep=plan.experts.keep)
    for module, parameter, weight in zip(modules, owned.parameters, copied.parameters, strict=True):
        module.use_stacked(parameter.name, weight.gathered)
    return copied


def _parameter_group(
    modules: Sequence[nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    sum_dtype: torch.dtype | None,
    whole: Collection[nn.Parameter],
) -> ParameterGroup | None:
    """The group of the parameters that are not `whole` on each rank; None without any."""
    if all(weight in whole for module in modules for weight in module.parameters()):
        return None
    group_class = ParameterGroup if mesh.size() > 1 else UnsharedParameterGroup
    return group_class(modules, mesh, plan.precision, sum_dtype, whole)


def _runs_embedding(model: Decoder) -> bool:
    """Whether the rank runs the embedding; the last pipeline rank may have its weight for the head's unit only."""
    return "0" in model.layers


def _embedding_forward(model: Decoder) -> UnitForward:
    return lambda x, batch, shared: model.embed_tokens(batch.tokens, shared.positions)


def _block_forward(block: Block) -> UnitForward:
    # Not `block(...)`, so that no module hooks run.
    def run(x: Tensor | None, batch: LocalBatch, shared: SharedInputs) -> Tensor | RoutedOutput:
        assert x is not None
        return block.forward(x, *shared.of(block.attention_kind), shared.counted)

    return run


def _head_forward(model: Decoder) -> UnitForward:
    def run(x: Tensor | None, batch: LocalBatch, shared: SharedInputs) -> Tensor | LossSums | HeadLosses:
        assert x is not None
        if batch.further is None or batch.targets is None:
            return model.logits_or_loss(x, batch.targets, batch.weights, batch.objective)
        return model.head_losses(x, batch.targets, batch.further, shared, batch.weights, batch.objective)

    return run
