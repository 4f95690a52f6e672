"""`OperationTable`: the recorded operations of all ranks and steps. It is the input of the straggler analysis.

A table is a set of numpy columns with one entry for each operation. Operation types have the same names as in the public traces of
"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), if these traces have the operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from meshwright.spec.errors import BadInput, nearest

CATEGORY_OF: Mapping[str, str] = {
    "forward-compute": "compute",
    "backward-compute": "compute",
    "weight-gradient-compute": "compute",
    "optimizer": "compute",
    "forward-send": "communication",
    "forward-recv": "communication",
    "backward-send": "communication",
    "backward-recv": "communication",
    "params-all-gather": "communication",
    "grads-reduce-scatter": "communication",
    "separate-grads-all-reduce": "communication",
    "layernorm-grads-all-reduce": "communication",
    "embedding-grads-all-reduce": "communication",
    "optimizer-clip-main-grad": "communication",
    "gradient-norm": "communication",
    "collective-wait": "communication",
    "step-all-reduce": "communication",
    "data": "data",
    "gc": "garbage_collection",
    "garbage-collection": "garbage_collection",
    "checkpoint": "other",
    "validation": "other",
}
"""For each operation type, the category whose delay it can explain. Types that need an explanation:

- collective-wait: compute waits for gathered weights or reduced gradients.
- step-all-reduce: small all-reduces over all ranks at the start and the end of a step.
- gradient-norm: all-reduce of the gradient norm; `optimizer-clip-main-grad` in the public traces.
- garbage-collection: by Python; `gc` in the public traces."""

TYPES: tuple[str, ...] = tuple(CATEGORY_OF)
"""Operation types. The column `type` has indices into this tuple."""
CODE_OF: Mapping[str, int] = {name: code for code, name in enumerate(TYPES)}
P2P_TYPES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
"""Messages between pipeline stages."""
MODEL_COMPUTE_TYPES = ("forward-compute", "backward-compute", "weight-gradient-compute")
"""Compute operations that belong to one stage and one micro-batch."""

_DTYPES = {
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "attention_work": np.int64,
    "step": np.int64,
    "type": np.int16,
}


@dataclass(frozen=True, eq=False)
class OperationTable:
    """Operations of a job. Each column has one entry for each operation.

    An entry is −1 if the column does not apply to the operation. All ranks use one clock for `start_ns` within a step; clocks of different
    steps may differ. Raises BadInput for columns of different lengths and for unknown types.
    """

    rank: np.ndarray
    """Global rank that executed the operation."""
    dp: np.ndarray
    """Data-parallel rank: index of the rank among the ranks of its stage, from 0 without gaps."""
    stage: np.ndarray
    """Pipeline rank, from 0 without gaps; 0 if there is no pipeline."""
    chunk: np.ndarray
    """Model chunk (virtual stage) on the pipeline rank, from 0."""
    virtual_stage: np.ndarray
    """Model chunk in the whole pipeline, numbered in the order in which a micro-batch passes through the chunks."""
    microbatch: np.ndarray
    """Micro-batch of a compute operation or a message."""
    step: np.ndarray
    type: np.ndarray
    """Index into `TYPES`."""
    sequence: np.ndarray
    """Number of the operation among those of the same type, rank and step, in the order of their starts, from 0."""
    start_ns: np.ndarray
    duration_ns: np.ndarray
    attention_work: np.ndarray
    """Sum of the squared document lengths in the operation's micro-batch, if it was recorded."""
    host_of_rank: Mapping[int, str] = field(default_factory=dict)
    """Name of each global rank's host; empty if unknown."""

    def __post_init__(self) -> None:
        _check_lengths({name: getattr(self, name) for name in COLUMNS})
        for name in COLUMNS:
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=_DTYPES.get(name, np.int32)))
        if len(self) and not 0 <= int(self.type.min()) <= int(self.type.max()) < len(TYPES):
            raise BadInput(f"column type: expected indices of the {len(TYPES)} operation types")

    def __len__(self) -> int:
        return len(self.step)

    @property
    def steps(self) -> np.ndarray:
        """The recorded steps in ascending order."""
        return np.unique(self.step)

    @property
    def dp_size(self) -> int:
        return int(self.dp.max()) + 1 if len(self) else 0

    @property
    def stages(self) -> int:
        return int(self.stage.max()) + 1 if len(self) else 0

    def is_type(self, *names: str) -> np.ndarray:
        """A boolean mask of the operations of these types."""
        return np.isin(self.type, [CODE_OF[name] for name in names])

    def select(self, mask: np.ndarray) -> OperationTable:
        """A table of the operations selected by `mask`, which is boolean or has indices."""
        columns: dict[str, Any] = {name: getattr(self, name)[mask] for name in COLUMNS}
        return OperationTable(**columns, host_of_rank=self.host_of_rank)

    def with_times(self, start_ns: np.ndarray, duration_ns: np.ndarray) -> OperationTable:
        """A table of the same operations with other times."""
        return replace(self, start_ns=start_ns, duration_ns=duration_ns)

    def last_steps(self, count: int) -> OperationTable:
        """A table of the operations of the last `count` steps."""
        return self.select(np.isin(self.step, self.steps[-count:]))


