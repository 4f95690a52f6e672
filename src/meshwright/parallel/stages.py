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
    """This rank's part of a micro-batch.

    `further` are the tokens and targets of the prediction modules; None where these modules do not run. `objective` computes the loss from
    the log-probabilities of the targets; if it is None, the loss is the weighted cross-entropy.
    """

    further: FurtherTokens | None = None
    objective: OfLogProbabilities | None = None


UnitForward = Callable[[Tensor | None, LocalBatch, SharedInputs], Tensor | RoutedOutput | LossSums | HeadLosses]
"""Maps a unit's input (None for the embedding), the micro-batch and the inputs that all blocks share to the unit's output."""


@dataclass(frozen=True)
class StageUnit:
    """Unit of a stage: the function that runs its forward, and its parameters.

    - `run`: maps the unit's input `(batch, seq, hidden)` to its output. The embedding has the input None. A block with experts returns
      `RoutedOutput`: its output with the router's losses and the expert loads. The head returns logits if the micro-batch has no targets,
      else the summed losses: `LossSums`, or `HeadLosses` if prediction modules run too.
    - `layer`: index of a block in the model; None for the other units.
    - `kept_elements`: estimate of the elements per token that the forward saves for the backward (`workload.activations`).
    - `offloads`: whether these elements are offloaded to host memory (`parallel.offload`).
    - `parts`: the three parts of a block with experts in which two micro-batches run together, else None (`parallel.block_parts`).
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

    - `stages`: the units of each virtual stage of the rank, by the stage's index.
    - `tensor`: this rank's index among the tensor ranks. They divide the activations between units along the sequence.
    - `context`: divides sequences over context ranks, or samples over hybrid ranks; None if the plan has neither.
    - `routing`: collects the statistics of routers; None for a dense model.
    - `predictions`: collects the loss of the prediction modules; None for a model without them.
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
        """Return this rank's tokens of a micro-batch of whole sequences.

        If the model has prediction modules and `trains` is True, the result also has their tokens and targets.
        """
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
        """The tokens whose choices of experts the routers count; None means all tokens.

        In a slot, the tokens that are trained on. In sequences with filler tokens, the tokens that are not filler.
        """
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
        """Before a block's forward, set the experts of the micro-batch if recorded routing is replayed; otherwise do nothing.

        `number` is the number of the micro-batch; None in validation.
        """
        if unit.layer is not None and self.routing is not None and self.routing.choose is not None:
            self.routing.choose(unit.layer, number)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Shape of the activation or gradient that stages exchange for a local micro-batch: `(batch, seq, hidden)`."""
        sequences, seq = batch.tokens.shape
        return sequences, seq // self.tensor.count, self.model.spec.hidden

    def whole_logits(self, logits: Tensor) -> Tensor:
        """The logits `(batch, seq, vocab)` of whole sequences, from the logits of this rank's tokens. Collective over context ranks."""
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
    """Replace every parameter of a model on the meta device by an empty one with the shape of this rank's part. Names stay the same.

    `division` tells which part of the weights the tensor and expert ranks have. Frozen weights get the dtype `compute`: they receive no
    updates, so a wider dtype would have no use.
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
    """Shard the rank's parameters over the mesh and return the units of each stage.

    `stages` has the range of layers of each stage. `parts` has an entry for each layer in which two micro-batches run together. Collective
    over all ranks of the job.
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
    """Shard the embedding and the head, as far as they are on this rank. Returns the units by name, `embed` and `head`.

    The head's unit includes the prediction modules. If embedding and head are both on this rank and share the embedding's weight, they are
    one unit with both names.
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
    """Shard the parameters of a unit over `shards`. Distributed experts are sharded over `expert_shards`, the ranks with the same experts.

    `copy_group` sends copies of experts; None if the plan copies none. `sum_dtype` is the dtype in which gradient
    shards are summed; None means the dtype of the master weight.
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
    return ShardedUnit(groups, uses=uses, single_backward=gradients_final_in_backward(spec, plan))


def _with_copies(owned: ParameterGroup, group: dist.ProcessGroup, plan: Plan) -> CopiedParameterGroup:
    """Wrap the parameter group of a unit's experts in one that adds copies of other ranks' experts; the unit then computes with both."""
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
    """A group of the parameters that are not in `whole`, the weights without a group; None if no parameters remain."""
    if all(weight in whole for module in modules for weight in module.parameters()):
        return None
    group_class = ParameterGroup if mesh.size() > 1 else UnsharedParameterGroup
    return group_class(modules, mesh, plan.precision, sum_dtype, whole)


def _runs_embedding(model: Decoder) -> bool:
    """Whether this rank runs the embedding. The last pipeline rank may have the embedding's weight too, but only for the head's unit."""
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
