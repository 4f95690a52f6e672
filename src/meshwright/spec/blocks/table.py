"""The operations of a block as a small dataflow: each names what it reads, and describes what it writes and its weights.

Everything that other packages know about a block follows from its table by general functions: parameters and FLOPs here, saved
activations in `memory.py`, transfers between tensor ranks in `transfers.py`. A table has no ranks, dtypes or seconds.

Example: the feed-forward network of a gated block of width 4 with an inner width of 8.

    NormOp("mlp_norm", reads=("x1",), writes=Value("mlp_norm", 4), width=4)
    LinearOp("mlp.gate_up", reads=("mlp_norm",), writes=Value("mlp.projected", 16), inputs=4, outputs=16, split="rows", …)
    ActivateOp("mlp.activate", reads=("mlp.projected",), writes=Value("mlp.activated", 8))
    LinearOp("mlp.down", reads=("mlp.activated",), writes=Value("mlp.output", 4), inputs=8, outputs=4, split="columns", …)
    Op("mlp.add", reads=("x1", "mlp.output"), writes=Value("x2", 4))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

Fill = Literal["normal", "ones", "zeros"]
TensorSplit = Literal["rows", "columns", "whole"]
"""How tensor ranks divide a weight (Shoeybi et al. 2019): output features, input features, or not at all."""
ADAPTER = "adapter"
"""Name of the module that holds a linear layer's adapters, inside the layer's."""
Rows = Literal["tokens", "sent", "received"]
"""Rows of a value: a token's own; a token's copies for its experts; the copies that the rank's experts get from all ranks."""


@dataclass(frozen=True)
class ParameterSpec:
    """Stored weight of a model.

    `blocks` names the logical weights fused along dimension 0 with their sizes, in order: `(("q", 4096), ("k", 1024),
    …)`; empty for a weight that is not fused. `decay` says whether AdamW's weight decay applies. The routed experts of
    a layer are one tensor with the experts along dimension 0, as a grouped matmul reads them:
    `moe.experts.gate_up` (experts, 2·expert_hidden, hidden), with the gate's rows first, and `moe.experts.down`
    (experts, hidden, expert_hidden). A weight that is not `trained` gets no gradient: the run itself updates it, and every
    rank of its layer has it whole, in the stored dtype. A `frozen` weight is not trained either, and no step changes it:
    it is in the dtype of compute, sharded as trained weights are, and checkpoints do not have it (`spec.blocks.adapter`).
    `split` says how tensor ranks divide it; `heads` counts, for each of `blocks`, the heads that a rank cannot divide
    further (0: any number of ranks can divide the block).
    """

    name: str
    shape: tuple[int, ...]
    fill: Fill
    std: float
    blocks: tuple[tuple[str, int], ...] = ()
    decay: bool = True
    trained: bool = True
    split: TensorSplit = "whole"
    heads: tuple[int, ...] = ()
    frozen: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def before_blocks(self) -> bool:
        """Whether it is applied before the first block."""
        return self.name.startswith(("embed.", "positions."))

    @property
    def precise(self) -> bool:
        """Whether it is kept in fp32 whatever the dtype of compute: the biases by which a router chooses experts."""
        return self.name.endswith(".choice_bias")

    @property
    def adapter(self) -> bool:
        """Whether it belongs to a low-rank adapter."""
        return f".{ADAPTER}." in self.name

    @property
    def expert(self) -> bool:
        """Whether it holds the routed experts of a layer, one after another along dimension 0."""
        return ".moe.experts." in self.name

    @property
    def predicts(self) -> bool:
        """Whether it belongs to a prediction module."""
        return self.name.startswith("predictions.")

    @property
    def inside(self) -> bool:
        """Whether it belongs to a block or a prediction module, and not to the embedding, the final norm or the head."""
        return self.name.startswith(("layers.", "predictions."))

    @property
    def module(self) -> str:
        """Name of its module, without the numbered block or prediction module around it: `attention.out`, `head`."""
        if not self.inside:
            return self.name.rpartition(".")[0]
        return self.name.split(".", 2)[2].rpartition(".")[0].removeprefix("block.")