COLUMNS: tuple[str, ...] = tuple(entry.name for entry in fields(OperationTable) if entry.name != "host_of_rank")


def operation_table(
    *,
    type_names: Sequence[str],
    rank: Any,
    dp: Any,
    stage: Any,
    step: Any,
    start_ns: Any,
    duration_ns: Any,
    chunk: Any = None,
    virtual_stage: Any = None,
    microbatch: Any = None,
    sequence: Any = None,
    host_of_rank: Mapping[int, str] | None = None,
) -> OperationTable:
    """Build a table from columns and from the names of operation types. If `sequence` is None, it is computed from the start times.

    `chunk`, `virtual_stage` and `microbatch` default to −1. Attention work is unknown. Raises BadInput for an unknown type name.
    """
    codes = _codes(type_names)
    unknown = np.full(len(codes), -1)
    if sequence is None:
        _check_lengths({"type": codes, "rank": rank, "step": step, "start_ns": start_ns})
        sequence = sequence_numbers(codes, rank, step, start_ns)
    return OperationTable(
        rank=rank,
        dp=dp,
        stage=stage,
        step=step,
        type=codes,
        start_ns=start_ns,
        duration_ns=duration_ns,
        sequence=sequence,
        chunk=unknown if chunk is None else chunk,
        virtual_stage=unknown if virtual_stage is None else virtual_stage,
        microbatch=unknown if microbatch is None else microbatch,
        attention_work=unknown,
        host_of_rank=host_of_rank or {},
    )


def _check_lengths(columns: Mapping[str, Any]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise BadInput(f"columns of an operation table must have one length, got {lengths}")


def _codes(type_names: Iterable[str]) -> np.ndarray:
    """Indices of the names in `TYPES`. Raises BadInput for an unknown name."""
    names, inverse = np.unique(np.asarray(type_names, dtype=str), return_inverse=True)
    for name in names.tolist():
        if name not in CODE_OF:
            near = nearest(name, TYPES)
            hint = f"; the nearest is {near!r}" if near else f"; expected {', '.join(TYPES)}"
            raise BadInput(f"unknown operation type {name!r}{hint}")
    return np.array([CODE_OF[name] for name in names.tolist()], dtype=np.int16)[inverse]


def sequence_numbers(codes: Any, rank: Any, step: Any, start_ns: Any) -> np.ndarray:
    """The number of each operation among those of the same type, rank and step, in the order of their starts."""
    codes, rank, step, start_ns = (np.asarray(column) for column in (codes, rank, step, start_ns))
    order = np.lexsort((start_ns, codes, rank, step))
    key = np.stack((step[order], rank[order], codes[order]))
    positions = np.arange(len(order))
    new_group = np.ones(len(order), dtype=bool)
    new_group[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    first = np.maximum.accumulate(np.where(new_group, positions, 0))
    numbers = np.empty(len(order), dtype=np.int32)
    numbers[order] = positions - first
    return numbers
