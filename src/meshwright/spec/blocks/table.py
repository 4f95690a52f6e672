"""The operations of a block as a small dataflow graph.

Each operation names what it reads, and describes what it writes and its weights.

Everything that other packages know about a block is computed from its table by general functions: parameters and FLOPs
here, saved activations in `memory.py`, transfers between tensor ranks in `transfers.py`. A table has no ranks, dtypes
or seconds.

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
"""Initial values of a weight."""
TensorSplit = Literal["rows", "columns", "whole"]
"""How tensor ranks divide a weight (Shoeybi et al. 2019): rows are output features, columns are input features, whole
is not at all.
"""
ADAPTER = "adapter"
"""Name of the module with a linear layer's adapters, inside the module of the layer."""
Rows = Literal["tokens", "sent", "received"]
"""What a row of a value belongs to.

tokens: one row for each token of the rank. sent: one row for each expert of such a token. received: the rows that the
rank's experts get from all ranks.
"""


@dataclass(frozen=True)
class ParameterSpec:
    """A stored weight of a model.

    The routed experts of a layer are one tensor with the experts along dimension 0, as a grouped matmul reads them:
    `moe.experts.gate_up` has shape (experts, 2 · expert_hidden, hidden) with the gate's rows first, and
    `moe.experts.down` has shape (experts, hidden, expert_hidden).
    """

    name: str
    """Name in the model, or in a block's table inside the block."""
    shape: tuple[int, ...]
    fill: Fill
    std: float
    """Standard deviation of initial values, for the fill "normal"."""
    blocks: tuple[tuple[str, int], ...] = ()
    """Names and sizes of the logical weights that are fused along dimension 0: `(("q", 4096), ("k", 1024), …)`.

    Empty for a weight that is not fused.
    """
    decay: bool = True
    """Whether AdamW's weight decay applies."""
    trained: bool = True
    """Whether it gets a gradient.

    If neither `trained` nor `frozen`, the run itself updates it, and each rank of its layer has the whole weight, in
    the stored dtype.
    """
    split: TensorSplit = "whole"
    """How tensor ranks divide it."""
    heads: tuple[int, ...] = ()
    """For each of `blocks`, the number of heads, which a rank cannot divide further.

    It is 0 if any number of ranks can divide the block.
    """
    frozen: bool = False
    """Whether no step changes it.

    It is then in the compute dtype, is sharded as trained weights are, and is not in checkpoints
    (`spec.blocks.adapter`).
    """

    @property
    def count(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.shape)

    @property
    def before_blocks(self) -> bool:
        """Return whether it is applied before the first block."""
        return self.name.startswith(("embed.", "positions."))

    @property
    def precise(self) -> bool:
        """Return whether it is stored in fp32 whatever the compute dtype is: a bias by which a router chooses experts."""
        return self.name.endswith(".choice_bias")

    @property
    def adapter(self) -> bool:
        """Return whether it belongs to a low-rank adapter."""
        return f".{ADAPTER}." in self.name

    @property
    def expert(self) -> bool:
        """Return whether it has the routed experts of a layer, one after another along dimension 0."""
        return ".moe.experts." in self.name

    @property
    def predicts(self) -> bool:
        """Return whether it belongs to a prediction module."""
        return self.name.startswith("predictions.")

    @property
    def inside(self) -> bool:
        """Return whether it belongs to a block or a prediction module, not to the embedding, the final norm or the
        head.
        """
        return self.name.startswith(("layers.", "predictions."))

    @property
    def module(self) -> str:
        """Return the name of its module without the numbered block or prediction module around it: `attention.out`,
        `head`.
        """
        if not self.inside:
            return self.name.rpartition(".")[0]
        return self.name.split(".", 2)[2].rpartition(".")[0].removeprefix("block.")


@dataclass(frozen=True)
class Value:
    """A tensor that an operation writes."""

    name: str
    width: int
    """Number of elements in each row."""
    rows: Rows = "tokens"
    copies: int = 1
    """Number of rows for each token: the number of its experts for "sent" and "received" rows."""
    inside: str = ""
    """Name of the value of whose memory this value is a part.

    For example, the keys are a part of the output of a fused projection.
    """

    @property
    def elements(self) -> int:
        """Return the number of elements for one token, if all experts get the same number of rows."""
        return self.width * self.copies


@dataclass(frozen=True)
class FusedWeight:
    """One of the logical weights that are fused in a linear layer."""

    name: str
    size: int
    """Number of its rows."""
    heads: int = 0
    """Number of heads of which the rows consist; 0 if they are not divided into heads."""