@dataclass(frozen=True)
class Value:
    """A tensor that an operation writes, with `width` elements in each row and `copies` rows for a token.

    `inside`: it is a part of that value's memory, such as the keys in the output of a fused projection.
    """

    name: str
    width: int
    rows: Rows = "tokens"
    copies: int = 1
    inside: str = ""

    @property
    def elements(self) -> int:
        """Elements of one token, if experts get equal numbers of copies."""
        return self.width * self.copies


@dataclass(frozen=True)
class FusedWeight:
    """One of the logical weights that are fused in a linear layer: `size` rows that consist of `heads` whole heads, or 0."""

    name: str
    size: int
    heads: int = 0


@dataclass(frozen=True)
class AdapterPart:
    """A low-rank adapter of a linear layer, or of one of its fused parts: A `(rank, inputs)` and B `(outputs, rank)`.

    `blocks` are the fused parts that it covers together.
    """

    part: str
    """The fused part; empty for an adapter of the whole layer."""
    outputs: int
    rank: int
    blocks: tuple[tuple[str, int], ...] = ()

    def parameter(self, name: str) -> str:
        """The name of its parameter `a`, `b` or `magnitude` inside the module of adapters."""
        return f"{self.part}_{name}" if self.part else name


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation without weights whose backward reads nothing, such as a sum, a rotation or a change of order."""

    name: str
    """Name of its module inside the block; of an operation that is no module, any name."""
    reads: tuple[str, ...]
    writes: tuple[Value, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Values that its backward reads."""
        return ()

    @property
    def rounds(self) -> bool:
        """Whether it keeps its input in the format of linear layers (fp8 in a run with fp8)."""
        return False

    @property
    def selected(self) -> bool:
        """Whether selective recompute saves its result, as it is dear to compute again."""
        return False

    @property
    def multiplications(self) -> int:
        """Multiplications of one token with its weights; a FLOP count has two FLOPs each."""
        return 0

    def weights(self) -> Iterator[ParameterSpec]:
        """Its parameters in registration order, named inside the block."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class NormOp(Op):
    """RMSNorm, or LayerNorm with a bias, of the last `width` elements."""

    width: int
    bias: bool = False
    fill: Fill = "ones"
    """Initial values of the weights: zeros if they are stored minus one."""
    heads: int = 0
    """Heads that it norms together, which tensor ranks divide with their weights; 0 where each rank has the whole width."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads

    def weights(self) -> Iterator[ParameterSpec]:
        split, heads = _split_by_heads(self.heads)
        yield ParameterSpec(f"{self.name}.weight", (self.width,), self.fill, 0.0, decay=False, split=split, heads=heads)
        if self.bias:
            yield ParameterSpec(f"{self.name}.bias", (self.width,), "zeros", 0.0, decay=False, split=split, heads=heads)


