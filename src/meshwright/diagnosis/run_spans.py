"""Turns the recorded spans of a run's ranks into a table of operations.

A span of compute includes the waits for collectives between its units, so these waits are subtracted from it. If there
are many such waits, only every n-th is measured, and its time counts n times. The result is right for the sum over a
step, not for each operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.diagnosis.operations import CODE_OF, MODEL_COMPUTE_TYPES, OperationTable
from meshwright.spec.errors import BadInput

TYPE_OF_PHASE: Mapping[str, str] = {
    "data": "data",
    "forward": "forward-compute",
    "backward": "backward-compute",
    "weight_gradient": "weight-gradient-compute",
    "gradient_norm": "gradient-norm",
    "optimizer": "optimizer",
}
"""Phase of a span → type of its operation.

For messages, waits and garbage collections, the type depends on more than the phase.
"""
COMPUTE_PHASES = ("forward", "backward", "weight_gradient")
"""Phases of spans in which the model computes."""


@dataclass(frozen=True, eq=False)
class RankRecords:
    """The spans of one rank."""

    rank: int
    """Global rank."""
    stage: int
    """Pipeline rank."""
    dp: int
    """Index of the rank among the ranks of its stage."""
    host: str
    """Name of its host."""
    records: np.ndarray
    """Array with the fields of `events.span.SpanRecord`; `phase` is an index into `phases`."""
    phases: Sequence[str]
    """Names of the phases."""


@dataclass(frozen=True, eq=False)
class _Columns:
    """Operations of one rank, as columns of `OperationTable`."""

    step: np.ndarray
    type: np.ndarray
    sequence: np.ndarray
    virtual_stage: np.ndarray
    microbatch: np.ndarray
    start_ns: np.ndarray
    duration_ns: np.ndarray
    attention_work: np.ndarray


def table_of_spans(ranks: Sequence[RankRecords], last_steps: int) -> OperationTable:
    """Return the operations of the last `last_steps` steps in which all ranks ran the same operations in the same
    order.

    Raises BadInput if there is no such step.
    """
    ordered = {rank.rank: _steps_of(rank) for rank in ranks}
    signatures = [signature for signature, _ in ordered.values()]
    steps = _common_steps(signatures)[-last_steps:]
    if not steps:
        raise BadInput("the ranks' spans have no complete step in common; at least one is expected")
    parts = [(rank, columns) for rank in ranks for columns in _operations(rank, ordered[rank.rank][1], steps)]
    counts = [len(columns.step) for _, columns in parts]

    def repeated(name: str) -> np.ndarray:
        return np.repeat([getattr(rank, name) for rank, _ in parts], counts)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(columns, name) for _, columns in parts])

    table = OperationTable(
        rank=repeated("rank"),
        dp=repeated("dp"),
        stage=repeated("stage"),
        step=joined("step"),
        type=joined("type"),
        chunk=np.full(sum(counts), -1),
        virtual_stage=joined("virtual_stage"),
        microbatch=joined("microbatch"),
        sequence=joined("sequence"),
        start_ns=joined("start_ns"),
        duration_ns=joined("duration_ns"),
        attention_work=joined("attention_work"),
        host_of_rank={rank.rank: rank.host for rank in ranks},
    )
    return _attribute_collections(table)


Signature = dict[int, bytes]
"""Number of a complete step → its operations in order, as bytes that can be compared."""


def _steps_of(rank: RankRecords) -> tuple[Signature, np.ndarray]:
    """Return the signature of a rank's complete steps, and the records inside these steps in the order of their starts."""
    records = rank.records
    codes = {name: code for code, name in enumerate(rank.phases)}
    whole = records[records["phase"] == codes["step"]]
    whole = whole[np.argsort(whole["step"], kind="stable")]
    inside = records[
        ~np.isin(records["phase"], [codes[name] for name in ("step", "clock", "checkpoint", "validation")])
    ]
    position = np.searchsorted(whole["step"], inside["step"])
    known = position < len(whole)
    inside = inside[known]
    position = position[known]
    steps = whole[position]
    known = (steps["step"] == inside["step"]) & (inside["start_ns"] >= steps["start_ns"])
    known &= inside["start_ns"] <= steps["start_ns"] + steps["duration_ns"]
    inside = inside[known]
    inside = inside[np.lexsort((inside["start_ns"], inside["step"]))]
    main = inside[np.isin(inside["phase"], [codes[name] for name in (*TYPE_OF_PHASE, "receive")])]
    shape = np.stack([main[name].astype(np.int32) for name in ("phase", "stage", "micro_batch", "peer")], axis=1)
    bounds = np.searchsorted(main["step"], whole["step"]), np.searchsorted(main["step"], whole["step"], "right")
    signature = {
        int(step): shape[first:last].tobytes() for step, first, last in zip(whole["step"], *bounds, strict=True)
    }
    return signature, inside


