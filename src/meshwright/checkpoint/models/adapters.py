"""Low-rank adapters and the weights that they belong to: merged weights, and a digest that identifies the base weights.

A run with adapters trains only the adapters (and the score's weight of a reward model), so its checkpoints have only
these. The frozen base weights are the ones that `model.init` names. The checkpoint has a digest of the base, so that
adapters are never applied to other weights.
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
"""`read_rows(parameter, start, stop)` returns the rows [start, stop) of dimension 0 of a parameter, on the CPU."""
BASE = "base"
"""Key of the base's digest in `state.json` of a checkpoint."""
DIGEST_ELEMENTS = 1 << 20
"""The digest of a base covers at most this many elements of each parameter, as whole rows."""
DIGEST_ROWS = 8
"""The digest of a base covers at most this many rows of each parameter."""


@dataclass(frozen=True)
class Delta:
    """An adapter of the rows [first_row, first_row + outputs) of a weight. It adds scale · B · A to these rows.

    `a` is `(rank, in)`, `b` `(outputs, rank)`. For stacked experts, all dimensions of the weight but the last are counted
    as rows. If `replaces`, `a` `(outputs, in)` has new values for the rows themselves, and `b` is empty.
    """

    first_row: int
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    """With DoRA, the length of each row of the merged weight, `(outputs,)`; else None."""
    replaces: bool = False

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.a if self.replaces else self.b))


Deltas = Mapping[str, Sequence[Delta]]
"""The adapters of each weight, by the name of the weight's parameter."""


@dataclass(frozen=True)
class PlacedPart:
    """An adapter of a model, and where it belongs.

    `weight` is the name of the layer's weight, `first_row` the first of its rows that the adapter changes, and `part`
    describes the adapter (rank, outputs, names).
    """

    weight: str
    first_row: int
    part: AdapterPart
    expert: int | None = None
    """Index of the expert, for adapters of stacked experts, whose parameters have the experts along dimension 0."""

    def parameter(self, name: str) -> str:
        """Return the full name of the adapter's parameter `name`: "a", "b" or "magnitude"."""
        if self.expert is None:
            return f"{self.weight.removesuffix('weight')}{ADAPTER}.{self.part.parameter(name)}"
        module, _, layer = self.weight.rpartition(".")
        return f"{module}.{ADAPTER}.{layer}_{self.part.parameter(name)}"

    def value(self, read: Callable[[str], Tensor], name: str) -> Tensor:
        """Return the adapter's parameter `name` ("a", "b" or "magnitude"). `read(full_name)` returns a parameter."""
        whole = read(self.parameter(name))
        return whole if self.expert is None else whole[self.expert]


def placed_parts(spec: ModelSpec) -> Iterator[PlacedPart]:
    """Yield every adapter of a model, in the order of its parameters."""
    for layer in range(spec.layers):
        for op in spec.block(layer).table().operations:
            if not isinstance(op, LinearOp | ExpertsOp):
                continue
            # First row of each linear layer that is fused into the operation's weight, by name; the whole weight begins at 0.
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
    """Return the adapters of a model. `read(name)` returns a parameter of the adapters.

    In a reward model they include the score's weight, which replaces the base's.
    """
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
    """Return the values of a model's adapter parameters by name, from the stored adapters `deltas`.

    Raises BadInput unless the stored adapters are those of the model. The message names the key of the run file that
    differs, and `where`, the place of the stored adapters.
    """
    assert spec.adapter is not None
    adapter = spec.adapter
    # What is left in `by_place` at the end has no place in the model.
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
    """Return a `ReadRows` of the merged weights. `read_rows` reads the base.

    Sums are computed in fp32. The caller rounds them once to its dtype.
    """

    def read(parameter: ParameterSpec, start: int, stop: int) -> Tensor:
        own = deltas.get(parameter.name, ())
        if parameter.name == SCORE and own:  # the base may be a language model, which has no such weight
            return own[0].a[start:stop]
        rows = read_rows(parameter, start, stop)
        if not own or not rows.numel():
            return rows
        # `Delta` counts all dimensions but the last as rows; one index of dimension 0 has `per_index` of them.
        per_index = math.prod(parameter.shape[1:-1])
        return _merged_rows(rows.flatten(0, -2), start * per_index, own).view(rows.shape)

    return read


def _merged_rows(rows: Tensor, start: int, deltas: Sequence[Delta]) -> Tensor:
    """Return `rows` `(rows, in)` of a weight, from row `start` on, with their adapters applied, in fp32 or wider."""
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
    """Return a `ReadRows` of the random weights from which a run from scratch with this seed starts."""

    def read(parameter: ParameterSpec, start: int, stop: int) -> Tensor:
        width = parameter.count // parameter.shape[0]
        values = initial_values(seed, parameter, start * width, (stop - start) * width, "cpu")
        return values.view(stop - start, *parameter.shape[1:])

    return read


def base_digest(spec: ModelSpec, read_rows: ReadRows) -> str:
    """Return a digest of the base weights: of the names, the shapes, and some rows of each parameter as fp32.

    It does not depend on how the weights are stored. It tells models apart, but does not prove that every element is
    equal. The score's weight of a reward model does not belong to the base.
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
    """Raise BadInput if `adapters` were trained with other base weights than `base`.

    `expected` and `found` are the digests of the base weights; `adapters` and `base` are names for the message.
    """
    if expected != found:
        raise BadInput(
            f"{adapters} was trained beside the weights with digest {expected}, and {base} has the digest {found}: "
            "give the base that it was trained with"
        )