@dataclass(frozen=True, kw_only=True)
class LinearOp(Op):
    """A linear layer, (outputs, inputs) weights; `parts` are the logical weights fused in its outputs.

    A `router` multiplies in the compute dtype whatever the format of linear layers; its input is counted as rounded
    nevertheless: another linear layer usually reads it.
    """

    inputs: int
    outputs: int
    std: float
    split: TensorSplit
    parts: tuple[FusedWeight, ...] = ()
    bias: bool = False
    router: bool = False
    adapters: tuple[AdapterPart, ...] = ()
    frozen: bool = False
    """Whether its weight has no gradient; then its backward reads the input for adapters only."""
    magnitudes: bool = False
    """Whether each adapter trains the lengths of its rows of the weights too (DoRA)."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads if self.adapters or not self.frozen else ()

    @property
    def rounds(self) -> bool:
        """A frozen weight needs no rounded input for its gradient; adapters keep the input as it is."""
        return not self.frozen

    @property
    def selected(self) -> bool:
        return True

    @property
    def multiplications(self) -> int:
        return self.inputs * self.outputs

    def weights(self) -> Iterator[ParameterSpec]:
        fused = tuple((part.name, part.size) for part in self.parts)
        heads = tuple(part.heads for part in self.parts)
        split = self.split
        weight = (self.outputs, self.inputs)
        bias = (self.outputs,)
        yield ParameterSpec(f"{self.name}.weight", weight, "normal", self.std, fused, split=split, heads=heads)
        if self.bias:
            # A bias after a sum over ranks is whole on each of them.
            bias_split = "rows" if split == "rows" else "whole"
            yield ParameterSpec(
                f"{self.name}.bias", bias, "zeros", 0.0, fused, decay=False, split=bias_split, heads=heads
            )
        yield from self._adapter_weights()

    def _adapter_weights(self) -> Iterator[ParameterSpec]:
        """A starts with the variance of peft's uniform draw, 1 / (3 · inputs), and B from zero: the first step has the base's output."""
        heads = {part.name: part.heads for part in self.parts}
        of_outputs: TensorSplit = "rows" if self.split == "rows" else "whole"
        of_inputs: TensorSplit = "columns" if self.split == "columns" else "whole"
        for adapter in self.adapters:
            a, b, magnitude = (f"{self.name}.{ADAPTER}.{adapter.parameter(name)}" for name in ("a", "b", "magnitude"))
            rows = tuple(heads.get(part, 0) for part, _ in adapter.blocks or ((adapter.part, adapter.outputs),))
            std = 1 / math.sqrt(3 * self.inputs)
            outputs = adapter.outputs
            yield ParameterSpec(a, (adapter.rank, self.inputs), "normal", std, split=of_inputs)
            yield ParameterSpec(b, (outputs, adapter.rank), "zeros", 0.0, adapter.blocks, split=of_outputs, heads=rows)
            if self.magnitudes:
                lengths = ParameterSpec(
                    magnitude, (outputs,), "ones", 0.0, adapter.blocks, split=of_outputs, heads=rows
                )
                yield replace(lengths, decay=False)


@dataclass(frozen=True, kw_only=True)
class ExpertsOp(Op):
    """The linear layers of all routed experts as one grouped matmul; a token has rows for `per_token` of them.

    Its weight gradients are in the compute dtype also in a run with fp8, so inputs are kept in it.
    """

    experts: int
    per_token: int
    inputs: int
    outputs: int
    std: float
    bias: bool = False
    """Whether each expert has a bias; those of a layer are one parameter `(experts, outputs)`, `NAME_bias`."""
    parts: tuple[FusedWeight, ...] = ()
    adapters: tuple[AdapterPart, ...] = ()
    """Adapters of each expert: A `(experts, rank, inputs)` and B `(experts, outputs, rank)`."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads

    @property
    def selected(self) -> bool:
        return True

    @property
    def multiplications(self) -> int:
        return self.per_token * self.inputs * self.outputs

    def weights(self) -> Iterator[ParameterSpec]:
        yield ParameterSpec(self.name, (self.experts, self.outputs, self.inputs), "normal", self.std)
        if self.bias:
            yield ParameterSpec(f"{self.name}_bias", (self.experts, self.outputs), "zeros", 0.0, decay=False)

    def adapter_weights(self) -> Iterator[ParameterSpec]:
        """Those of its adapters: of the module of all adapters of the experts, which is registered behind their weights."""
        module, _, layer = self.name.rpartition(".")
        for adapter in self.adapters:
            a, b = (f"{module}.{ADAPTER}.{layer}_{adapter.parameter(name)}" for name in ("a", "b"))
            yield ParameterSpec(a, (self.experts, adapter.rank, self.inputs), "normal", 1 / math.sqrt(3 * self.inputs))
            yield ParameterSpec(b, (self.experts, adapter.outputs, adapter.rank), "zeros", 0.0)