@dataclass(frozen=True)
class AdapterPart:
    """A low-rank adapter of a linear layer, or of one of its fused parts: A `(rank, inputs)` and B `(outputs, rank)`."""

    part: str
    """Name of the fused part; empty for an adapter of the whole layer."""
    outputs: int
    """Outputs of the adapter."""
    rank: int
    """Rank of the adapter."""
    blocks: tuple[tuple[str, int], ...] = ()
    """Names and sizes of the fused parts that an adapter of the whole layer covers."""

    def parameter(self, name: str) -> str:
        """Return the name of its parameter `a`, `b` or `magnitude` inside the module of adapters."""
        return f"{self.part}_{name}" if self.part else name


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation without weights whose backward reads nothing, such as a sum, a rotation or a change of order."""

    name: str
    """Name of its module inside the block; any name if it is no module."""
    reads: tuple[str, ...]
    """Names of the values that it reads."""
    writes: tuple[Value, ...] = ()
    """Values that it writes."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the names of the values that its backward reads."""
        return ()

    @property
    def rounds(self) -> bool:
        """Return whether it saves its input in the number format of linear layers (fp8 in a run with fp8)."""
        return False

    @property
    def selected(self) -> bool:
        """Return whether selective recompute saves its result, because it would cost much to compute it again."""
        return False

    @property
    def multiplications(self) -> int:
        """Return the number of multiplications of one token with its weights. Each of them is two FLOPs."""
        return 0

    def weights(self) -> Iterator[ParameterSpec]:
        """Yield its parameters in the order of their registration, with names inside the block."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class NormOp(Op):
    """RMSNorm, or LayerNorm with a bias, of the last `width` elements of a row."""

    width: int
    bias: bool = False
    fill: Fill = "ones"
    """Initial values of the weights: "zeros" if they are stored minus one."""
    heads: int = 0
    """Number of heads that it norms together, if tensor ranks divide the heads and its weights.

    It is 0 if each rank has the whole width.
    """

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
    """A linear layer with a weight of shape (outputs, inputs)."""

    inputs: int
    outputs: int
    std: float
    """Standard deviation of initial weights."""
    split: TensorSplit
    """How tensor ranks divide the weight."""
    parts: tuple[FusedWeight, ...] = ()
    """The logical weights that are fused in its outputs."""
    bias: bool = False
    router: bool = False
    """Whether it multiplies in the compute dtype even if linear layers have another format.

    Its input still counts as rounded, because another linear layer usually reads the same input.
    """
    adapters: tuple[AdapterPart, ...] = ()
    """Low-rank adapters of the layer, or of its fused parts."""
    frozen: bool = False
    """Whether its weight has no gradient. Then its backward reads the input only for adapters."""
    magnitudes: bool = False
    """Whether each adapter also trains the lengths of its rows of the weight (DoRA)."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads if self.adapters or not self.frozen else ()

    @property
    def rounds(self) -> bool:
        """Return whether it saves a rounded input.

        A frozen weight needs no input for a gradient, and adapters use the input as it is.
        """
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
            # A bias that is added after an all-reduce is whole on each rank.
            bias_split = "rows" if split == "rows" else "whole"
            yield ParameterSpec(
                f"{self.name}.bias", bias, "zeros", 0.0, fused, decay=False, split=bias_split, heads=heads
            )
        yield from self._adapter_weights()

    def _adapter_weights(self) -> Iterator[ParameterSpec]:
        """Yield the weights of its adapters.

        A starts with the variance of peft's uniform distribution, 1 / (3 · inputs), and B with zeros, so that the first
        step has the output of the base model.
        """
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
    """One linear layer of all routed experts, computed as one grouped matmul.

    A token has a row for each of its `per_token` experts.

    Its weight gradients are computed in the compute dtype, also in a run with fp8, so its inputs are saved in that
    dtype.
    """

    experts: int
    per_token: int
    inputs: int
    outputs: int
    std: float
    bias: bool = False
    """Whether each expert has a bias.

    The biases of a layer are one parameter `NAME_bias` of shape (experts, outputs).
    """
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
        """Yield the weights of its adapters.

        They belong to the one module of all adapters of the experts, which is registered after the experts' weights.
        """
        module, _, layer = self.name.rpartition(".")
        for adapter in self.adapters:
            a, b = (f"{module}.{ADAPTER}.{layer}_{adapter.parameter(name)}" for name in ("a", "b"))
            yield ParameterSpec(a, (self.experts, adapter.rank, self.inputs), "normal", 1 / math.sqrt(3 * self.inputs))
            yield ParameterSpec(b, (self.experts, adapter.outputs, adapter.rank), "zeros", 0.0)


