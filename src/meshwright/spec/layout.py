"""Who holds what, where: rank ↔ mesh coordinates ↔ node, and parameter → shard, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import Literal

from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.plan import CONTEXT_AXES, DATA_AXES, SHARD_AXES, Plan, SchedulePlan, layer_range


@dataclass(frozen=True)
class Layout:
    """Ranks laid over mesh axes, outermost first, nodes filled in rank order."""

    axes: tuple[tuple[str, int], ...]
    ranks_per_node: int
    expert: int = 1
    """Ranks that a layer's experts are spread over, neighbours of the shard and context axes together."""

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
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return place

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at `coordinates`; an axis left out counts as 0."""
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
        """Ranks from one member to the next of a group along `axes`, on average where other axes lie between them; 1 for a group of one."""
        size, span, inner = 1, 1, 1
        for name, length in reversed(self.axes):
            if name in axes and length > 1:
                size, span = size * length, inner * length
            inner *= length
        return span / size

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """All ranks that differ from `rank` only along `axis`, itself included, in axis order."""
        place = self.coordinates(rank)
        return tuple(self.rank({**place, axis: index}) for index in range(self.size(axis)))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ along `axes` only, in rank order; by their lowest rank, together every rank once."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            others = tuple(place for axis, place in self.coordinates(rank).items() if axis not in axes)
            found.setdefault(others, []).append(rank)
        return tuple(map(tuple, found.values()))

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """All ranks, by those that hold a layer's experts together, each in the order of their parts: neighbours of the shard and context
        axes taken as one, as tokens pass between them in every layer, with their tensor ranks."""
        return self._folded(1, (*SHARD_AXES, "tensor"))

    def expert_shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """All ranks, by those of one copy of the model that hold the same experts and split their weights."""
        return self._folded(0, SHARD_AXES)

    def _folded(self, alike: int, inside: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All ranks, by their coordinate `alike` of the fold and those along axes that are not `inside` it."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            place, index = self.coordinates(rank), 0
            for axis, size in self.axes:
                if axis in SHARD_AXES:
                    index = index * size + place[axis]
            shard, expert = divmod(index, self.expert)
            outside = (at for axis, at in place.items() if axis not in inside)
            groups.setdefault(((expert, shard)[alike], *outside), []).append(rank)
        return tuple(map(tuple, groups.values()))

    def crosses_nodes(self, ranks: Iterable[int]) -> bool:
        """Whether `ranks` live on more than one node."""
        return len({self.node(rank) for rank in ranks}) > 1

    def axis_crosses_nodes(self, axis: str) -> bool:
        """Whether any group along `axis` lives on more than one node: where spans of whole groups do not fill a node evenly, one lies
        across its border."""
        span = int(self.stride(axis)) * self.size(axis)
        return self.size(axis) > 1 and self.ranks > self.ranks_per_node and self.ranks_per_node % span > 0

    def data_index(self, rank: int) -> int:
        """Which part of the global batch `rank` reads, of `data_ranks` parts."""
        place = self.coordinates(rank)
        return place.get("replicate", 0) * self.size("shard") + place.get("shard", 0)

    @property
    def data_ranks(self) -> int:
        total = 1
        for axis in DATA_AXES:
            total *= self.size(axis)
        return total


V_SCHEDULES = ("zbv", "dualpipe_v")
"""Schedules that lay their stages in a V: down the ranks and up again."""
STAGES_PER_RANK = {"interleaved": 2, "zbv": 2, "dualpipe_v": 2}
"""Virtual stages a rank holds when the plan does not list them; 1 for the others."""


@lru_cache(maxsize=1024)  # the search asks several times for each plan
def stage_table(schedule: SchedulePlan, pipeline: int, layers: int) -> tuple[tuple[range, ...], ...]:
    """By pipeline rank, the layers of its virtual stages in the order a micro-batch visits them.

    Raises ValueError when the plan's stages are not in that order, leave a layer out, or are not laid out as the schedule runs them.
    """
    if not schedule.stages:
        return balanced_stages(schedule.name, pipeline, layers, head=0.5)  # what does not divide goes to the first ones
    table = tuple(tuple(layer_range(text, layers) for text in row) for row in schedule.stages)
    if len(table) != pipeline:
        raise ValueError(f"{len(table)} rows of stages for {pipeline} pipeline ranks")
    if len({len(row) for row in table}) != 1:
        raise ValueError("ranks hold different numbers of stages")
    wanted = 0
    for stage, (rank, place) in enumerate(_visits(schedule.name, pipeline, len(table[0]))):
        held = table[rank][place]
        if held.start != wanted:
            raise ValueError(f"stage {stage} (rank {rank}) begins with layer {held.start} where layer {wanted} is next")
        wanted = held.stop
    if wanted != layers:
        raise ValueError(f"the last stage ends with layer {wanted - 1} of {layers}")
    return table


def with_node_crossings(plan: Plan, ranks_per_node: int) -> Plan:
    """The plan with what its axes cross on nodes of so many ranks, whatever it says of that."""
    layout = Layout.of(plan, ranks_per_node)
    mesh = (replace(one, crosses="node" if layout.axis_crosses_nodes(one.axis) else "device") for one in plan.mesh)
    return replace(plan, mesh=tuple(mesh))


def gradients_final_in_backward(spec: ModelSpec, plan: Plan) -> bool:
    """Whether gradients are final as a backward makes them: it is the step's only one, and no other rank's are added."""
    depth = plan.axis_size("pipeline")
    return plan.batch.accumulate == 1 and plan.ranks == depth and (depth == 1 or not spec.tied)


@lru_cache(maxsize=1024)
def balanced_stages(
    name: str, pipeline: int, layers: int, head: float, per_rank: int | None = None, speeds: tuple[float, ...] = ()
) -> tuple[tuple[range, ...], ...]:
    """Layers cut so that the slowest pipeline rank has the least to do, and then the slowest stage.

    The last stage has the head too, which takes as long as `head` layers. `speeds` are layers a second by pipeline rank, relative; alike
    when left out. `per_rank` stages on each rank, as many as the schedule needs when left out. What does not divide goes to the first
    stages.
    Raises ValueError when there are more stages than layers.
    """
    per_rank = STAGES_PER_RANK.get(name, 1) if per_rank is None else max(1, per_rank)
    if layers < pipeline * per_rank:
        raise ValueError(f"{layers} layers cannot fill {pipeline * per_rank} stages")
    owners, speeds = [rank for rank, _ in _visits(name, pipeline, per_rank)], speeds or (1.0,) * pipeline
    ends = [head * (rank == owners[-1]) for rank in range(pipeline)]
    held = _dealt(layers, [per_rank] * pipeline, ends, speeds, owners[-1], [layers] * pipeline, range(pipeline))
    slowest = max((count + end) / speed for count, end, speed in zip(held, ends, speeds, strict=True))
    # A rank may take more than it was dealt, as long as none becomes slower than the slowest: that leaves room to even out stages.
    most = [max(count, int(slowest * speed - end + 1e-9)) for count, end, speed in zip(held, ends, speeds, strict=True)]
    stages, last = len(owners), len(owners) - 1
    heads = [0.0] * last + [head]
    sizes = _dealt(layers, [1] * stages, heads, [speeds[rank] for rank in owners], last, most, owners)
    rows: list[list[range]] = [[] for _ in range(pipeline)]
    for rank, (first, stop) in zip(owners, pairwise(accumulate(sizes, initial=0)), strict=True):
        rows[rank].append(range(first, stop))
    return tuple(map(tuple, rows))


def _dealt(
    layers: int, least: Sequence[int], extra: Sequence[float], speeds: Sequence[float], last: int,
    most: Sequence[int], owners: Sequence[int],
) -> list[int]:  # fmt: skip
    """Layers of each place, dealt one by one to the place that ends first with it, `last` before others.

    `owners` says whose each place is, and `most` how many layers an owner may hold.
    Layers are alike and limits nest, so dealing greedily makes the latest end as early as can be (a bottleneck over a laminar matroid).
    """
    counts, room = list(least), list(most)
    for owner, count in zip(owners, least, strict=True):
        room[owner] -= count
    for _ in range(layers - sum(counts)):
        places = (place for place in range(len(counts)) if room[owners[place]] > 0)
        chosen = min(places, key=lambda at: ((counts[at] + 1 + extra[at]) / speeds[at], at != last, at))
        counts[chosen] += 1
        room[owners[chosen]] -= 1
    return counts


def _visits(name: str, pipeline: int, per_rank: int) -> list[tuple[int, int]]:
    """(rank, place among the rank's stages) of every stage in order."""
    turns = [range(pipeline)[:: -1 if name in V_SCHEDULES and turn % 2 else 1] for turn in range(per_rank)]
    return [(rank, turn) for turn, ranks in enumerate(turns) for rank in ranks]


def rank_parameters(spec: ModelSpec, table: tuple[tuple[range, ...], ...], pipeline_rank: int) -> tuple[str, ...]:
    """Names of the parameters one pipeline rank holds: its layers', and those of the ends of the model beside its first and last layer.

    A tied embedding is held at both ends.
    """
    mine = {layer for stage in table[pipeline_rank] for layer in stage}
    first, last = 0 in mine, spec.layers - 1 in mine
    names = []
    for row in parameters(spec):
        part, _, rest = row.name.partition(".")
        if part == "layers":
            held = int(rest.partition(".")[0]) in mine
        elif part in ("embed", "positions"):
            held = first or (last and spec.tied and part == "embed")
        else:
            held = last
        names += [row.name] * held
    return tuple(names)


@dataclass(frozen=True)
class Part:
    """Part `index` of `count` equal parts: the coordinate and size of an axis that splits parameters or tokens."""

    index: int = 0
    count: int = 1


WHOLE = Part()


@dataclass(frozen=True)
class Division:
    """A rank's parts of what axes divide: `tensor` of every matrix, `expert` of a layer's experts. Shards divide what is left."""

    tensor: Part = WHOLE
    expert: Part = WHOLE


UNDIVIDED = Division()

TensorSplit = Literal["rows", "columns", "whole"]
TENSOR_SPLITS: dict[str, TensorSplit] = {
    "embed": "rows",
    "attention.qkv": "rows",
    "attention.out": "columns",
    "mlp.gate_up": "rows",
    "mlp.up": "rows",
    "mlp.down": "columns",
    "moe.shared.gate_up": "rows",
    "moe.shared.up": "rows",
    "moe.shared.down": "columns",
    "head": "rows",
}
"""How tensor ranks divide the weights of a module (Shoeybi et al. 2019): output features or the vocabulary by rows, each fused weight's
blocks for themselves, and input features by columns. What is not listed every rank holds whole: norms, learned positions, routers, and the
biases behind a product whose sum is taken over ranks. Routed experts are whole and on different ranks (`Layout.expert_groups`)."""


def token_exchanges(spec: ModelSpec, layer: int) -> int:
    """Gathers of tokens, each with a scattered sum behind, in one forward of block `layer` over tensor ranks: attention's and the
    feed-forward network's, one for both where they stand beside each other; routed experts' rows travel by themselves."""
    if spec.routed(layer):
        return 1 + bool(spec.shared_expert_hidden)
    return 1 if spec.parallel_block else 2


@dataclass(frozen=True)
class Box:
    """A rectangular part of a parameter: where it begins in the whole and how large it is, in elements by dimension.

    A rank's boxes of one parameter lie one after another in the rows of its own tensor, from `first_row` on. `holders` neighbours along
    the tensor axis hold the same box; `counts` says that the rank is the first of them, whose copy stands for all in sums over elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first_row: int = 0
    copies: int = 1
    primary: bool = True


def local_boxes(
    spec: ModelSpec, row: ParameterSpec, division: Division = UNDIVIDED, shard: Part = WHOLE
) -> tuple[Box, ...]:
    """What a rank holds of one parameter: its part by `division`, the rows of which its shard group divides further.

    Boxes without elements are left out. `check_tensor` says which models `division.tensor.count` ranks can divide.
    """
    boxes = _divided_boxes(spec, row, division)
    if row.expert and expert_shard_dimension(boxes[0].sizes, shard.count):
        return (_columns_of(boxes[0], even_rows(boxes[0].sizes[1], shard.count, shard.index)),)
    mine = shard_rows(sum(box.sizes[0] for box in boxes), shard.count, shard.index)
    return tuple(_rows_of(box, mine) for box in boxes if box.first_row < mine.stop and _stop(box) > mine.start)


def expert_shard_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension along which shards divide the experts `(experts, rows, columns)` a rank was left: whole experts where that comes out
    even, else the rows of each one's matrix, which must; whole experts again where they do not."""
    return int(shape[0] % shards > 0 and shape[1] % shards == 0)


def local_shape(spec: ModelSpec, row: ParameterSpec, division: Division) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter, before shards divide it."""
    boxes = _divided_boxes(spec, row, division)
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:])


def _divided_boxes(spec: ModelSpec, row: ParameterSpec, division: Division) -> list[Box]:
    if not row.expert:
        return _tensor_boxes(spec, row, division.tensor)
    mine = even_rows(row.shape[0], division.expert.count, division.expert.index)
    return [Box((mine.start, *(0 for _ in row.shape[1:])), (len(mine), *row.shape[1:]))]


def _tensor_boxes(spec: ModelSpec, row: ParameterSpec, tensor: Part) -> list[Box]:
    module, _, kind = row.name.removeprefix("layers.").lstrip("0123456789.").rpartition(".")
    cut = TENSOR_SPLITS.get(module, "whole")
    if tensor.count == 1 or cut == "whole" or (cut == "columns" and kind == "bias"):
        return [Box((0,) * len(row.shape), row.shape, 0, tensor.count, tensor.index == 0)]
    if cut == "columns":
        mine = even_rows(row.shape[1], tensor.count, tensor.index)
        return [Box((0, mine.start), (row.shape[0], len(mine)))]
    boxes: list[Box] = []
    start = 0
    for name, size in row.blocks or (("all", row.shape[0]),):
        # Fewer key/value heads than ranks: neighbours hold the same one.
        parts = min(tensor.count, spec.kv_heads) if name in ("k", "v") else tensor.count
        holders = tensor.count // parts
        mine = even_rows(size, parts, tensor.index // holders)
        offsets, sizes = (start + mine.start, *(0 for _ in row.shape[1:])), (len(mine), *row.shape[1:])
        boxes.append(Box(offsets, sizes, _stop(boxes[-1]) if boxes else 0, holders, tensor.index % holders == 0))
        start += size
    return boxes


def _stop(box: Box) -> int:
    return box.first_row + box.sizes[0]


def _rows_of(box: Box, rows: range) -> Box:
    """The part of a box in `rows` of the tensor it lies in, which become a tensor of their own."""
    first, stop = max(box.first_row, rows.start), min(_stop(box), rows.stop)
    at = (box.offsets[0] + first - box.first_row, *box.offsets[1:])
    return replace(box, offsets=at, sizes=(stop - first, *box.sizes[1:]), first_row=first - rows.start)


def _columns_of(box: Box, columns: range) -> Box:
    """The part of a box in `columns` of its own, along dimension 1."""
    at, size = list(box.offsets), list(box.sizes)
    at[1], size[1] = at[1] + columns.start, len(columns)
    return replace(box, offsets=tuple(at), sizes=tuple(size))


def even_rows(rows: int, parts: int, index: int) -> range:
    """The rows that part `index` of `parts` holds when none may hold two more than another."""
    return range(rows * index // parts, rows * (index + 1) // parts)


def check_tensor(spec: ModelSpec, ranks: int, seq_len: int | None = None) -> str | None:
    """What tensor ranks the model, and sequences of `seq_len` tokens, can be divided over, when it is not `ranks`; None when it is."""
    misfit = tensor_split_error(ranks, spec.heads, spec.kv_heads, spec.ffn_hidden, spec.vocab_size, seq_len)
    return misfit or expert_split_error(ranks, spec.experts, spec.shared_expert_hidden)


def tensor_split_error(
    ranks: int, heads: int, kv_heads: int, ffn_hidden: int, vocab_size: int, seq_len: int | None
) -> str | None:
    """`check_tensor` of a model of which no more is known; a vocabulary of 0 is not known either."""
    if heads % ranks:
        return f"a divisor of model.heads = {heads}, as every rank has whole heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"a divisor or a multiple of model.kv_heads = {kv_heads}"
    if ffn_hidden % ranks:
        return f"a divisor of model.ffn_hidden = {ffn_hidden}"
    if 0 < vocab_size < ranks:
        return f"at most model.vocab_size = {vocab_size}"
    if seq_len is not None and seq_len % ranks:
        return f"a divisor of train.seq_len = {seq_len}, as between products each rank has a part of the sequence"
    return None


def expert_split_error(ranks: int, experts: int, shared_hidden: int) -> str | None:
    """The same of a mixture of experts; 0 experts are a dense model, and 0 wide is no expert for all tokens."""
    if experts % ranks:
        return f"a divisor of model.experts = {experts}, as tensor ranks hold different experts"
    if shared_hidden % ranks:
        return f"a divisor of model.shared_expert_hidden = {shared_hidden}"
    return None


def local_tokens(seq: int, ring: Part = WHOLE, ulysses: Part = WHOLE) -> tuple[range, ...]:
    """Which tokens of a sequence a context rank holds, in order.

    The sequence is cut for the ring first: into two chunks for each of its n ranks, of which rank r has numbers r and 2n-1-r, so that
    under a causal mask all have as much to do. Ulysses ranks have parts in order of what their ring rank has, laid end to end; tensor ranks
    divide a rank's own tokens in the same way. `check_context` says what lengths can be cut.
    """
    if ring.count == 1:
        chunks: tuple[range, ...] = (range(seq),)
    else:
        chunks = tuple(even_rows(seq, 2 * ring.count, chunk) for chunk in (ring.index, 2 * ring.count - 1 - ring.index))
    mine, start, found = even_rows(sum(map(len, chunks)), ulysses.count, ulysses.index), 0, []
    for chunk in chunks:
        part = chunk[max(0, mine.start - start) : max(0, mine.stop - start)]
        found += [part] if part else []
        start += len(chunk)
    return tuple(found)


def check_context(spec: ModelSpec, plan: Plan, seq_len: int | None = None) -> tuple[str, str] | None:
    """The context axis along which the plan cannot divide the model, or sequences of `seq_len` tokens, and what was expected."""
    ring, ulysses, tensor = (plan.axis_size(axis) for axis in (*CONTEXT_AXES, "tensor"))
    return context_split_error(ring, ulysses, tensor, spec.heads, spec.kv_heads, seq_len)


def context_split_error(
    ring: int, ulysses: int, tensor: int, heads: int, kv_heads: int, seq_len: int | None
) -> tuple[str, str] | None:
    """`check_context` of a model of which no more is known."""
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


def shard_rows(rows: int, parts: int, index: int) -> range:
    """The rows of dimension 0 that part `index` of `parts` holds: ceil(rows / parts) each, the last ones fewer or none (FSDP2's rule)."""
    size = -(-rows // parts)
    return range(min(index * size, rows), min((index + 1) * size, rows))
