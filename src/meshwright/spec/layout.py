"""Where everything is: ranks on mesh axes and nodes, layers on pipeline stages, and parameters on ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm

from meshwright.spec.blocks.table import ParameterSpec, TensorSplit
from meshwright.spec.blocks.transfers import transfers
from meshwright.spec.model import (
    ModelSpec,
    block_parameters,
    end_parameters,
    parameters,
)
from meshwright.spec.plan import CONTEXT_AXES, DATA_AXES, SHARD_AXES, Plan, SchedulePlan, layer_range


@dataclass(frozen=True)
class Layout:
    """Ranks arranged over mesh axes, outermost axis first; nodes are filled in rank order."""

    axes: tuple[tuple[str, int], ...]
    ranks_per_node: int
    expert: int = 1
    """Ranks over which the experts of a layer are spread: consecutive ranks of the shard and context axes together."""

    @classmethod
    def of(cls, plan: Plan, ranks_per_node: int) -> Layout:
        axes = tuple((axis.axis, axis.size) for axis in plan.mesh)
        return cls(axes, ranks_per_node, plan.experts.expert if plan.experts else 1)

    @property
    def ranks(self) -> int:
        total = 1
        for _, size in self.axes:
            total *= size
        return total

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at `coordinates`. An axis that is missing counts as coordinate 0."""
        number = 0
        for name, size in self.axes:
            number = number * size + coordinates.get(name, 0)
        return number

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 when there is no such axis."""
        return dict(self.axes).get(axis, 1)

    def stride(self, *axes: str) -> float:
        """Average distance between consecutive ranks of a group along `axes`; 1 for a single rank."""
        size = 1
        span = 1
        inner = 1
        for name, length in reversed(self.axes):
            if name in axes and length > 1:
                size = size * length
                span = inner * length
            inner *= length
        return span / size

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """All ranks that differ from `rank` only along `axis`, including `rank`, in the order of the axis."""
        coordinates = self.coordinates(rank)
        return tuple(self.rank({**coordinates, axis: index}) for index in range(self.size(axis)))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """All ranks that differ from `rank` only along `axes`, including `rank`, in rank order."""
        ranks = [self.coordinates(rank)]
        for axis in axes:
            ranks = [{**coordinates, axis: index} for coordinates in ranks for index in range(self.size(axis))]
        return tuple(sorted({self.rank(coordinates) for coordinates in ranks}))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along `axes`. A group is in rank order; groups are ordered by their lowest rank."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            other_indices = tuple(index for axis, index in self.coordinates(rank).items() if axis not in axes)
            members.setdefault(other_indices, []).append(rank)
        return tuple(map(tuple, members.values()))

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that together have all experts of a layer, in the order of their expert index.

        A group has consecutive ranks of the shard and context axes, and their tensor ranks. Every layer exchanges tokens within a group.
        """
        return self._groups_by_expert(1, (*SHARD_AXES, "tensor"))

    def expert_shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks of one model copy that have the same experts and shard their weights."""
        return self._groups_by_expert(0, SHARD_AXES)

    def _groups_by_expert(self, index: int, inside: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that agree in (expert index, expert shard)[`index`] and in the coordinates of all axes except `inside`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            coordinates = self.coordinates(rank)
            position = 0
            for axis, size in self.axes:
                if axis in SHARD_AXES:
                    position = position * size + coordinates[axis]
            shard, expert = divmod(position, self.expert)
            outside = (coordinate for axis, coordinate in coordinates.items() if axis not in inside)
            groups.setdefault(((expert, shard)[index], *outside), []).append(rank)
        return tuple(map(tuple, groups.values()))

    def crosses_nodes(self, ranks: Iterable[int]) -> bool:
        """Whether `ranks` are on more than one node."""
        return len({self.node(rank) for rank in ranks}) > 1

    def axis_crosses_nodes(self, axis: str) -> bool:
        """Whether any group along `axis` has ranks on more than one node.

        That is the case if the consecutive ranks that a whole group covers do not divide a node evenly."""
        span = int(self.stride(axis)) * self.size(axis)
        return self.size(axis) > 1 and self.ranks > self.ranks_per_node and self.ranks_per_node % span > 0

    def data_index(self, rank: int) -> int:
        """Which part of the global batch `rank` reads: its index among `data_ranks` parts."""
        coordinates = self.coordinates(rank)
        index = 0
        for axis in DATA_AXES:
            index = index * self.size(axis) + coordinates.get(axis, 0)
        return index

    @property
    def data_ranks(self) -> int:
        total = 1
        for axis in DATA_AXES:
            total *= self.size(axis)
        return total


V_SCHEDULES = ("zbv",)
"""Schedules whose stages form a V: in the order of the pipeline ranks, and then back."""
STAGES_PER_RANK = {"interleaved": 2, "zbv": 2}
"""Virtual stages on each rank if the plan does not list them. Other schedules have 1."""


@lru_cache(maxsize=1024)  # the search calls it several times for each plan
def stage_table(schedule: SchedulePlan, pipeline: int, layers: int) -> tuple[tuple[range, ...], ...]:
    """For each pipeline rank, the layers of its virtual stages, in the order in which a micro-batch visits them.

    Raises ValueError if the plan's stages are in another order, leave out a layer, or do not fit the placement of the schedule.
    """
    if not schedule.stages:
        return balanced_stages(schedule.name, pipeline, layers, head=0.5)  # a remainder goes to the first stages
    table = tuple(tuple(layer_range(text, layers) for text in stages) for stages in schedule.stages)
    if len(table) != pipeline:
        raise ValueError(f"{len(table)} rows of stages for {pipeline} pipeline ranks")
    if len({len(stages) for stages in table}) != 1:
        raise ValueError("ranks hold different numbers of stages")
    next_layer = 0
    for stage, (rank, index) in enumerate(_visit_order(schedule.name, pipeline, len(table[0]))):
        stage_layers = table[rank][index]
        if stage_layers.start != next_layer:
            raise ValueError(
                f"stage {stage} (rank {rank}) begins with layer {stage_layers.start} where layer {next_layer} is expected"
            )
        next_layer = stage_layers.stop
    if next_layer != layers:
        raise ValueError(f"the last stage ends with layer {next_layer - 1} of {layers}")
    return table


def with_node_crossings(plan: Plan, ranks_per_node: int) -> Plan:
    """The plan, with `crosses` of each axis computed for nodes of `ranks_per_node` ranks."""
    layout = Layout.of(plan, ranks_per_node)
    mesh = (replace(axis, crosses="node" if layout.axis_crosses_nodes(axis.axis) else "device") for axis in plan.mesh)
    return replace(plan, mesh=tuple(mesh))


def gradients_final_in_backward(spec: ModelSpec, plan: Plan) -> bool:
    """Whether gradients are final right after a backward: there is one micro-batch, and no all-reduce over other ranks."""
    depth = plan.axis_size("pipeline")
    return plan.batch.accumulate == 1 and plan.ranks == depth and (depth == 1 or not spec.embedding_at_both_ends)


@lru_cache(maxsize=1024)
def balanced_stages(
    name: str, pipeline: int, layers: int, head: float, per_rank: int | None = None, speeds: tuple[float, ...] = ()
) -> tuple[tuple[range, ...], ...]:
    """Divide layers into stages so that the slowest pipeline rank, and then the slowest stage, takes as little time as possible.

    The last stage also has the head, which takes as long as `head` layers. `speeds` are the relative layers per second of each pipeline
    rank; empty if all are equal. Each rank has `per_rank` stages; None means as many as the schedule needs. If layers cannot be divided
    evenly, the first stages get one more. Raises ValueError if there are more stages than layers.
    """
    per_rank = STAGES_PER_RANK.get(name, 1) if per_rank is None else max(1, per_rank)
    if layers < pipeline * per_rank:
        raise ValueError(f"{layers} layers cannot fill {pipeline * per_rank} stages")
    owners = [rank for rank, _ in _visit_order(name, pipeline, per_rank)]
    speeds = speeds or (1.0,) * pipeline
    ends = [head * (rank == owners[-1]) for rank in range(pipeline)]
    counts = _assign_layers_greedily(
        layers, [per_rank] * pipeline, ends, speeds, owners[-1], [layers] * pipeline, range(pipeline)
    )
    slowest = max((count + end) / speed for count, end, speed in zip(counts, ends, speeds, strict=True))
    # A rank may get more layers, as long as it does not become slower than the slowest: that helps to even out stages.
    most = [
        max(count, int(slowest * speed - end + 1e-9)) for count, end, speed in zip(counts, ends, speeds, strict=True)
    ]
    stages = len(owners)
    last = len(owners) - 1
    heads = [0.0] * last + [head]
    sizes = _assign_layers_greedily(layers, [1] * stages, heads, [speeds[rank] for rank in owners], last, most, owners)
    table: list[list[range]] = [[] for _ in range(pipeline)]
    for rank, (first, stop) in zip(owners, pairwise(accumulate(sizes, initial=0)), strict=True):
        table[rank].append(range(first, stop))
    return tuple(map(tuple, table))


def _assign_layers_greedily(
    layers: int,
    least: Sequence[int],
    extra: Sequence[float],
    speeds: Sequence[float],
    last: int,
    most: Sequence[int],
    owners: Sequence[int],
) -> list[int]:
    """The number of layers of each slot. Layers are assigned one by one, each to the slot that then ends first.

    Of equal slots, `last` is preferred, and then the first. `least` are layers that each slot gets in advance. `extra` is the time that a
    slot needs in addition to its layers. `owners` has the owner of each slot, and `most` how many layers an owner may have. This greedy
    assignment minimises the latest end, because layers are alike and the limits are nested (a bottleneck problem over a laminar matroid).
    """
    counts = list(least)
    free = list(most)
    for owner, count in zip(owners, least, strict=True):
        free[owner] -= count
    for _ in range(layers - sum(counts)):
        slots = (slot for slot in range(len(counts)) if free[owners[slot]] > 0)
        chosen = min(slots, key=lambda slot: ((counts[slot] + 1 + extra[slot]) / speeds[slot], slot != last, slot))
        counts[chosen] += 1
        free[owners[chosen]] -= 1
    return counts


def _visit_order(name: str, pipeline: int, per_rank: int) -> list[tuple[int, int]]:
    """(pipeline rank, index among the rank's stages) of every stage, in the order of the stages."""
    turns = [range(pipeline)[:: -1 if name in V_SCHEDULES and turn % 2 else 1] for turn in range(per_rank)]
    return [(rank, turn) for turn, ranks in enumerate(turns) for rank in ranks]


def rank_parameters(spec: ModelSpec, table: tuple[tuple[range, ...], ...], pipeline_rank: int) -> tuple[str, ...]:
    """Names of the parameters on one pipeline rank: those of its layers, and the embedding and the head on the ranks that have them.

    If first and last stage both use the embedding, both have it.
    """
    rank_layers = {layer for stage in table[pipeline_rank] for layer in stage}
    first = 0 in rank_layers
    last = spec.layers - 1 in rank_layers
    names = []
    for parameter in parameters(spec):
        module, _, suffix = parameter.name.partition(".")
        if module == "layers":
            is_held = int(suffix.partition(".")[0]) in rank_layers
        elif module in ("embed", "positions"):
            is_held = first or (last and spec.embedding_at_both_ends and module == "embed")
        else:
            is_held = last
        names += [parameter.name] * is_held
    return tuple(names)


@dataclass(frozen=True)
class AxisPart:
    """Part `index` of `count` equal parts. It is a rank's coordinate on an axis that splits parameters or tokens, and the axis' size."""

    index: int = 0
    count: int = 1


WHOLE = AxisPart()


@dataclass(frozen=True)
class Division:
    """A rank's part of the parameters: the `tensor` part of every matrix, and the `expert` part of a layer's experts.

    Shards divide it further.
    """

    tensor: AxisPart = WHOLE
    expert: AxisPart = WHOLE


UNDIVIDED = Division()


@lru_cache(maxsize=64)
def tensor_splits(spec: ModelSpec) -> dict[str, TensorSplit]:
    """How tensor ranks divide the weights of each module. Modules that are not listed are whole on every rank.

    - By rows: output features and the vocabulary. Each part of a fused weight is divided separately.
    - By columns: input features.
    - Whole: norms, learned positions, routers, projections to latents, and biases that are added after results were summed over ranks.
    - Routed experts are whole too, but each tensor rank has different ones (`Layout.expert_groups`).
    """
    kinds = [block_parameters(spec, kind) for kind in range(len(spec.block_kinds))]
    weights = (*end_parameters(spec), *(weight for kind in kinds for weight in kind))
    return {weight.module: weight.split for weight in weights if weight.split != "whole"}


def token_exchanges(spec: ModelSpec, layer: int) -> int:
    """Number of reduce-scatters of tokens over tensor ranks in one forward of block `layer`. An all-gather precedes each.

    The exchange of tokens for routed experts is not counted.
    """
    return len(transfers(spec.block(layer)).scattered)


@dataclass(frozen=True)
class Box:
    """A rectangular part of a parameter: its offset in the whole parameter and its size, in elements for each dimension.

    A rank's boxes of one parameter are consecutive rows of its local tensor, and this box begins at row `first_row`. `copies` neighbouring
    ranks along the tensor axis have the same box. `primary` is true on the first of them; only there, the box counts in sums over elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first_row: int = 0
    copies: int = 1
    primary: bool = True


def local_boxes(parameter: ParameterSpec, division: Division = UNDIVIDED, shard: AxisPart = WHOLE) -> tuple[Box, ...]:
    """The boxes of a parameter on one rank. `division` gives the rank's part, which its shard group divides further by `shard`.

    Empty boxes are left out. `check_tensor` says into how many parts a model can be divided.
    """
    boxes = _divided_boxes(parameter, division)
    if parameter.expert and expert_shard_dimension(boxes[0].sizes, shard.count):
        return (_columns_of(boxes[0], even_rows(boxes[0].sizes[1], shard.count, shard.index)),)
    local_rows = shard_rows(sum(box.sizes[0] for box in boxes), shard.count, shard.index)
    return tuple(
        _rows_of(box, local_rows) for box in boxes if box.first_row < local_rows.stop and _stop(box) > local_rows.start
    )


def expert_shard_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension along which shards divide a rank's experts `(experts, rows, columns)`.

    0: each shard has whole experts, if their number is divisible or if the rows are not. 1: shards divide the rows of each expert's matrix.
    """
    return int(shape[0] % shards > 0 and shape[1] % shards == 0)


def local_shape(parameter: ParameterSpec, division: Division) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter before shards divide it."""
    boxes = _divided_boxes(parameter, division)
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:])


def _divided_boxes(parameter: ParameterSpec, division: Division) -> list[Box]:
    """The boxes of a rank's part of a parameter before shards divide it."""
    if not parameter.expert:
        return _tensor_boxes(parameter, division.tensor)
    local_rows = even_rows(parameter.shape[0], division.expert.count, division.expert.index)
    return [Box((local_rows.start, *(0 for _ in parameter.shape[1:])), (len(local_rows), *parameter.shape[1:]))]


def _tensor_boxes(parameter: ParameterSpec, tensor: AxisPart) -> list[Box]:
    """The boxes of a tensor rank's part of a parameter."""
    if tensor.count == 1 or parameter.split == "whole":
        return [Box((0,) * len(parameter.shape), parameter.shape, 0, tensor.count, tensor.index == 0)]
    if parameter.split == "columns":
        local_range = even_rows(parameter.shape[1], tensor.count, tensor.index)
        return [Box((0, local_range.start), (parameter.shape[0], len(local_range)))]
    boxes: list[Box] = []
    start = 0
    sizes_of_parts = [size for _, size in parameter.blocks] or [parameter.shape[0]]
    for size, heads in zip(sizes_of_parts, parameter.heads or (0,) * len(sizes_of_parts), strict=True):
        # With fewer key/value heads than ranks, neighbouring ranks have the same head.
        parts = min(tensor.count, heads or tensor.count)
        copies = tensor.count // parts
        local_range = even_rows(size, parts, tensor.index // copies)
        offsets = (start + local_range.start, *(0 for _ in parameter.shape[1:]))
        sizes = (len(local_range), *parameter.shape[1:])
        boxes.append(Box(offsets, sizes, _stop(boxes[-1]) if boxes else 0, copies, tensor.index % copies == 0))
        start += size
    return boxes


def _stop(box: Box) -> int:
    return box.first_row + box.sizes[0]


def _rows_of(box: Box, row_range: range) -> Box:
    """The part of a box in `row_range` of its local tensor. Its `first_row` is counted from the start of `row_range`."""
    first = max(box.first_row, row_range.start)
    stop = min(_stop(box), row_range.stop)
    at = (box.offsets[0] + first - box.first_row, *box.offsets[1:])
    return replace(box, offsets=at, sizes=(stop - first, *box.sizes[1:]), first_row=first - row_range.start)


def _columns_of(box: Box, columns: range) -> Box:
    """The part of a box in `columns`, counted in the box's dimension 1."""
    at = list(box.offsets)
    size = list(box.sizes)
    at[1] = at[1] + columns.start
    size[1] = len(columns)
    return replace(box, offsets=tuple(at), sizes=tuple(size))


def even_rows(row_count: int, parts: int, index: int) -> range:
    """The rows of part `index` of `parts`, where sizes differ by at most 1."""
    return range(row_count * index // parts, row_count * (index + 1) // parts)


def check_tensor(spec: ModelSpec, ranks: int, seq_len: int | None = None) -> str | None:
    """If `ranks` tensor ranks cannot divide the model: a text about which numbers of ranks can. None if they can.

    `seq_len` is checked too if it is given."""
    error = tensor_split_error(ranks, spec.heads, spec.kv_heads, spec.dense_widths, spec.vocab_size, seq_len)
    error = error or adapter_split_error(ranks, spec.adapter.kind if spec.adapter else "")
    return error or expert_split_error(ranks, spec.experts, spec.shared_expert_hidden)


def tensor_split_error(
    ranks: int, heads: int, kv_heads: int, widths: Mapping[str, int], vocab_size: int, seq_len: int | None
) -> str | None:
    """`check_tensor` for given dimensions. `widths` is `ModelSpec.dense_widths`; a `vocab_size` of 0 is not checked."""
    if heads % ranks:
        return f"a divisor of model.heads = {heads}, as every rank has whole heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"a divisor or a multiple of model.kv_heads = {kv_heads}"
    for key, width in widths.items():
        if width % ranks:
            return f"a divisor of model.{key} = {width}"
    if 0 < vocab_size < ranks:
        return f"at most model.vocab_size = {vocab_size}"
    if seq_len is not None and seq_len % ranks:
        return f"a divisor of train.seq_len = {seq_len}, as between matmuls each rank has a part of the sequence"
    return None


def adapter_split_error(ranks: int, kind: str) -> str | None:
    """`check_tensor` for adapters of a kind."""
    row_lengths = "the row lengths of model.adapter.kind = dora are sums over the inputs of all tensor ranks"
    return f"1, as {row_lengths}" if kind == "dora" and ranks > 1 else None


def expert_split_error(ranks: int, experts: int, shared_hidden: int) -> str | None:
    """`check_tensor` for an MoE model. 0 experts mean a dense model, and a width of 0 means no shared expert."""
    if experts % ranks:
        return f"a divisor of model.experts = {experts}, as tensor ranks hold different experts"
    if shared_hidden % ranks:
        return f"a divisor of model.shared_expert_hidden = {shared_hidden}"
    return None


def local_tokens(seq: int, ring: AxisPart = WHOLE, ulysses: AxisPart = WHOLE) -> tuple[range, ...]:
    """The tokens of a sequence that a context rank has, in order.

    First the sequence is divided among n ring ranks: it is cut into 2n chunks, and rank r gets the chunks r and 2n − 1 − r, so that all
    ranks have equal work under a causal mask. Then the Ulysses ranks divide the tokens of their ring rank, in order. Tensor ranks divide a
    rank's tokens in the same way. `check_context` says which lengths can be divided. Example: with 2 ring ranks and 8 tokens, rank 0 has
    tokens 0–1 and 6–7.
    """
    if ring.count == 1:
        chunks: tuple[range, ...] = (range(seq),)
    else:
        chunks = tuple(even_rows(seq, 2 * ring.count, chunk) for chunk in (ring.index, 2 * ring.count - 1 - ring.index))
    local_range = even_rows(sum(map(len, chunks)), ulysses.count, ulysses.index)
    start = 0
    ranges = []
    for chunk in chunks:
        part = chunk[max(0, local_range.start - start) : max(0, local_range.stop - start)]
        ranges += [part] if part else []
        start += len(chunk)
    return tuple(ranges)


def check_context(spec: ModelSpec, plan: Plan, seq_len: int | None = None) -> tuple[str, str] | None:
    """(axis, what is expected) for a context axis that cannot divide the model or sequences of `seq_len` tokens; None if all can."""
    ring, ulysses, tensor = (plan.axis_size(axis) for axis in (*CONTEXT_AXES, "tensor"))
    return context_split_error(ring, ulysses, tensor, spec.heads, spec.kv_heads, seq_len)


def context_split_error(
    ring: int, ulysses: int, tensor: int, heads: int, kv_heads: int, seq_len: int | None
) -> tuple[str, str] | None:
    """`check_context` for given dimensions of a model."""
    beside = f" ÷ tensor {tensor}" if tensor > 1 else ""
    if ulysses > 1 and heads % (tensor * ulysses):
        return "context_ulysses", f"a divisor of model.heads = {heads}{beside}, as every rank attends with whole heads"
    if ulysses > 1 and kv_heads % (tensor * ulysses) and (tensor * ulysses) % kv_heads:
        return "context_ulysses", f"a divisor or a multiple of model.kv_heads = {kv_heads}{beside}"
    unit = ring * lcm(2, ulysses * tensor) if ring > 1 else ulysses * tensor
    if ring * ulysses > 1 and seq_len is not None and seq_len % unit:
        axis = "context_ring" if ring > 1 else "context_ulysses"
        return axis, f"ranks that divide train.seq_len = {seq_len} evenly, which must be a multiple of {unit}"
    return None


def shard_rows(row_count: int, parts: int, index: int) -> range:
    """The rows of dimension 0 in part `index` of `parts`, as FSDP2 divides them.

    Each part has ceil(row_count / parts) rows; the last parts have fewer, or none."""
    size = -(-row_count // parts)
    return range(min(index * size, row_count), min((index + 1) * size, row_count))