@dataclass(frozen=True, kw_only=True)
class AttendOp(Op):
    """Causal attention. `reads` are queries, keys and values."""

    heads: int
    kv_heads: int
    key_dim: int
    """Size of a query head and of a key head."""
    value_dim: int
    """Size of a value head."""
    window: int | None = None
    """Number of tokens to which a token attends at most; None for all tokens before it."""
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
    """The activation function of a feed-forward network, between its linear layers."""

    tiled: bool = False
    """Whether recompute can compute the network for one tile of tokens at a time (`plan.mlp_tile`)."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads


@dataclass(frozen=True, kw_only=True)
class WeighOp(Op):
    """Multiplies rows by the router's weights. Its backward reads the first of its inputs."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.reads[:1]


@dataclass(frozen=True, kw_only=True)
class GateOp(Op):
    """Multiplies a value by the sigmoid of another value of width 1."""

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
    """Sends rows to the ranks of their experts, or returns them. Selective recompute does not send them again."""

    stages: bool = False
    """Whether selective recompute also saves the rows as they were sent."""

    @property
    def selected(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class VectorOp(Op):
    """A vector of parameters that is neither a norm nor the bias of a linear layer."""

    size: int
    fill: Fill = "zeros"
    trained: bool = True
    """Whether it gets a gradient."""
    heads: int = 0
    """Number of heads with one element each, which tensor ranks divide; 0 if every rank has the whole vector."""

    def weights(self) -> Iterator[ParameterSpec]:
        split, heads = _split_by_heads(self.heads)
        yield ParameterSpec(
            self.name, (self.size,), self.fill, 0.0, decay=False, trained=self.trained, split=split, heads=heads
        )


@dataclass(frozen=True)
class Table:
    """The operations of a block, or of a part of one, in the order in which its modules are registered."""

    source: Value
    """Input of the block, with shape (…, hidden)."""
    operations: tuple[Op, ...]
    frozen: bool = False
    """Whether all weights except adapters are frozen."""

    @cached_property
    def values(self) -> dict[str, Value]:
        """Return all values by name."""
        written = {value.name: value for op in self.operations for value in op.writes}
        return {self.source.name: self.source, **written}

    @cached_property
    def writer(self) -> dict[str, Op]:
        """Return the operation that writes each value, by the name of the value."""
        return {value.name: op for op in self.operations for value in op.writes}

    @cached_property
    def weights(self) -> tuple[ParameterSpec, ...]:
        """Return all parameters in the order of their registration, with names inside the block."""
        weights = chain.from_iterable(_weights(self.operations))
        return tuple(as_frozen(weight) if self.frozen and not weight.adapter else weight for weight in weights)

    def memory_of(self, name: str) -> Value:
        """Return the value in whose memory the value `name` is: itself, or the value of which it is a part."""
        value = self.values[name]
        return self.memory_of(value.inside) if value.inside else value

    @cached_property
    def multiplications(self) -> int:
        """Return the number of multiplications of one token with weights."""
        return sum(op.multiplications for op in self.operations)

    @cached_property
    def adapter_multiplications(self) -> int:
        """Return the number of multiplications of one token with adapters."""
        adapted = [op for op in self.operations if isinstance(op, LinearOp | ExpertsOp)]
        copies = {op.name: op.per_token if isinstance(op, ExpertsOp) else 1 for op in adapted}
        return sum(copies[op.name] * part.rank * (op.inputs + part.outputs) for op in adapted for part in op.adapters)

    @cached_property
    def attends(self) -> tuple[AttendOp, ...]:
        """Return the attention operations."""
        return tuple(op for op in self.operations if isinstance(op, AttendOp))


def _split_by_heads(heads: int) -> tuple[TensorSplit, tuple[int, ...]]:
    """Return how tensor ranks divide a vector that consists of `heads` heads; 0 for a vector that every rank has whole."""
    return ("rows", (heads,)) if heads else ("whole", ())


def _weights(operations: Iterable[Op]) -> Iterator[Iterator[ParameterSpec]]:
    """Yield the weights of each operation.

    The adapters of experts follow after the last linear layer of the experts.
    """
    experts: list[ExpertsOp] = []
    for op in operations:
        if experts and not isinstance(op, ExpertsOp | ActivateOp):
            yield from (each.adapter_weights() for each in experts)
            experts = []
        yield op.weights()
        experts += [op] if isinstance(op, ExpertsOp) else []
    yield from (each.adapter_weights() for each in experts)


def as_frozen(weight: ParameterSpec) -> ParameterSpec:
    """Return the weight as it is in a model of which only the adapters are trained."""
    return replace(weight, trained=False, frozen=True)