@dataclass(frozen=True, kw_only=True)
class AttendOp(Op):
    """Causal attention; `reads` are queries, keys and values. A token attends to `window` tokens, or to all before it."""

    heads: int
    kv_heads: int
    key_dim: int
    """Width of a query and of a key head."""
    value_dim: int
    window: int | None = None
    cap: float | None = None
    """Cap of the scores (`AttentionSpec.score_cap`)."""

    @property
    def kept(self) -> tuple[str, ...]:
        return (*self.reads, *(value.name for value in self.writes))

    @property
    def selected(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class ActivateOp(Op):
    """The activation of a feed-forward network, between its linear layers.

    `tiled`: recompute can compute the network for a tile of the tokens at a time (`plan.mlp_tile`).
    """

    tiled: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads


@dataclass(frozen=True, kw_only=True)
class WeighOp(Op):
    """Multiplies rows by the routers' weights; its backward reads the first of what it reads."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads[:1]


@dataclass(frozen=True, kw_only=True)
class GateOp(Op):
    """Multiplies a value by the sigmoid of another one of width 1."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads


@dataclass(frozen=True, kw_only=True)
class RouteOp(Op):
    """Chooses each token's experts from a router's output."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads


@dataclass(frozen=True, kw_only=True)
class ExchangeOp(Op):
    """Sends rows to the ranks of their experts, or returns them. Selective recompute does not send them again.

    `stages`: it then also has the rows as they were sent.
    """

    stages: bool = False

    @property
    def selected(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class VectorOp(Op):
    """A vector of parameters that is no norm and no bias of a linear layer."""

    size: int
    fill: Fill = "zeros"
    trained: bool = True
    heads: int = 0
    """Heads that have an element each, which tensor ranks divide; 0 for a vector that every rank has whole."""

    def weights(self) -> Iterator[ParameterSpec]:
        split, heads = _split_by_heads(self.heads)
        yield ParameterSpec(
            self.name, (self.size,), self.fill, 0.0, decay=False, trained=self.trained, split=split, heads=heads
        )


@dataclass(frozen=True)
class Table:
    """The operations of a block, or of a part of one, in the order in which its modules are registered.

    `source` is its input `(…, hidden)`.
    """

    source: Value
    operations: tuple[Op, ...]
    frozen: bool = False
    """Whether all weights but those of adapters are frozen."""

    @cached_property
    def values(self) -> dict[str, Value]:
        """Every value by name."""
        written = {value.name: value for op in self.operations for value in op.writes}
        return {self.source.name: self.source, **written}

    @cached_property
    def writer(self) -> dict[str, Op]:
        """The operation that writes each value."""
        return {value.name: op for op in self.operations for value in op.writes}

    @cached_property
    def weights(self) -> tuple[ParameterSpec, ...]:
        """Every parameter in registration order, named inside the block."""
        weights = chain.from_iterable(_weights(self.operations))
        return tuple(as_frozen(weight) if self.frozen and not weight.adapter else weight for weight in weights)

    def memory_of(self, name: str) -> Value:
        """The value whose memory holds the value `name`."""
        value = self.values[name]
        return self.memory_of(value.inside) if value.inside else value

    @cached_property
    def multiplications(self) -> int:
        """Multiplications of one token with weights."""
        return sum(op.multiplications for op in self.operations)

    @cached_property
    def adapter_multiplications(self) -> int:
        """Multiplications of one token with adapters."""
        adapted = [op for op in self.operations if isinstance(op, LinearOp | ExpertsOp)]
        copies = {op.name: op.per_token if isinstance(op, ExpertsOp) else 1 for op in adapted}
        return sum(copies[op.name] * part.rank * (op.inputs + part.outputs) for op in adapted for part in op.adapters)

    @cached_property
    def attends(self) -> tuple[AttendOp, ...]:
        return tuple(op for op in self.operations if isinstance(op, AttendOp))


def _split_by_heads(heads: int) -> tuple[TensorSplit, tuple[int, ...]]:
    """How tensor ranks divide a vector that consists of so many heads; 0 for one that every rank has whole."""
    return ("rows", (heads,)) if heads else ("whole", ())


def _weights(operations: Iterable[Op]) -> Iterator[Iterator[ParameterSpec]]:
    """The weights of each operation; those of adapters of experts follow the last linear layer of these."""
    experts: list[ExpertsOp] = []
    for op in operations:
        if experts and not isinstance(op, ExpertsOp | ActivateOp):
            yield from (each.adapter_weights() for each in experts)
            experts = []
        yield op.weights()
        experts += [op] if isinstance(op, ExpertsOp) else []
    yield from (each.adapter_weights() for each in experts)


def as_frozen(weight: ParameterSpec) -> ParameterSpec:
    """The weight of a model of which only adapters are trained."""
    return replace(weight, trained=False, frozen=True)