def _common_steps(signatures: Sequence[Signature]) -> list[int]:
    """Return the steps in which every rank ran the same operations as in its last step.

    The first step after a start, for example, has another order.
    """
    steps = sorted(set.intersection(*(set(signature) for signature in signatures))) if signatures else []
    return [step for step in steps if all(signature[step] == signature[steps[-1]] for signature in signatures)]


def _operations(rank: RankRecords, records: np.ndarray, steps: Sequence[int]) -> list[_Columns]:
    """Return the operations of one rank in the steps `steps`."""
    codes = {name: code for code, name in enumerate(rank.phases)}
    records = records[np.isin(records["step"], steps)]
    phase = records["phase"]
    types = np.full(len(records), -1, dtype=np.int16)
    for name, operation in TYPE_OF_PHASE.items():
        types[phase == codes[name]] = CODE_OF[operation]
    # A send without an amount is the wait for the last sends.
    sends = (phase == codes["send"]) & (records["amount"] > 0)
    for selected, end in ((phase == codes["receive"], "recv"), (sends, "send")):
        forward = (records["peer"] < records["stage"]) == (end == "recv")
        types[selected & forward] = CODE_OF[f"forward-{end}"]
        types[selected & ~forward] = CODE_OF[f"backward-{end}"]
    waits = phase == codes["collective_wait"]
    at_ends = waits & (records["action"] < 0)
    types[at_ends] = CODE_OF["step-all-reduce"]
    main = _columns(records[types >= 0], types[types >= 0])
    work = records[phase == codes["attention_work"]] if "attention_work" in codes else records[:0]
    main.attention_work[:] = _attention_work(main, work)
    compute = np.flatnonzero(np.isin(phase, [codes[name] for name in COMPUTE_PHASES]))
    if not len(compute):
        return [main]
    by_type = np.isin(main.type, types[compute])
    collective, nested = _waits_of_compute(records, compute, np.flatnonzero(waits & (records["stage"] >= 0)))
    nested = np.minimum(nested, main.duration_ns[by_type])
    main.start_ns[by_type] += nested  # moved to the start, as if the operation had waited first
    main.duration_ns[by_type] -= nested
    ordinal = np.arange(len(compute)) - np.searchsorted(records["step"][compute], records["step"][compute])
    waited = np.flatnonzero(collective)
    waits_of = _at_compute(records[compute[waited]], "collective-wait", ordinal[waited], collective[waited])
    waits_of.start_ns[:] += nested[waited] - collective[waited]  # the waits end when their compute operation starts
    extra = [waits_of]
    collections = np.flatnonzero(phase == codes["garbage_collection"])
    owner, _ = _owners(records, compute, collections)
    known = collections[owner >= 0], owner[owner >= 0]
    extra.append(
        _at_compute(records[known[0]], "garbage-collection", ordinal[known[1]], records["duration_ns"][known[0]])
    )
    return [main, *extra]


def _columns(records: np.ndarray, types: np.ndarray) -> _Columns:
    """Return operations with the times of the records.

    `sequence` is the position among the operations of the same type and step.
    """
    sequence = np.zeros(len(types), dtype=np.int64)
    for code in np.unique(types):
        indices = np.flatnonzero(types == code)
        steps = records["step"][indices]
        sequence[indices] = np.arange(len(indices)) - np.searchsorted(steps, steps)
    return _Columns(
        step=records["step"],
        type=types,
        sequence=sequence,
        virtual_stage=records["stage"],
        microbatch=records["micro_batch"],
        start_ns=records["start_ns"].astype(np.int64),
        duration_ns=records["duration_ns"].astype(np.int64),
        attention_work=np.full(len(types), -1),
    )


def _attention_work(operations: _Columns, work: np.ndarray) -> np.ndarray:
    """Return the attention work that was recorded for each operation's step and micro-batch; −1 if there is none."""
    if not len(work):
        return np.full(len(operations.step), -1)
    recorded, wanted = (
        step.astype(np.int64) << 16 | micro_batch.astype(np.uint16)
        for step, micro_batch in ((work["step"], work["micro_batch"]), (operations.step, operations.microbatch))
    )
    order = np.argsort(recorded)
    position = order[np.minimum(np.searchsorted(recorded[order], wanted), len(order) - 1)]
    return np.where(recorded[position] == wanted, work["amount"][position], -1)


