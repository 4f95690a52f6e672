"""Low-rank adapters beside the weights that they belong to: merged weights, and the digest that names a base.

A checkpoint of a run with adapters has these alone, and a score's weight, which such a run trains too. The frozen weights are those that
`model.init` names; the checkpoint has a digest of them, so that adapters are never put beside other weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from meshwright.models.initial_values import initial_values
from meshwright.spec.blocks.table import ADAPTER, AdapterPart, ExpertsOp, LinearOp
from meshwright.spec.errors import BadInput
from meshwright.spec.model import SCORE, ModelSpec, ParameterSpec, parameters, without_adapter

ReadRows = Callable[[ParameterSpec, int, int], Tensor]
"""Reads rows [start, stop) of dimension 0 of a parameter, on the CPU."""
BASE = "base"
"""Key of the base's digest in the plain values of a checkpoint."""
DIGEST_ELEMENTS = 1 << 20
"""Elements of a parameter that the digest of a base covers at most, as whole rows."""
DIGEST_ROWS = 8


@dataclass(frozen=True)
class Delta:
    """An adapter of rows [first_row, first_row + outputs) of a weight: A `(rank, in)`, B `(outputs, rank)`.

    Of stacked experts all dimensions but the last are counted as rows. A delta that `replaces` has the rows themselves in `a`.
    """

    first_row: int
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    """Length of each row of the merged weight `(outputs,)`, with DoRA."""
    replaces: bool = False

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.a if self.replaces else self.b))


Deltas = Mapping[str, Sequence[Delta]]
"""The adapters of each weight, by the name of the weight's parameter."""


@dataclass(frozen=True)
class PlacedPart:
    """An adapter of a model: the layer's weight, its first row of it, and the prefix of its parameters' names."""

    weight: str
    first_row: int
    part: AdapterPart
    expert: int | None = None
    """Its index in the parameters of all experts' adapters; the rows of stacked experts follow one another."""

    def parameter(self, name: str) -> str:
        """The full name of its parameter `a`, `b` or `magnitude`."""
        if self.expert is None:
            return f"{self.weight.removesuffix('weight')}{ADAPTER}.{self.part.parameter(name)}"
        module, _, layer = self.weight.rpartition(".")
        return f"{module}.{ADAPTER}.{layer}_{self.part.parameter(name)}"

    def value(self, read: Callable[[str], Tensor], name: str) -> Tensor:
        """Its parameter `a`, `b` or `magnitude`, of the parameters that `read` returns by name."""
        whole = read(self.parameter(name))
        return whole if self.expert is None else whole[self.expert]


def placed_parts(spec: ModelSpec) -> Iterator[PlacedPart]:
    """Every adapter of a model, in the order of its parameters."""
    for layer in range(spec.layers):
        for op in spec.block(layer).table().operations:
            if not isinstance(op, LinearOp | ExpertsOp):
                continue
            starts = {"": 0}
            row = 0
            for fused in op.parts:
                starts[fused.name] = row
                row = row + fused.size
            if isinstance(op, LinearOp):
                for part in op.adapters:
                    yield PlacedPart(f"layers.{layer}.{op.name}.weight", starts[part.part], part)
                continue
            for expert, part in product(range(op.experts if op.adapters else 0), op.adapters):
                first = expert * op.outputs + starts[part.part]
                yield PlacedPart(f"layers.{layer}.{op.name}", first, part, expert)


def deltas_of(spec: ModelSpec, read: Callable[[str], Tensor]) -> Deltas:
    """The adapters of a model, whose parameters `read` returns by name, and its score's weight in place of the base's."""
    assert spec.adapter is not None
    deltas: dict[str, list[Delta]] = {}
    read = lru_cache(maxsize=8)(read)  # experts share parameters
    for placed in placed_parts(spec):
        magnitude = placed.value(read, "magnitude") if spec.adapter.kind == "dora" else None
        values = placed.value(read, "a"), placed.value(read, "b")
        deltas.setdefault(placed.weight, []).append(
            Delta(placed.first_row, *values, scale=spec.adapter.scale, magnitude=magnitude)
        )
    if spec.head == "score":
        deltas[SCORE] = [Delta(0, read(SCORE), torch.empty(0), 1.0, replaces=True)]
    return deltas