def _at_compute(records: np.ndarray, name: str, ordinal: np.ndarray, duration_ns: np.ndarray) -> _Columns:
    """Return operations of type `name` that belong to compute operations.

    `ordinal` has the positions of these in their step.
    """
    return _Columns(
        step=records["step"],
        type=np.full(len(records), CODE_OF[name]),
        sequence=ordinal,
        virtual_stage=records["stage"],
        microbatch=np.full(len(records), -1),
        start_ns=records["start_ns"].astype(np.int64),
        duration_ns=duration_ns,
        attention_work=np.full(len(records), -1),
    )


def _owners(records: np.ndarray, compute: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the compute operation to which each record of `others` belongs, and whether that operation contains the
    record.

    It is an index into `compute`: the operation that contains the record, or else the next operation in the same step;
    −1 if there is none. `compute` and `others` are indices of `records`, which are in the order of their starts.
    """
    position = np.searchsorted(compute, others) - 1
    before = compute[np.maximum(position, 0)]
    end = records["start_ns"][before] + records["duration_ns"][before]
    inside = (
        (position >= 0) & (records["step"][before] == records["step"][others]) & (records["start_ns"][others] < end)
    )
    owner = np.where(inside, position, position + 1)
    following = compute[np.minimum(owner, len(compute) - 1)]
    missing = (owner >= len(compute)) | (records["step"][following] != records["step"][others])
    return np.where(missing, -1, owner), inside


def _waits_of_compute(records: np.ndarray, compute: np.ndarray, waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nanoseconds of waits for collectives, for each compute operation: (all waits, waits inside its span).

    If a measured wait counts several times, the sum is divided evenly among the operations of the same phase and step.
    """
    owner, inside = _owners(records, compute, waits)
    known = owner >= 0
    waits = waits[known]
    owner = owner[known]
    inside = inside[known]
    total = records["duration_ns"][waits] * np.maximum(records["count"][waits], 1).astype(np.int64)
    sampled = records["count"][waits] > 1
    every = np.zeros(len(compute), dtype=np.int64)
    nested = np.zeros(len(compute), dtype=np.int64)
    np.add.at(every, owner[~sampled], total[~sampled])
    np.add.at(nested, owner[~sampled & inside], total[~sampled & inside])
    keys = np.stack((records["step"][compute], records["phase"][compute]))
    _, group, sizes = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    sums = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(sums, group.ravel()[owner[sampled]], total[sampled])
    share = (sums // sizes)[group.ravel()]
    return every + share, nested + share


def _attribute_collections(table: OperationTable) -> OperationTable:
    """Return the table with each garbage collection subtracted from the compute operation that contains it.

    The device continues to compute while the host collects. So a collection costs at most the time by which its
    operation is longer than usual.
    """
    collections = np.flatnonzero(table.is_type("garbage-collection"))
    if not len(collections):
        return table
    compute = np.flatnonzero(table.is_type(*MODEL_COMPUTE_TYPES))
    compute = compute[np.lexsort((table.start_ns[compute], table.step[compute], table.rank[compute]))]
    of_step: dict[tuple[int, int], list[int]] = {}
    of_rank: dict[tuple[int, int], list[int]] = {}
    for index, rank, step in zip(
        compute.tolist(), table.rank[compute].tolist(), table.step[compute].tolist(), strict=True
    ):
        operations = of_step.setdefault((rank, step), [])
        of_rank.setdefault((rank, len(operations)), []).append(index)
        operations.append(index)
    start = table.start_ns.copy()
    duration = table.duration_ns.copy()
    for index in collections.tolist():
        rank = int(table.rank[index])
        ordinal = int(table.sequence[index])
        owner = of_step[rank, int(table.step[index])][ordinal]
        if table.start_ns[index] >= table.start_ns[owner]:
            usual = np.median(table.duration_ns[of_rank[rank, ordinal]])
            duration[index] = min(duration[index], max(0, duration[owner] - int(usual)))
            duration[owner] -= duration[index]
            start[index] = start[owner]  # moved to the start, as if the host had collected before the operation
            start[owner] += duration[index]
    return table.with_times(start, duration)