def adapter_values(spec: ModelSpec, deltas: Deltas, where: str) -> dict[str, Tensor]:
    """The adapters' parameters of a model by name, from the stored ones `deltas`, which must be those of the model.

    Raises BadInput with the key of the run file that differs; `where` names what was stored.
    """
    assert spec.adapter is not None
    adapter = spec.adapter
    by_place = {(weight, delta.first_row): delta for weight, of_weight in deltas.items() for delta in of_weight}
    score = by_place.pop((SCORE, 0), None) if spec.head == "score" else None
    values: dict[str, Tensor] = {} if score is None else {SCORE: score.a}
    of_experts: dict[str, list[Tensor]] = {}
    for placed in placed_parts(spec):
        delta = by_place.pop((placed.weight, placed.first_row), None)
        if delta is None or delta.replaces or len(delta.b) != placed.part.outputs:
            rows = f"rows {placed.first_row} to {placed.first_row + placed.part.outputs - 1}"
            raise BadInput(f"model.adapter.targets: {where} has no adapter of {placed.weight}, {rows}")
        if len(delta.a) != adapter.rank:
            raise BadInput(f"model.adapter.rank {adapter.rank}: expected {len(delta.a)}, the rank in {where}")
        if not math.isclose(delta.scale, adapter.scale, rel_tol=1e-6):
            alpha = adapter.alpha * delta.scale / adapter.scale
            raise BadInput(
                f"model.adapter.alpha {adapter.alpha:g}: expected {alpha:g} with kind {adapter.kind}: {where} has the scale {delta.scale:g}"
            )
        if (delta.magnitude is None) == (adapter.kind == "dora"):
            found = (
                "no lengths of rows, which dora has" if delta.magnitude is None else "lengths of rows: expected dora"
            )
            raise BadInput(f"model.adapter.kind {adapter.kind}: {where} has {found}")
        for name, value in (("a", delta.a), ("b", delta.b), ("magnitude", delta.magnitude)):
            if value is not None and placed.expert is not None:
                of_experts.setdefault(placed.parameter(name), []).append(value)
            elif value is not None:
                values[placed.parameter(name)] = value
    if by_place:
        weight, _ = next(iter(by_place))
        raise BadInput(f"model.adapter.targets: expected also {weight}, of which {where} has an adapter")
    values |= {name: torch.stack(each) for name, each in of_experts.items()}
    for parameter in parameters(spec):
        if (value := values.get(parameter.name)) is not None and tuple(value.shape) != parameter.shape:
            raise BadInput(f"{where} has {parameter.name} of shape {tuple(value.shape)}, expected {parameter.shape}")
    return values


def merged(read_rows: ReadRows, deltas: Deltas) -> ReadRows:
    """`read_rows` of a base, of the base with its adapters: sums in fp32, which the reader rounds once to what it keeps."""

    def read(parameter: ParameterSpec, start: int, stop: int) -> Tensor:
        own = deltas.get(parameter.name, ())
        if parameter.name == SCORE and own:  # the base may be a language model, which has none
            return own[0].a[start:stop]
        rows = read_rows(parameter, start, stop)
        if not own or not rows.numel():
            return rows
        # Rows of experts follow one another.
        per_index = math.prod(parameter.shape[1:-1])
        return _merged_rows(rows.flatten(0, -2), start * per_index, own).view(rows.shape)

    return read


def _merged_rows(rows: Tensor, start: int, deltas: Sequence[Delta]) -> Tensor:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for delta in deltas:
        first = max(start, delta.rows.start)
        last = min(start + len(rows), delta.rows.stop)
        if first >= last:
            continue
        own = slice(first - delta.first_row, last - delta.first_row)
        part = wide[first - start : last - start]
        if delta.replaces:
            part.copy_(delta.a[own])
            continue
        part += delta.scale * (delta.b[own].to(wide.dtype) @ delta.a.to(wide.dtype))
        if delta.magnitude is not None:
            part *= (delta.magnitude[own].to(wide.dtype) / part.norm(dim=1))[:, None]
    return wide


def random_base(seed: int) -> ReadRows:
    """The weights from which a run from scratch starts."""

    def read(parameter: ParameterSpec, start: int, stop: int) -> Tensor:
        width = parameter.count // parameter.shape[0]
        values = initial_values(seed, parameter, start * width, (stop - start) * width, "cpu")
        return values.view(stop - start, *parameter.shape[1:])

    return read


def base_digest(spec: ModelSpec, read_rows: ReadRows) -> str:
    """A digest of the weights beside which adapters are trained: of names, shapes and some rows of each as fp32.

    It does not depend on how they are stored. It tells models apart; it does not prove that every element is the same. A score's weight is
    not of the base.
    """
    digest = hashlib.blake2b(digest_size=16)
    for parameter in (each for each in parameters(without_adapter(spec)) if each.name != SCORE):
        digest.update(f"{parameter.name} {parameter.shape}".encode())
        rows = parameter.shape[0]
        width = parameter.count // parameter.shape[0]
        count = max(1, min(DIGEST_ROWS, rows, DIGEST_ELEMENTS // width))
        for number in range(count):
            row = number * (rows - 1) // max(1, count - 1)
            digest.update(read_rows(parameter, row, row + 1).float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_base(expected: object, found: str, adapters: str, base: str) -> None:
    """Raise BadInput if `adapters` were trained beside other weights than `base`."""
    if expected != found:
        raise BadInput(
            f"{adapters} was trained beside the weights with digest {expected}, and {base} has the digest {found}: "
            "give the base that it was trained with"
        )
